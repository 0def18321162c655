"""Variants: how queries arise from stored patterns, how well a memory undoes it, and how well any memory could.

A query is a *variant* of one stored pattern: noise is added, some dimensions are replaced by random values, and one
fixed bias is added to all of them. Because this generator is known, so is the likelihood of each pattern; the accuracy
of the most likely one is the *Bayes limit*, which no memory can pass.
"""

import math
from dataclasses import dataclass
from functools import lru_cache
from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional

from ahop_layers.association import negative_distance
from ahop_layers.errors import AHopError, check_patterns
from ahop_layers.ops.reference import accumulation_dtype

__all__ = ["Biased", "Masked", "Mixed", "Noisy", "bayes_accuracy", "retrieval_accuracy", "retrieval_error"]

BLOCK_ELEMENTS = 2**21
"""How many (query, pattern, dimension) triples the likelihood looks at together."""

SHARPEST = 1e-8
"""The smallest variance a likelihood is given: without noise only rounding separates a kept value from its pattern."""


@lru_cache(maxsize=64)
def _signs(seed: int, dim: int, device: torch.device) -> Tensor:
    """Random signs ``(dim,)``, the same on every device; kept, since a copy to a GPU makes it wait."""
    generator = torch.Generator().manual_seed(seed)
    return (2.0 * torch.randint(2, (dim,), generator=generator) - 1).to(device)


