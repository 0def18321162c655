"""Corruptions of stored patterns, the accuracy of a memory on them, and the accuracy of the best possible memory.

A query is a *variant* of one stored pattern: noise is added, some dimensions are replaced by random values, and a fixed
bias is added. The distribution of the queries is known, and with it the likelihood of each pattern. The accuracy of the
most likely pattern is the *Bayes limit*, an upper bound for every memory.
"""

import math
from dataclasses import dataclass
from functools import lru_cache
from typing import Protocol, SupportsIndex

import torch
from torch import Tensor
from torch.nn import functional

from ahop_layers.association import negative_distance
from ahop_layers.errors import AHopError, check_numbers, check_patterns
from ahop_layers.ops.reference import accumulation_dtype

__all__ = ["Biased", "Masked", "Mixed", "Noisy", "bayes_accuracy", "retrieval_accuracy", "retrieval_error"]

BLOCK_ELEMENTS = 2**21
"""Number of (query, pattern, dimension) triples whose likelihood is computed at once."""

BLOCK_DISTANCES = 2**23
"""Number of distances between retrieved and stored patterns that are computed at once."""

MIN_VARIANCE = 1e-8
"""Smallest variance in a likelihood: without noise, an unmasked value differs from its pattern by rounding alone."""


@lru_cache(maxsize=64)
def _signs(seed: int, dim: int, device: torch.device) -> Tensor:
    """Random signs ``(dim,)``, equal on all devices; cached, because a host-to-device copy synchronizes."""
    generator = torch.Generator().manual_seed(seed)
    return (2.0 * torch.randint(2, (dim,), generator=generator) - 1).to(device)


