"""Blocks of dimensions: how a similarity cuts its dimensions, and how queries and keys are arranged for the kernels."""

from collections.abc import Sequence
from dataclasses import dataclass
from numbers import Integral
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from ahop_layers.errors import AHopError, check_block_numbers, check_divides, check_sizes, describe
from ahop_layers.ops.reference import accumulation_dtype

EPSILON = 1e-3
"""Added to the norm of a block before the division, relative to the root mean square norm of the stored blocks."""

SLICE_ELEMENTS = 2**21
"""Number of elements of stored patterns that are processed at once."""


@dataclass(frozen=True, eq=False, repr=False)
class Blocks:
    """One way to cut d dimensions into n blocks.

    Args:
        blocks: an integer n, a divisor of d, for n consecutive blocks of equal width; or an integer tensor or array
            ``(d,)`` with the block of each dimension, from 0 to n - 1, such as :func:`patches` returns. None makes
            every dimension a block.
        normalize: whether to center each block of query and key, and to divide it by its norm plus a small constant,
            before any base similarity. ``dot`` is then the correlation of two blocks: an offset of a block or a
            positive factor does not change it. The constant is 0.001 times the root mean square norm of the stored
            blocks, so that the unit of the data does not matter and a block without contrast counts little.

    Attributes:
        blocks: the integer, a copy of the tensor on the CPU, or None.
        normalize: as given.

    Raises:
        AHopError: an argument is invalid.

    >>> import ahop_layers as ah
    >>> ah.Blocks(4, normalize=True)
    Blocks(4, normalize=True)
    >>> ah.AdaptiveSimilarity(64, blocks=[ah.Blocks(ah.patches(8, 8, 2), normalize=True), 8]).blocks
    (Blocks(tensor(n=16), normalize=True), Blocks(8, normalize=False))
    """

    blocks: Any
    normalize: bool = False

    def __post_init__(self) -> None:
        """Validates and copies the arguments."""
        blocks = self.blocks
        if isinstance(blocks, Integral):
            check_sizes(blocks=blocks if isinstance(blocks, bool) else int(blocks))
            blocks = int(blocks)
        elif isinstance(blocks, Tensor) or hasattr(blocks, "__array__"):
            if getattr(blocks, "is_meta", False):
                raise AHopError("blocks must be a tensor with values, got one on the meta device")
            try:
                numbers = torch.as_tensor(blocks, device="cpu")
            except (TypeError, ValueError):
                raise AHopError(f"blocks must have an integer dtype, got {blocks!r}") from None
            if numbers.ndim != 1:
                raise AHopError(f"blocks must be (d,), the block of each dimension, got shape {describe(numbers)}")
            check_block_numbers(numbers, len(numbers))
            blocks = numbers.long().clone()
        elif blocks is not None:
            expected = "None, an integer, or an integer tensor or array"
            raise AHopError(f"an entry of blocks must be {expected}, got {blocks!r}")
        if not isinstance(self.normalize, bool):
            raise AHopError(f"normalize must be True or False, got {self.normalize!r}")
        object.__setattr__(self, "blocks", blocks)

    @property
    def dim(self) -> int | None:
        """The number of dimensions, if a tensor determines it."""
        return len(self.blocks) if isinstance(self.blocks, Tensor) else None

    def count(self, dim: int) -> int:
        """Returns the number n of blocks of ``dim`` dimensions; raises if the blocks do not fit.

        >>> Blocks(None).count(6), Blocks(3).count(6), Blocks(patches(2, 3, 2)).count(6)
        (6, 3, 2)
        """
        if isinstance(self.blocks, Tensor):
            if len(self.blocks) != dim:
                raise AHopError(f"blocks must name the block of each of the {dim} dimensions, got {len(self.blocks)}")
            n = int(self.blocks.max()) + 1
        else:
            n = dim if self.blocks is None else self.blocks
            check_divides(n, dim)
        if self.normalize and n == dim:
            raise AHopError(f"normalize=True needs blocks of several dimensions, got {n} blocks of {dim} dimensions")
        return n

    def numbers(self, dim: int) -> Tensor:
        """Returns the block of each of ``dim`` dimensions.

        >>> Blocks(2).numbers(6)
        tensor([0, 0, 0, 1, 1, 1])
        """
        n = self.count(dim)
        return self.blocks if isinstance(self.blocks, Tensor) else torch.arange(dim, device="cpu") // (dim // n)

    def short(self) -> str:
        """Returns the shortest ``blocks`` argument of a layer that means the same.

        >>> Blocks(4).short(), Blocks(4, normalize=True).short()
        ('4', 'Blocks(4, normalize=True)')
        """
        entry = repr(self.blocks)
        if isinstance(self.blocks, Tensor):
            entry = f"tensor(n={int(self.blocks.max()) + 1})"
        return f"Blocks({entry}, normalize=True)" if self.normalize else entry

    def __repr__(self) -> str:
        """Constructor arguments."""
        return self.short() if self.normalize else f"Blocks({self.short()}, normalize=False)"


def resolutions(blocks: Any) -> tuple[Blocks, ...]:
    """Returns the ``blocks`` argument of a similarity as one :class:`Blocks` for each resolution."""
    entries: Sequence[Any] = blocks if isinstance(blocks, (list, tuple)) else (blocks,)
    if not entries:
        raise AHopError(f"blocks must have at least one entry, got {blocks!r}")
    return tuple(entry if isinstance(entry, Blocks) else Blocks(entry) for entry in entries)


