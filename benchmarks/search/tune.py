"""Compares settings of the adaptive memory of the search benchmark on held-out stored images.

To run: python -m benchmarks.search.tune --corruptions pixels --views pixels+patches --lr 0.03 0.1 [--device cuda]

The queries of the benchmark are not used: a quarter of the stored images of each class of a split is held out, the
memory stores the others, and corrupted copies of the held-out images are classified. Prints the accuracy at each level
of corruption, its mean, and the seconds of training for each combination of the settings.
"""

import argparse
import itertools
import time

import torch

from benchmarks.harness.command import add_data_dir, explain_missing_data, make_parser
from benchmarks.harness.report import table
from benchmarks.search.data import LEVELS, SETS, TRAINING_LEVELS, Images, Split, corruption, load, queries, split_halves
from benchmarks.search.measure import choose_device, seconds
from benchmarks.search.ours import SETTINGS, VIEWS, AdaptiveClassifier, Settings, adaptive


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    """Parses the command line."""
    parser = make_parser("search.tune", __doc__)
    add = parser.add_argument
    add("--data", choices=SETS, default="faces", help="data set (default: faces)")
    add("--corruptions", nargs="+", choices=LEVELS, default=list(LEVELS), help="kinds of corruption (default: all)")
    add("--views", nargs="+", help=f"views to combine, such as {'+'.join(VIEWS)} (default: those of the benchmark)")
    for name in ("steps", "batch", "lr"):
        add(f"--{name}", nargs="+", type=float if name == "lr" else int, help="default: that of the benchmark")
    add("--split", type=int, default=0, help="number of the split (default: 0)")
    add("--device", default="auto", help="cpu, cuda, or auto: cuda if available (default: auto)")
    add_data_dir(parser, "faces/, mnist/ and fashion-mnist/")
    options = parser.parse_args(arguments)
    if unknown := {view for views in options.views or () for view in views.split("+")} - set(VIEWS):
        parser.error(f"argument --views: expected some of {', '.join(VIEWS)}, joined by +, got {sorted(unknown)}")
    return options


def hold_out(stored: Images, fraction: float = 0.25) -> Split:
    """Splits stored images into those to store and the last images of each class to ask."""
    own = [(stored.labels == label).nonzero()[:, 0] for label in stored.labels.unique()]
    kept = [max(1, round((1 - fraction) * len(index))) for index in own]
    first = torch.cat([index[:count] for index, count in zip(own, kept, strict=True)])
    last = torch.cat([index[count:] for index, count in zip(own, kept, strict=True)])
    return Split(stored.subset(first), stored.subset(last))


def candidates(kind: str, options: argparse.Namespace) -> list[Settings]:
    """Returns all combinations of the given settings; the others are those of the benchmark."""
    default = SETTINGS[kind]
    views = [tuple(each.split("+")) for each in options.views or ()]
    given = zip((views, options.steps, options.batch, options.lr), default, strict=True)
    return list(itertools.starmap(Settings, itertools.product(*(values or [value] for values, value in given))))


def accuracies(classify: AdaptiveClassifier, kind: str, split: Split, seed: int) -> list[float]:
    """Returns the accuracy at each level."""
    labels = [classify(queries(split, kind, level, seed)).label for level in LEVELS[kind]]
    return [(label == split.asked.labels).double().mean().item() for label in labels]


def main(arguments: list[str] | None = None) -> None:
    """Prints a table for each kind of corruption, and each line as soon as it is measured."""
    options = parse(arguments)
    device = choose_device(options.device)
    with explain_missing_data():
        images = load(options.data, options.data_dir)
    split = hold_out(split_halves(images, options.split).stored.to(device))
    for kind in options.corruptions:
        body = []
        for settings in candidates(kind, options):
            start = seconds(device)
            variant = corruption(kind, TRAINING_LEVELS, split.stored)
            classify = adaptive(split.stored, variant, options.split, settings)
            fit = seconds(device) - start
            found = accuracies(classify, kind, split, options.split)
            name = ["+".join(settings.views), settings.steps, settings.batch, settings.lr]
            body.append([*name, *(f"{each:.3f}" for each in found), f"{sum(found) / len(found):.4f}", f"{fit:.1f}"])
            print(f"{time.strftime('%X')} {kind}", *body[-1], flush=True)
        print(table(["views", "steps", "batch", "lr", *LEVELS[kind], "mean", "fit s"], body), end="\n\n", flush=True)


if __name__ == "__main__":
    main()