@dataclass(frozen=True)
class Mixed:
    """Adds noise, then masks, then adds a bias: the mixed variant of the paper.

    Args:
        mask: fraction of dimensions to replace by values drawn uniformly from [-1, 1]. Every query has ``mask * d``
            masked dimensions, rounded down, at random positions.
        noise: variance of the Gaussian noise.
        bias: absolute value of the bias in every dimension. Its signs are random and equal for all queries.
        seed: seed of the signs, so that all queries from this object have the same bias.

    Raises:
        AHopError: an argument is not a finite number, is negative, or ``mask`` is above 1.

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
        check_numbers("a number between 0 and 1", mask=self.mask)
        check_numbers("a number of at least 0", noise=self.noise, bias=self.bias)
        if not isinstance(self.seed, SupportsIndex):
            raise AHopError(f"seed must be an integer, got {self.seed!r}")

    def masked_count(self, dim: int) -> int:
        """The number of masked dimensions out of ``dim``.

        >>> Mixed(mask=0.3).masked_count(64)
        19
        """
        return math.floor(self.mask * dim + 1e-9)  # 0.29 * 100 is 28.999...

    def shift(self, patterns: Tensor) -> Tensor:
        """The bias ``(d,)`` of every query made from ``patterns (N, d)``.

        >>> Mixed(bias=0.5).shift(torch.zeros(3, 4)).abs()
        tensor([0.5000, 0.5000, 0.5000, 0.5000])
        """
        return self.bias * _signs(self.seed, patterns.shape[-1], patterns.device).to(patterns.dtype)

    def sample(self, patterns: Tensor, n: int, generator: torch.Generator | None = None) -> tuple[Tensor, Tensor]:
        """Draw ``n`` queries from uniformly chosen patterns.

        Args:
            patterns: ``(N, d)``.
            n: number of queries.
            generator: random generator on the device of the patterns; None for the global one.

        Returns:
            ``index (n,)`` of the patterns, and ``query (n, d)``.

        Raises:
            AHopError: ``patterns`` is not a floating-point matrix, or ``n`` not an integer of at least 0.

        >>> import torch, ahop_layers as ah
        >>> index, query = ah.variants.Noisy(0.1).sample(torch.randn(100, 16), 5)
        >>> index.shape, query.shape
        (torch.Size([5]), torch.Size([5, 16]))
        """
        check_patterns(patterns)
        if not isinstance(n, SupportsIndex) or int(n) < 0:
            raise AHopError(f"n must be an integer of at least 0, got {n!r}")
        index = torch.randint(len(patterns), (int(n),), generator=generator, device=patterns.device)
        return index, self.corrupt(patterns[index], generator)

    def corrupt(self, origin: Tensor, generator: torch.Generator | None = None) -> Tensor:
        """Corrupt each row of ``origin (n, d)``: ``(n, d)``.

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
        """Compute ``log p(query | origin)`` exactly, in float64: ``(..., d), (..., d) -> (...)``.

        The likelihood is marginalized over all sets of masked dimensions.

        Args:
            query, origin: tensors whose shapes broadcast.
            bias_known: whether the signs of the bias are known. If not, they are marginalized, each sign with
                probability 1/2.

        >>> import torch, ahop_layers as ah
        >>> variant = ah.variants.Masked(1.0)  # replaces every dimension: density 1/2 each
        >>> variant.log_likelihood(torch.zeros(2), torch.ones(2)).exp()
        tensor(0.2500, dtype=torch.float64)
        """
        bound, masked = self._bound(query, origin, bias_known)
        return bound + _log_probability_of_count(masked, self.masked_count(query.shape[-1]))

    def most_likely(self, query: Tensor, patterns: Tensor, *, bias_known: bool = True) -> Tensor:
        """Find the index of the pattern with the largest likelihood: ``(n, d), (N, d) -> (n,)``.

        Args:
            query: ``(n, d)``.
            patterns: ``(N, d)``.
            bias_known: as in :meth:`log_likelihood`.

        >>> patterns = torch.eye(3)
        >>> Mixed(noise=0.1).most_likely(patterns + 0.1, patterns)
        tensor([0, 1, 2])
        """
        size = max(1, BLOCK_ELEMENTS // patterns.numel())
        bound = torch.cat([self._bound(rows[:, None], patterns, bias_known)[0] for rows in torch.split(query, size)])
        best = bound.argmax(-1)
        reached = self.log_likelihood(query, patterns[best], bias_known=bias_known)
        # Only patterns whose bound is at least the likelihood reached so far can be more likely.
        candidates = (bound >= reached[:, None]).nonzero()
        exact = torch.full_like(bound, -torch.inf).scatter(-1, best[:, None], reached[:, None])
        for row, column in (each.unbind(-1) for each in torch.split(candidates, BLOCK_ELEMENTS // query.shape[-1])):
            exact[row, column] = self.log_likelihood(query[row], patterns[column], bias_known=bias_known)
        return exact.argmax(-1)

    def _bound(self, query: Tensor, origin: Tensor, bias_known: bool) -> tuple[Tensor, Tensor]:
        """An upper bound of the log-likelihood, and the probability of each dimension to be masked.

        The exact likelihood is that of dimensions masked independently with prior odds ``exp(tilt)``, conditioned on
        ``count`` masked dimensions. It is this bound times the posterior probability of that count, which is at most 1.
        The product does not depend on ``tilt``.
        """
        query, origin = query.double(), origin.double()
        d = query.shape[-1]
        count, variance = self.masked_count(d), max(self.noise, MIN_VARIANCE)
        kept, replaced = [], []
        for shift in (self.shift(query),) if bias_known else (self.bias, -self.bias):
            value = query - shift
            kept.append((value - origin).square() / (-2 * variance) - 0.5 * math.log(2 * math.pi * variance))
            # The tolerance keeps a replaced value inside its interval despite the rounding of the shift.
            replaced.append(torch.full_like(value, -math.log(2)).masked_fill(value.abs() > 1 + 1e-6, -torch.inf))
        log_kept, log_replaced = (_log_mean(each) for each in (kept, replaced))
        tilt = math.log((count + 0.5) / (d - count + 0.5))
        odds = log_replaced - log_kept + tilt
        choices = math.lgamma(d + 1) - math.lgamma(count + 1) - math.lgamma(d - count + 1)
        return (log_kept + functional.softplus(odds)).sum(-1) - count * tilt - choices, odds.sigmoid()


class Noisy(Mixed):
    """Adds Gaussian noise of variance ``noise`` to every dimension.

    >>> import torch, ahop_layers as ah
    >>> index, query = ah.variants.Noisy(0.25).sample(torch.zeros(1, 10000), 1)
    >>> bool((query.std() - 0.5).abs() < 0.05)
    True
    """

    def __init__(self, noise: float) -> None:
        super().__init__(noise=noise)


class Masked(Mixed):
    """Replaces a fraction ``mask`` of the dimensions by values drawn uniformly from [-1, 1].

    >>> import torch, ahop_layers as ah
    >>> index, query = ah.variants.Masked(0.5).sample(torch.full((1, 8), 3.0), 1)
    >>> int((query == 3).sum())
    4
    """

    def __init__(self, mask: float) -> None:
        super().__init__(mask=mask)


class Biased(Mixed):
    """Adds a bias of absolute value ``bias`` whose random signs depend on ``seed`` alone.

    >>> import torch, ahop_layers as ah
    >>> index, query = ah.variants.Biased(0.5).sample(torch.zeros(3, 4), 2)
    >>> query.abs(), bool((query[0] == query[1]).all())
    (tensor([[0.5000, 0.5000, 0.5000, 0.5000],
            [0.5000, 0.5000, 0.5000, 0.5000]]), True)
    """

    def __init__(self, bias: float, seed: int = 0) -> None:
        super().__init__(bias=bias, seed=seed)


class _Memory(Protocol):
    patterns: Tensor

    def retrieve(self, x: Tensor) -> Tensor: ...


@torch.no_grad()
def retrieval_accuracy(memory: _Memory, index: Tensor, query: Tensor) -> float:
    """The fraction of queries whose retrieved pattern is nearest to the pattern that the query was made from.

    Args:
        memory: an object with ``patterns (N, d)`` and ``retrieve``, such as :class:`ahop_layers.AssociativeMemory`.
        index: ``(n,)``, the index of the pattern of each query.
        query: ``(n, d)``.

    >>> import torch, ahop_layers as ah
    >>> memory = ah.AssociativeMemory(torch.eye(4))
    >>> ah.variants.retrieval_accuracy(memory, torch.tensor([0, 1]), torch.eye(4)[:2])
    1.0
    """
    patterns = memory.patterns.to(accumulation_dtype(memory.patterns.dtype))
    chunks = torch.split(memory.retrieve(query).to(patterns), max(1, BLOCK_DISTANCES // len(patterns)))
    nearest = torch.cat([negative_distance(chunk, patterns).argmax(-1) for chunk in chunks])
    return (nearest == index).double().mean().item()


@torch.no_grad()
def retrieval_error(memory: _Memory, index: Tensor, query: Tensor) -> float:
    """The mean squared error, per dimension, of the retrieved patterns.

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
    """The accuracy of the most likely pattern on ``n`` random queries: the Bayes limit, an upper bound for any memory.

    Args:
        variant: the distribution of the queries.
        patterns: ``(N, d)``.
        n: number of queries.
        generator: random generator on the device of the patterns; None for the global one.
        bias_known: as in :meth:`Mixed.log_likelihood`.

    Raises:
        AHopError: ``patterns`` is not a floating-point matrix, or ``n`` not an integer of at least 0.

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
    """The log-probability that exactly ``count`` of ``d`` independent events occur: ``(..., d) -> (...)``."""
    reached = torch.zeros(*probability.shape[:-1], count + 1, dtype=probability.dtype, device=probability.device)
    reached[..., 0] = 1.0
    for each in probability.unsqueeze(-2).unbind(-1):
        reached = reached * (1 - each) + functional.pad(reached, (1, -1)) * each
    return reached[..., count].log()
