"""The demonstration: find damaged records and covered digits, classify damaged bags, convert a vision transformer.

To run: make demo   (or: python -m examples.demo; less than two minutes)

1. Store 569 records of 30 measurements and find them by copies in which 40 % of the values are wrong and 20 % unknown:
   Euclidean distance of standardized values against a memory.
2. Store 600 digits and find them by copies of which a rectangle is covered.
3. Classify bags of digits, half of whose pixels are replaced: does a bag hold a nine? The same network without and with
   a first layer that looks each digit up among 600 clean ones.
4. Train a small vision transformer with dot-product attention and convert it by one call, with 4 blocks in each head.
   Its outputs do not change. Fine-tune the converted model, and the original one for comparison.

Ends with a table and the list of pictures. With --seeds 3, figures are means and standard deviations.
"""

import argparse
import re
import shlex
import warnings
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

import torch
from matplotlib.axes import Axes
from sklearn.datasets import load_breast_cancer
from sklearn.metrics.pairwise import nan_euclidean_distances
from torch import Tensor

import ahop_layers as ah
from examples import mil, vit
from examples.common.command import Parser, number
from examples.common.outputs import digit_patterns, draw_digit, draw_rows, spread

Row = tuple[str, str, str]  # of the table: what is measured, without and with this package


def run(example: ModuleType, options: argparse.Namespace, folder: str, arguments: str, seed: int = 0) -> Any:
    """Runs an example in a folder of its own, and returns its results."""
    print(f"==> {folder}: {arguments}", flush=True)
    shared = ["--seed", str(options.seed + seed), "--out", str(options.out / folder)]
    return example.main([*shlex.split(arguments), *shared, *["--overwrite"] * options.overwrite])


def find(
    options: argparse.Namespace,
    name: str,
    patterns: Tensor,
    damage: ah.variants.Variant,
    unit: Tensor | float,
    draw: Callable[[Axes, Tensor], object],
) -> tuple[str, str]:
    """Finds patterns by damaged copies of them, by Euclidean distance and by a memory, and draws some answers."""
    print(f"==> {name}: {damage}", flush=True)
    patterns = patterns[:60] if options.quick else patterns
    rows = patterns.flatten(1)
    accuracies: dict[str, list[float]] = {"Euclid": [], "memory": []}
    for seed in range(options.seed, options.seed + options.seeds):
        memory = ah.AssociativeMemory(patterns)
        print(memory.fit(seed=seed))  # it does not know the damage of the queries
        index, query = damage.bind(rows).sample(rows, 1000, torch.Generator().manual_seed(seed))
        found = {
            "Euclid": torch.tensor(nan_euclidean_distances(query / unit, rows / unit)).argmin(-1),
            "memory": memory.recall(query),
        }
        for method, answer in found.items():
            accuracies[method].append((answer == index).double().mean().item())
    shown = {"original": rows[index[:8]], "query": query[:8]} | {each: rows[found[each][:8]] for each in found}
    right = {method: (answer == index)[:8] for method, answer in found.items()}
    figure = draw_rows({each: values / unit for each, values in shown.items()}, draw, 1.3, 0.9, right)
    figure.savefig(options.out / f"{name}.png", dpi=100)
    plain, learned = map(spread, accuracies.values())
    return plain, learned


def draw_record(axis: Axes, record: Tensor) -> None:
    """Draws the measurements of a record as bars, and gaps for those that are unknown."""
    axis.bar(range(len(record)), record.numpy(), color="#3a93b5")
    axis.set_ylim(-3.5, 3.5)


def find_records(options: argparse.Namespace) -> list[Row]:
    """Finds records by copies of them with wrong and unknown values."""
    records = torch.tensor(load_breast_cancer().data, dtype=torch.float32)
    records = records - records.mean(0)  # in units of their own, from a thousandth to hundreds
    damage = ah.variants.as_damage([ah.variants.Replaced(0.4), ah.variants.Missing(0.2)])
    found = find(options, "records", records, damage, records.std(0), draw_record)
    return [("records found, 40 % of the values wrong, 20 % unknown", *found)]


def find_covered(options: argparse.Namespace) -> list[Row]:
    """Finds digits by copies of them of which a half is covered."""
    digits = digit_patterns(600).unflatten(1, (8, 8))
    damage = ah.variants.Covered(0.5, 8, 8)
    found = find(options, "covered", digits, damage, 1.0, draw_digit)
    return [("digits found, half of the image covered", *found)]


def classify_bags(options: argparse.Namespace) -> list[Row]:
    """Compares networks for bags of damaged digits, without and with a lookup as the first layer."""
    common = f"--data digit-bags --damage 0.5 --accelerator cpu {'--fast-dev-run' if options.quick else '--epochs 4'}"
    plain, lookup = (
        [run(mil, options, f"bags/{first}-{seed}", f"{common} --first {first}", seed)["test_auc"]
         for seed in range(options.seeds)]
        for first in ("none", "lookup")
    )  # fmt: skip
    return [("test AUC, bags of digits with 50 % of the pixels replaced", spread(plain), spread(lookup))]


def convert(options: argparse.Namespace) -> list[Row]:
    """Trains with the dot product, then fine-tunes the original and the converted model for the same epochs."""
    common = f"--model tiny --accelerator cpu --blocks 4 --batch-size {128 if options.quick else 32} --epochs"
    first = run(vit, options, "vit/dot", f"{common} {1 if options.quick else 4} --attention dot --lr 3e-3")
    tune = f"{common} 1 --lr 1e-3 --convert"
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
    parser.add_argument("--seeds", type=number(int, 1), metavar="N", default=1, help="number of seeds, from --seed on")
    return parser


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs all parts and prints the table."""
    parser = make_parser()
    options = parser.parse_args(arguments)
    warnings.filterwarnings("ignore", module="lightning")  # advice for larger machines and data sets
    with parser.one_line_errors():
        parser.start(options)
        rows = [row for part in (find_records, find_covered, classify_bags, convert) for row in part(options)]
    width = max(len(name) for name, *_ in rows)
    print(f"\n{'':{width}}  {'without':>14}  {'adaptive':>14}")
    for name, plain, adaptive in rows:
        print(f"{name:{width}}  {plain:>14}  {adaptive:>14}")
    print("\nwithout: Euclidean distance, no lookup, dot-product attention; a ViT on clean images gains nothing")
    drawn = sorted(path for path in options.out.rglob("*.png") if not re.search(r"-[1-9]\d*$", path.parent.name))
    print("\npictures:", *drawn, sep="\n  ")
    print("\nNext: search your own data by the lines at the top of README.md. docs/search.md is the guide.")


if __name__ == "__main__":
    main()
