"""What a memory asks of a similarity, and the similarities without parameters."""

from collections.abc import Callable, Sequence
from typing import Any, TypeGuard

import torch
from torch import Tensor, nn

from ahop_layers.errors import AHopError
from ahop_layers.ops import adaptive_similarity
from ahop_layers.ops.gpu import launch as gpu
from ahop_layers.ops.reference import accumulation_dtype, pair_values

ScoreFunction = Callable[..., Tensor]
"""Scores queries against keys: ``(..., L, d)``, ``(..., S, d)`` -> ``(..., L, S)``."""


class Similarity:
    """What a memory asks of a similarity, with the answers of one that has only scores.

    Attributes:
        allows_missing: whether NaN is an unknown value in a call with ``missing=True``.
        is_fused: whether scores need little memory beyond query and key.
        is_solvable: whether the score is the sum of adaptive similarities, its :meth:`parts`, of :meth:`views` of query
            and key, so that it is linear in weights.
        is_clamped: whether :meth:`within` moves values far beyond the stored patterns.
        overview: cheap scores ``(L, d), (S, d) -> (L, S)`` by which a fit chooses candidates, or None.
    """

    allows_missing: Any = False
    is_fused: Any = False
    is_solvable: Any = False
    is_clamped: Any = False
    overview: Any = None

    def __call__(
        self, query: Tensor, key: Tensor, missing: bool = False, prepared: Sequence[Tensor] | None = None
    ) -> Tensor:
        """Scores ``query (..., L, d)`` against ``key (..., S, d)``: ``(..., L, S)``.

        ``prepared`` is what :meth:`prepare` returned for the keys.
        """
        raise NotImplementedError

    def prepare(self, key: Tensor) -> list[Tensor]:
        """Returns tensors ``(S, ...)`` from which keys are scored faster; none if there is nothing to prepare."""
        return []

    def fix_scales_(self, key: Tensor) -> "Similarity":
        """Takes over norms, widths and other scales of the stored patterns ``(S, d)``, once."""
        return self

    def within(self, query: Tensor, low: Tensor, high: Tensor) -> Tensor:
        """Clamps values that are wrong because they are far beyond the limits ``(d,)`` of the patterns."""
        return query

    def unbiased(self, query: Tensor) -> Tensor:
        """Subtracts the learned bias, if any, from ``query (..., d)``."""
        return query

    def biased(self, query: Tensor) -> Tensor:
        """Adds the learned bias, if any, to ``query (..., d)``: the inverse of :meth:`unbiased`."""
        return query

    def explain(self, query: Tensor, key: Tensor) -> Tensor:
        """Returns what each dimension adds to the scores of the pairs of ``query (L, d)`` and ``key (L, d)``."""
        raise AHopError(f"explain needs a fixed or an adaptive similarity, got {self!r}")

    def parts(self) -> list[Any]:
        """Returns the similarity of each view, if the score :attr:`is_solvable`."""
        return []

    def views(self, rows: Tensor) -> list[Tensor]:
        """Returns what each of the :meth:`parts` compares of ``rows (..., d)``."""
        return [rows]


class OwnSimilarity(Similarity):
    """A module or a function of the user: its scores, and what else it has of a similarity."""

    def __init__(self, score: ScoreFunction) -> None:
        self.score = score
        for name in ("allows_missing", "fix_scales_", "is_clamped", "within", "unbiased", "biased", "explain"):
            if hasattr(score, name):
                setattr(self, name, getattr(score, name))

    def __call__(self, query: Tensor, key: Tensor, missing: bool = False, prepared: Any = None) -> Tensor:
        """Scores queries against keys."""
        return self.score(query, key, missing=True) if missing else self.score(query, key)

    def __repr__(self) -> str:
        return getattr(self.score, "__name__", type(self.score).__name__)


def is_solvable(similarity: Similarity) -> TypeGuard[Any]:
    """Returns whether the weights of a similarity can be solved for, and none of them is frozen."""
    parameters = similarity.parameters() if isinstance(similarity, nn.Module) else ()
    return similarity.is_solvable and all(parameter.requires_grad for parameter in parameters)


def dot_product(query: Tensor, key: Tensor) -> Tensor:
    """Computes the dot product: ``(..., L, d)``, ``(..., S, d)`` -> ``(..., L, S)``."""
    return query @ key.mT


class FixedSimilarity(Similarity):
    """The sum of a base similarity over all dimensions.

    Args:
        base: ``"dot"``, ``"dis"`` or ``"l1"``.

    >>> FixedSimilarity("l1")(torch.zeros(1, 3), torch.tensor([[1.0, 2.0, 9.0]]))
    tensor([[-12.]])
    """

    allows_missing = True

    def __init__(self, base: str) -> None:
        self.base = base

    def __call__(self, query: Tensor, key: Tensor, missing: bool = False, prepared: Any = None) -> Tensor:
        """Scores ``query (..., L, d)`` against ``key (..., S, d)``: ``(..., L, S)``.

        If ``missing``, NaN is an unknown value: the score is ``d / m`` times the sum over the m of d dimensions that
        both know, and -inf if there is none.
        """
        if self.base == "dot" and not missing:
            return dot_product(query, key)
        if self.base == "dis" and not missing:
            # Center first to avoid cancellation far from the origin. A rounded center keeps integers exact.
            center = key.mean(-2, keepdim=True).detach().round()
            query, key = query - center, key - center
            return 2 * query @ key.mT - query.square().sum(-1, keepdim=True) - key.square().sum(-1).unsqueeze(-2)
        if query.is_cuda and not missing and (gpu.unavailable() or not gpu.serves(query, (self.base,), 1)):
            # Of float64, or of many dimensions, plain PyTorch would take longer.
            wide = accumulation_dtype(query.dtype)
            return -torch.cdist(query.to(wide), key.to(wide), p=1).to(query.dtype)
        return adaptive_similarity(query, key, query.new_ones(1, 1), (self.base,), missing=missing)  # one block

    def explain(self, query: Tensor, key: Tensor) -> Tensor:
        """Returns what each dimension adds to the scores of the pairs of ``query (L, d)`` and ``key (L, d)``."""
        known = ~(query.isnan() | key.isnan())
        values = pair_values(query[:, None], key[:, None], self.base).reshape(query.shape)
        return values.nan_to_num(0.0) * (query.shape[-1] / known.sum(-1, keepdim=True).clamp(min=1))

    def __repr__(self) -> str:
        return f"FixedSimilarity({self.base!r})"


FIXED = {base: FixedSimilarity(base) for base in ("dot", "dis", "l1")}
"""The similarities without parameters, by the base that each sums up."""
