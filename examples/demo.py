"""The demonstration: switch Hopfield layers and a vision transformer, pool bags, find and repair damaged rows.

To run: make demo   (or: python -m examples.demo)

1. Switch a model on the layers of hopfield-layers by one line: the outputs are equal, and the similarity learns. Its
   time stands beside our plain layers, because hopfield-layers is on no package registry.
2. Classify bags of digits, half of whose pixels are replaced: does a bag hold a nine? The same network without and
   with a memory of 600 clean digits as its first layer.
3. Train a small vision transformer with dot-product attention and convert it by one call. Its outputs do not change.
   Fine-tune the converted model, and the original one for comparison.
4. Store 569 records of 30 measurements and find them by copies in which 40 % of the values are wrong and 20 % unknown:
   Euclidean distance of standardized values against a memory.
5. Repair records, half of whose values are wrong, before a network that was trained on clean ones.

Ends with a table and the list of pictures. With --seeds 3, figures are means and standard deviations.
"""

import argparse
import warnings
from collections.abc import Sequence
from pathlib import Path

import torch
from sklearn.datasets import load_breast_cancer
from sklearn.metrics.pairwise import nan_euclidean_distances

import ahop_layers as ah
from examples import hopfield, mil, repair, vit
from examples.search import spread

Row = tuple[str, str, str]  # of the table: what is measured, without and with this package
WRONG = ah.variants.as_damage([ah.variants.Replaced(0.4), ah.variants.Missing(0.2)])
PICTURES = ("hopfield/hopfield", "bags-memory*/adap*/instances", "vit-tuned*/adap*/maps", "records", "repair/accuracy")
"""The pictures that the end of the demonstration lists, of the first seed."""


def seeds(options: argparse.Namespace) -> range:
    """Returns the seeds of the repetitions."""
    return range(options.seed, options.seed + options.seeds)


def switch(options: argparse.Namespace) -> list[Row]:
    """Switches, trains, saves and reverts a model on Hopfield layers."""
    print("==> a model on hopfield-layers, switched", flush=True)
    length = ["--bags", "64", "--epochs", "1"] if options.quick else []
    found = [
        hopfield.main([*length, "--seed", str(seed), "--out", str(options.out / "hopfield")]) for seed in seeds(options)
    ]
    pairs = {
        measure: [spread([each[f"{measure}, {layers}"] for each in found]) for layers in ("plain", "adaptive")]
        for measure in ("ms per training step", "test accuracy")
    }
    change = max(each["outputs differ after the switch"] for each in found)
    return [
        ("Hopfield pooling, largest change of an output by the switch", "", f"{change:.1e}"),
        ("Hopfield pooling, ms per training step (without: our plain layers)", *pairs["ms per training step"]),
        ("Hopfield pooling, test accuracy on bags of bit patterns", *pairs["test accuracy"]),
    ]


def classify_bags(options: argparse.Namespace) -> list[Row]:
    """Compares networks for bags of damaged digits, without and with a memory as the first layer."""
    areas: dict[str, list[float]] = {"none": [], "memory": []}
    for seed in seeds(options):
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
    for seed in seeds(options):
        tuned = vit.main([*tune, "--seed", str(seed), "--out", str(options.out / f"vit-tuned-{seed}")])
        changes.append(tuned["adaptive"]["logit_change"])
        for attention, found in accuracies.items():
            found.append(tuned[attention]["test_accuracy"])
    return [
        ("ViT, largest change of a logit by conversion", "", f"{max(changes):.1e}"),
        ("ViT, test accuracy before conversion", f"{first['dot']['test_accuracy']:.3f}", "the same"),
        ("ViT, test accuracy after fine-tuning", *map(spread, accuracies.values())),
    ]


def find_records(options: argparse.Namespace) -> list[Row]:
    """Finds records by copies of them with wrong and unknown values, and explains an answer."""
    print(f"==> records: {WRONG}", flush=True)
    records = torch.tensor(load_breast_cancer().data[: 60 if options.quick else None], dtype=torch.float32)
    records = records - records.mean(0)  # in units of their own, from a thousandth to hundreds
    unit = records.std(0)
    accuracies: dict[str, list[float]] = {"Euclid": [], "memory": []}
    for seed in seeds(options):
        memory = ah.AssociativeMemory(records)
        print(memory.fit(seed=seed))  # it does not know the damage of the queries
        index, query = WRONG.bind(records).sample(records, 1000, torch.Generator().manual_seed(seed))
        euclid = torch.tensor(nan_euclidean_distances(query / unit, records / unit))
        found = {"Euclid": euclid.argmin(-1), "memory": memory.recall(query)}
        for method, answer in found.items():
            accuracies[method].append((answer == index).double().mean().item())
    options.out.mkdir(parents=True, exist_ok=True)
    ah.plots.explanation(memory, query[0]).savefig(options.out / "records.png", dpi=100)
    return [("records found, 40 % of the values wrong, 20 % unknown", *map(spread, accuracies.values()))]


def repair_records(options: argparse.Namespace) -> list[Row]:
    """Repairs damaged records before a frozen network."""
    print("==> repair before a network that is not trained again", flush=True)
    found = [repair.main(["--seed", str(seed), "--out", str(options.out / "repair")]) for seed in seeds(options)]
    place = repair.SHARES.index(0.5)
    pair = (
        spread([each[f"replaced, {name}"][place] for each in found]) for name in ("network alone", "with ah.Repair")
    )
    return [("accuracy of a frozen network, 50 % of the values wrong", *pair)]


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
    rows = [row for part in (switch, classify_bags, convert, find_records, repair_records) for row in part(options)]
    width = max(len(name) for name, *_ in rows)
    print(f"\n{'':{width}}  {'without':>14}  {'adaptive':>14}")
    for name, plain, adaptive in rows:
        print(f"{name:{width}}  {plain:>14}  {adaptive:>14}")
    print("\nwithout: the dot product, no memory, Euclidean distance; on clean images expect the same accuracy")
    print("\npictures:", *(min(options.out.glob(f"{name}.png")) for name in PICTURES), sep="\n  ")
    print("\nNext: change your own import by the lines at the top of README.md. docs/hopfield-layers.md is the guide.")


if __name__ == "__main__":
    main()
