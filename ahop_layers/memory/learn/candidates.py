"""The patterns that the queries of a fit are compared with: right ones, the hardest wrong ones, and random ones."""

from collections.abc import Callable, Sequence
from functools import reduce
from typing import NamedTuple

import torch
from torch import Tensor

from ahop_layers.memory.learn.questions import Questions
from ahop_layers.memory.learn.ranks import rows_at_once
from ahop_layers.ops import adaptive_similarity
from ahop_layers.similarity.widths import differences, quantiles

CANDIDATES = 128  # number of candidates of a query
RIGHT_ONES = 8  # at most one in so many candidates is right
RANDOM_ONES = 4  # one in so many wrong candidates is random
MINED_ELEMENTS = 2**21  # number of elements of the patterns out of which candidates are taken
MINED_PATTERNS = 2**12  # most patterns out of which candidates are taken
HARD_QUANTILES = (0.05, 0.2, 0.5)  # widths of saturating bases that find the hardest wrong patterns


def some_patterns(count: int, dim: int, generator: torch.Generator) -> Tensor:
    """Returns the indices of random patterns, out of ``count``, from which candidates are taken."""
    size = max(CANDIDATES, min(MINED_PATTERNS, MINED_ELEMENTS // dim))
    return torch.randperm(count, generator=generator, device=generator.device)[:size]


class Candidates(NamedTuple):
    """Queries ``(L, d)``, their candidates ``(L, C)``, log weights and right ones, see Problem.

    ``usable`` says which of all queries have a right candidate: the others are left out.
    """

    query: Tensor
    candidates: Tensor
    offset: Tensor
    right: int
    usable: Tensor


def find_candidates(
    asked: Questions, patterns: Tensor, labels: Tensor | None, generator: torch.Generator, count: int = CANDIDATES,
    overview: Callable[[Tensor, Tensor], Tensor] | None = None,
) -> Candidates:  # fmt: skip
    """Takes ``count`` candidates for each query out of ``patterns (N, d)`` of the classes ``labels (N,)``.

    The hardest wrong patterns have the smallest distance by one of several measures, for which unknown values have
    the mean of their dimension; ``overview`` is one more of them. If a query asks for a class, all its patterns are
    right, except the one that the query was made of, unless it is the only one.
    """
    rows = []
    largest = 1
    if labels is not None:
        largest = min(count // RIGHT_ONES, int(torch.unique(labels, return_counts=True)[1].max()))
    wrong = max(0, min(count, len(patterns)) - largest)
    random = wrong // RANDOM_ONES
    place, step = torch.arange(len(patterns), device=patterns.device), rows_at_once(patterns, 4 * len(patterns))
    center = patterns.nanmean(0).nan_to_num(0.0)
    complete = torch.where(patterns.isnan(), center, patterns)
    gaps, clips = patterns.isnan().any(), quantiles(differences(patterns), HARD_QUANTILES)
    for start in range(0, len(asked.query), step):
        part = asked.part(slice(start, start + step))
        own = place == part.origin[:, None]
        same = own
        if labels is not None and part.label is not None:
            same = torch.where(part.label[:, None] < 0, own, labels == part.label[:, None])
        right = torch.where((same & ~own).any(1, keepdim=True), same & ~own, same)
        filled = torch.where(part.query.isnan(), center, part.query)
        near = _closeness(filled, complete, clips)
        near = near if overview is None else near.maximum(_standardized(overview(filled, complete)))
        unknown = part.query.isnan()
        if gaps or unknown.all(-1).any():  # pairs without a common dimension
            common = (~unknown).to(near) @ (~patterns.isnan()).to(near).mT
            near = near.masked_fill(common == 0, -torch.inf)
        first = near.masked_fill(~right, -torch.inf).topk(largest)
        near = near.masked_fill(same, -torch.inf)
        hard = near.topk(wrong - random)
        keys = torch.rand(near.shape, generator=generator, device=near.device).masked_fill(near == -torch.inf, -1.0)
        others = keys.scatter(1, hard.indices, -1.0).topk(random)
        represented = ((~same).sum(1, keepdim=True) - hard.indices.shape[1]).clamp(min=1) / max(1, random)
        offset = [torch.zeros_like(x.values).masked_fill(x.values == -torch.inf, -torch.inf) for x in (first, hard)]
        offset.append(represented.log().to(near).masked_fill(others.values < 0, -torch.inf))
        rows.append((torch.cat([first.indices, hard.indices, others.indices], 1), torch.cat(offset, 1)))
    candidates, weights = (torch.cat(each) for each in zip(*rows, strict=True))
    usable = (weights[:, :largest] > -torch.inf).any(1)  # a query without a known value has no right candidate
    return Candidates(asked.query[usable], candidates[usable], weights[usable], largest, usable)


def _closeness(query: Tensor, patterns: Tensor, clips: Sequence[float]) -> Tensor:
    """Returns the largest of several standardized similarities, without missing values: ``(L, N)``."""
    whole, scores = query.new_ones(1, 1), [query @ patterns.mT]  # one block: nothing is sorted
    scores += [
        adaptive_similarity(query, patterns, whole, (name,), widths=whole.new_tensor([clip]))
        for name, clip in (("l1", 1.0), *(("near", clip) for clip in clips))
    ]
    return reduce(torch.maximum, map(_standardized, scores))


def _standardized(score: Tensor) -> Tensor:
    """Scales the scores of each query to mean 0 and deviation 1: ``(L, N)``."""
    deviation = score.std(-1, correction=0, keepdim=True).clamp(min=1e-30)
    return (score - score.mean(-1, keepdim=True)) / deviation
