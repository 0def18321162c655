"""Classify bags of instances, and show which instances each prediction depends on.

To run: python -m examples.mil                                  (bags of digits: is there a nine? no download)
        python -m examples.mil --pooling adaptive dot           (against a dot-product Hopfield pooling)
        python -m examples.mil --damage 0.5 --first memory      (damaged digits)
        python -m examples.mil --data csv --data-dir bags.csv
        python -m examples.mil --data folder --data-dir SLIDES --batch-size 1 --width 256 --heads 8

bags.csv has an instance in each row: bag,label,feature,feature,... SLIDES holds labels.csv (columns bag,label) and one
file of features per bag, SLIDES/<bag>.pt, .npy, .npz or .h5. The column bag may be named slide_id. Labels are texts or
numbers, of two or more classes. Bags are read batch by batch, may hold 100,000 instances, and may be empty. --damage
replaces a fraction of the pixels of all digits. --first memory puts an AssociativeMemory of 600 clean digits, which are
in no bag, before the network. Writes checkpoints, a log, ROC curves and the instances of test bags ranked by weight.
--resume continues a run.
"""

import argparse
import csv
import importlib
import logging
import sys
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import lightning as L
import numpy as np
import torch
from lightning.pytorch import callbacks, loggers
from matplotlib.figure import Figure
from sklearn.datasets import load_digits
from sklearn.metrics import RocCurveDisplay
from sklearn.model_selection import train_test_split
from sklearn.preprocessing import StandardScaler
from torch import Tensor, nn
from torch.utils.data import DataLoader
from torchmetrics.classification import MulticlassAUROC

import ahop_layers as ah

logging.getLogger("lightning.pytorch").setLevel(logging.WARNING)  # not the hardware found, and tips
TRAIN, TEST, STORED = 600, 300, 600  # training and test bags of digits; clean digits for --first memory
Batch = tuple[Tensor, list[int], Tensor]  # instances (total, features), sizes of the bags, labels


class BagSet(NamedTuple):
    """The names and classes of n bags, and a function that reads the instances of a bag by its index."""

    names: list[str]
    labels: Tensor  # (n,), indices of classes
    classes: list[str]
    read: Callable[[int], Tensor]  # returns (size, features)
    parts: tuple[range, range] | None = None  # training and test bags; None for a random split
    clean: Tensor | None = None  # digits (STORED, 64) that are in no bag

    def gather(self, index: Sequence[int]) -> Batch:
        """Reads some bags and concatenates their instances."""
        bags = [self.read(number) for number in index]
        return torch.cat(bags), [len(bag) for bag in bags], self.labels[list(index)]


def digit_bags(damage: float, seed: int) -> BagSet:
    """Draws bags of about ten digits; label 1: the bag holds a nine. Training and test bags share no digit."""
    pixels, classes = load_digits(return_X_y=True)
    digits, random = torch.tensor(pixels / 16, dtype=torch.float32), np.random.default_rng(0)
    bags, labels = [], []
    replaced, generator = ah.variants.Replaced(damage, low=0.0, high=1.0), torch.Generator().manual_seed(seed)
    held, clean, rest = np.split(random.permutation(len(digits)), [500, 500 + STORED])
    for pool, count in ((rest, TRAIN), (held, TEST)):
        nines, others = pool[classes[pool] == 9], pool[classes[pool] != 9]
        for number in range(count):
            size = max(2, round(random.normal(10, 2)))
            shown = number % 2 * min(random.integers(1, 3), size)  # every second bag has one or two nines
            chosen = np.concatenate([random.choice(nines, shown), random.choice(others, size - shown)])
            bags.append(replaced(digits[random.permutation(chosen)], generator))
            labels.append(int(shown > 0))
    names, parts = [f"bag {number}" for number in range(len(bags))], (range(TRAIN), range(TRAIN, TRAIN + TEST))
    return BagSet(names, torch.tensor(labels), ["0", "1"], bags.__getitem__, parts, digits[clean])


def read_table(path: Path) -> tuple[tuple[list[str], Tensor, list[str]], list[tuple[int, str, list[str]]]]:
    """Reads names, labels and classes of bags from a CSV table, and the line, the bag and the rest of each row."""
    labels, rows = {}, []
    with path.open(newline="", encoding="utf-8-sig") as file:
        for row in (reader := csv.DictReader(file)):
            bag, label = row.pop("slide_id" if "slide_id" in row else "bag", None), row.pop("label", None)
            if not bag or not label or labels.setdefault(bag, label) != label:
                rule = "expected columns bag or slide_id, and label, with one label per bag"
                raise ah.AHopError(f"{path}, line {reader.line_num}: {rule}, got bag {bag!r}, label {label!r}")
            rows.append((reader.line_num, bag, [*row.values()]))
    if len(classes := sorted({*labels.values()})) < 2:
        raise ah.AHopError(f"{path}: expected labels of at least two classes, got {classes}")
    return ([*labels], torch.tensor([classes.index(label) for label in labels.values()]), classes), rows


