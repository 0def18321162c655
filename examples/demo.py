"""The demonstration: find damaged digits, convert a vision transformer, classify bags of damaged digits. A few minutes.

To run: make demo   (or: python -m examples.demo)

1. Store 500 digits and find them by damaged copies: Euclidean distance against a learned similarity.
2. Classify bags of digits, half of whose pixels are replaced: does a bag hold a nine? The same network without and with
   a first layer that looks each digit up among 600 clean ones.
3. Train a small vision transformer with dot-product attention and convert it by one call, with 4 blocks in each head.
   Its outputs do not change. Fine-tune the converted model, and the original one for comparison.

Ends with a table and the list of pictures. Figures are means and standard deviations over three seeds.
"""

import argparse
import re
import shlex
import warnings
from collections.abc import Sequence
from types import ModuleType
from typing import Any

from examples import mil, search, vit
from examples.common.command import Parser, number
from examples.common.outputs import spread


def run(example: ModuleType, options: argparse.Namespace, folder: str, arguments: str, seed: int = 0) -> Any:
    """Runs an example in a folder of its own, and returns its results."""
    print(f"==> {folder}: {arguments}", flush=True)
    shared = ["--seed", str(options.seed + seed), "--out", str(options.out / folder)]
    return example.main([*shlex.split(arguments), *shared, *["--overwrite"] * options.overwrite])


def find_digits(options: argparse.Namespace) -> list[tuple[str, str, str]]:
    """Finds digits by damaged copies of them."""
    size = "--patterns 60" if options.quick else ""
    found = run(search, options, "search", f"--seeds {options.seeds} {size}")
    return [
        (f"digits found, {level:.0%} of the pixels replaced", spread(found["Euclid"][level]), spread(values))
        for level, values in found["adaptive"].items()
        if level in (0.6, 0.7, 0.8)
    ]


def classify_bags(options: argparse.Namespace) -> list[tuple[str, str, str]]:
    """Compares networks for bags of damaged digits, without and with a lookup as the first layer."""
    common = f"--data digit-bags --corrupt 0.5 --accelerator cpu {'--fast-dev-run' if options.quick else '--epochs 4'}"
    plain, lookup = (
        [run(mil, options, f"bags/{first}-{seed}", f"{common} --first {first}", seed)["test_auc"]
         for seed in range(options.seeds)]
        for first in ("none", "lookup")
    )  # fmt: skip
    return [("test AUC, bags of digits with 50 % of the pixels replaced", spread(plain), spread(lookup))]


def convert(options: argparse.Namespace) -> list[tuple[str, str, str]]:
    """Trains with the dot product, then fine-tunes the original and the converted model for the same epochs."""
    common = f"--model tiny --accelerator cpu --blocks 4 --batch-size {128 if options.quick else 32} --epochs"
    first = run(vit, options, "vit/dot", f"{common} {1 if options.quick else 8} --attention dot --lr 3e-3")
    tune = f"{common} {1 if options.quick else 2} --lr 1e-3 --convert"
    tune += f" {shlex.quote(str(options.out / 'vit' / 'dot' / 'best.ckpt'))}"
    dot, adaptive = (
        [run(vit, options, f"vit/{name}-tuned-{seed}", f"{tune} --attention {name}", seed)
         for seed in range(options.seeds)]
        for name in ("dot", "adaptive")
    )  # fmt: skip
    accuracies = [spread([each["test_accuracy"] for each in runs]) for runs in (dot, adaptive)]
    return [
        ("ViT, largest change of a logit by conversion", "", f"{max(each['logit_change'] for each in adaptive):.1e}"),
        ("ViT, test accuracy before conversion", f"{first['test_accuracy']:.3f}", "the same"),
        ("ViT, test accuracy after fine-tuning", *accuracies),
    ]


def make_parser() -> Parser:
    """Returns the parser of the command line."""
    parser = Parser("demo", __doc__)
    parser.add_argument("--quick", action="store_true", help="run a few steps of everything")
    parser.add_argument("--seeds", type=number(int, 1), metavar="N", default=3, help="number of seeds, from --seed on")
    return parser


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs all parts and prints the table."""
    parser = make_parser()
    options = parser.parse_args(arguments)
    warnings.filterwarnings("ignore", module="lightning")  # advice for larger machines and data sets
    with parser.one_line_errors():
        parser.start(options)
        rows = [row for part in (find_digits, classify_bags, convert) for row in part(options)]
    width = max(len(name) for name, *_ in rows)
    print(f"\n{'':{width}}  {'without':>14}  {'adaptive':>14}")
    for name, plain, adaptive in rows:
        print(f"{name:{width}}  {plain:>14}  {adaptive:>14}")
    print("\nwithout: Euclidean distance, no lookup, dot-product attention")
    drawn = sorted(path for path in options.out.rglob("*.png") if not re.search(r"-[1-9]\d*$", path.parent.name))
    print("\npictures of the first seed:", *drawn, sep="\n  ")


if __name__ == "__main__":
    main()
