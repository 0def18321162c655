"""Blocks of dimensions: how a similarity cuts its dimensions, and how queries and keys are arranged for the kernels."""

from dataclasses import dataclass
from numbers import Integral
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from ahop_layers.errors import AHopError, check_block_numbers, check_divides, check_sizes
from ahop_layers.ops.reference import accumulation_dtype

# Added to the norm of a block before the division, relative to the root mean square norm of the stored blocks.
EPSILON = 1e-3
SLICE_ELEMENTS = 2**21  # number of elements of stored patterns that are processed at once


BlocksArgument = Any
"""None, ``"auto"``, an integer, an integer tensor or array, or a :class:`~ahop_layers.Blocks`."""
AUTO_DIMENSIONS = 16  # fewer dimensions have full footprints with "auto"
AUTO_BLOCKS = range(4, 9)  # numbers of blocks that "auto" tries, in this order


@dataclass(frozen=True, eq=False, repr=False)
class Blocks:
    """One way to cut d dimensions into n blocks.

    Args:
        assignment: an integer n, a divisor of d, for n consecutive blocks of equal width; or an integer tensor or array
            ``(d,)`` with the block of each dimension, from 0 to n - 1, such as :func:`patches` returns, of which a copy
            on the CPU is kept. None makes every dimension a block. ``"auto"`` is the smallest n from 4 to 8 that is a
            divisor of d if d is at least 16, and None for other d.
        normalize: whether to center each block of query and key, and to divide it by its norm plus a small constant,
            before any base similarity. ``dot`` is then the correlation of two blocks: an offset of a block or a
            positive factor does not change it. The constant is 0.001 times the root mean square norm of the stored
            blocks, so that the unit of the data does not matter and a block without contrast counts little. Where NaN
            is an unknown value, it takes the mean of the known values of its block, and a block with fewer than half of
            its values known is 0.

    >>> import ahop_layers as ah
    >>> ah.Blocks(4, normalize=True)
    Blocks(4, normalize=True)
    >>> ah.AdaptiveSimilarity(64, blocks=ah.Blocks(ah.patches(8, 8, 2), normalize=True)).blocks
    Blocks(tensor(n=16), normalize=True)
    """

    assignment: Any
    normalize: bool = False

    def __post_init__(self) -> None:
        given = self.assignment
        if isinstance(given, Integral):
            check_sizes(blocks=given)
            given = int(given)
        elif isinstance(given, Tensor) or hasattr(given, "__array__"):
            try:
                numbers = torch.as_tensor(given, device="cpu")
            except (NotImplementedError, TypeError, ValueError):  # such as a tensor on the meta device
                raise AHopError(f"blocks must have an integer dtype and values, got {given!r}") from None
            check_block_numbers(numbers, numbers.numel())
            given = numbers.long().clone()
        elif given is not None and not (isinstance(given, str) and given == "auto"):
            expected = 'None, "auto", an integer, or an integer tensor or array'
            raise AHopError(f"blocks must be {expected}, got {given!r}")
        if not isinstance(self.normalize, bool):
            raise AHopError(f"normalize must be True or False, got {self.normalize!r}")
        object.__setattr__(self, "assignment", given)

    @property
    def named(self) -> Tensor | None:
        """The tensor that names the block of each dimension, if one was given."""
        return self.assignment if isinstance(self.assignment, Tensor) else None

    @property
    def is_auto(self) -> bool:
        """Whether the number of blocks is still to be chosen."""
        return isinstance(self.assignment, str)

    def chosen(self, dim: int, n: int | None = None) -> "Blocks":
        """Returns blocks that are not ``"auto"``, for ``dim`` dimensions; with an ``n`` that divides it, n blocks."""
        n = n if n and dim % n == 0 else self.count(dim)
        return Blocks(None if n == dim else n, self.normalize) if self.is_auto else self

    def count(self, dim: int) -> int:
        """Returns the number n of blocks of ``dim`` dimensions; raises if the blocks do not fit."""
        if self.named is not None:
            if len(self.named) != dim:
                raise AHopError(f"blocks must name the block of each of the {dim} dimensions, got {len(self.named)}")
            n = int(self.named.max()) + 1
        elif self.is_auto:
            n = next((n for n in AUTO_BLOCKS if dim % n == 0 and dim >= AUTO_DIMENSIONS), dim)
        else:
            n = dim if self.assignment is None else self.assignment
            check_divides(n, dim)
        if self.normalize and n == dim:
            raise AHopError(f"normalize=True needs blocks of several dimensions, got {n} blocks of {dim} dimensions")
        return n

    def numbers(self, dim: int) -> Tensor:
        """Returns the block of each of ``dim`` dimensions."""
        n = self.count(dim)
        return torch.arange(dim, device="cpu") // (dim // n) if self.named is None else self.named

    def gather(self) -> Tensor | None:
        """Returns the index that arranges named blocks one after another with equal width, or None if they are.

        It has n * width entries, with ``width`` the size of the largest block. Entries equal to d mean zero padding,
        which changes the sum over a block in none of the built-in bases.
        """
        if self.named is None:
            return None
        blocks, sizes = self.named, torch.bincount(self.named)
        order, first = torch.argsort(blocks, stable=True), sizes.cumsum(0) - sizes
        index = torch.full((len(sizes), int(sizes.max())), len(blocks), device="cpu")
        index[blocks[order], torch.arange(len(blocks), device="cpu") - first[blocks[order]]] = order
        flat = index.flatten()
        unchanged = len(flat) == len(blocks) and bool((flat[1:] > flat[:-1]).all())
        return None if unchanged else flat

    def short(self) -> str:
        """Returns the shortest ``blocks`` argument of a layer that means the same."""
        entry = repr(self.assignment) if self.named is None else f"tensor(n={int(self.named.max()) + 1})"
        return f"Blocks({entry}, normalize=True)" if self.normalize else entry

    def __repr__(self) -> str:
        return self.short() if self.normalize else f"Blocks({self.short()}, normalize=False)"


