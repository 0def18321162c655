"""Columns of a table: categories as codes, and rows as comparable columns."""

import math
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from ahop_layers.errors import AHopError

Array = NDArray[Any]
NUMBER, RAMP, CATEGORY, MISSING = range(4)  # kinds of columns
LIMIT = 3.0  # standard deviations at which the soft clip of a numeric feature bends


class Categories:
    """Replaces the categories of a table by codes.

    A feature is categorical if its pandas dtype is ``category``, or if a value of it is neither a number nor missing.
    A category that was not in the training set is encoded as missing, NaN.

    Attributes:
        codes: the code of each category, by the index of the feature.
    """

    def __init__(self) -> None:
        self.codes: dict[int, dict[Any, float]] = {}

    def fit(self, X: Any) -> "Categories":
        """Collect the categories of every categorical feature of ``X``, a data frame or an array."""
        for index, values in _texts(X):
            known = sorted(
                {value for value in values if value is not None}, key=lambda value: (str(type(value)), value)
            )
            self.codes[index] = {value: float(code) for code, value in enumerate(known)}
        return self

    def encode(self, X: Any) -> Any:
        """Return ``X`` with codes in place of categories; ``X`` itself if it has no categorical feature."""
        given = dict(_texts(X))
        wanted = self.codes.keys() | given.keys()
        if not wanted:
            return X
        frame = hasattr(X, "iloc")
        columns = []
        for index in range(X.shape[1]):
            values = given[index] if index in given else (X.iloc[:, index] if frame else X[:, index])
            if index in self.codes:
                known = self.codes[index]
                values = np.array([known.get(_plain(value), np.nan) for value in values])
            elif index in given:
                bad = next(value for value in values if not (value is None or _is_number(value)))
                raise ValueError(f"feature {index} was numeric in fit, got {bad!r}: could not convert string to float")
            columns.append(np.asarray(values, dtype=np.float64))
        matrix = np.column_stack(columns)
        return type(X)(matrix, columns=X.columns, index=X.index) if frame else matrix


class Gaps(nn.Module):
    """Fills missing values, and appends one indicator for each feature that has missing values in the training set.

    The value is the mean of a numeric feature, and the most frequent code of a category.

    Args:
        rows: ``(n, features)`` of float64, with NaN for missing values.
        weight: ``(n,)``.
        categorical: indices of the categorical features.
    """

    fill: Tensor
    feature: Tensor

    def __init__(self, rows: Tensor, weight: Tensor, categorical: list[int]) -> None:
        super().__init__()
        missing = rows.isnan()
        shares = weight[:, None] * ~missing
        fill = (shares * rows.nan_to_num()).sum(0) / shares.sum(0).clamp(min=torch.finfo(weight.dtype).tiny)
        for index in categorical:
            codes, code = torch.unique(rows[:, index].nan_to_num(-1), return_inverse=True)
            counts = torch.zeros_like(codes).index_add_(0, code, shares[:, index])
            fill[index] = codes[counts.argmax()]
        self.register_buffer("fill", fill)
        features = torch.arange(rows.shape[1])
        self.register_buffer("feature", torch.cat([features, features[missing.any(0)]]))

    def forward(self, rows: Tensor) -> Tensor:
        """Fill ``rows (n, features) -> (n, features + indicators)``."""
        missing = rows.isnan()
        full = torch.where(missing, self.fill, rows)
        indicators = missing[:, self.feature[len(self.fill) :]]
        return torch.cat([full, indicators.to(full.dtype)], 1) if indicators.shape[1] else full


class Column(NamedTuple):
    """A column of encoded rows: ``height * clamp(rate * (x - low), 0, 1) - center`` if it is a ramp."""

    feature: int
    kind: int
    low: float = 0.0
    rate: float = 1.0
    height: float = 1.0
    center: float = 0.0


