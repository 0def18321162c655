"""The data sets of the tabular benchmark: read, encoded as numbers, split into a training and a test part."""

import csv
import lzma
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
from sklearn.datasets import load_breast_cancer
from sklearn.model_selection import train_test_split

Cells = list[list[str]]
Content = tuple[Cells, list[bool], int]
"""Rows, classes, and the index of the first test row; 0 if no test part is published."""


class Split(NamedTuple):
    """Training and test rows ``(n, features)`` and classes ``(n,)``, and which features are categories."""

    X: np.ndarray
    y: np.ndarray
    test_X: np.ndarray
    test_y: np.ndarray
    categories: np.ndarray

    @property
    def measure(self) -> str:
        """The measure of the paper: accuracy, or the area under the ROC curve if a class has less than a fifth."""
        return "accuracy" if 0.2 < self.y.mean() < 0.8 else "roc_auc"


def read(path: Path, delimiter: str = ",") -> Cells:
    """Reads the lines of a compressed table, without empty lines and comments."""
    with lzma.open(path, "rt") as file:
        lines = csv.reader(file, delimiter=delimiter, skipinitialspace=True)
        return [[cell.strip() for cell in line] for line in lines if len(line) > 1]


def encode(columns: Sequence[Sequence[str]]) -> tuple[np.ndarray, np.ndarray]:
    """Encodes columns of text as numbers ``(n, features)``.

    A missing value is a separate category, or -1 in a numerical column. Numerical columns with missing values have no
    negative values.

    Returns:
        The numbers, and which columns are categories.
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


def adult(training_path: Path, test_path: Path) -> Content:
    """Reads Adult, which has a published test part."""
    training, test = read(training_path), read(test_path)
    rows = training + test
    return [row[:-1] for row in rows], [row[-1].startswith(">50K") for row in rows], len(training)


def bank(path: Path) -> Content:
    """Reads Bank."""
    rows = read(path, ";")[1:]
    return [row[:-1] for row in rows], [row[-1] == "yes" for row in rows], 0


def purchase(path: Path) -> Content:
    """Reads Purchase."""
    rows = read(path)[1:]
    return [row[:-1] for row in rows], [row[-1] == "TRUE" for row in rows], 0


def heart(path: Path) -> Content:
    """Reads Heart, without the row number in the first column."""
    rows = read(path, ";")[1:]
    return [row[1:-1] for row in rows], [row[-1] == "1" for row in rows], 0


def vaccine(features: Path, labels: Path) -> Content:
    """Reads Vaccine. 26,232 of the 26,707 rows have features."""
    rows = read(features)[1:]
    seasonal = {row[0]: row[2] == "1" for row in read(labels)[1:]}
    return [row[1:] for row in rows], [seasonal[row[0]] for row in rows], 0


SETS: dict[str, tuple[Callable[..., Content], tuple[str, ...]]] = {
    "adult": (adult, ("adult.data.xz", "adult.test.xz")),
    "bank": (bank, ("bank-full.csv.xz",)),
    "vaccine": (vaccine, ("training_set_features_26232.csv.xz", "training_set_labels.csv.xz")),
    "purchase": (purchase, ("online_shoppers_intention.csv.xz",)),
    "heart": (heart, ("cardio_train.csv.xz",)),
}
"""The reader of a data set, and its files in ``tabular/``."""


def files_of(name: str, folder: Path) -> list[Path]:
    """Returns the files of a data set, none for ``tumors``.

    Raises:
        FileNotFoundError: a file is missing.
    """
    paths = [folder / "tabular" / file for file in SETS[name][1]] if name in SETS else []
    for path in paths:
        if not path.exists():
            raise FileNotFoundError(f"expected the data set {name} in {path}, got no such file; see --data-dir")
    return paths


def load(name: str, folder: Path, seed: int, rows: int | None = None) -> Split:
    """Reads a data set.

    Args:
        name: a key of ``SETS``, or ``tumors``: the breast cancer data of scikit-learn, which needs no files.
        folder: folder with ``tabular/``.
        seed: seed of the test part, a random fifth, if none is published, and of the selection of rows.
        rows: number of training rows; None for all.
    """
    if name == "tumors":
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
