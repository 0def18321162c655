"""Corruptions of stored patterns, the accuracy of a memory on them, and the accuracy of the best possible memory.

A query is a *variant* of one stored pattern. :class:`Mixed` adds noise, replaces some dimensions by random values, and
adds a fixed bias. Its distribution is known, and with it the likelihood of each pattern. The accuracy of the most
likely pattern is the *Bayes limit*, an upper bound for every memory. Other variants erase, occlude or rescale a
pattern, or apply a function of the caller; they have no likelihood.

A *level*, such as the fraction of dimensions to erase, is a number or a range ``(low, high)``. With a range, each query
draws its own level uniformly.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Protocol, SupportsIndex

import torch
from torch import Tensor
from torch.nn import functional

from ahop_layers.association import negative_distance
from ahop_layers.errors import AHopError, check_floating, check_numbers, check_patterns, check_sizes, describe
from ahop_layers.ops.reference import accumulation_dtype

__all__ = [
    "Biased",
    "Brightened",
    "Custom",
    "DroppedChannels",
    "Erased",
    "Masked",
    "Mixed",
    "Noisy",
    "Occluded",
    "Replaced",
    "SaltAndPepper",
    "Variant",
    "bayes_accuracy",
    "retrieval_accuracy",
    "retrieval_error",
]

Level = float | tuple[float, float]
"""A number, or a range ``(low, high)`` from which each query draws its own number uniformly."""

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


def _check_levels(rule: str, **levels: object) -> None:
    """Raises unless every level is a number that satisfies ``rule``, or a range of such numbers."""
    for name, level in levels.items():
        if not isinstance(level, tuple):
            check_numbers(rule, **{name: level})
            continue
        if len(level) != 2:
            raise AHopError(f"{name} must be {rule} or a range (low, high), got {level!r}")
        for end in level:
            check_numbers(rule, **{name: end})
        if level[0] > level[1]:
            raise AHopError(f"{name} must be a range (low, high) with low <= high, got {level!r}")


def _draw(level: Level, origin: Tensor, generator: torch.Generator | None) -> float | Tensor:
    """Returns the level if it is a number, otherwise one random level per row of ``origin (..., d)``: ``(..., 1)``."""
    if not isinstance(level, tuple):
        return level
    drawn = torch.empty((*origin.shape[:-1], 1), dtype=accumulation_dtype(origin.dtype), device=origin.device)
    return drawn.uniform_(*level, generator=generator)


def _count(share: float | Tensor, dim: int) -> int | Tensor:
    """Returns ``share * dim``, rounded down."""
    product = share * dim + 1e-9  # 0.29 * 100 is 28.999...
    return product.floor() if isinstance(product, Tensor) else math.floor(product)


def _chosen(share: Level, origin: Tensor, generator: torch.Generator | None, dim: int | None = None) -> Tensor:
    """Chooses a fraction ``share`` of ``dim`` entries at random for each row of ``origin``: bool ``(..., dim)``."""
    dim = origin.shape[-1] if dim is None else dim
    count = _count(_draw(share, origin, generator), dim)
    # In half precision, ties would favor some positions.
    order = torch.empty((*origin.shape[:-1], dim), dtype=accumulation_dtype(origin.dtype), device=origin.device)
    return order.uniform_(generator=generator).argsort(-1) < count


def _fill(chosen: Tensor, value: Level, origin: Tensor, generator: torch.Generator | None) -> Tensor:
    """Sets the chosen entries of ``origin`` to ``value``."""
    level = _draw(value, origin, generator)
    return torch.where(chosen, level.to(origin.dtype) if isinstance(level, Tensor) else level, origin)


def _number(name: str, level: Level) -> float:
    """Returns the level. Raises an AHopError if it is a range."""
    if isinstance(level, tuple):
        raise AHopError(f"{name} must be a number for a likelihood, got the range {level!r}")
    return level


def _check_interval(low: float, high: float) -> None:
    check_numbers("a finite number", low=low, high=high)
    if not low < high:
        raise AHopError(f"low must be below high, got {low!r} and {high!r}")


class Variant(ABC):
    """A corruption of patterns. A subclass defines :meth:`corrupt`.

    >>> import torch, ahop_layers as ah
    >>> class Negated(ah.variants.Variant):
    ...     def corrupt(self, origin, generator=None):
    ...         return -origin
    >>> Negated().sample(torch.ones(3, 2), 1)[1]
    tensor([[-1., -1.]])
    """

    @abstractmethod
    def corrupt(self, origin: Tensor, generator: torch.Generator | None = None) -> Tensor:
        """Corrupt each row of ``origin (n, d)``: ``(n, d)``. All randomness comes from ``generator``.

        >>> Erased(1.0).corrupt(torch.ones(1, 3))
        tensor([[0., 0., 0.]])
        """

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


@dataclass(frozen=True)
class Mixed(Variant):
    """Adds noise, then masks, then adds a bias: the mixed variant of the paper.

    Args:
        mask: fraction of dimensions to replace by values drawn uniformly from [low, high]. Every query has ``mask * d``
            masked dimensions, rounded down, at random positions.
        noise: variance of the Gaussian noise.
        bias: absolute value of the bias in every dimension. Its signs are random and equal for all queries.
        seed: seed of the signs, so that all queries from this object have the same bias.
        std: standard deviation of the noise, instead of its variance.
        low, high: range of the values that replace masked dimensions.

    ``mask``, ``noise``, ``bias`` and ``std`` are levels: numbers or ranges. With a range there is no likelihood.

    Raises:
        AHopError: an argument is not a finite number, is negative, or ``mask`` is above 1; both ``noise`` and ``std``
            are given; or ``low`` is not below ``high``.

    >>> import torch, ahop_layers as ah
    >>> variant = Mixed(mask=0.25, noise=0.0, bias=0.5)
    >>> patterns = torch.zeros(3, 8)
    >>> index, query = variant.sample(patterns, 10)
    >>> ((query - variant.shift(patterns)).abs() > 1e-6).sum(-1)
    tensor([2, 2, 2, 2, 2, 2, 2, 2, 2, 2])
    """

    mask: Level = 0.0
    noise: Level = 0.0
    bias: Level = 0.0
    seed: int = 0
    std: Level | None = None
    low: float = -1.0
    high: float = 1.0

    def __post_init__(self) -> None:
        _check_levels("a number between 0 and 1", mask=self.mask)
        _check_levels("a number of at least 0", noise=self.noise, bias=self.bias)
        if self.std is not None:
            _check_levels("a number of at least 0", std=self.std)
            if self.noise != 0:
                raise AHopError(f"noise must be 0 if std is given, got noise={self.noise!r} and std={self.std!r}")
        if not isinstance(self.seed, SupportsIndex):
            raise AHopError(f"seed must be an integer, got {self.seed!r}")
        _check_interval(self.low, self.high)

    def masked_count(self, dim: int) -> int:
        """The number of masked dimensions out of ``dim``.

        Raises:
            AHopError: ``mask`` is a range.

        >>> Mixed(mask=0.3).masked_count(64)
        19
        """
        return int(_count(_number("mask", self.mask), dim))

    @property
    def variance(self) -> float:
        """The variance of the noise.

        Raises:
            AHopError: ``noise`` or ``std`` is a range.

        >>> Mixed(std=0.5).variance
        0.25
        """
        return _number("noise", self.noise) if self.std is None else _number("std", self.std) ** 2

    def shift(self, patterns: Tensor) -> Tensor:
        """The bias ``(d,)`` of every query made from ``patterns (N, d)``.

        Raises:
            AHopError: ``bias`` is a range.

        >>> Mixed(bias=0.5).shift(torch.zeros(3, 4)).abs()
        tensor([0.5000, 0.5000, 0.5000, 0.5000])
        """
        return _number("bias", self.bias) * self._signs(patterns)

    def _signs(self, patterns: Tensor) -> Tensor:
        return _signs(self.seed, patterns.shape[-1], patterns.device).to(patterns.dtype)

    def corrupt(self, origin: Tensor, generator: torch.Generator | None = None) -> Tensor:
        """Corrupt each row of ``origin (n, d)``: ``(n, d)``.

        >>> Mixed(noise=0.1).corrupt(torch.zeros(2, 4)).shape
        torch.Size([2, 4])
        """
        query = origin
        if self.noise or self.std:
            level = _draw(self.noise if self.std is None else self.std, query, generator)
            deviation = level**0.5 if self.std is None else level
            query = (query + deviation * torch.empty_like(query).normal_(generator=generator)).to(origin.dtype)
        if isinstance(self.mask, tuple) or self.masked_count(query.shape[-1]):
            chosen = _chosen(self.mask, query, generator)
            values = torch.empty_like(query).uniform_(self.low, self.high, generator=generator)
            query = torch.where(chosen, values, query)
        if not self.bias:
            return query
        return (query + _draw(self.bias, query, generator) * self._signs(query)).to(origin.dtype)

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
        count, variance, bias = self.masked_count(d), max(self.variance, MIN_VARIANCE), _number("bias", self.bias)
        kept, replaced, width = [], [], self.high - self.low
        for shift in (self.shift(query),) if bias_known else (bias, -bias):
            value = query - shift
            kept.append((value - origin).square() / (-2 * variance) - 0.5 * math.log(2 * math.pi * variance))
            # The tolerance keeps a replaced value inside its interval despite the rounding of the shift.
            outside = (value < self.low - 1e-6 * width / 2) | (value > self.high + 1e-6 * width / 2)
            replaced.append(torch.full_like(value, -math.log(width)).masked_fill(outside, -torch.inf))
        log_kept, log_replaced = (_log_mean(each) for each in (kept, replaced))
        tilt = math.log((count + 0.5) / (d - count + 0.5))
        odds = log_replaced - log_kept + tilt
        choices = math.lgamma(d + 1) - math.lgamma(count + 1) - math.lgamma(d - count + 1)
        return (log_kept + functional.softplus(odds)).sum(-1) - count * tilt - choices, odds.sigmoid()


class Noisy(Mixed):
    """Adds Gaussian noise to every dimension.

    Args:
        noise: variance of the noise, a level.
        std: standard deviation of the noise, a level; give either ``noise`` or ``std``.

    Raises:
        AHopError: an argument is invalid, or neither or both are given.

    >>> import torch, ahop_layers as ah
    >>> index, query = ah.variants.Noisy(0.25).sample(torch.zeros(1, 10000), 1)
    >>> bool((query.std() - 0.5).abs() < 0.05)
    True
    >>> ah.variants.Noisy(std=0.5).variance
    0.25
    """

    def __init__(self, noise: Level | None = None, *, std: Level | None = None) -> None:
        if (noise is None) == (std is None):
            raise AHopError(f"either noise or std must be given, got noise={noise!r} and std={std!r}")
        super().__init__(noise=0.0 if noise is None else noise, std=std)


class Replaced(Mixed):
    """Replaces a fraction ``mask`` of the dimensions by values drawn uniformly from [low, high].

    :class:`Erased` sets the dimensions to a constant instead.

    Args:
        mask: fraction of the dimensions, a level.
        low, high: range of the random values.

    Raises:
        AHopError: an argument is invalid.

    >>> import torch, ahop_layers as ah
    >>> index, query = ah.variants.Replaced(0.5).sample(torch.full((1, 8), 3.0), 1)
    >>> int((query == 3).sum())
    4
    """

    def __init__(self, mask: Level, low: float = -1.0, high: float = 1.0) -> None:
        super().__init__(mask=mask, low=low, high=high)


class Masked(Replaced):
    """An older name of :class:`Replaced`: the arguments are those of :class:`Replaced`.

    >>> import torch, ahop_layers as ah
    >>> index, query = ah.variants.Masked(0.5).sample(torch.full((1, 8), 3.0), 1)
    >>> int((query == 3).sum())
    4
    """


class Biased(Mixed):
    """Adds a bias with random signs that are the same for all queries.

    Args:
        bias: absolute value of the bias, a level.
        seed: seed of the signs.

    >>> import torch, ahop_layers as ah
    >>> index, query = ah.variants.Biased(0.5).sample(torch.zeros(3, 4), 2)
    >>> query.abs(), bool((query[0] == query[1]).all())
    (tensor([[0.5000, 0.5000, 0.5000, 0.5000],
            [0.5000, 0.5000, 0.5000, 0.5000]]), True)
    """

    def __init__(self, bias: Level, seed: int = 0) -> None:
        super().__init__(bias=bias, seed=seed)


@dataclass(frozen=True)
class Erased(Variant):
    """Sets a fraction of the dimensions to a constant.

    Args:
        share: fraction of the dimensions, a level. Every query loses ``share * d`` dimensions, rounded down, at random
            positions.
        value: the constant, a level.

    Raises:
        AHopError: an argument is invalid.

    >>> import torch, ahop_layers as ah
    >>> query = ah.variants.Erased(0.75).corrupt(torch.ones(3, 8))
    >>> query.sum(-1)
    tensor([2., 2., 2.])
    """

    share: Level
    value: Level = 0.0

    def __post_init__(self) -> None:
        _check_levels("a number between 0 and 1", share=self.share)
        _check_levels("a finite number", value=self.value)

    def corrupt(self, origin: Tensor, generator: torch.Generator | None = None) -> Tensor:
        """Erase dimensions of each row of ``origin (n, d)``: ``(n, d)``.

        >>> Erased(1.0, value=5.0).corrupt(torch.ones(1, 3))
        tensor([[5., 5., 5.]])
        """
        return _fill(_chosen(self.share, origin, generator), self.value, origin, generator)


@dataclass(frozen=True)
class SaltAndPepper(Variant):
    """Sets a fraction of the dimensions to ``low`` or ``high``, each with probability 1/2.

    Args:
        share: fraction of the dimensions, a level, rounded down to a number of dimensions at random positions.
        low, high: the two values.

    Raises:
        AHopError: an argument is invalid.

    >>> import torch, ahop_layers as ah
    >>> query = ah.variants.SaltAndPepper(0.5).corrupt(torch.zeros(2, 8))
    >>> query.abs().sum(-1)
    tensor([4., 4.])
    """

    share: Level
    low: float = -1.0
    high: float = 1.0

    def __post_init__(self) -> None:
        _check_levels("a number between 0 and 1", share=self.share)
        _check_interval(self.low, self.high)

    def corrupt(self, origin: Tensor, generator: torch.Generator | None = None) -> Tensor:
        """Corrupt each row of ``origin (n, d)``: ``(n, d)``.

        >>> SaltAndPepper(1.0, low=0.0, high=3.0).corrupt(torch.ones(50, 4)).unique()
        tensor([0., 3.])
        """
        chosen = _chosen(self.share, origin, generator)
        salt = torch.empty_like(origin).uniform_(generator=generator) < 0.5
        return torch.where(chosen, torch.full_like(origin, self.low).masked_fill(salt, self.high), origin)


@dataclass(frozen=True)
class Occluded(Variant):
    """Covers a block of an image, which has the aspect ratio of the image and a random position.

    Args:
        share: fraction of the area of the image, a level. The sides of the block are rounded to pixels.
        height, width: size of the image in pixels.
        channels: number of channels; images are flattened with channels first, as in :func:`~ahop_layers.patches`. The
            block covers all channels.
        value: value of the covered pixels, a level.

    Raises:
        AHopError: an argument is invalid.

    >>> import torch, ahop_layers as ah
    >>> query = ah.variants.Occluded(0.25, height=4, width=4).corrupt(torch.ones(1, 16))
    >>> int((query == 0).sum())
    4
    """

    share: Level
    height: int
    width: int
    channels: int = 1
    value: Level = 0.0

    def __post_init__(self) -> None:
        _check_levels("a number between 0 and 1", share=self.share)
        _check_levels("a finite number", value=self.value)
        check_sizes(height=self.height, width=self.width, channels=self.channels)

    def corrupt(self, origin: Tensor, generator: torch.Generator | None = None) -> Tensor:
        """Occlude each row of ``origin (n, d)``: ``(n, d)``.

        Raises:
            AHopError: ``d`` is not ``channels * height * width``.

        >>> Occluded(1.0, height=1, width=2).corrupt(torch.ones(1, 2))
        tensor([[0., 0.]])
        """
        sizes = (self.channels, self.height, self.width)
        if origin.shape[-1] != math.prod(sizes):
            raise AHopError(
                f"origin must be (n, channels * height * width) = (n, {math.prod(sizes)}), got {describe(origin)}"
            )
        side = _draw(self.share, origin, generator) ** 0.5
        rows, columns = (_interval(side, size, origin, generator) for size in sizes[1:])
        block = rows[..., :, None] & columns[..., None, :]
        covered = block.flatten(-2).repeat(*[1] * (origin.ndim - 1), self.channels)
        return _fill(covered, self.value, origin, generator)


def _interval(side: float | Tensor, size: int, origin: Tensor, generator: torch.Generator | None) -> Tensor:
    """Chooses ``side * size`` consecutive entries of ``size`` for each row, at a random start: bool ``(..., size)``."""
    length = torch.as_tensor(side * size, dtype=accumulation_dtype(origin.dtype), device=origin.device).round()
    start = _draw((0.0, 1.0), origin, generator) * (size - length + 1)
    first = start.floor().minimum(size - length)  # the product can round up
    place = torch.arange(size, device=origin.device)
    return (place >= first) & (place < first + length)


@dataclass(frozen=True)
class Brightened(Variant):
    """Multiplies a pattern by a gain and adds the same shift to all of its dimensions.

    Args:
        shift: change of brightness, a level.
        gain: change of contrast, a level.

    Raises:
        AHopError: an argument is invalid.

    >>> import torch, ahop_layers as ah
    >>> ah.variants.Brightened(shift=0.5, gain=2.0).corrupt(torch.tensor([[0.0, 1.0]]))
    tensor([[0.5000, 2.5000]])
    """

    shift: Level = 0.0
    gain: Level = 1.0

    def __post_init__(self) -> None:
        _check_levels("a finite number", shift=self.shift, gain=self.gain)

    def corrupt(self, origin: Tensor, generator: torch.Generator | None = None) -> Tensor:
        """Change the brightness of each row of ``origin (n, d)``: ``(n, d)``.

        >>> Brightened(gain=3.0).corrupt(torch.ones(1, 2))
        tensor([[3., 3.]])
        """
        gain, shift = (_draw(level, origin, generator) for level in (self.gain, self.shift))
        return (gain * origin + shift).to(origin.dtype)


@dataclass(frozen=True)
class DroppedChannels(Variant):
    """Sets all dimensions of some channels to a constant, such as those of a failed sensor.

    Args:
        share: fraction of the channels, a level, rounded down to a number of random channels.
        channels: number of channels; dimensions are ordered with channels first.
        value: the constant, a level.

    Raises:
        AHopError: an argument is invalid.

    >>> import torch, ahop_layers as ah
    >>> query = ah.variants.DroppedChannels(0.5, channels=2).corrupt(torch.ones(1, 6))
    >>> query.reshape(2, 3).sum(-1).sort().values
    tensor([0., 3.])
    """

    share: Level
    channels: int
    value: Level = 0.0

    def __post_init__(self) -> None:
        _check_levels("a number between 0 and 1", share=self.share)
        _check_levels("a finite number", value=self.value)
        check_sizes(channels=self.channels)

    def corrupt(self, origin: Tensor, generator: torch.Generator | None = None) -> Tensor:
        """Drop channels of each row of ``origin (n, d)``: ``(n, d)``.

        Raises:
            AHopError: ``d`` is not a multiple of ``channels``.

        >>> DroppedChannels(1.0, channels=2).corrupt(torch.ones(1, 4))
        tensor([[0., 0., 0., 0.]])
        """
        if origin.shape[-1] % self.channels:
            raise AHopError(f"origin must be (n, d) with d a multiple of {self.channels}, got {describe(origin)}")
        chosen = _chosen(self.share, origin, generator, self.channels)
        dropped = chosen.repeat_interleave(origin.shape[-1] // self.channels, -1)
        return _fill(dropped, self.value, origin, generator)


@dataclass(frozen=True)
class Custom(Variant):
    """Corrupts patterns with a function of the caller.

    Args:
        function: takes ``origin (n, d)`` and a generator or None, and returns the queries ``(n, d)``. It should draw
            all random numbers from the generator, so that a seed determines them.

    Raises:
        AHopError: ``function`` is not callable.

    >>> import torch, ahop_layers as ah
    >>> reverse = ah.variants.Custom(lambda origin, generator: origin.flip(-1))
    >>> reverse.corrupt(torch.tensor([[1.0, 2.0, 3.0]]))
    tensor([[3., 2., 1.]])
    """

    function: Callable[[Tensor, torch.Generator | None], Tensor]

    def __post_init__(self) -> None:
        if not callable(self.function):
            raise AHopError(f"function must be callable, got {self.function!r}")

    def corrupt(self, origin: Tensor, generator: torch.Generator | None = None) -> Tensor:
        """Apply the function to ``origin (n, d)``: ``(n, d)``.

        Raises:
            AHopError: the function does not return a floating-point tensor of the shape of ``origin``.

        >>> Custom(lambda origin, generator: origin + 1).corrupt(torch.ones(1, 2))
        tensor([[2., 2.]])
        """
        query = self.function(origin, generator)
        check_floating(query=query)
        if query.shape != origin.shape:
            raise AHopError(f"function must return a tensor {describe(origin)}, got {describe(query)}")
        return query


class _Memory(Protocol):
    patterns: Tensor

    def retrieve(self, x: Tensor) -> Tensor: ...


def _all_patterns(memory: _Memory) -> Tensor:
    """Returns the patterns of a memory; raises if it has only a part of them."""
    if getattr(memory, "shard", None) is not None:
        raise AHopError("memory must hold all patterns, got a sharded memory: compare memory.recall with the index")
    return memory.patterns


@torch.no_grad()
def retrieval_accuracy(memory: _Memory, index: Tensor, query: Tensor) -> float:
    """The fraction of queries whose retrieved pattern is nearest to the pattern that the query was made from.

    Args:
        memory: an object with ``patterns (N, d)`` and ``retrieve``, such as :class:`ahop_layers.AssociativeMemory`.
        index: ``(n,)``, the index of the pattern of each query.
        query: ``(n, d)``.

    Raises:
        AHopError: the memory is sharded.

    >>> import torch, ahop_layers as ah
    >>> memory = ah.AssociativeMemory(torch.eye(4))
    >>> ah.variants.retrieval_accuracy(memory, torch.tensor([0, 1]), torch.eye(4)[:2])
    1.0
    """
    stored = _all_patterns(memory)
    patterns = stored.to(accumulation_dtype(stored.dtype))
    chunks = torch.split(memory.retrieve(query).to(patterns), max(1, BLOCK_DISTANCES // len(patterns)))
    nearest = torch.cat([negative_distance(chunk, patterns).argmax(-1) for chunk in chunks])
    return (nearest == index).double().mean().item()


@torch.no_grad()
def retrieval_error(memory: _Memory, index: Tensor, query: Tensor) -> float:
    """The mean squared error, per dimension, of the retrieved patterns.

    Args:
        memory, index, query: as in :func:`retrieval_accuracy`.

    Raises:
        AHopError: the memory is sharded.

    >>> import torch, ahop_layers as ah
    >>> memory = ah.AssociativeMemory(torch.eye(4), separation="argmax")
    >>> ah.variants.retrieval_error(memory, torch.tensor([0, 1]), torch.eye(4)[:2])
    0.0
    """
    return (memory.retrieve(query) - _all_patterns(memory)[index]).double().square().mean().item()


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
        variant: the distribution of the queries: a :class:`Mixed` or a subclass of it, whose levels are numbers.
        patterns: ``(N, d)``.
        n: number of queries.
        generator: random generator on the device of the patterns; None for the global one.
        bias_known: as in :meth:`Mixed.log_likelihood`.

    Raises:
        AHopError: ``variant`` has no likelihood, ``patterns`` is not a floating-point matrix, or ``n`` is not an
            integer of at least 0.

    >>> import torch, ahop_layers as ah
    >>> patterns = torch.rand(50, 32) * 2 - 1
    >>> ah.variants.bayes_accuracy(ah.variants.Noisy(0.01), patterns, 200)
    1.0
    """
    if not isinstance(variant, Mixed):
        raise AHopError(f"variant must be a Mixed, which has a likelihood, got {type(variant).__name__}")
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
