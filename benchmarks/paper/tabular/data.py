"""The five data sets of benchmarks/tabular.py: read, coded as numbers, split into a training and a test part."""

import csv
import lzma
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
from sklearn.datasets import load_breast_cancer
from sklearn.model_selection import train_test_split

Table = list[list[str]]
Found = tuple[Table, list[bool], int]


class Split(NamedTuple):
    """Rows (n, features) and classes (n,), which features are categories, and the measure that the paper reports."""

    X: np.ndarray
    y: np.ndarray
    test_X: np.ndarray
    test_y: np.ndarray
    categories: np.ndarray

    @property
    def measure(self) -> str:
        """Accuracy, or the area under the ROC curve where fewer than a fifth are positive."""
        return "accuracy" if 0.2 < self.y.mean() < 0.8 else "roc_auc"


def read(path: Path, delimiter: str = ",") -> Table:
    """The lines of a compressed table, without empty ones and remarks."""
    with lzma.open(path, "rt") as file:
        lines = csv.reader(file, delimiter=delimiter, skipinitialspace=True)
        return [[cell.strip() for cell in line] for line in lines if len(line) > 1]


def encode(columns: Sequence[Sequence[str]]) -> tuple[np.ndarray, np.ndarray]:
    """Columns of text as numbers (n, features), and which of them are codes of categories.

    A missing value is a category of its own, or -1 among numbers, all of which are positive where any is missing.
    """
    features, categories = [], []
    for column in columns:
        try:
            values = np.array([float(cell or -1) for cell in column])
            categories.append(False)
        except ValueError:
            values = np.unique(column, return_inverse=True)[1].astype(float)
            categories.append(True)
        features.append(values)
    return np.column_stack(features), np.array(categories)


def adult(training_path: Path, test_path: Path) -> Found:
    """Rows, classes, and where the test part begins (0: none is published)."""
    training, test = read(training_path), read(test_path)
    rows = training + test
    return [row[:-1] for row in rows], [row[-1].startswith(">50K") for row in rows], len(training)


def bank(path: Path) -> Found:
    """As for :func:`adult`."""
    rows = read(path, ";")[1:]
    return [row[:-1] for row in rows], [row[-1] == "yes" for row in rows], 0


def purchase(path: Path) -> Found:
    """As for :func:`adult`."""
    rows = read(path)[1:]
    return [row[:-1] for row in rows], [row[-1] == "TRUE" for row in rows], 0


def heart(path: Path) -> Found:
    """As for :func:`adult`; the first column is a running number."""
    rows = read(path, ";")[1:]
    return [row[1:-1] for row in rows], [row[-1] == "1" for row in rows], 0


def vaccine(features: Path, labels: Path) -> Found:
    """As for :func:`adult`; 26,232 of the 26,707 rows have features."""
    rows = read(features)[1:]
    seasonal = {row[0]: row[2] == "1" for row in read(labels)[1:]}
    return [row[1:] for row in rows], [seasonal[row[0]] for row in rows], 0


SETS: dict[str, tuple[Callable[..., Found], tuple[str, ...]]] = {
    "adult": (adult, ("adult.data.xz", "adult.test.xz")),
    "bank": (bank, ("bank-full.csv.xz",)),
    "vaccine": (vaccine, ("training_set_features_26232.csv.xz", "training_set_labels.csv.xz")),
    "purchase": (purchase, ("online_shoppers_intention.csv.xz",)),
    "heart": (heart, ("cardio_train.csv.xz",)),
}
"""What reads a data set, and its files in ``tabular/``."""


def files_of(name: str, folder: Path) -> list[Path]:
    """The files of a data set, all of which must be there; none for one without files."""
    paths = [folder / "tabular" / file for file in SETS[name][1]] if name in SETS else []
    for path in paths:
        if not path.exists():
            raise FileNotFoundError(f"expected the data set {name} in {path}, got no such file; see --data-dir")
    return paths


def load(name: str, folder: Path, seed: int, rows: int | None = None) -> Split:
    """A data set; without a published test part a fifth, drawn by the seed; ``rows`` keeps so many to learn from.

    ``"tumours"`` is scikit-learn's breast cancer data, for a trial without files.
    """
    if name == "tumours":
        X, y = load_breast_cancer(return_X_y=True)
        categories, boundary = np.zeros(X.shape[1], dtype=bool), 0
    else:
        table, classes, boundary = SETS[name][0](*files_of(name, folder))
        X, categories = encode(list(zip(*table, strict=True)))
        y = np.array(classes).astype(int)
    if boundary:
        X, test_X, y, test_y = X[:boundary], X[boundary:], y[:boundary], y[boundary:]
    else:
        X, test_X, y, test_y = train_test_split(X, y, test_size=0.2, stratify=y, random_state=seed)
    if rows is not None and rows < len(X):
        X, _, y, _ = train_test_split(X, y, train_size=rows, stratify=y, random_state=seed)
    return Split(X, y, test_X, test_y, categories)