def csv_bags(path: Path) -> BagSet:
    """Reads a table of instances, or ``bags.csv`` in a folder: ``bag,label,feature,feature,...``."""
    path = path / "bags.csv" if path.is_dir() else path
    known, rows = read_table(path)
    bags: dict[str, list[Tensor]] = {bag: [] for bag in known[0]}
    for line, bag, features in rows:
        instance = torch.from_numpy(np.genfromtxt(map(str, features), np.float32, ndmin=1))  # NaN for a text
        if not instance.isfinite().all():
            raise ah.AHopError(f"{path}, line {line}: expected finite features, got {features} in bag {bag!r}")
        bags[bag].append(instance)
    return BagSet(*known, [torch.stack(bag) for bag in bags.values()].__getitem__)


def folder_bags(home: Path) -> BagSet:
    """Reads ``labels.csv`` and checks the feature files; the features of a bag are read when they are needed."""
    known, _ = read_table(home / "labels.csv")
    files = {path.stem: path for path in home.iterdir() if path.suffix in (".pt", ".npy", ".npz", ".h5")}
    paths = [files.get(bag, home / f"{bag}.pt") for bag in known[0]]
    if len(widths := {read_features(path, check=False).shape[1] for path in paths}) > 1:
        raise ah.AHopError(f"{home}: expected the same number of features in all bags, got {widths}")
    return BagSet(*known, lambda number: read_features(paths[number]).float())


def read_features(path: Path, check: bool = True) -> Tensor:
    """Returns the array ``(instances, features)`` of a file: the one named ``features``, or the only one."""
    try:
        if path.suffix == ".pt":  # mapped into memory, not read
            held = torch.load(path, weights_only=True, mmap=True, map_location="cpu")
        else:
            held = importlib.import_module("h5py").File(path) if path.suffix == ".h5" else np.load(path, mmap_mode="c")
        array = held if hasattr(held, "ndim") else held["features" if "features" in held else "".join(held)]
        features = torch.as_tensor(array[()])
        if features.ndim != 2:
            raise ValueError(f"an array {tuple(features.shape)}")
        if check and not features.float().isfinite().all():
            raise ValueError("NaN or infinity in float32")
    except Exception as error:  # each format has its own errors for a damaged file
        raise ah.AHopError(f"{path}: expected finite features (instances, features), got {error!r}") from None
    return features


class Standardize(nn.Module):
    """Standardizes features by the mean and deviation of some bags, and clips them at four standard deviations."""

    def __init__(self, bags: Iterable[Tensor]) -> None:
        super().__init__()
        scaler = StandardScaler()
        for bag in filter(len, bags):
            scaler.partial_fit(bag.double())
        self.register_buffer("mean", torch.tensor(scaler.mean_, dtype=torch.float32))
        self.register_buffer("scale", torch.tensor(scaler.scale_, dtype=torch.float32))

    def forward(self, instances: Tensor) -> Tensor:
        """Standardizes ``instances (total, features)``."""
        return ((instances - self.mean) / self.scale).clamp(-4, 4)


class BagClassifier(L.LightningModule):
    """Embeds every instance, pools the instances of a bag to one vector, and applies a linear layer."""

    def __init__(self, options: argparse.Namespace, data: BagSet, train: Sequence[int], pooling: str) -> None:
        super().__init__()
        self.options, self.auc = options, MulticlassAUROC(len(data.classes))
        self.embed, self.head = make_embedding(options, data, train), nn.Linear(options.width, len(data.classes) - 1)
        heads = {"num_heads": options.heads, "scaling": options.scaling, "dropout": options.dropout}
        self.pool = ah.AdaptiveHopfieldPooling(options.width, options.head_width, **heads)
        for parameter in ah.similarity_parameters(self.pool):  # initialized to the dot product
            parameter.requires_grad_(pooling == "adaptive")

    def forward(self, instances: Tensor, sizes: list[int]) -> tuple[Tensor, Tensor]:
        """Computes logits ``(bags, classes)`` and the weights of instances ``(total,)``, averaged over the heads."""
        pooled, weights = self.pool.pool_packed(self.embed(instances), sizes, return_association=True)
        return nn.functional.pad(self.head(pooled), (1, 0)), weights.mean((1, 2))  # the first class has the logit 0

    def training_step(self, batch: Batch, number: int) -> Tensor:
        """Returns the loss of a batch."""
        loss = nn.functional.cross_entropy(self(*batch[:2])[0], batch[2])
        self.log("train_loss", loss, prog_bar=True, batch_size=len(batch[2]))
        return loss

    def validation_step(self, batch: Batch, number: int) -> None:
        """Logs loss and AUC, the mean over the classes, over all bags."""
        logits, part = self(*batch[:2])[0], "test" if self.trainer.testing else "val"
        self.auc(logits.softmax(-1), batch[2])
        loss = nn.functional.cross_entropy(logits, batch[2])
        self.log_dict({f"{part}_loss": loss, f"{part}_auc": self.auc}, prog_bar=True, batch_size=len(logits))

    test_step = validation_step

    def configure_optimizers(self) -> dict[str, Any]:
        """Returns AdamW, without weight decay of the similarities, and a decaying learning rate."""
        groups = ah.parameter_groups(self, self.options.lr, weight_decay=self.options.weight_decay)
        optimizer = torch.optim.AdamW(groups)
        return {"optimizer": optimizer, "lr_scheduler": torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.94)}


