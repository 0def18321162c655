"""The queries from which a similarity is solved: damaged copies of stored patterns, or given pairs."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Generator, Tensor

from ahop_layers.errors import AHopError
from ahop_layers.memory.variants import Covered, Missing, Replaced, Variant

Pairs = tuple[Tensor, Tensor]
"""Indices or labels ``(n,)``, and the queries ``(n, d)`` that belong to them."""

QUERIES = 1024  # number of queries of a fit; as many are held out, half for the choice, half for the report
MOST_QUERIES = 2048  # the number for few dimensions, and for several views
QUERY_ELEMENTS = 2**17  # number of elements of the queries between these numbers
LARGE_DIM = 512  # from this number of dimensions on, half as many queries are held out: each costs more time
MOST_DAMAGED = 0.9  # largest share of values that is replaced or missing if no damage is given
MOST_COVERED = 0.6  # largest share of an image that is covered if no damage is given
SPARED_QUERIES = 8  # one in so many queries is damaged in part only
COPIES = 8  # with classes, one in so many queries asks for the pattern that it was made of, not for its class
FEW_PAIRS = 96  # fewer pairs are all used for the fit and for the report


class Questions(NamedTuple):
    """What a similarity is learned from: queries and what belongs to them.

    Attributes:
        query: ``(n, d)``; NaN is unknown.
        origin: the pattern that each query was made of ``(n,)``, or -1.
        label: the class that each query belongs to ``(n,)``, -1 if the pattern itself is to be found; None for all.
        fitted: the number of queries of the fit, the first ones. The others are held out.
        intact: the number of queries without damage, the first ones of the fit.
    """

    query: Tensor
    origin: Tensor
    label: Tensor | None
    fitted: int
    intact: int = 0

    def part(self, rows: slice | Tensor) -> "Questions":
        """Returns some of the queries."""
        label = None if self.label is None else self.label[rows]
        return Questions(self.query[rows], self.origin[rows], label, 0)

    def held(self) -> "Questions":
        """Returns the queries that are held out, or all damaged ones if none is."""
        return self.part(slice(self.fitted if self.fitted < len(self.query) else self.intact, None))


class Anything(Variant):
    """Damages each query by one of two variants at random, after a little noise.

    By default, a share between none and most of the values is replaced, or missing. If they are ``noisy``, half of the
    queries have noise of up to a tenth of the deviation of their dimension.

    >>> query = Anything().bind(torch.rand(5, 10))(torch.rand(4, 10))
    >>> query.shape, query.isfinite().any(-1).all()
    (torch.Size([4, 10]), tensor(True))
    """

    shifts = False

    def __init__(self, *either: Variant, noisy: bool = True, deviation: Tensor | float = 0.0) -> None:
        self.either = either or (Replaced((0.0, MOST_DAMAGED)), Missing((0.0, MOST_DAMAGED)))
        self.noisy, self.deviation = noisy, deviation

    def bind(self, patterns: Tensor) -> Variant:
        """Takes the range and the deviation of values from the patterns."""
        center = patterns.nanmean(0)
        deviation = (patterns - center).square().nanmean(0).sqrt().nan_to_num(0.0)
        bound = (each.bind(patterns) for each in self.either)
        return Anything(*bound, noisy=self.noisy, deviation=deviation * self.noisy)

    def __call__(self, origin: Tensor, generator: Generator | None = None) -> Tensor:
        """Damages each row of ``origin (n, d)``."""
        size = torch.rand(len(origin), 1, generator=generator, device=origin.device)
        noise = torch.empty_like(origin).normal_(generator=generator) * (self.deviation * (size - 0.5).clamp(min=0) / 5)
        noisy = origin + noise.to(origin.dtype)
        second = torch.rand(len(origin), generator=generator, device=origin.device) < 0.5
        query = self.either[0](noisy, generator)
        query[second] = self.either[1](noisy[second], generator)
        return query


def any_damage(shape: Sequence[int], missing: bool = True, copies: bool = True) -> Variant:
    """Returns the damage that is assumed for patterns of a ``shape`` if none is given.

    Values are replaced or, if they may be, ``missing``; images are covered or have replaced pixels. Queries that ask
    for the patterns they are ``copies`` of are noisy, or only equal values would count as intact. Other patterns of a
    class differ as queries will, and with noise a fit would not learn what equal values say.
    """
    replaced = Replaced((0.0, MOST_DAMAGED))
    if len(shape) < 2:
        return Anything(noisy=copies) if missing else Anything(replaced, replaced, noisy=copies)
    channels, height, width = (1, *shape)[-3:]
    return Anything(Covered((0.0, MOST_COVERED), height, width, channels), replaced, noisy=copies)


def draw(
    damage: Variant, patterns: Tensor, labels: Tensor | None, generator: Generator, count: int = QUERIES
) -> Questions:
    """Draws damaged copies of ``patterns (N, d)`` of the classes ``labels (N,)``: ``count`` or more, and held-out ones.

    One in SPARED_QUERIES is damaged in part, between not at all and fully: a similarity that was learned from strong
    noise alone can fail without noise. With labels, one in COPIES asks for its own pattern: if no query did, nothing
    would hold up the score of small differences, and a stored pattern might not find itself.

    Raises:
        AHopError: the damage returns infinity, or no query with a known value.
    """
    held = max(QUERIES, min(MOST_QUERIES, QUERY_ELEMENTS // patterns.shape[1]))
    count, held = max(count, held), held // 2 if patterns.shape[1] >= LARGE_DIM else held
    origin = torch.randint(len(patterns), (count + held,), generator=generator, device=patterns.device)
    intact = patterns[origin]
    query = damage.bind(patterns)(intact, generator)
    if query.isinf().any() or query.isnan().all():
        got = "infinity" if query.isinf().any() else "NaN only"
        raise AHopError(f"damage must return finite values, and NaN where a value is unknown, got {got}")
    share = torch.rand(len(query), 1, generator=generator, device=query.device).mul_(2).sub_(1).clamp_(min=0)
    share[torch.rand(len(query), generator=generator, device=query.device) * SPARED_QUERIES > 1] = 1.0
    query = torch.where(share < 1, intact + share.to(query.dtype) * (query - intact), query)
    label = None if labels is None else labels[origin]
    if label is not None:
        label[::COPIES] = -1
    return Questions(query, origin, label, count)


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


def with_intact(asked: Questions, patterns: Tensor, generator: Generator) -> Questions:
    """Adds copies of ``patterns (N, d)`` without damage to the queries of a fit; each asks for its own pattern."""
    count = max(32, asked.fitted // SPARED_QUERIES)
    origin = torch.randint(len(patterns), (count,), generator=generator, device=patterns.device)
    label = None if asked.label is None else torch.cat([torch.full_like(origin, -1), asked.label])
    query = torch.cat([patterns[origin], asked.query.to(patterns.dtype)])
    return Questions(query, torch.cat([origin, asked.origin]), label, count + asked.fitted, count)
