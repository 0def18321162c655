"""The demonstration: find damaged records and covered digits, classify damaged bags, convert a vision transformer.

To run: make demo   (or: python -m examples.demo; less than two minutes)

1. Store 569 records of 30 measurements and find them by copies in which 40 % of the values are wrong and 20 % unknown:
   Euclidean distance of standardized values against a memory.
2. Store 600 digits and find them by copies of which a rectangle is covered.
3. Classify bags of digits, half of whose pixels are replaced: does a bag hold a nine? The same network without and with
   a memory of 600 clean digits as its first layer.
4. Train a small vision transformer with dot-product attention and convert it by one call, with 4 blocks in each head.
   Its outputs do not change. Fine-tune the converted model, and the original one for comparison.

Ends with a table and the list of pictures. With --seeds 3, figures are means and standard deviations.
"""

import argparse
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from sklearn.datasets import load_breast_cancer, load_digits
from sklearn.metrics.pairwise import nan_euclidean_distances
from torch import Tensor

import ahop_layers as ah
from examples import mil, vit
from examples.search import spread

Row = tuple[str, str, str]  # of the table: what is measured, without and with this package
WRONG = ah.variants.as_damage([ah.variants.Replaced(0.4), ah.variants.Missing(0.2)])
COVER = ah.variants.Covered(0.5, 8, 8)


def find(
    options: argparse.Namespace, name: str, patterns: Tensor, damage: ah.variants.Variant, unit: Tensor | float,
    draw: Callable[[Axes, Tensor], object],
) -> tuple[str, str]:  # fmt: skip
    """Finds patterns by damaged copies of them, by Euclidean distance and by a memory, and draws some answers."""
    print(f"==> {name}: {damage}", flush=True)
    patterns = patterns[:60] if options.quick else patterns
    rows = patterns.flatten(1)
    accuracies: dict[str, list[float]] = {"Euclid": [], "memory": []}
    for seed in range(options.seed, options.seed + options.seeds):
        memory = ah.AssociativeMemory(patterns)
        print(memory.fit(seed=seed))  # it does not know the damage of the queries
        index, query = damage.bind(rows).sample(rows, 1000, torch.Generator().manual_seed(seed))
        euclid = torch.tensor(nan_euclidean_distances(query / unit, rows / unit))
        found = {"Euclid": euclid.argmin(-1), "memory": memory.recall(query)}
        for method, answer in found.items():
            accuracies[method].append((answer == index).double().mean().item())
    figure = Figure(figsize=(11.6, 3.6), layout="constrained")
    lines = [("original", rows[index[:8]], None), ("query", query[:8], None)]
    lines += [(method, rows[answer[:8]], answer[:8] == index[:8]) for method, answer in found.items()]
    for (label, shown, right), axes in zip(lines, figure.subplots(len(lines), 8), strict=True):
        for place, axis in enumerate(axes):
            draw(axis, shown[place] / unit)
            axis.set(xticks=[], yticks=[])
            axis.spines[:].set_visible(right is not None)
            if right is not None:
                axis.spines[:].set(color="#6a9a3b" if right[place] else "#c8555b", linewidth=2.5)
        axes[0].set_ylabel(label, rotation=0, ha="right", va="center")
    options.out.mkdir(parents=True, exist_ok=True)
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
    found = find(options, "records", records, WRONG, records.std(0), draw_record)
    return [("records found, 40 % of the values wrong, 20 % unknown", *found)]


def find_covered(options: argparse.Namespace) -> list[Row]:
    """Finds digits by copies of them of which a half is covered."""
    digits = torch.tensor(load_digits().images[:600] / 8 - 1, dtype=torch.float32)

    def draw(axis: Axes, digit: Tensor) -> None:
        axis.imshow(digit.reshape(8, 8).numpy(), cmap="gray_r", vmin=-1, vmax=1)

    return [("digits found, half of the image covered", *find(options, "covered", digits, COVER, 1.0, draw))]


def classify_bags(options: argparse.Namespace) -> list[Row]:
    """Compares networks for bags of damaged digits, without and with a memory as the first layer."""
    areas: dict[str, list[float]] = {"none": [], "memory": []}
    for seed in range(options.seed, options.seed + options.seeds):
        for first, found in areas.items():
            print(f"==> bags, first layer: {first}", flush=True)
            length = ["--fast-dev-run"] if options.quick else ["--epochs", "4"]
            where = ["--seed", str(seed), "--out", str(options.out / f"bags-{first}-{seed}")]
            found.append(mil.main(["--damage", "0.5", "--first", first, *length, *where])["adaptive"]["test_auc"])
    return [("test AUC, bags of digits with 50 % of the pixels replaced", *map(spread, areas.values()))]


def convert(options: argparse.Namespace) -> list[Row]:
    """Trains with the dot product, then fine-tunes the original and the converted model for the same epochs."""
    print("==> vision transformer", flush=True)
    size, out = ["--batch-size", "128" if options.quick else "32"], options.out / "vit"
    epochs = ["--epochs", "1" if options.quick else "4"]
    first = vit.main(["--attention", "dot", *size, *epochs, "--seed", str(options.seed), "--out", str(out)])
    tune = [*size, "--epochs", "1", "--lr", "1e-3", "--convert", str(first["dot"]["checkpoint"])]
    accuracies: dict[str, list[float]] = {"dot": [], "adaptive": []}
    changes = []
    for seed in range(options.seed, options.seed + options.seeds):
        tuned = vit.main([*tune, "--seed", str(seed), "--out", str(options.out / f"vit-tuned-{seed}")])
        changes.append(tuned["adaptive"]["logit_change"])
        for attention, found in accuracies.items():
            found.append(tuned[attention]["test_accuracy"])
    return [
        ("ViT, largest change of a logit by conversion", "", f"{max(changes):.1e}"),
        ("ViT, test accuracy before conversion", f"{first['dot']['test_accuracy']:.3f}", "the same"),
        ("ViT, test accuracy after fine-tuning", *map(spread, accuracies.values())),
    ]


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs all parts and prints the table."""
    shown = type("Help", (argparse.ArgumentDefaultsHelpFormatter, argparse.RawDescriptionHelpFormatter), {})
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=shown)
    parser.add_argument("--quick", action="store_true", help="run a few steps of everything")
    parser.add_argument("--seeds", type=int, metavar="N", default=1, help="number of seeds, from --seed on")
    parser.add_argument("--seed", type=int, metavar="N", default=0, help="seed of all random number generators")
    parser.add_argument("--out", type=Path, metavar="DIR", default="out/demo", help="folder for all output files")
    options = parser.parse_args(arguments)
    warnings.filterwarnings("ignore", module="lightning")  # advice for larger machines and data sets
    rows = [row for part in (find_records, find_covered, classify_bags, convert) for row in part(options)]
    width = max(len(name) for name, *_ in rows)
    print(f"\n{'':{width}}  {'without':>14}  {'adaptive':>14}")
    for name, plain, adaptive in rows:
        print(f"{name:{width}}  {plain:>14}  {adaptive:>14}")
    print("\nwithout: Euclidean distance, no memory, dot-product attention; a ViT on clean images gains nothing")
    print("\npictures:", *sorted(options.out.rglob("*.png")), sep="\n  ")
    print("\nNext: search your own data by the lines at the top of README.md. docs/search.md is the guide.")


if __name__ == "__main__":
    main()