def make_embedding(options: argparse.Namespace, data: BagSet, train: Sequence[int]) -> nn.Module:
    """Returns a network that embeds digits or features ``(total, features)``."""
    if data.clean is None:
        features = Standardize(map(data.read, train))
        return nn.Sequential(features, nn.Linear(len(features.mean), options.width), nn.ReLU())
    convolutions = nn.Conv2d(1, 8, 3), nn.ReLU(), nn.Conv2d(8, 16, 3), nn.ReLU(), nn.Flatten()
    layers = nn.Unflatten(1, (1, 8, 8)), *convolutions, nn.Linear(16 * 16, options.width), nn.ReLU()
    memory = [ah.AssociativeMemory(data.clean).requires_grad_(False)] if options.first == "memory" else []
    return nn.Sequential(*memory, *layers)  # the memory replaces each digit by the similar stored ones


def run(options: argparse.Namespace, data: BagSet, pooling: str) -> dict[str, float]:
    """Trains a classifier, writes its files, and returns the test measures of the best epoch."""
    L.seed_everything(options.seed, verbose=False)
    split = partial(train_test_split, test_size=0.2, random_state=options.seed)
    rest, test = split(range(len(data.labels)), stratify=data.labels) if data.parts is None else data.parts
    train, held = split(rest, stratify=data.labels[list(rest)])
    loader = partial(DataLoader, batch_size=options.batch_size, collate_fn=data.gather, num_workers=options.workers)
    folder, module = options.out / pooling, BagClassifier(options, data, train, pooling)
    best = callbacks.ModelCheckpoint(folder, "best", monitor="val_loss", save_last=True)
    trainer = L.Trainer(
        devices=1, max_epochs=options.epochs, fast_dev_run=options.fast_dev_run, log_every_n_steps=1,
        logger=loggers.CSVLogger(folder, "log"), callbacks=[best, callbacks.EarlyStopping("val_loss", patience=10)],
        enable_progress_bar=sys.stderr.isatty(), enable_model_summary=False,
    )  # fmt: skip
    trainer.fit(module, loader(train, shuffle=True), loader(held), ckpt_path="last" if options.resume else None)
    results = trainer.test(module, loader(test), ckpt_path=best.best_model_path or None, verbose=False)[0]
    write_files(module.eval().cpu(), data, test, folder)
    return {**results, "epochs": trainer.current_epoch}


@torch.no_grad()
def write_files(module: BagClassifier, data: BagSet, test: Sequence[int], folder: Path) -> None:
    """Writes the ROC curve, a table of the instances of each test bag by their weight, and digits as a picture."""
    folder.mkdir(parents=True, exist_ok=True)
    found = {number: module(*data.gather([number])[:2]) for number in test}
    shares, labels = torch.cat([logits for logits, _ in found.values()]).softmax(-1).numpy(), data.labels[list(test)]
    axis = (figure := Figure(figsize=(4.2, 4), layout="constrained")).subplots()
    for at, name in [*enumerate(data.classes)][len(data.classes) == 2 :]:  # of two classes, the second
        RocCurveDisplay.from_predictions(labels == at, shares[:, at], ax=axis, name=name, plot_chance_level=at == 1)
    figure.savefig(folder / "roc.png", dpi=100)
    with (folder / "instances.csv").open("w", newline="") as file:
        table = csv.writer(file)
        table.writerow(("bag", "label", *(f"probability {name}" for name in data.classes), "instance", "weight"))
        for share, (number, (_, weights)) in zip(shares, found.items(), strict=True):
            bag = data.names[number], data.classes[data.labels[number]], *(f"{each:.4f}" for each in share)
            table.writerows((*bag, place.item(), f"{weights[place]:.6f}") for place in weights.argsort(descending=True))
    if data.clean is not None:
        draw_digits(data, found).savefig(folder / "instances.png", dpi=100)