def as_blocks(blocks: BlocksArgument) -> Blocks:
    """Returns the ``blocks`` argument of a similarity as :class:`Blocks`."""
    return blocks if isinstance(blocks, Blocks) else Blocks(blocks)


def patches(height: int, width: int, size: int, channels: int = 1) -> Tensor:
    """Returns the blocks of an image that is cut into square patches: int64 ``(channels * height * width,)``.

    A patch covers all channels. Patches are numbered row by row. Those at the right and lower edge are smaller if
    ``size`` does not divide ``width`` or ``height``.

    Args:
        height, width: size of the image in pixels.
        size: height and width of a patch in pixels.
        channels: number of channels; the image is flattened with channels first.

    >>> patches(2, 4, 2)
    tensor([0, 0, 1, 1, 0, 0, 1, 1])
    """
    check_sizes(height=height, width=width, size=size, channels=channels)
    rows, columns = (torch.arange(pixels, device="cpu") // size for pixels in (height, width))
    numbers = rows[:, None] * -(-width // size) + columns
    return numbers.expand(channels, height, width).flatten()


def arrange(rows: Tensor, index: Tensor) -> Tensor:
    """Arranges ``rows (..., d)`` as consecutive blocks by the index of :meth:`Blocks.gather`."""
    padded = rows if len(index) == rows.shape[-1] else functional.pad(rows, (0, 1))
    return padded.index_select(-1, index)


def restore(rows: Tensor, index: Tensor, dim: int) -> Tensor:
    """Undoes :func:`arrange`: ``(..., n * width) -> (..., d)``."""
    places = torch.arange(len(index), device=index.device)
    inverse = index.new_zeros(dim + 1).scatter(0, index, places)[:dim]
    return rows.index_select(-1, inverse)


def normalize(
    query: Tensor, key: Tensor, n: int, norm: Tensor, real: Tensor | None, missing: bool
) -> tuple[Tensor, Tensor]:
    """Centers and scales the n consecutive blocks of ``(..., L, n * width)`` and ``(..., S, n * width)``.

    The scalar ``norm`` is the root mean square norm of the stored blocks; 0 means the norm of the keys of each batch
    entry. ``real``, a bool tensor ``(n * width,)``, is False for padding, and None if there is none.

    If ``missing``, NaN is an unknown value. Unknown values take the mean of the known ones of their block, and a block
    with fewer than half of its values known is 0, without any correlation: the result has no NaN.
    """
    queries, keys = (_center(rows, n, real, missing) for rows in (query, key))
    norms = [torch.linalg.vector_norm(each, dim=-1, keepdim=True) for each in (queries, keys)]
    # Unlike the root of a mean, vector_norm has the gradient 0 where all values are 0.
    own = torch.linalg.vector_norm(norms[1], dim=(-3, -2, -1), keepdim=True) / max(1, n * key.shape[-2]) ** 0.5
    constant = torch.where(norm > 0, norm.to(own.dtype), own)
    constant = torch.where(constant > 0, EPSILON * constant, 1.0)  # 0 if the keys have no contrast at all
    queries, keys = queries / (norms[0] + constant), keys / (norms[1] + constant)
    return queries.flatten(-2).to(query.dtype), keys.flatten(-2).to(key.dtype)


def stored_norm(key: Tensor, n: int, gather: Tensor | None) -> Tensor:
    """Returns the root mean square norm of all blocks of ``key (..., S, d)`` as :func:`normalize` centers them.

    ``gather`` is the index of :meth:`Blocks.gather`. Rows are processed in slices to bound memory.
    """
    total = torch.zeros((), dtype=torch.float64, device=key.device)
    real = None if gather is None else gather < key.shape[-1]
    rows = key.reshape(-1, key.shape[-1])
    for part in torch.split(rows, max(1, SLICE_ELEMENTS // key.shape[-1])):
        part = part if gather is None else arrange(part, gather)
        total += _center(part, n, real, missing=True).square().sum(dtype=torch.float64)
    return (total / max(1, n * len(rows))).sqrt()


def _center(rows: Tensor, n: int, real: Tensor | None, missing: bool) -> Tensor:
    """Subtracts the mean of each block: ``(..., n * width) -> (..., n, width)``; padding and unknown values are 0."""
    blocks = torch.unflatten(rows.to(accumulation_dtype(rows.dtype)), -1, (n, -1))
    if real is None and not missing:
        return blocks - blocks.mean(-1, keepdim=True)
    counted = real if real is not None else torch.ones(rows.shape[-1], dtype=torch.bool, device=rows.device)
    counted = torch.unflatten(counted, -1, (n, -1))
    size = counted.sum(-1, keepdim=True)
    if missing:
        counted = counted & ~blocks.isnan()
        counted = counted & (2 * counted.sum(-1, keepdim=True) >= size)
        blocks = blocks.masked_fill(~counted, 0.0)
    return (blocks - blocks.sum(-1, keepdim=True) / counted.sum(-1, keepdim=True).clamp(min=1)) * counted
