"""Distances of rows of numbers, plain and learned: sums of terms that may depend on ranks."""

import math
from collections.abc import Sequence
from functools import reduce
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import normalize

from ahop_layers.association import FIXED
from ahop_layers.learning.ranks import features, pools
from ahop_layers.ops import adaptive_similarity
from ahop_layers.ops.reference import unfold

BASES = {"L1": "l1", "Euclid": "dis", "Sorensen": "l1"}
"""Kind of a term -> the base similarity that it sums. Cosine is a product."""

POWERS = (1.0, math.sqrt(math.e), math.e)
"""Exponents of values between 0 and 1. Fingerprints of radio signals are often raised to the last."""


class Term(NamedTuple):
    """A similarity of two rows: the negative of a distance, or cosine similarity.

    Attributes:
        kind: ``"L1"``, ``"Euclid"`` (squared), ``"cosine"``, or ``"Sorensen"``: L1 divided by the sum of both rows.
        power: exponent of the values, which must not be negative unless it is 1.
        ranked: whether the differences are sorted and have a weight for each rank.
    """

    kind: str
    power: float = 1.0
    ranked: bool = False

    def scores(self, query: Tensor, key: Tensor, weight: Tensor | None = None, missing: bool = False) -> Tensor:
        """Compares ``(..., L, d)`` with ``(..., S, d)``: the mean over ranks, or their sum by ``weight (d,)``."""
        query, key = self._raised(query), self._raised(key)
        if self.kind == "cosine":
            return normalize(query, dim=-1) @ normalize(key, dim=-1).mT
        base = BASES[self.kind]
        if missing or weight is not None:
            ranks = query.new_full(query.shape[-1:], 1 / query.shape[-1]) if weight is None else weight.to(query)
            score = adaptive_similarity(query, key, unfold(ranks)[None], (base,), missing=missing)
        elif base == "l1" and _is_sparse(query) and _is_sparse(key):
            score = -sparse_manhattan(query, key) / query.shape[-1]
        else:
            score = FIXED[base](query, key) / query.shape[-1]
        return score / self._mass(query, key) if self.kind == "Sorensen" else score

    def bins(self, query: Tensor, patterns: Tensor, candidates: Tensor, edges: list[int]) -> Tensor:
        """Means over bins of ranks, of queries and their candidates: ``(L, d), (N, d), (L, C) -> (L, C, bins)``."""
        query, patterns = self._raised(query), self._raised(patterns)
        found = features(query, patterns, candidates, (BASES[self.kind],), (1.0,), edges)[..., 1:]
        if self.kind != "Sorensen":
            return found
        return found / self._mass(query, patterns).gather(1, candidates)[..., None]

    def _raised(self, rows: Tensor) -> Tensor:
        return rows if self.power == 1 else rows**self.power

    @staticmethod
    def _mass(query: Tensor, key: Tensor) -> Tensor:
        """Returns the mean value of both rows ``(..., L, S)``, at least a tiny number."""
        mass = query.mean(-1)[..., :, None] + key.mean(-1)[..., None, :]
        return mass.clamp(min=torch.finfo(mass.dtype).tiny)


def sparse_manhattan(query: Tensor, key: Tensor) -> Tensor:
    """Sums the absolute differences of rows without negative values, fast if most are 0: ``(L, d), (S, d) -> (L, S)``.

    They are the sum of both rows without twice the smaller values, of which only those count where a query is not 0.

    >>> sparse_manhattan(torch.tensor([[0.0, 2.0, 0.0]]), torch.tensor([[1.0, 0.5, 0.0], [0.0, 3.0, 0.0]]))
    tensor([[2.5000, 1.0000]])
    """
    columns, common = key.mT.contiguous(), []
    for row in query:
        heard = row.nonzero()[:, 0]
        common.append(torch.minimum(columns[heard], row[heard, None]).sum(0))
    return (query.sum(-1)[:, None] + key.sum(-1) - 2 * torch.stack(common)).clamp(min=0.0)


def _is_sparse(rows: Tensor) -> bool:
    """Returns whether no value of a matrix is negative, and at least half of them are 0."""
    return rows.ndim == 2 and len(rows) > 0 and bool((rows >= 0).all() and (rows == 0).double().mean() >= 0.5)


class RowSimilarity(nn.Module):
    """The sum of terms, each with a factor, or with a weight for each bin of ranks.

    Args:
        terms: the terms.
        weights: the factor of each term ``(1,)``, or the weights of its bins ``(bins,)``.
        edges: the last rank of each bin, up to the number of features.

    >>> similarity = RowSimilarity([Term("L1")], [torch.ones(1)], [2])
    >>> similarity(torch.tensor([[1.0, 1.0]]), torch.tensor([[1.0, 3.0], [0.0, 0.0]]))
    tensor([[-1., -1.]])
    """

    allows_missing = True

    def __init__(self, terms: Sequence[Term], weights: Sequence[Tensor], edges: list[int]) -> None:
        super().__init__()
        pool = pools(edges)
        merged: dict[Term, Tensor] = {}
        for term, weight in zip(terms, weights, strict=True):
            twin = term._replace(ranked=True)
            if term.ranked or twin in terms:  # a factor is an equal weight of all ranks
                ranks = weight @ (pool[1:] if term.ranked else pool[:1]).to(weight)
                merged[twin] = merged[twin] + ranks if twin in merged else ranks
            else:
                merged[term] = weight
        self.terms = tuple(merged)
        for index, weight in enumerate(merged.values()):
            self.register_buffer(f"weight_{index}", weight)

    def forward(self, query: Tensor, key: Tensor, missing: bool = False, ranked: bool = True) -> Tensor:
        """Scores ``query (..., L, d)`` against ``key (..., S, d)``; NaN is unknown if ``missing``.

        If not ``ranked``, all ranks of a term have its mean weight, which is much faster.
        """
        scores = []
        for index, term in enumerate(self.terms):
            weight = self.get_buffer(f"weight_{index}")
            if term.ranked and ranked:
                scores.append(term.scores(query, key, weight, missing))
            else:
                scores.append(weight.sum().to(query) * term.scores(query, key, None, missing))
        return reduce(torch.add, scores)

    def has_ranks(self) -> bool:
        """Returns whether a term has weights of ranks."""
        return any(term.ranked for term in self.terms)

    def extra_repr(self) -> str:
        """The terms, for ``repr``."""
        return ", ".join(f"{kind}{'' if power == 1 else f' of powers {power:.3g}'}" for kind, power, _ in self.terms)