class RowEncoding(nn.Module):
    """Encodes rows as columns of comparable scale; a missing value is encoded as zeros.

    A numeric feature has one column with mean 0 and standard deviation 1, clipped softly at 3 standard deviations. With
    knots, it has a ramp between any two adjacent knots instead, whose sum has mean 0 and standard deviation 1. Knots
    are quantiles of the distinct values, and all features have the same number of ramps. A category has one column for
    each of its codes. A feature with missing values in the training set has one more column, which indicates them.

    Args:
        rows: ``(n, features)`` of float64, with NaN for missing values.
        weight: ``(n,)``.
        categorical: indices of the categorical features.
        knots: number of knots of a numeric feature; 0 for no ramps.

    Raises:
        AHopError: the variance of a feature is not finite.
    """

    feature: Tensor
    kind: Tensor
    low: Tensor
    rate: Tensor
    height: Tensor
    center: Tensor

    def __init__(self, rows: Tensor, weight: Tensor, categorical: list[int], knots: int = 0) -> None:
        super().__init__()
        columns: list[Column] = []
        for index, values in enumerate(rows.T):
            known = ~values.isnan()
            if index in categorical:
                columns += [Column(index, CATEGORY, code) for code in torch.unique(values[known]).tolist()]
            elif known.any():
                columns += _encode_numbers(index, values[known], weight[known], knots)
            if not known.all():
                columns.append(Column(index, MISSING))
        self.ramps = max(knots - 1, 0)  # of each numeric feature
        for name, entries in zip(Column._fields, zip(*columns, strict=True), strict=True):
            dtype = torch.int64 if name in ("feature", "kind") else torch.float64
            self.register_buffer(name, torch.tensor(entries, dtype=dtype))

    def forward(self, rows: Tensor) -> Tensor:
        """Encode ``rows (n, features) -> (n, columns)`` in float64."""
        values = rows[:, self.feature]
        missing = values.isnan()
        numbers = (values - self.low) * self.rate
        ramps = numbers.clamp(0, 1) * self.height - self.center
        numbers = torch.where(self.kind == RAMP, ramps, numbers / (1 + (numbers / LIMIT).square()).sqrt())
        indicators = torch.where(self.kind == CATEGORY, values == self.low, missing)
        return torch.where(self.kind > RAMP, indicators.to(numbers.dtype), torch.where(missing, 0.0, numbers))

    @property
    def axes(self) -> Tensor:
        """Indices of a column of each axis, see :meth:`add_ramps`."""
        ramp = self.kind == RAMP
        return torch.cat([ramp.nonzero()[:: max(self.ramps, 1), 0], (~ramp).nonzero()[:, 0]])

    def add_ramps(self, columns: Tensor) -> Tensor:
        """Replace the ramps of each feature by their sum, ``(n, columns) -> (n, axes)``. Sums come first."""
        if not self.ramps:
            return columns
        ramp = self.kind == RAMP
        sums = columns[:, ramp].reshape(len(columns), -1, self.ramps).sum(-1)
        return torch.cat([sums, columns[:, ~ramp]], 1)


def _encode_numbers(feature: int, values: Tensor, weight: Tensor, knots: int) -> list[Column]:
    """The columns of the known values ``(n,)`` of a numeric feature."""
    weight = weight / weight.sum()

    def moments(values: Tensor) -> tuple[float, float]:
        mean = (weight * values).sum()
        return mean.item(), (weight * (values - mean).square()).sum().sqrt().item()

    mean, deviation = moments(values)
    if not (math.isfinite(mean) and math.isfinite(deviation)):
        raise AHopError(f"X must have a finite range and variance in float64, got feature {feature}")
    number = torch.finfo(values.dtype)
    # The computed deviation of a constant feature can be a rounding error.
    varies = deviation > max(16 * number.eps * abs(mean), number.tiny)
    if not knots or not varies:
        constant = [Column(feature, RAMP, height=0.0)] * (knots - 1)
        return constant or [Column(feature, NUMBER, mean, 1 / deviation if varies else 0.0)]
    distinct = torch.unique(values)
    places = torch.linspace(0, len(distinct) - 1, min(knots, len(distinct)), dtype=torch.float64)
    ends = distinct[places.round().long()]
    rate = 1 / ends.diff()
    ramps = ((values[:, None] - ends[:-1]) * rate).clamp(0, 1)
    height = 1 / moments(ramps.sum(1))[1]
    entries = zip(ends.tolist(), rate.tolist(), (height * weight @ ramps).tolist(), strict=False)
    columns = [Column(feature, RAMP, low, slope, height, center) for low, slope, center in entries]
    return columns + [Column(feature, RAMP, height=0.0)] * (knots - 1 - len(columns))


def _texts(X: Any) -> list[tuple[int, list[Any]]]:
    """The categorical features of a data frame or an array: their index, and their values with None if missing."""
    if hasattr(X, "iloc") and hasattr(X, "dtypes"):
        columns = [(index, X.iloc[:, index], str(dtype)) for index, dtype in enumerate(X.dtypes)]
    elif isinstance(X, np.ndarray) and X.ndim == 2 and X.dtype.kind in "OUS":
        columns = [(index, X[:, index], "object") for index in range(X.shape[1])]
    else:
        return []
    found = []
    for index, column, dtype in columns:
        if dtype != "category" and getattr(column.dtype, "kind", "O") in "biuf":
            continue
        values = [_plain(value) for value in column]
        if dtype == "category" or not all(value is None or _is_number(value) for value in values):
            found.append((index, values))
    return found


def _plain(value: Any) -> Any:
    """Return None for a missing value, and a Python scalar for one of NumPy.

    Raises:
        TypeError: the value is neither a string nor a number.
    """
    value = value.item() if isinstance(value, np.generic) else value
    if value is None or type(value).__name__ in ("NAType", "NaTType") or value != value:
        return None
    if not isinstance(value, str | int | float | bytes):
        raise TypeError(f"a value of X must be missing, or: argument must be a string or a number, got {value!r}")
    return value


def _is_number(value: Any) -> bool:
    try:
        float(value)
    except ValueError:
        return False
    return True
