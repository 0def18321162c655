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
import warnings
from collections.abc import Sequence
from types import ModuleType
from typing import Any

from examples import mil, search, vit
from examples.common import cli
from examples.common.outputs import spread

Row = tuple[str, str, str]


def run(example: ModuleType, options: argparse.Namespace, folder: str, *arguments: str, seed: int = 0) -> Any:
    """Runs an example in a folder of its own, and returns its results."""
    print(f"==> {folder}: {' '.join(arguments)}", flush=True)
    seed += options.seed
    shared = ["--seed", str(seed), "--out", str(options.out / folder), *["--overwrite"] * options.overwrite]
    return example.main([*arguments, *shared])


def find_digits(options: argparse.Namespace) -> list[Row]:
    """Finds digits by damaged copies of them."""
    size = ["--patterns", "60", "--epochs", "25"] if options.quick else []
    found = run(search, options, "search", *size, "--seeds", str(options.seeds))
    return [
        (f"digits found, {level:.0%} of the pixels replaced", spread(found["Euclid"][level]), spread(values))
        for level, values in found["adaptive"].items()
        if level in (0.6, 0.7, 0.8)
    ]


def classify_bags(options: argparse.Namespace) -> list[Row]:
    """Compares networks for bags of damaged digits, without and with a lookup as the first layer."""
    size = ["--fast-dev-run"] if options.quick else ["--epochs", "4"]
    common = ["--data", "digit-bags", "--corrupt", "0.5", "--accelerator", "cpu", *size]
    plain, lookup = (
        [
            run(mil, options, f"bags/{first}-{seed}", *common, "--first", first, seed=seed)["test_auc"]
            for seed in range(options.seeds)
        ]
        for first in ("none", "lookup")
    )
    return [("test AUC, bags of digits with 50 % of the pixels replaced", spread(plain), spread(lookup))]


def convert(options: argparse.Namespace) -> list[Row]:
    """Trains with the dot product, then fine-tunes the original and the converted model for the same epochs."""
    common = ["--model", "tiny", "--accelerator", "cpu", "--blocks", "4"]
    common += ["--batch-size", "128" if options.quick else "32"]

    def train(folder: str, attention: str, epochs: int, *more: str, seed: int = 0) -> dict[str, float]:
        changes = ["--attention", attention, "--epochs", str(1 if options.quick else epochs), *more]
        results: dict[str, float] = run(vit, options, f"vit/{folder}", *common, *changes, seed=seed)
        return results

    first = train("dot", "dot", 8, "--lr", "3e-3")
    tune = ["--lr", "1e-3", "--convert", str(options.out / "vit" / "dot" / "best.ckpt")]
    dot, adaptive = (
        [train(f"{name}-tuned-{seed}", name, 2, *tune, seed=seed) for seed in range(options.seeds)]
        for name in ("dot", "adaptive")
    )
    accuracies = [spread([each["test_accuracy"] for each in runs]) for runs in (dot, adaptive)]
    return [
        ("ViT, largest change of a logit by conversion", "", f"{max(each['logit_change'] for each in adaptive):.1e}"),
        ("ViT, test accuracy before conversion", f"{first['test_accuracy']:.3f}", "the same"),
        ("ViT, test accuracy after fine-tuning", *accuracies),
    ]


def make_parser() -> cli.Parser:
    """Returns the parser of the command line."""
    parser = cli.Parser("demo", __doc__, "out/demo")
    parser.option("--quick", action="store_true", help="run a few steps of everything")
    parser.option("--seeds", type=cli.positive_int, metavar="N", default=3, help="number of seeds, from --seed on")
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
