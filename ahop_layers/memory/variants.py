"""Kinds of damage to stored patterns, to train and to test a memory.

A query is a *variant* of one stored pattern: noisy, occluded, with wrong or missing values. A *damage* is a variant, a
function, or a list of these that are applied in order; :func:`as_damage` makes one variant of it.

A *level*, such as the variance of noise, is a number or a range ``(low, high)``. With a range, each query draws its own
level uniformly. A *share* is a level between 0 and 1: a fraction, rounded down to a number of dimensions at random
positions. An invalid argument raises an :class:`~ahop_layers.AHopError`.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import lru_cache
from inspect import Parameter, signature
from typing import Any, SupportsIndex

import torch
from torch import Generator, Tensor, nn

from ahop_layers.errors import AHopError, check_floating, check_numbers, check_seed, check_sizes, describe
from ahop_layers.ops.reference import accumulation_dtype

__all__ = ["Covered", "Missing", "Mixed", "Noisy", "Replaced", "Variant", "as_damage"]

# A number, or a range ``(low, high)`` from which each query draws its own number uniformly.
Level = float | tuple[float, float]
COVER_SQUARE = 4  # side in pixels of the squares with which :class:`Covered` covers images
COVER_IMAGES = 512  # number of the patterns with which it covers others
RANGE_ELEMENTS = 2**21  # number of values of the patterns that are read at once to find their range


class Variant(ABC):
    """A kind of damage. A subclass defines ``__call__``.

    >>> import torch, ahop_layers as ah
    >>> class Negated(ah.variants.Variant):
    ...     def __call__(self, origin, generator=None):
    ...         return -origin
    >>> Negated().sample(torch.ones(3, 2), 1)[1]
    tensor([[-1., -1.]])
    """

    shifts: bool = True
    """Whether values may be moved by the same amount in all queries: then a fit looks for a bias."""

    @abstractmethod
    def __call__(self, origin: Tensor, generator: Generator | None = None) -> Tensor:
        """Damages each row of ``origin (..., d)``: ``(..., d)``. All random numbers come from ``generator``."""

    def bind(self, patterns: Tensor) -> "Variant":
        """Returns the variant for queries of ``patterns (..., d)``, from which :class:`Replaced` takes its range.

        >>> Replaced(1.0).bind(torch.tensor([[3.0, 5.0], [3.0, 5.0]]))(torch.zeros(1, 2))
        tensor([[3., 5.]])
        """
        return self

    def of_shape(self, shape: Sequence[int]) -> "Variant":
        """Returns the variant for patterns of a ``shape``, such as ``(H, W)``, from which :class:`Covered` takes it."""
        return self

    def sample(self, patterns: Tensor, n: int, generator: Generator | None = None) -> tuple[Tensor, Tensor]:
        """Draws ``n`` queries from uniformly chosen ``patterns (N, d)``: their ``index (n,)``, and ``query (n, d)``.

        The generator is on the device of the patterns; None means the global one.
        """
        check_floating(patterns=patterns)
        if patterns.ndim != 2 or 0 in patterns.shape:
            raise AHopError(f"patterns must be (N, d) with N, d >= 1, got {describe(patterns)}")
        if not isinstance(n, SupportsIndex) or int(n) < 0:
            raise AHopError(f"n must be an integer of at least 0, got {n!r}")
        index = torch.randint(len(patterns), (int(n),), generator=generator, device=patterns.device)
        return index, self.bind(patterns)(patterns[index], generator)


def as_damage(damage: object) -> Variant:
    """Makes a variant of a variant, a function, or a list of damages, which apply in order.

    A function takes ``x (n, d)`` and returns the queries ``(n, d)``. Its second argument, if it is required or named
    ``generator``, is a generator or None. Otherwise torch's global generator is seeded during the call, so that a seed
    determines the queries here, too.

    >>> as_damage([Missing(0.0), lambda x: x + 1])(torch.ones(1, 2))
    tensor([[2., 2.]])
    """
    if isinstance(damage, Variant):
        return damage
    if isinstance(damage, list | tuple):
        if not damage:
            raise AHopError(f"damage must be a list of at least one damage, got {damage!r}")
        return _Composed(tuple(as_damage(part) for part in damage))
    if callable(damage):
        return _Function(damage)
    raise AHopError(f"damage must be a variant, a function or a list of these, got {damage!r}")


@dataclass(frozen=True)
class _Composed(Variant):
    """Applies several variants in order."""

    parts: tuple[Variant, ...]

    @property
    def shifts(self) -> bool:  # type: ignore[override]
        """Whether one of the parts may."""
        return any(part.shifts for part in self.parts)

    def bind(self, patterns: Tensor) -> Variant:
        """Binds every part."""
        return _Composed(tuple(part.bind(patterns) for part in self.parts))

    def of_shape(self, shape: Sequence[int]) -> Variant:
        """Gives every part the shape."""
        return _Composed(tuple(part.of_shape(shape) for part in self.parts))

    def __call__(self, origin: Tensor, generator: Generator | None = None) -> Tensor:
        """Applies every part to the result of the one before."""
        for part in self.parts:
            origin = part(origin, generator)
        return origin


@dataclass(frozen=True)
class _Function(Variant):
    """Damages patterns with a function; see :func:`as_damage`."""

    function: Callable[..., Tensor]

    def __call__(self, origin: Tensor, generator: Generator | None = None) -> Tensor:
        """Applies the function, and checks that it returns a floating-point tensor of the shape of ``origin``."""
        if _takes_generator(self.function):
            query = self.function(origin, generator)
        elif generator is None:
            query = self.function(origin)
        else:
            with torch.random.fork_rng([origin.device] if origin.is_cuda else []):
                torch.manual_seed(int(torch.randint(2**62, (), generator=generator, device=generator.device)))
                query = self.function(origin)
        check_floating(query=query)
        if query.shape != origin.shape:
            raise AHopError(f"function must return a tensor {describe(origin)}, got {describe(query)}")
        return query


def _takes_generator(function: Callable[..., Tensor]) -> bool:
    try:
        parameters = signature(function.forward if isinstance(function, nn.Module) else function).parameters.values()
    except (TypeError, ValueError):  # a function in C, such as torch.neg
        return False
    ordered = [each for each in parameters if each.kind in (Parameter.POSITIONAL_ONLY, Parameter.POSITIONAL_OR_KEYWORD)]
    return len(ordered) > 1 and (ordered[1].default is Parameter.empty or ordered[1].name == "generator")


class _Draw:
    """Draws what a damage of the rows of ``origin (..., d)`` needs; a half-precision row draws in float32."""

    def __init__(self, origin: Tensor, generator: Generator | None) -> None:
        self.origin, self.generator = origin, generator
        self.options: dict[str, Any] = {"dtype": accumulation_dtype(origin.dtype), "device": origin.device}

    def uniform(self, dim: int, low: float = 0.0, high: float = 1.0) -> Tensor:
        """Returns ``dim`` uniform numbers for each row: ``(..., dim)``."""
        shape = (*self.origin.shape[:-1], dim)
        return torch.empty(shape, **self.options).uniform_(low, high, generator=self.generator)

    def level(self, level: Level) -> float | Tensor:
        """Returns the level if it is a number, otherwise one random level per row: ``(..., 1)``."""
        return self.uniform(1, *level) if isinstance(level, tuple) else level

    def chosen(self, share: Level) -> Tensor:
        """Chooses a fraction ``share`` of the dimensions at random for each row: bool ``(..., d)``."""
        dim = self.origin.shape[-1]
        count = self.level(share) * dim + 1e-9  # 0.29 * 100 is 28.999...
        return self.uniform(dim).argsort(-1) < count // 1  # in half precision, ties would favor some positions

    def interval(self, side: Tensor, size: int) -> Tensor:
        """Chooses ``side * size`` consecutive entries of ``size`` for each row, from a random start on."""
        length = (side * size).round()
        first = (self.uniform(1) * (size - length + 1)).floor().minimum(size - length)  # the product can round up
        place = torch.arange(size, device=self.origin.device)
        return (place >= first) & (place < first + length)


FRACTION, NOT_NEGATIVE, FINITE = "a number between 0 and 1", "a number of at least 0", "a finite number"
RULES = {"share": FRACTION, "mask": FRACTION, "noise": NOT_NEGATIVE, "std": NOT_NEGATIVE, "bias": NOT_NEGATIVE}
"""What a level must be, by its name."""


class _Drawn(Variant):
    """A dataclass that checks its arguments, whose names say what they must be, and damages rows by ``_apply``."""

    shifts = False

    def __post_init__(self) -> None:
        given: dict[str, Any] = {each.name: getattr(self, each.name) for each in fields(self)}  # type: ignore[arg-type]
        low: Any = given.get("low")
        high: Any = given.get("high")
        if not (isinstance(low, Tensor) and low.ndim) and (low, high) != (None, None):  # bind takes rows of numbers
            check_numbers(FINITE, low=low, high=high)
            if not low < high:
                raise AHopError(f"low must be below high, got {low!r} and {high!r}")
        check_seed(seed=given.get("seed", 0))
        sizes = {name: given.get(name) for name in ("height", "width", "channels")}
        check_sizes(**{name: size for name, size in sizes.items() if size is not None})
        for name in (name for name in RULES if name in given):
            level = given[name]
            if level is None and "std" in given:  # Noisy has the other one
                continue
            ends = level if isinstance(level, tuple) else (level, level)
            for end in ends:
                check_numbers(RULES[name], **{name: end})
            if len(ends) != 2 or ends[0] > ends[1]:
                raise AHopError(f"{name} must be {RULES[name]} or a range (low, high) with low <= high, got {level!r}")

    def __call__(self, origin: Tensor, generator: Generator | None = None) -> Tensor:
        """Damages each row."""
        return self._apply(origin, _Draw(origin, generator)).to(origin.dtype)

    @abstractmethod
    def _apply(self, origin: Tensor, draw: _Draw) -> Tensor: ...


@dataclass(frozen=True)
class Noisy(_Drawn):
    """Adds Gaussian noise of variance ``noise`` or of standard deviation ``std``, levels, to every dimension.

    >>> round(Noisy(std=0.5)(torch.zeros(1, 100_000)).std().item(), 1)
    0.5
    """

    noise: Level | None = None
    std: Level | None = field(default=None, kw_only=True)

    def __post_init__(self) -> None:
        if (self.noise is None) == (self.std is None):
            raise AHopError(f"either noise or std must be given, got noise={self.noise!r} and std={self.std!r}")
        super().__post_init__()

    def _apply(self, origin: Tensor, draw: _Draw) -> Tensor:
        level = self.noise if self.std is None else self.std
        if not level:
            return origin
        deviation = draw.level(level) ** (0.5 if self.std is None else 1)
        return origin + deviation * torch.empty_like(origin).normal_(generator=draw.generator)


@dataclass(frozen=True)
class Replaced(_Drawn):
    """Replaces a share of the dimensions by values drawn uniformly between ``low`` and ``high``.

    Without these, the range of each dimension is the range of the known values of the patterns; a call without
    :meth:`bind` takes the range of its rows.

    >>> (Replaced(0.5, low=0.0, high=1.0)(torch.full((2, 8), 3.0)) == 3).sum(-1)
    tensor([4, 4])
    """

    share: Level
    low: float | Tensor | None = None
    high: float | Tensor | None = None

    def bind(self, patterns: Tensor) -> Variant:
        """Takes the range from the patterns, unless it was given."""
        if self.low is not None:
            return self
        low, high = known_range(patterns.flatten(0, -2))
        return replace(self, low=low, high=high)

    def _apply(self, origin: Tensor, draw: _Draw) -> Tensor:
        if not self.share or not origin.numel():
            return origin
        if self.low is None or self.high is None:
            if origin.numel() > origin.shape[-1]:
                return self.bind(origin)(origin, draw.generator)
            raise AHopError("low and high must be given for a single row, got None: give them, or call bind(patterns)")
        chosen, values = draw.chosen(self.share), torch.empty_like(origin).uniform_(generator=draw.generator)
        return torch.where(chosen, self.low + (self.high - self.low) * values, origin)


@dataclass(frozen=True)
class Mixed(_Drawn):
    """Adds noise, replaces a share ``mask`` of the values, then adds a bias: the mixed variant of the paper.

    The absolute value of the bias is a level. Its random signs come from ``seed`` and are the same for all queries.

    >>> index, query = (variant := Mixed(mask=0.25, bias=0.5)).sample(torch.zeros(3, 8), 5)
    >>> (query - variant.shift(query) != 0).sum(-1)
    tensor([2, 2, 2, 2, 2])
    """

    mask: Level = 0.0
    noise: Level = 0.0
    bias: Level = 0.0
    seed: int = 0
    low: float = -1.0
    high: float = 1.0

    @property
    def shifts(self) -> bool:  # type: ignore[override]
        """Whether there is a bias."""
        return bool(self.bias)

    def shift(self, patterns: Tensor) -> Tensor:
        """Returns the bias ``(d,)`` of every query of ``patterns (..., d)``; ``bias`` must be a number."""
        if isinstance(self.bias, tuple):
            raise AHopError(f"bias must be a number, got the range {self.bias!r}")
        return self.bias * _signs(self.seed, patterns.shape[-1], patterns.device).to(patterns.dtype)

    def _apply(self, origin: Tensor, draw: _Draw) -> Tensor:
        query = Noisy(self.noise)(origin, draw.generator)
        query = Replaced(self.mask, self.low, self.high)(query, draw.generator)
        signs = _signs(self.seed, origin.shape[-1], origin.device)
        return query + draw.level(self.bias) * signs if self.bias else query


@dataclass(frozen=True)
class Missing(_Drawn):
    """Makes a share of the dimensions unknown: NaN.

    >>> Missing(0.75)(torch.ones(3, 8)).isnan().sum(-1)
    tensor([6, 6, 6])
    """

    share: Level

    def _apply(self, origin: Tensor, draw: _Draw) -> Tensor:
        return origin.masked_fill(draw.chosen(self.share), torch.nan)


@dataclass(frozen=True, eq=False)
class Covered(_Drawn):
    """Covers a rectangle at a random position of an image, in all channels, with something else.

    The rectangle has any shape and ``share`` of the area. It is filled, each in a third of the queries, with one value,
    with random squares of 4 x 4 pixels, or with the same part of another pattern, upside down. A call without
    :meth:`bind` takes values and patterns from its rows. ``height``, ``width`` and ``channels`` may be left out for a
    memory of images, which knows them.

    >>> images = torch.rand(3, 64)
    >>> (Covered(0.5, height=8, width=8)(images) == images).float().mean(-1) > 0.3
    tensor([True, True, True])
    """

    share: Level
    height: int | None = None
    width: int | None = None
    channels: int = 1
    others: Tensor | None = field(default=None, repr=False, kw_only=True)

    def of_shape(self, shape: Sequence[int]) -> Variant:
        """Takes the size of an image from the patterns, unless it was given."""
        if self.height is not None or len(shape) < 2:
            return self
        channels, height, width = (1, *shape)[-3:]
        return replace(self, height=height, width=width, channels=channels)

    def bind(self, patterns: Tensor) -> Variant:
        """Takes values, and the images that cover others, from the patterns."""
        rows = patterns.flatten(0, -2)
        return replace(self, others=rows[:: max(1, len(rows) // COVER_IMAGES)])

    def _apply(self, origin: Tensor, draw: _Draw) -> Tensor:
        if self.height is None or self.width is None:
            rule = "Covered needs a memory of images (N, H, W) or (N, C, H, W), or height and width"
            raise AHopError(f"{rule}, got height={self.height}, width={self.width} and rows {describe(origin)}")
        dim = self.channels * self.height * self.width
        if origin.shape[-1] != dim:
            raise AHopError(f"origin must be (n, channels * height * width) = (n, {dim}), got {describe(origin)}")
        others = origin.reshape(-1, origin.shape[-1]) if self.others is None else self.others
        if not origin.numel() or not len(others):
            return origin
        share = torch.as_tensor(draw.level(self.share), **draw.options)
        tall = draw.uniform(1, 0.2).maximum(share)
        rows, columns = draw.interval(tall, self.height), draw.interval(share / tall, self.width)
        inside = (rows[..., :, None] & columns[..., None, :]).flatten(-2)
        inside = torch.cat([inside] * self.channels, -1)
        cells = [-(-size // COVER_SQUARE) for size in (self.height, self.width)]
        squares = torch.unflatten(draw.uniform(self.channels * math.prod(cells)), -1, (self.channels, *cells))
        squares = squares.repeat_interleave(COVER_SQUARE, -2).repeat_interleave(COVER_SQUARE, -1)
        squares = squares[..., : self.height, : self.width].flatten(-3)
        kind, known = draw.uniform(1, high=3.0), others[~others.isnan()]
        low, high = (known.amin(), known.amax()) if len(known) else (0.0, 0.0)
        values = low + (high - low) * torch.where(kind < 1, draw.uniform(1), squares)
        place = (draw.uniform(1).squeeze(-1) * len(others)).long().clamp(max=len(others) - 1)
        turned = torch.unflatten(others[place], -1, (self.channels, self.height, self.width)).flip(-2).flatten(-3)
        return torch.where(inside, torch.where(kind < 2, values.to(origin.dtype), turned), origin)


def known_range(rows: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the smallest and the largest known value of each column, NaN for a column without any: ``(d,)`` each."""
    low = torch.full_like(rows[0], math.inf)
    high = -low
    for chunk in torch.split(rows, max(1, RANGE_ELEMENTS // rows.shape[1])):  # bounds memory
        unknown = chunk.isnan()
        low = low.minimum(chunk.masked_fill(unknown, math.inf).amin(0))
        high = high.maximum(chunk.masked_fill(unknown, -math.inf).amax(0))
    return torch.where(low > high, torch.nan, low), torch.where(low > high, torch.nan, high)


@lru_cache(maxsize=64)
def _signs(seed: int, dim: int, device: torch.device) -> Tensor:
    """Random signs ``(dim,)``, equal on all devices; cached, because a host-to-device copy synchronizes."""
    generator = Generator().manual_seed(int(seed))
    return (2.0 * torch.randint(2, (dim,), generator=generator) - 1).to(device)
