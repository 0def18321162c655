"""The network behind the tabular estimators: encode a row, compare it with the cases, judge by the similarities."""

import math
from collections.abc import Callable, Sequence
from itertools import pairwise

import torch
from torch import Tensor, nn

from ahop_layers.association import dot_product
from ahop_layers.errors import check_choice
from ahop_layers.memory.kernel import KernelModulation
from ahop_layers.ops.reference import check_bases
from ahop_layers.similarity import AdaptiveSimilarity

SIMILARITIES = ("adaptive", "dot", "kernel")
FEW_VALUES = 128  # a feature with no more of them is a table
CHUNK = 4096  # rows at once where no gradient is needed: some 10 MB for each table of scores or columns


class Encoding(nn.Module):
    """Features as columns of comparable size: ``clamp((x - low) / width) - centre``, one or more columns a feature.

    Made by :meth:`standard` or :meth:`ramps`. Rows are float64, since features come in any unit; columns have the
    precision of ``centre``, in which the network computes.
    """

    column: Tensor
    low: Tensor
    rate: Tensor
    centre: Tensor

    def __init__(self, column: Tensor, low: Tensor, width: Tensor, limits: tuple[float, float]) -> None:
        super().__init__()
        self.limits = limits
        # A feature that is the same in all rows says nothing: at a rate of 0 it is zero everywhere.
        # Its deviation is the rounding of its mean, and not always exactly 0.
        number = torch.finfo(width.dtype)
        rate = torch.where(width > (16 * number.eps * low.abs()).clamp(min=number.tiny), 1 / width, 0.0)
        centre = torch.zeros_like(low, dtype=torch.float32)
        for name, values in (("column", column), ("low", low), ("rate", rate), ("centre", centre)):
            self.register_buffer(name, values)

    @classmethod
    def standard(cls, rows: Tensor, weight: Tensor) -> "Encoding":
        """One column a feature, of mean 0 and deviation 1: ``rows (n, features)``, ``weight (n,)`` of mean 1."""
        mean = (weight[:, None] * rows).mean(0)
        spread = (weight[:, None] * (rows - mean).square()).mean(0).sqrt()
        return cls(torch.arange(rows.shape[1]), mean, spread, (-math.inf, math.inf))

    @classmethod
    def ramps(cls, rows: Tensor, weight: Tensor, knots: int) -> "Encoding":
        """For each feature ramps from 0 to 1 between neighbouring knots, which stand at quantiles of its values.

        A linear map of the ramps is any function that is linear between knots. A feature with few values has a knot at
        each of them, so the codes of a category need no columns of their own. Values count once however often they
        occur: else a feature that is mostly zero would have all its knots there. Few rows cannot support many knots.
        """
        few = min(FEW_VALUES, max(2, len(rows) // 32))
        knots = min(knots, few)
        column, low, width = [], [], []
        for number, feature in enumerate(rows.T):
            values = feature.unique()
            if len(values) > few:
                values = values[torch.linspace(0, len(values) - 1, knots, dtype=torch.float64).round().long()]
            if len(values) == 1:
                values = values.repeat(2)
            column += [number] * (len(values) - 1)
            low.append(values[:-1])
            width.append(values.diff())
        encoding = cls(torch.tensor(column), torch.cat(low), torch.cat(width), (0.0, 1.0))
        shares = (weight / weight.sum()).float()
        parts = zip(torch.split(shares, CHUNK), torch.split(rows, CHUNK), strict=True)
        encoding.centre = torch.stack([share @ encoding(part) for share, part in parts]).sum(0)
        return encoding

    def forward(self, rows: Tensor) -> Tensor:
        """``(n, features) -> (n, columns)``."""
        # Features first, so that each column is one stretch of memory; in place, since rows have no gradient.
        columns = rows.T.contiguous().index_select(0, self.column).sub_(self.low[:, None]).mul_(self.rate[:, None])
        return columns.to(self.centre.dtype).clamp_(*self.limits).sub_(self.centre[:, None]).T


class CaseNetwork(nn.Module):
    """``MLP(LayerNorm(similarity(cases, row)))``, after a linear embedding shared by rows and cases.

    Args:
        encoding: from features to columns.
        cases: ``(S, columns)``.
        outputs: numbers to predict.
        similarity: ``"adaptive"``, ``"dot"``, or ``"kernel"`` (a dot product of cases changed by a learned kernel).
        bases: the base similarities of an adaptive one, which starts as the first of them.
        embedding_dim: dimensions in which rows and cases are compared; ``None`` compares the columns themselves.
        hidden: widths of the hidden layers.
        dropout: share of similarities and hidden units that are dropped in training.
    """

    cases: Tensor

    def __init__(
        self,
        encoding: Encoding,
        cases: Tensor,
        outputs: int,
        *,
        similarity: str,
        bases: Sequence[str],
        embedding_dim: int | None,
        hidden: Sequence[int],
        dropout: float,
    ) -> None:
        super().__init__()
        check_choice("similarity", similarity, SIMILARITIES)
        count, columns = cases.shape
        dim = columns if embedding_dim is None else embedding_dim
        self.encoding = encoding
        self.register_buffer("cases", cases)
        self.embedding = nn.Identity() if embedding_dim is None else nn.Linear(columns, dim)
        self.similarity = _as_first_base(dim, bases) if similarity == "adaptive" else None
        self.modulation = KernelModulation(dim) if similarity == "kernel" else nn.Identity()
        self.norm = nn.LayerNorm(count)
        widths = [count, *hidden]
        layers: list[nn.Module] = [nn.Dropout(dropout)]
        for before, after in pairwise(widths):
            layers += [nn.Linear(before, after), nn.ReLU(), nn.Dropout(dropout)]
        self.mlp = nn.Sequential(*layers, nn.Linear(widths[-1], outputs))

    def scores(self, rows: Tensor) -> Tensor:
        """Compare ``rows (n, features)`` with the cases: ``(n, S)``."""
        query = self.embedding(self.encoding(rows))
        key = self.embedding(self.cases)
        score = dot_product if self.similarity is None else self.similarity
        scores: Tensor = score(query, self.modulation(key))
        return scores

    def forward(self, rows: Tensor) -> Tensor:
        """``(n, features) -> (n, outputs)``."""
        outputs: Tensor = self.mlp(self.norm(self.scores(rows)))
        return outputs


def _as_first_base(dim: int, bases: Sequence[str]) -> AdaptiveSimilarity:
    """An adaptive similarity that starts as the first of its bases, whichever it is."""
    weight = torch.zeros(len(check_bases(bases)), dim)
    weight[0, -1] = 1.0
    return AdaptiveSimilarity(dim, bases=bases, init=weight)


def apply_in_chunks(function: Callable[[Tensor], Tensor], rows: Tensor) -> Tensor:
    """Apply ``function`` to rows in bounded memory."""
    return torch.cat([function(part) for part in torch.split(rows, CHUNK)])
