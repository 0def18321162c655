"""The reference implementation in plain PyTorch, which specifies what every kernel computes.

A base similarity gives one number per dimension, ``base(query_i, key_i)``. The dimensions form n blocks, and ``q_j`` is
the sum over block j; by default every dimension is a block. The *footprint* of a pair is the cumulative sum of the
``q_j`` in descending order: its entry ``k`` is the largest sum that any ``k`` blocks reach. The *adaptive similarity*
is a weighted sum of the footprints of several bases:

    score(query, key) = sum over bases of  weight_base . cumsum(sort(q_base))

Summation by parts turns this into ``u_base . sort(q_base)`` with ``u = reverse_cumsum(weight)``, the *folded* weight.
The kernels use the folded weight because it needs no cumulative sum per pair.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ahop_layers.errors import (
    AHopError,
    broadcast_batch,
    check_block_numbers,
    check_choice,
    check_divides,
    check_pair,
    check_sizes,
)

Slopes = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]


class Base(NamedTuple):
    """A decomposable similarity: its value per dimension, and its derivatives with respect to query and key.

    Kernels need ``slopes``, which only built-in bases have. A base without them runs on the reference path, where
    autograd differentiates it.
    """

    value: Callable[[Tensor, Tensor], Tensor]
    slopes: Slopes | None = None


def _dis_slopes(query: Tensor, key: Tensor) -> tuple[Tensor, Tensor]:
    difference = 2 * (query - key)
    return -difference, difference


def _l1_slopes(query: Tensor, key: Tensor) -> tuple[Tensor, Tensor]:
    sign = torch.sign(query - key)
    return -sign, sign


BASES: dict[str, Base] = {
    "dis": Base(lambda query, key: -(query - key).square(), _dis_slopes),
    "dot": Base(lambda query, key: query * key, lambda query, key: (key, query)),
    "l1": Base(lambda query, key: -(query - key).abs(), _l1_slopes),
}


def register_base(name: str, function: Callable[[Tensor, Tensor], Tensor]) -> None:
    """Registers a custom decomposable base similarity under ``name``.

    Args:
        name: the name for ``bases=``, an identifier that is not registered yet.
        function: takes query values and key values, two tensors that broadcast against each other, and returns the
            elementwise similarity. It runs on the reference path, where autograd differentiates it.

    >>> import torch, ahop_layers as ah
    >>> ah.register_base("agree", lambda query, key: torch.exp(-(query - key) ** 2))
    >>> ah.footprint(torch.zeros(1, 3), torch.zeros(1, 3), base="agree")
    tensor([[[1., 2., 3.]]])
    """
    if not isinstance(name, str) or not name.isidentifier():
        raise AHopError(f"name must be an identifier, got {name!r}")
    if name in BASES:
        raise AHopError(f"name must not be registered yet, got {name!r}; registered are {', '.join(BASES)}")
    if not callable(function):
        raise AHopError(f"function must be callable with two tensors, got {type(function).__name__}")
    BASES[name] = Base(function)


def check_bases(bases: Sequence[str]) -> tuple[str, ...]:
    """Returns ``bases`` as a tuple; raises unless it is one registered name, or a tuple or list of distinct ones."""
    names = (bases,) if isinstance(bases, str) else bases
    if not isinstance(names, (tuple, list)) or not names:
        raise AHopError(f"bases must be a tuple or list of base names, got {bases!r}")
    for name in names:
        if not isinstance(name, str) or name not in BASES:
            raise AHopError(f"bases must be names out of {', '.join(BASES)}, got {bases!r}")
    if len(set(names)) < len(names):
        raise AHopError(f"each base may appear once in bases, got {bases!r}")
    return tuple(names)


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """Returns the dtype in which scores of ``dtype`` inputs are accumulated: at least float32."""
    return torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype


def block_sums(values: Tensor, n: int, blocks: Tensor | None = None) -> Tensor:
    """Sums values over blocks of dimensions: ``(..., d) -> (..., n)``.

    ``blocks (d,)`` names the block of each dimension; None means consecutive blocks of width d / n.
    """
    if blocks is not None:
        return values.new_zeros(*values.shape[:-1], n).index_add(-1, blocks.long(), values)
    return values if values.shape[-1] == n else torch.unflatten(values, -1, (n, -1)).sum(-1)


def sorted_similarities(
    query: Tensor, key: Tensor, base: str, n: int | None = None, blocks: Tensor | None = None
) -> Tensor:
    """Similarities per block of every pair in descending order: ``(..., L, d), (..., S, d) -> (..., L, S, n)``.

    ``n`` is the number of blocks, by default d, and ``blocks`` is that of :func:`block_sums`.
    """
    values = BASES[base].value(query.unsqueeze(-2), key.unsqueeze(-3))
    return block_sums(values, n or query.shape[-1], blocks).sort(dim=-1, descending=True).values


def footprint(query: Tensor, key: Tensor, base: str = "dis", blocks: int | Tensor | None = None) -> Tensor:
    """Computes the similarity footprint of every query-key pair.

    Entry ``k`` (counted from 1) is the sum of the ``k`` largest similarities, the largest sum that any ``k`` dimensions
    reach. With ``blocks`` the similarities are first summed over blocks of dimensions, and ``k`` counts blocks.

    Args:
        query: ``(..., L, d)``.
        key: ``(..., S, d)``; batch dimensions broadcast.
        base: ``"dis"`` (negative squared distance), ``"dot"`` (product), ``"l1"`` (negative absolute difference) or a
            registered base.
        blocks: None makes every dimension a block. An integer n, a divisor of d, means n consecutive blocks of equal
            width. An integer tensor ``(d,)`` names the block of each dimension, from 0 to n - 1.

    Returns:
        ``(..., L, S, n)``, without ``blocks`` ``(..., L, S, d)``.

    Raises:
        AHopError: a shape, dtype, device, base or ``blocks`` is invalid.

    >>> import torch, ahop_layers as ah
    >>> query, key = torch.tensor([[1.0, 2.0, 3.0]]), torch.tensor([[1.0, 4.0, 4.0]])
    >>> ah.footprint(query, key)
    tensor([[[ 0., -1., -5.]]])
    >>> ah.footprint(query, key, blocks=torch.tensor([0, 0, 1]))
    tensor([[[-1., -5.]]])
    """
    check_pair(query, key)
    broadcast_batch(query.shape[:-2], key.shape[:-2])
    check_choice("base", base, tuple(BASES))
    n, numbers = check_blocks(blocks, query)
    return sorted_similarities(query, key, base, n, numbers).cumsum(-1)


def check_blocks(blocks: int | Tensor | None, query: Tensor) -> tuple[int, Tensor | None]:
    """Validates ``blocks`` for ``query (..., d)``; returns n, and ``blocks`` if it is a tensor of block numbers."""
    if blocks is None:
        return query.shape[-1], None
    if isinstance(blocks, Tensor):
        return check_block_numbers(blocks, query.shape[-1]), blocks.to(query.device)
    check_sizes(blocks=blocks)
    check_divides(blocks, query.shape[-1])
    return blocks, None


def adaptive_similarity(
    query: Tensor, key: Tensor, weight: Tensor, bases: Sequence[str], blocks: Tensor | None = None
) -> Tensor:
    """Scores as the paper defines them: weighted footprints, summed over the bases, in the dtype of the inputs.

    ``(..., L, d), (..., S, d), (n_bases, n) -> (..., L, S)``; with weights per head
    ``(..., H, L, d), (..., H, S, d), (H, n_bases, n) -> (..., H, L, S)``. ``blocks`` is that of :func:`block_sums`.
    """
    n = weight.shape[-1]
    scores = [
        _weigh(sorted_similarities(query, key, base, n, blocks).cumsum(-1), weight[..., index, :])
        for index, base in enumerate(bases)
    ]
    return torch.stack(scores).sum(0)


def fold(weight: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """Returns the folded weight ``u``, for which ``weight . cumsum(sorted) == u . sorted``, in ``dtype``."""
    return weight.flip(-1).cumsum(-1, dtype=dtype).flip(-1)


def folded_similarity(query: Tensor, key: Tensor, folded: Tensor, bases: Sequence[str]) -> Tensor:
    """The scores of :func:`adaptive_similarity` from folded weights, without the cumulative sum."""
    n = folded.shape[-1]
    scores = [
        _weigh(sorted_similarities(query, key, base, n), folded[..., index, :]) for index, base in enumerate(bases)
    ]
    return torch.stack(scores).sum(0)


def _weigh(features: Tensor, weight: Tensor) -> Tensor:
    """``(..., H, L, S, n) . (H, n) -> (..., H, L, S)``, or with one weight ``(n,)`` for all."""
    if weight.ndim == 1:
        return features @ weight
    return torch.einsum("...hlsn,hn->...hls", features, weight)