def patches(height: int, width: int, size: int, channels: int = 1) -> Tensor:
    """Returns the blocks of an image that is cut into square patches.

    A patch covers all channels. Patches are numbered row by row. Those at the right and lower edge are smaller if
    ``size`` does not divide ``width`` or ``height``.

    Args:
        height, width: size of the image in pixels.
        size: height and width of a patch in pixels.
        channels: number of channels; the image is flattened with channels first.

    Returns:
        The patch of each dimension, an int64 tensor ``(channels * height * width,)``.

    Raises:
        AHopError: a size is invalid.

    >>> patches(2, 4, 2)
    tensor([0, 0, 1, 1, 0, 0, 1, 1])
    """
    check_sizes(height=height, width=width, size=size, channels=channels)
    rows, columns = (torch.arange(pixels, device="cpu") // size for pixels in (height, width))
    numbers = rows[:, None] * -(-width // size) + columns
    return numbers.expand(channels, height, width).flatten()


def gather_index(blocks: Tensor) -> Tensor | None:
    """Returns the index that arranges dimensions as consecutive blocks of equal width, or None if they are.

    ``blocks (d,)`` is the block of each dimension. The index has n * width entries, with ``width`` the size of the
    largest block; entries equal to d mean zero padding, which changes the sum over a block in none of the built-in
    bases.
    """
    sizes = torch.bincount(blocks)
    order = torch.argsort(blocks, stable=True)
    first = sizes.cumsum(0) - sizes
    place = torch.arange(len(blocks), device=blocks.device) - first[blocks[order]]
    width = int(sizes.max())
    index = torch.full((len(sizes), width), len(blocks), device=blocks.device)
    index[blocks[order], place] = order
    flat = index.flatten()
    unchanged = len(flat) == len(blocks) and bool((flat[1:] > flat[:-1]).all())
    return None if unchanged else flat


def arrange(rows: Tensor, index: Tensor) -> Tensor:
    """Arranges ``rows (..., d)`` as consecutive blocks by the index of :func:`gather_index`."""
    padded = rows if len(index) == rows.shape[-1] else functional.pad(rows, (0, 1))
    return padded.index_select(-1, index)


def restore(rows: Tensor, index: Tensor, dim: int) -> Tensor:
    """Undoes :func:`arrange`: ``(..., n * width) -> (..., d)``."""
    places = torch.arange(len(index), device=index.device)
    inverse = index.new_zeros(dim + 1).scatter(0, index, places)[:dim]
    return rows.index_select(-1, inverse)


def padding(index: Tensor | None, dim: int) -> Tensor | None:
    """Returns the index of :func:`gather_index` if it pads ``dim`` dimensions, otherwise None."""
    return None if index is None or len(index) == dim else index


def normalize(query: Tensor, key: Tensor, n: int, norm: Tensor, padded: Tensor | None) -> tuple[Tensor, Tensor]:
    """Centers and scales each of the n consecutive blocks of query and key; see :class:`Blocks`.

    Args:
        query: ``(..., L, n * width)``.
        key: ``(..., S, n * width)``.
        n: number of blocks.
        norm: scalar, the root mean square norm of the stored blocks; 0 means that of the keys of each batch entry.
        padded: the index of :func:`padding`, or None.
    """
    queries, keys = _center(query, n, padded), _center(key, n, padded)
    query_norms, key_norms = (torch.linalg.vector_norm(each, dim=-1, keepdim=True) for each in (queries, keys))
    own = root_mean_square(key_norms, dim=(-3, -2, -1))
    constant = torch.where(norm > 0, norm.to(own.dtype), own)
    constant = torch.where(constant > 0, EPSILON * constant, 1.0)  # 0 if the keys have no contrast at all
    return (
        (queries / (query_norms + constant)).flatten(-2).to(query.dtype),
        (keys / (key_norms + constant)).flatten(-2).to(key.dtype),
    )


def stored_norm(key: Tensor, n: int, gather: Tensor | None) -> Tensor:
    """Returns the root mean square norm of all blocks of ``key (..., S, d)`` after centering, a scalar.

    ``gather`` is the index of :func:`gather_index`. Rows are processed in slices to bound memory.
    """
    total = torch.zeros((), dtype=torch.float64, device=key.device)
    rows = key.reshape(-1, key.shape[-1])
    for part in torch.split(rows, max(1, SLICE_ELEMENTS // key.shape[-1])):
        arranged = part if gather is None else arrange(part, gather)
        total += _center(arranged, n, padding(gather, key.shape[-1])).square().sum(dtype=torch.float64)
    return (total / max(1, rows.shape[0] * n)).sqrt()


def root_mean_square(values: Tensor, dim: tuple[int, ...] | None) -> Tensor:
    """Returns the root mean square over ``dim``, with gradient 0 where all values are 0; of no values it is 0."""
    norm: Tensor = torch.linalg.vector_norm(values, dim=dim, keepdim=True)
    count = max(1, values.numel() // max(1, norm.numel()))
    return torch.div(norm, count**0.5)


def _center(rows: Tensor, n: int, padded: Tensor | None) -> Tensor:
    """Subtracts from each block the mean of its dimensions: ``(..., n * width) -> (..., n, width)``.

    Padding stays zero and does not count.
    """
    blocks = torch.unflatten(rows.to(accumulation_dtype(rows.dtype)), -1, (n, -1))
    if padded is None:
        return blocks - blocks.mean(-1, keepdim=True)
    real = torch.unflatten(padded < padded.max(), 0, (n, -1))  # the largest entry of the index marks padding
    return (blocks - blocks.sum(-1, keepdim=True) / real.sum(-1, keepdim=True)) * real
