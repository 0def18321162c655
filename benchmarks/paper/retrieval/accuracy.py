"""Accuracy of memories on damaged queries, and the accuracy of the best possible memory.

The distribution of :class:`~ahop_layers.memory.variants.Mixed` is known, and with it the likelihood of each pattern.
The accuracy of the most likely pattern is the *Bayes limit*, an upper bound for every memory.
"""

import math

import torch
from torch import Tensor
from torch.nn import functional

from ahop_layers.errors import AHopError
from ahop_layers.memory.memory import AssociativeMemory
from ahop_layers.memory.variants import Mixed
from ahop_layers.ops.reference import accumulation_dtype
from ahop_layers.similarity.protocol import FIXED
from benchmarks.paper.networks import Network

Memory = AssociativeMemory | Network

BLOCK_ELEMENTS = 2**21
"""Number of (query, pattern, dimension) triples whose likelihood is computed at once."""

BLOCK_DISTANCES = 2**23
"""Number of distances between retrieved and stored patterns that are computed at once."""

MIN_VARIANCE = 1e-8
"""Smallest variance in a likelihood: without noise, an unmasked value differs from its pattern by rounding alone."""


@torch.no_grad()
def retrieval_accuracy(memory: Memory, index: Tensor, query: Tensor) -> float:
    """Returns the fraction of queries whose retrieved pattern is nearest to their own, the pattern ``index (n,)``."""
    return (nearest_to_readout(memory, query) == index).double().mean().item()


@torch.no_grad()
def nearest_to_readout(memory: Memory, query: Tensor) -> Tensor:
    """Finds the index of the stored pattern nearest to the retrieved one: ``(n, d) -> (n,)``."""
    patterns = memory.patterns.to(accumulation_dtype(memory.patterns.dtype))
    chunks = torch.split(memory.retrieve(query).to(patterns), max(1, BLOCK_DISTANCES // len(patterns)))
    return torch.cat([FIXED["dis"](chunk, patterns).argmax(-1) for chunk in chunks])


@torch.no_grad()
def retrieval_error(memory: Memory, index: Tensor, query: Tensor) -> float:
    """Returns the mean squared error, per dimension, of the retrieved patterns."""
    return (memory.retrieve(query) - memory.patterns[index]).double().square().mean().item()


@torch.no_grad()
def bayes_accuracy(
    variant: Mixed,
    patterns: Tensor,
    n: int = 2000,
    generator: torch.Generator | None = None,
    *,
    bias_known: bool = True,
) -> float:
    """Returns the Bayes limit, measured on ``n`` random queries of ``patterns (N, d)``."""
    index, query = variant.sample(patterns, n, generator)
    return (most_likely(variant, query, patterns, bias_known=bias_known) == index).double().mean().item()


def most_likely(variant: Mixed, query: Tensor, patterns: Tensor, *, bias_known: bool = True) -> Tensor:
    """Finds the index of the pattern with the largest likelihood: ``(n, d), (N, d) -> (n,)``."""
    size = max(1, BLOCK_ELEMENTS // patterns.numel())
    bound = torch.cat([_bound(variant, rows[:, None], patterns, bias_known)[0] for rows in torch.split(query, size)])
    best = bound.argmax(-1)
    reached = log_likelihood(variant, query, patterns[best], bias_known=bias_known)
    # Only patterns whose bound is at least the likelihood reached so far can be more likely.
    candidates = (bound >= reached[:, None]).nonzero()
    exact = torch.full_like(bound, -torch.inf).scatter(-1, best[:, None], reached[:, None])
    for row, column in (each.unbind(-1) for each in torch.split(candidates, BLOCK_ELEMENTS // query.shape[-1])):
        exact[row, column] = log_likelihood(variant, query[row], patterns[column], bias_known=bias_known)
    return exact.argmax(-1)


def log_likelihood(variant: Mixed, query: Tensor, origin: Tensor, *, bias_known: bool = True) -> Tensor:
    """Computes ``log p(query | origin)`` exactly, in float64: ``(..., d), (..., d) -> (...)``.

    The likelihood is marginalized over all sets of masked dimensions and, unless the bias is known, over its signs,
    each with probability 1/2.
    """
    bound, masked = _bound(variant, query, origin, bias_known)
    return bound + _log_probability_of_count(masked, masked_count(variant, query.shape[-1]))


def masked_count(variant: Mixed, dim: int) -> int:
    """Returns the number of masked dimensions out of ``dim``."""
    return math.floor(_number("mask", variant.mask) * dim + 1e-9)


def _bound(variant: Mixed, query: Tensor, origin: Tensor, bias_known: bool) -> tuple[Tensor, Tensor]:
    """Returns an upper bound of the log-likelihood, and the probability of each dimension to be masked.

    The exact likelihood is that of dimensions masked independently with prior odds ``exp(tilt)``, conditioned on
    ``count`` masked dimensions. It is this bound times the posterior probability of that count, which is at most 1. The
    product does not depend on ``tilt``.
    """
    query, origin, d = query.double(), origin.double(), query.shape[-1]
    variance, bias = max(_number("noise", variant.noise), MIN_VARIANCE), _number("bias", variant.bias)
    count = masked_count(variant, d)
    kept, replaced, width = [], [], variant.high - variant.low
    for shift in (variant.shift(query),) if bias_known else (bias, -bias):
        value = query - shift
        kept.append((value - origin).square() / (-2 * variance) - 0.5 * math.log(2 * math.pi * variance))
        # The tolerance keeps a replaced value inside its interval despite the rounding of the shift.
        outside = (value < variant.low - 1e-6 * width / 2) | (value > variant.high + 1e-6 * width / 2)
        replaced.append(torch.full_like(value, -math.log(width)).masked_fill(outside, -torch.inf))
    log_kept, log_replaced = (torch.stack(each).logsumexp(0) - math.log(len(each)) for each in (kept, replaced))
    tilt = math.log((count + 0.5) / (d - count + 0.5))
    odds = log_replaced - log_kept + tilt
    choices = math.lgamma(d + 1) - math.lgamma(count + 1) - math.lgamma(d - count + 1)
    return (log_kept + functional.softplus(odds)).sum(-1) - count * tilt - choices, odds.sigmoid()


def _number(name: str, level: object) -> float:
    """Returns the level. Raises an AHopError if it is a range."""
    if not isinstance(level, int | float):
        raise AHopError(f"{name} must be a number for a likelihood, got the range {level!r}")
    return level


def _log_probability_of_count(probability: Tensor, count: int) -> Tensor:
    """Returns the log-probability that exactly ``count`` of ``d`` independent events occur: ``(..., d) -> (...)``."""
    reached = torch.zeros(*probability.shape[:-1], count + 1, dtype=probability.dtype, device=probability.device)
    reached[..., 0] = 1.0
    for each in probability.unsqueeze(-2).unbind(-1):
        reached = reached * (1 - each) + functional.pad(reached, (1, -1)) * each
    return reached[..., count].log()
