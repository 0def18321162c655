"""The queries from which a similarity is solved: damaged copies of stored patterns, or given pairs."""

import torch
from torch import Generator, Tensor

from ahop_layers.memory.batches import Pairs
from ahop_layers.memory.solve import MOST_QUERIES, QUERIES, QUERY_ELEMENTS, Questions
from ahop_layers.variants import Missing, Replaced, Variant

MOST = 0.9
"""The largest share of values that is replaced or missing if no damage is given."""

FEW_PAIRS = 96
"""Fewer pairs are all used for the fit and for the report."""


class Anything(Variant):
    """Replaces a share of the values of every second query, and removes a share of those of the others.

    The share is between none and most of the values.

    >>> query = Anything().bind(torch.rand(5, 10)).corrupt(torch.rand(4, 10))
    >>> query.isnan().any(-1)[::2].any(), query.isfinite().any(-1).all()
    (tensor(False), tensor(True))
    """

    def __init__(self) -> None:
        self.replaced: Variant = Replaced((0.0, MOST))

    def bind(self, patterns: Tensor) -> Variant:
        """Takes the range of values from the patterns."""
        bound = Anything()
        bound.replaced = self.replaced.bind(patterns)
        return bound

    def corrupt(self, origin: Tensor, generator: Generator | None = None) -> Tensor:
        """Damages each row of ``origin (n, d)``."""
        query = self.replaced.corrupt(origin, generator)
        query[1::2] = Missing((0.0, MOST)).corrupt(origin[1::2], generator)
        return query


def draw(damage: Variant, patterns: Tensor, labels: Tensor | None, generator: Generator) -> Questions:
    """Draws damaged copies of ``patterns (N, d)`` of the classes ``labels (N,)``, as many for the fit as held out."""
    count = max(QUERIES, min(MOST_QUERIES, QUERY_ELEMENTS // patterns.shape[1]))
    origin = torch.randint(len(patterns), (2 * count,), generator=generator, device=patterns.device)
    query = damage.bind(patterns).corrupt(patterns[origin], generator)
    return Questions(query, origin, None if labels is None else labels[origin], count)


def given(pairs: Pairs, by_label: bool, generator: Generator) -> Questions:
    """Takes pairs of an index or a class ``(n,)`` and a query ``(n, d)``; a third of them is held out.

    The origin of a query is an index of all patterns.
    """
    target, query = pairs
    order = torch.randperm(len(target), generator=generator, device=generator.device)[: 2 * MOST_QUERIES]
    target, query = target[order], query[order]
    fitted = len(order) - len(order) // 3 if len(order) >= FEW_PAIRS else len(order)
    if by_label:
        return Questions(query, torch.full_like(target, -1), target, fitted)
    return Questions(query, target, None, fitted)