@dataclass(frozen=True)
class Mixed:
    """Noise, then masking, then a bias: the mixed variant of the paper, taken literally.

    Args:
        mask: the share of dimensions that are replaced by values drawn uniformly from [-1, 1]. Their number is fixed,
            ``mask * d`` rounded down; which they are is drawn anew for each query.
        noise: the variance of the Gaussian noise that is added first.
        bias: the size of the bias that is added last; its signs are random, but the same for every query.
        seed: decides the signs. They belong to this object, so what is learned about them can be used again.

    Raises:
        AHopError: a share or strength that is negative, or a share above 1.

    >>> import torch, ahop_layers as ah
    >>> variant = Mixed(mask=0.25, noise=0.0, bias=0.5)
    >>> patterns = torch.zeros(3, 8)
    >>> index, query = variant.sample(patterns, 10)
    >>> ((query - variant.shift(patterns)).abs() > 1e-6).sum(-1)
    tensor([2, 2, 2, 2, 2, 2, 2, 2, 2, 2])
    """

    mask: float = 0.0
    noise: float = 0.0
    bias: float = 0.0
    seed: int = 0

    def __post_init__(self) -> None:
        if not 0 <= self.mask <= 1:
            raise AHopError(f"mask must be a share between 0 and 1, got {self.mask!r}")
        for name in ("noise", "bias"):
            if not getattr(self, name) >= 0:
                raise AHopError(f"{name} must not be negative, got {getattr(self, name)!r}")

    def masked_count(self, dim: int) -> int:
        """How many of ``dim`` dimensions are replaced.

        >>> Mixed(mask=0.3).masked_count(64)
        19
        """
        return math.floor(self.mask * dim + 1e-9)  # 0.29 * 100 is 28.999...

    def shift(self, patterns: Tensor) -> Tensor:
        """The bias ``(d,)`` that is added to every variant of ``patterns (N, d)``.

        >>> Mixed(bias=0.5).shift(torch.zeros(3, 4)).abs()
        tensor([0.5000, 0.5000, 0.5000, 0.5000])
        """
        return self.bias * _signs(self.seed, patterns.shape[-1], patterns.device).to(patterns.dtype)

    def sample(self, patterns: Tensor, n: int, generator: torch.Generator | None = None) -> tuple[Tensor, Tensor]:
        """Draw ``n`` variants of patterns that are chosen uniformly.

        Args:
            patterns: ``(N, d)``.
            n: how many queries to draw.
            generator: on the device of the patterns.

        Returns:
            ``index (n,)`` of the patterns, and ``query (n, d)``.

        Raises:
            AHopError: patterns that are no floating-point matrix.

        >>> import torch, ahop_layers as ah
        >>> index, query = ah.variants.Noisy(0.1).sample(torch.randn(100, 16), 5)
        >>> index.shape, query.shape
        (torch.Size([5]), torch.Size([5, 16]))
        """
        check_patterns(patterns)
        index = torch.randint(len(patterns), (n,), generator=generator, device=patterns.device)
        return index, self.corrupt(patterns[index], generator)

    def corrupt(self, origin: Tensor, generator: torch.Generator | None = None) -> Tensor:
        """One variant of each row of ``origin (n, d)``: ``(n, d)``.

        >>> Mixed(noise=0.1).corrupt(torch.zeros(2, 4)).shape
        torch.Size([2, 4])
        """
        query = origin
        if self.noise:
            query = query + self.noise**0.5 * torch.empty_like(query).normal_(generator=generator)
        count = self.masked_count(query.shape[-1])
        if count:
            order = torch.empty_like(query).uniform_(generator=generator).argsort(-1)
            query = torch.where(order < count, torch.empty_like(query).uniform_(-1, 1, generator=generator), query)
        return query + self.shift(query) if self.bias else query

    def log_likelihood(self, query: Tensor, origin: Tensor, *, bias_known: bool = True) -> Tensor:
        """The exact ``log p(query | origin)``: ``(..., d), (..., d) -> (...)``, in float64.

        All sets of masked dimensions are summed over.

        Args:
            query, origin: of shapes that broadcast.
            bias_known: whether the bias is known; else each of its signs is as likely as the other, as for somebody who
                sees this query alone.

        >>> import torch, ahop_layers as ah
        >>> variant = ah.variants.Masked(1.0)  # every dimension is replaced: density 1/2 each, whatever the origin
        >>> variant.log_likelihood(torch.zeros(2), torch.ones(2)).exp()
        tensor(0.2500, dtype=torch.float64)
        """
        bound, masked = self._bound(query, origin, bias_known)
        return bound + _log_probability_of_count(masked, self.masked_count(query.shape[-1]))

    def most_likely(self, query: Tensor, patterns: Tensor, *, bias_known: bool = True) -> Tensor:
        """The index of the pattern of largest likelihood: ``(n, d), (N, d) -> (n,)``.

        Args:
            query: ``(n, d)``.
            patterns: ``(N, d)``.
            bias_known: as in :meth:`log_likelihood`.

        >>> patterns = torch.eye(3)
        >>> Mixed(noise=0.1).most_likely(patterns + 0.1, patterns)
        tensor([0, 1, 2])
        """
        rows_together = max(1, BLOCK_ELEMENTS // patterns.numel())
        bound = torch.cat(
            [self._bound(rows[:, None], patterns, bias_known)[0] for rows in torch.split(query, rows_together)]
        )
        promising = bound.argmax(-1)
        reached = self.log_likelihood(query, patterns[promising], bias_known=bias_known)
        # Only a pattern whose bound passes what is already reached can be more likely.
        candidates = (bound >= reached[:, None]).nonzero()
        exact = torch.full_like(bound, -torch.inf).scatter(-1, promising[:, None], reached[:, None])
        for row, column in (each.unbind(-1) for each in torch.split(candidates, BLOCK_ELEMENTS // query.shape[-1])):
            exact[row, column] = self.log_likelihood(query[row], patterns[column], bias_known=bias_known)
        return exact.argmax(-1)

    def _bound(self, query: Tensor, origin: Tensor, bias_known: bool) -> tuple[Tensor, Tensor]:
        """The log-likelihood without the last factor, and the probability of each dimension to be masked.

        If dimensions were masked independently with odds ``exp(tilt)``, a mask of ``count`` dimensions would have a
        probability. Dividing by its prior leaves the likelihood exactly; the one factor left out here, the probability
        of that count, is below 1. So this is an upper bound, and any tilt would do.
        """
        query, origin = query.double(), origin.double()
        d = query.shape[-1]
        count, variance = self.masked_count(d), max(self.noise, SHARPEST)
        kept, replaced = [], []
        for shift in (self.shift(query),) if bias_known else (self.bias, -self.bias):
            value = query - shift
            kept.append((value - origin).square() / (-2 * variance) - 0.5 * math.log(2 * math.pi * variance))
            # Rounding of the shift must not push a replaced value off its interval.
            replaced.append(torch.full_like(value, -math.log(2)).masked_fill(value.abs() > 1 + 1e-6, -torch.inf))
        log_kept, log_replaced = (_log_mean(each) for each in (kept, replaced))
        tilt = math.log((count + 0.5) / (d - count + 0.5))
        odds = log_replaced - log_kept + tilt
        choices = math.lgamma(d + 1) - math.lgamma(count + 1) - math.lgamma(d - count + 1)
        return (log_kept + functional.softplus(odds)).sum(-1) - count * tilt - choices, odds.sigmoid()


class Noisy(Mixed):
    """Gaussian noise of variance ``noise`` on every dimension.

    >>> import torch, ahop_layers as ah
    >>> index, query = ah.variants.Noisy(0.25).sample(torch.zeros(1, 10000), 1)
    >>> bool((query.std() - 0.5).abs() < 0.05)
    True
    """

    def __init__(self, noise: float) -> None:
        super().__init__(noise=noise)


class Masked(Mixed):
    """A share ``mask`` of the dimensions replaced by values drawn uniformly from [-1, 1].

    >>> import torch, ahop_layers as ah
    >>> index, query = ah.variants.Masked(0.5).sample(torch.full((1, 8), 3.0), 1)
    >>> int((query == 3).sum())
    4
    """

    def __init__(self, mask: float) -> None:
        super().__init__(mask=mask)


class Biased(Mixed):
    """A bias of size ``bias`` and fixed random signs, decided by ``seed``.

    >>> import torch, ahop_layers as ah
    >>> index, query = ah.variants.Biased(0.5).sample(torch.zeros(3, 4), 2)
    >>> query.abs(), bool((query[0] == query[1]).all())
    (tensor([[0.5000, 0.5000, 0.5000, 0.5000],
            [0.5000, 0.5000, 0.5000, 0.5000]]), True)
    """

    def __init__(self, bias: float, seed: int = 0) -> None:
        super().__init__(bias=bias, seed=seed)


NEAREST_AT_ONCE = 2**23
"""How many distances between readouts and patterns are held together."""


class _Memory(Protocol):
    patterns: Tensor

    def retrieve(self, x: Tensor) -> Tensor: ...


@torch.no_grad()
def retrieval_accuracy(memory: _Memory, index: Tensor, query: Tensor) -> float:
    """The share of queries for which what is retrieved lies nearest to the pattern they were made from.

    Args:
        memory: has ``patterns (N, d)`` and ``retrieve``, as :class:`ahop_layers.AssociativeMemory`.
        index: ``(n,)``, the pattern of each query.
        query: ``(n, d)``.

    >>> import torch, ahop_layers as ah
    >>> memory = ah.AssociativeMemory(torch.eye(4))
    >>> ah.variants.retrieval_accuracy(memory, torch.tensor([0, 1]), torch.eye(4)[:2])
    1.0
    """
    patterns = memory.patterns.to(accumulation_dtype(memory.patterns.dtype))
    chunks = torch.split(memory.retrieve(query).to(patterns), max(1, NEAREST_AT_ONCE // len(patterns)))
    nearest = torch.cat([negative_distance(chunk, patterns).argmax(-1) for chunk in chunks])
    return (nearest == index).double().mean().item()


@torch.no_grad()
def retrieval_error(memory: _Memory, index: Tensor, query: Tensor) -> float:
    """The mean squared difference, per dimension, of what is retrieved and the pattern a query was made from.

    Args:
        memory, index, query: as in :func:`retrieval_accuracy`.

    >>> import torch, ahop_layers as ah
    >>> memory = ah.AssociativeMemory(torch.eye(4), separation="argmax")
    >>> ah.variants.retrieval_error(memory, torch.tensor([0, 1]), torch.eye(4)[:2])
    0.0
    """
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
    """The accuracy of the most likely pattern on ``n`` fresh queries: the ceiling of every memory.

    Args:
        variant: where the queries come from.
        patterns: ``(N, d)``.
        n: how many queries to draw.
        generator: on the device of the patterns.
        bias_known: whether the one who decides knows the bias, or must guess each sign from the one query at hand.

    Raises:
        AHopError: patterns that are no floating-point matrix.

    >>> import torch, ahop_layers as ah
    >>> patterns = torch.rand(50, 32) * 2 - 1
    >>> ah.variants.bayes_accuracy(ah.variants.Noisy(0.01), patterns, 200)
    1.0
    """
    index, query = variant.sample(patterns, n, generator)
    return (variant.most_likely(query, patterns, bias_known=bias_known) == index).double().mean().item()


def _log_mean(parts: list[Tensor]) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.stack(parts).logsumexp(0) - math.log(len(parts))


def _log_probability_of_count(probability: Tensor, count: int) -> Tensor:
    """The log-probability that exactly ``count`` of independent events happen: ``(..., d) -> (...)``."""
    reached = torch.zeros(*probability.shape[:-1], count + 1, dtype=probability.dtype, device=probability.device)
    reached[..., 0] = 1.0
    for each in probability.unsqueeze(-2).unbind(-1):
        reached = reached * (1 - each) + functional.pad(reached, (1, -1)) * each
    return reached[..., count].log()
