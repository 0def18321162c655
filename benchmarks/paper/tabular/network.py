"""The network of the paper: encode a row, score it against the cases, apply an MLP to the scores."""

import math
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from ahop_layers.errors import AHopError
from ahop_layers.similarity.adaptive import AdaptiveSimilarity
from ahop_layers.similarity.protocol import dot_product
from benchmarks.paper.kernel_similarity import KernelModulation
from benchmarks.paper.tabular.rows import CHUNK

FEW_VALUES = 128  # a feature with at most this many distinct values has a knot at each of them


class Encoding(nn.Module):
    """Encodes features as columns of comparable scale, ``clamp((x - low) / width) - center``.

    A feature has one or more columns. Create an encoding with :meth:`standard` or :meth:`ramps`. Rows are float64,
    because features come in any unit. Columns have the dtype of ``center``, which is that of the network.
    """

    column: Tensor
    low: Tensor
    rate: Tensor
    center: Tensor

    def __init__(self, column: Tensor, low: Tensor, width: Tensor, limits: tuple[float, float]) -> None:
        super().__init__()
        self.limits = limits
        overflow = column[~(low.isfinite() & width.isfinite())].tolist()
        if overflow:
            raise AHopError(f"X must have a finite range and variance in float64, got feature {overflow[0]}")
        # A constant feature has rate 0, so that it is encoded as zero. Its computed width can be a rounding error.
        number = torch.finfo(width.dtype)
        rate = torch.where(width > (16 * number.eps * low.abs()).clamp(min=number.tiny), 1 / width, 0.0)
        center = torch.zeros_like(low, dtype=torch.float32)
        for name, values in (("column", column), ("low", low), ("rate", rate), ("center", center)):
            self.register_buffer(name, values)

    @classmethod
    def standard(cls, rows: Tensor, weight: Tensor) -> "Encoding":
        """Standardizes each feature to one column with mean 0 and standard deviation 1.

        Args:
            rows: ``(n, features)``.
            weight: ``(n,)`` with mean 1.
        """
        mean = (weight[:, None] * rows).mean(0)
        deviation = (weight[:, None] * (rows - mean).square()).mean(0).sqrt()
        return cls(torch.arange(rows.shape[1]), mean, deviation, (-math.inf, math.inf))

    @classmethod
    def ramps(cls, rows: Tensor, weight: Tensor, knots: int) -> "Encoding":
        """Encodes each feature as ramps from 0 to 1 between adjacent knots, placed at quantiles of its distinct values.

        A linear map of the ramps is a piecewise linear function of the feature. A feature with few distinct values has
        a knot at each of them, so category codes need no one-hot encoding. Quantiles are those of the distinct values:
        otherwise a feature that is mostly zero would have all knots there. Small tables get fewer knots.

        Args:
            rows: ``(n, features)``.
            weight: ``(n,)``.
            knots: maximum number of knots of a feature with many distinct values.
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
        encoding.center = torch.stack([share @ encoding(part) for share, part in parts]).sum(0)
        return encoding

    def forward(self, rows: Tensor) -> Tensor:
        """Encodes ``rows (n, features) -> (n, columns)``."""
        # Transposed, so that each column is contiguous. In place, because rows have no gradient.
        columns = rows.T.contiguous().index_select(0, self.column).sub_(self.low[:, None]).mul_(self.rate[:, None])
        return columns.to(self.center.dtype).clamp_(*self.limits).sub_(self.center[:, None]).T


class CaseNetwork(nn.Module):
    """Computes ``MLP(LayerNorm(similarity(cases, row)))``; rows and cases share one linear embedding.

    Args:
        encoding: from features to columns.
        cases: ``(S, columns)``.
        outputs: number of outputs.
        similarity: ``"adaptive"``, ``"dot"``, or ``"kernel"``, a dot product with a learned kernel.
        bases: base similarities of the adaptive similarity, which is initialized to the first.
        blocks: blocks of the adaptive similarity; see :class:`~ahop_layers.AdaptiveSimilarity`.
        embedding_dim: dimension of the embedding; ``None`` compares the columns directly.
        hidden: widths of the hidden layers.
        dropout: dropout probability of scores and hidden units.
        generator: CPU generator of the initial weights.
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
        blocks: Any,
        embedding_dim: int | None,
        hidden: Sequence[int],
        dropout: float,
        generator: torch.Generator,
    ) -> None:
        super().__init__()
        count, columns = cases.shape
        dim = columns if embedding_dim is None else embedding_dim
        self.encoding, self.dropout = encoding, dropout
        self.register_buffer("cases", cases)
        self.embedding = nn.Identity() if embedding_dim is None else _linear(columns, dim, generator)
        adaptive = similarity == "adaptive"
        self.similarity = AdaptiveSimilarity(dim, bases=bases, init=bases[0], blocks=blocks) if adaptive else None
        self.modulation = KernelModulation(dim) if similarity == "kernel" else nn.Identity()
        self.norm = nn.LayerNorm(count)
        self.mlp = nn.ModuleList(_linear(*widths, generator) for widths in pairwise([count, *hidden, outputs]))

    def scores(self, rows: Tensor) -> Tensor:
        """Scores ``rows (n, features)`` against the cases: ``(n, S)``."""
        query = self.embedding(self.encoding(rows))
        key = self.embedding(self.cases)
        score = dot_product if self.similarity is None else self.similarity
        scores: Tensor = score(query, self.modulation(key))
        return scores

    def forward(self, rows: Tensor, generator: torch.Generator | None = None) -> Tensor:
        """Computes ``rows (n, features) -> (n, outputs)``, with dropout if a ``generator`` of its masks is given."""
        values: Tensor = self.norm(self.scores(rows))
        for number, layer in enumerate(self.mlp):
            values = values if number == 0 else functional.relu(values)
            values = layer(values if generator is None else _dropout(values, self.dropout, generator))
        return values


def _linear(inputs: int, outputs: int, generator: torch.Generator) -> nn.Linear:
    """A linear layer with PyTorch's default initialization, drawn from ``generator`` and not from the global one."""
    layer = nn.Linear(inputs, outputs, device="meta").to_empty(device="cpu")  # the constructor draws nothing on meta
    for parameter in layer.parameters():
        nn.init.uniform_(parameter, -(inputs**-0.5), inputs**-0.5, generator=generator)
    return layer


def _dropout(values: Tensor, probability: float, generator: torch.Generator) -> Tensor:
    """Dropout of ``values (n, m)`` with a mask from ``generator``."""
    if probability == 0:
        return values
    mask = torch.empty_like(values).bernoulli_(1 - probability, generator=generator)
    return values * mask.div_(1 - probability)
