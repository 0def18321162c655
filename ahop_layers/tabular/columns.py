"""Columns of a table: categories as codes, and rows as columns of comparable scale."""

import math
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from ahop_layers.errors import AHopError

NUMBER, RAMP, CATEGORY, MISSING = range(4)  # kinds of columns
LIMIT = 3.0  # standard deviations at which the soft clip of a numeric feature bends


class Categories:
    """Replaces the categories of a table by codes. ``codes`` has those of each categorical feature, by its index.

    A feature is categorical if its pandas dtype is ``category``, or if it has a string: strings are not parsed, so that
    ``"01"`` and ``"1"`` are two categories. A category that is not in the training set is encoded as missing, NaN.
    """

    def __init__(self, X: Any) -> None:
        self.codes: dict[int, dict[Any, float]] = {}
        for index, (values, categorical) in enumerate(_columns(X)):
            if categorical:
                known = sorted(set(values) - {None}, key=lambda value: (_kind(value), value))
                self.codes[index] = {value: float(code) for code, value in enumerate(known)}

    def encode(self, X: Any) -> Any:
        """Returns ``X`` with codes in place of categories; ``X`` itself if it has no categorical feature.

        Raises an AHopError for a string in a numeric feature, and for 1 where all categories are strings or vice versa.
        """
        columns = _columns(X)
        if not columns or not (self.codes or any(categorical for _, categorical in columns)):
            return X
        encoded = []
        for index, (values, categorical) in enumerate(columns):
            known = self.codes.get(index)
            if categorical or known is not None:
                values = [_plain(value) for value in values]
                kinds = {"number"} if known is None else {_kind(value) for value in known}
                wrong = [value for value in values if value is not None and _kind(value) not in kinds]
                if kinds and wrong:
                    rule = "was numeric in fit" if known is None else f"must have categories like {next(iter(known))!r}"
                    raise AHopError(f"feature {index} {rule}, got {wrong[0]!r}")
                values = [value if known is None else known.get(value, math.nan) for value in values]
            encoded.append(np.asarray(values, dtype=np.float64))
        matrix = np.column_stack(encoded)
        return type(X)(matrix, columns=X.columns, index=X.index) if hasattr(X, "iloc") else matrix


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
        self.features = rows.shape[1]
        self.ramps = max(knots - 1, 0)  # of each numeric feature
        for name, entries in zip(Column._fields, zip(*columns, strict=True), strict=True):
            dtype = torch.int64 if name in ("feature", "kind") else torch.float64
            self.register_buffer(name, torch.tensor(entries, dtype=dtype))

    def forward(self, rows: Tensor) -> Tensor:
        """Encodes ``rows (n, features) -> (n, columns)`` in float64."""
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
        """Replaces the ramps of each feature by their sum, ``(n, columns) -> (n, axes)``. Sums come first."""
        if not self.ramps:
            return columns
        ramp = self.kind == RAMP
        sums = columns[:, ramp].reshape(len(columns), -1, self.ramps).sum(-1)
        return torch.cat([sums, columns[:, ~ramp]], 1)


def standardization(feature: int, values: Tensor, weight: Tensor) -> tuple[float, float]:
    """Returns the mean of values ``(n,)``, and the factor that scales their deviation to 1; 0 if it is constant."""
    mean, deviation = moments(values, weight)
    if not (math.isfinite(mean) and math.isfinite(deviation)):
        raise AHopError(f"X must have a finite range and variance in float64, got feature {feature}")
    number = torch.finfo(values.dtype)
    # The computed deviation of a constant feature can be a rounding error.
    varies = deviation > max(16 * number.eps * abs(mean), number.tiny)
    return mean, 1 / deviation if varies else 0.0


def moments(values: Tensor, weight: Tensor) -> tuple[float, float]:
    """Returns the weighted mean and standard deviation of values ``(n,)``."""
    weight = weight / weight.sum()
    mean = (weight * values).sum()
    return mean.item(), (weight * (values - mean).square()).sum().sqrt().item()


def _encode_numbers(feature: int, values: Tensor, weight: Tensor, knots: int) -> list[Column]:
    """Returns the columns of the known values ``(n,)`` of a numeric feature."""
    mean, rate = standardization(feature, values, weight)
    if not knots:
        return [Column(feature, NUMBER, mean, rate)]
    unused = Column(feature, RAMP, height=0.0)
    if not rate:
        return [unused] * (knots - 1)
    distinct = torch.unique(values)
    places = torch.linspace(0, len(distinct) - 1, min(knots, len(distinct)), dtype=torch.float64)
    ends = distinct[places.round().long()]
    rates = 1 / ends.diff()
    ramps = ((values[:, None] - ends[:-1]) * rates).clamp(0, 1)
    height = 1 / moments(ramps.sum(1), weight)[1]
    centers = height * weight / weight.sum() @ ramps
    entries = zip(ends.tolist(), rates.tolist(), centers.tolist(), strict=False)
    columns = [Column(feature, RAMP, low, slope, height, center) for low, slope, center in entries]
    return columns + [unused] * (knots - 1 - len(columns))


def _columns(X: Any) -> list[tuple[Any, bool]]:
    """Returns the columns of a table, arrays of numbers or lists of Python values, and whether each is categorical.

    Missing values of a list are None. An ``X`` that is no table has no columns.
    """
    if isinstance(X, list | tuple):
        X = np.array(X, dtype=object)
    if hasattr(X, "iloc") and X.ndim == 2:
        columns = [X.iloc[:, index] for index in range(X.shape[1])]
    else:
        columns = list(X.T) if isinstance(X, np.ndarray) and X.ndim == 2 and X.dtype.kind in "OUSbiuf" else []
    found: list[tuple[Any, bool]] = []
    for column in columns:
        if getattr(column.dtype, "kind", "O") in "biuf":
            found.append((column, False))
        else:
            values = [_plain(value) for value in column]
            found.append((values, str(column.dtype) == "category" or any(_kind(each) != "number" for each in values)))
    return found


def _plain(value: Any) -> Any:
    """Returns None for a missing value, and a Python scalar for one of NumPy; raises if it is no string or number."""
    value = value.item() if isinstance(value, np.generic) else value
    if value is None or type(value).__name__ in ("NAType", "NaTType") or value != value:
        return None
    if not isinstance(value, str | int | float | bytes):
        raise TypeError(f"a value of X must be missing, or: argument must be a string or a number, got {value!r}")
    return value


def _kind(value: Any) -> str:
    return type(value).__name__ if isinstance(value, str | bytes) else "number"