def draw_digits(data: BagSet, found: dict[int, tuple[Tensor, Tensor]]) -> Figure:
    """Draws the digits of some bags, with their logits and weights, in descending order of weight."""
    shown = [number for label in (1, 0) for number in [each for each in found if data.labels[each] == label][:4]]
    figure = Figure(figsize=(10.2, 1.05 * len(shown) + 0.3), layout="constrained")
    figure.suptitle("digits of test bags by attention weight, shown above each digit; label 1: holds a nine", size=10)
    bare = {"xticks": [], "yticks": [], "frame_on": False}
    for number, axes in zip(shown, figure.subplots(len(shown), 10, subplot_kw=bare), strict=True):
        instances, (((_, logit),), weights), label = data.read(number), found[number], int(data.labels[number])
        for axis, place in zip(axes, weights.argsort(descending=True), strict=False):
            axis.imshow(instances[place].reshape(8, 8).numpy(), cmap="gray_r", vmin=0, vmax=1)
            axis.set_title(f"{weights[place]:.2f}", fontsize=8)
        color, sign = ("#6a9a3b", "\u2713") if (logit > 0) == label else ("#c8555b", "\u2717")
        text = f"label {label}, predicted {logit.sigmoid():.2f} {sign}"
        axes[0].set_ylabel(text, rotation=0, ha="right", va="center", fontsize=9, color=color)
    return figure


def main(arguments: Sequence[str] | None = None) -> dict[str, dict[str, float]]:
    """Trains and tests a classifier for each pooling, prints the table, and returns the test measures."""
    shown = type("Help", (argparse.ArgumentDefaultsHelpFormatter, argparse.RawDescriptionHelpFormatter), {})
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=shown, usage=argparse.SUPPRESS)
    add, whole = parser.add_argument, {"type": int, "metavar": "N"}
    add("--pooling", nargs="+", choices=("adaptive", "dot"), default=["adaptive"], help="poolings to compare")
    add("--data", choices=("digits", "csv", "folder"), default="digits", help="data set")
    add("--data-dir", type=Path, metavar="DIR", default="data", help="folder or CSV file of your own bags")
    add("--damage", type=float, default=0.0, help="fraction of the pixels of a digit to replace by random values")
    add("--first", choices=("none", "memory"), default="none", help="first layer of the network for digits")
    add("--epochs", **whole, default=12, help="number of epochs")
    add("--batch-size", **whole, default=16, help="bags per step")
    add("--lr", type=float, default=1e-3, help="learning rate")
    add("--weight-decay", type=float, default=0.01, help="weight decay of all parameters but the similarities")
    add("--dropout", type=float, default=0.5, help="probability of dropping the weight of an instance in training")
    add("--width", **whole, default=64, help="dimension of an embedded instance")
    add("--heads", **whole, default=4, help="heads of the Hopfield association")
    add("--head-width", **whole, default=32, help="dimension of a head")
    add("--scaling", type=float, default=1.0, help="factor of the scores, 0.1 to 10 in published work")
    add("--workers", **whole, default=0, help="processes that read bags in advance")
    add("--seed", **whole, default=0, help="seed of all random number generators")
    add("--out", type=Path, metavar="DIR", default="out/mil", help="folder for all output files")
    add("--fast-dev-run", action="store_true", help="run one batch of training, validation and test")
    add("--resume", action="store_true", help="continue the interrupted run in the folder of --out")
    options = parser.parse_args(arguments)
    readers = {"csv": csv_bags, "folder": folder_bags, "digits": lambda _: digit_bags(options.damage, options.seed)}
    try:
        data = readers[options.data](options.data_dir)
        results = {pooling: run(options, data, pooling) for pooling in options.pooling}
    except (ah.AHopError, OSError, ValueError) as error:
        parser.error(" ".join(str(error).split()))
    print(f"\n{'pooling':<10}{'test AUC':>10}{'test loss':>11}{'epochs':>8}")
    for pooling, found in results.items():
        print(f"{pooling:<10}{found['test_auc']:>10.4f}{found['test_loss']:>11.4f}{found['epochs']:>8}")
    print("\nwritten:", *sorted(options.out.glob("*/*.*")), sep="\n  ")
    return results


if __name__ == "__main__":
    main()
