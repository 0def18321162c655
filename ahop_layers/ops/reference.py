"""The reference implementation in plain PyTorch, which specifies what every kernel computes.

A base similarity gives one number per dimension, ``base(query_i, key_i)``. The dimensions form n blocks, and ``q_j`` is
the sum over block j; by default every dimension is a block. The *footprint* of a pair is the cumulative sum of the
``q_j`` in descending order: its entry ``k`` is the largest sum that any ``k`` blocks reach. The *adaptive similarity*
is a weighted sum of the footprints of several bases:

    score(query, key) = sum over bases of  weight_base . cumsum(sort(q_base))

Summation by parts turns this into ``u_base . sort(q_base)`` with ``u = reverse_cumsum(weight)``, the *folded* weight.
The kernels use the folded weight because it needs no cumulative sum per pair.

A dimension that is unknown, NaN in the query or in the key, can be left out. The sorted similarities of the m blocks
that are known are then stretched, as a step function, to the n ranks of the weights: see :func:`missing_similarity`.
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
    autograd differentiates it. A base that ``saturates`` compares values in units of a width.
    """

    value: Callable[[Tensor, Tensor], Tensor]
    slopes: Slopes | None = None
    saturates: bool = False


def _dis_slopes(query: Tensor, key: Tensor) -> tuple[Tensor, Tensor]:
    difference = 2 * (query - key)
    return -difference, difference


def _l1_slopes(query: Tensor, key: Tensor) -> tuple[Tensor, Tensor]:
    sign = torch.sign(query - key)
    return -sign, sign


def _near_slopes(query: Tensor, key: Tensor) -> tuple[Tensor, Tensor]:
    difference = query - key
    slope = torch.sign(difference) * torch.exp(-difference.abs())
    return -slope, slope


BASES: dict[str, Base] = {
    "dis": Base(lambda query, key: -(query - key).square(), _dis_slopes),
    "dot": Base(lambda query, key: query * key, lambda query, key: (key, query)),
    "l1": Base(lambda query, key: -(query - key).abs(), _l1_slopes),
    "near": Base(lambda query, key: torch.exp(-(query - key).abs()), _near_slopes, saturates=True),
}


def register_base(name: str, function: Callable[[Tensor, Tensor], Tensor]) -> None:
    """Registers a custom decomposable base similarity under ``name``.

    Args:
        name: the name for ``bases=``, an identifier that is not registered yet.
        function: takes query values and key values, two tensors that broadcast against each other, and returns the
            elementwise similarity. It runs on the reference path, where autograd differentiates it.

    >>> import torch, ahop_layers as ah
    >>> ah.register_base("gaussian", lambda query, key: torch.exp(-(query - key) ** 2))
    >>> ah.footprint(torch.zeros(1, 3), torch.zeros(1, 3), base="gaussian")
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
    """Returns ``bases`` as a tuple; raises unless it is one registered name, or a tuple or list of distinct ones.

    A base that saturates may appear several times, with different widths.
    """
    names = (bases,) if isinstance(bases, str) else bases
    if not isinstance(names, (tuple, list)) or not names:
        raise AHopError(f"bases must be a tuple or list of base names, got {bases!r}")
    for name in names:
        if not isinstance(name, str) or name not in BASES:
            raise AHopError(f"bases must be names out of {', '.join(BASES)}, got {bases!r}")
    single = [name for name in names if not BASES[name].saturates]
    if len(set(single)) < len(single):
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


def block_products(query: Tensor, key: Tensor, n: int) -> Tensor:
    """Dot products of n consecutive blocks of every pair, as matrix products: ``(..., L, S, n)``."""
    query, key = (torch.unflatten(each, -1, (n, -1)).transpose(-2, -3) for each in (query, key))
    return (query @ key.mT).movedim(-3, -1)


def pair_values(query: Tensor, key: Tensor, base: str, width: Tensor | None = None) -> Tensor:
    """Similarities per dimension of every pair: ``(..., L, d), (..., S, d) -> (..., L, S, d)``."""
    if width is not None and BASES[base].saturates:
        query, key = query / width, key / width
    return BASES[base].value(query.unsqueeze(-2), key.unsqueeze(-3))


def sorted_similarities(
    query: Tensor, key: Tensor, base: str, n: int | None = None, blocks: Tensor | None = None,
    width: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Similarities per block of every pair in descending order: ``(..., L, d), (..., S, d) -> (..., L, S, n)``.

    ``n`` is the number of blocks, by default d, and ``blocks`` as in :func:`block_sums`. ``width`` belongs to a base
    that saturates, by default 1.
    """
    values = pair_values(query, key, base, width)
    return block_sums(values, n or query.shape[-1], blocks).sort(dim=-1, descending=True).values


def footprint(query: Tensor, key: Tensor, base: str = "dis", blocks: int | Tensor | None = None) -> Tensor:
    """Computes the similarity footprint of every query-key pair.

    Entry ``k`` (counted from 1) is the sum of the ``k`` largest similarities, the largest sum that any ``k`` dimensions
    reach. With ``blocks`` the similarities are first summed over blocks of dimensions, and ``k`` counts blocks.

    Args:
        query: ``(..., L, d)``.
        key: ``(..., S, d)``; batch dimensions broadcast.
        base: ``"dis"`` (negative squared distance), ``"dot"`` (product), ``"l1"`` (negative absolute difference),
            ``"near"`` (exponential of it, which saturates) or a registered base.
        blocks: None makes every dimension a block. An integer n, a divisor of d, means n consecutive blocks of equal
            width. An integer tensor ``(d,)`` names the block of each dimension, from 0 to n - 1.

    Returns:
        ``(..., L, S, n)``, without ``blocks`` ``(..., L, S, d)``.

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
    query: Tensor, key: Tensor, weight: Tensor, bases: Sequence[str], blocks: Tensor | None = None,
    widths: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Scores as the paper defines them: weighted footprints, summed over the bases, in the dtype of the inputs.

    ``(..., L, d), (..., S, d), (n_bases, n) -> (..., L, S)``; with weights per head
    ``(..., H, L, d), (..., H, S, d), (H, n_bases, n) -> (..., H, L, S)``. ``blocks`` is as in :func:`block_sums`, and
    ``widths (n_bases,)`` belong to bases that saturate.
    """
    n = weight.shape[-1]
    scores = [
        weigh(sorted_similarities(query, key, base, n, blocks, _at(widths, index)).cumsum(-1), weight[..., index, :])
        for index, base in enumerate(bases)
    ]
    return torch.stack(scores).sum(0)


def known_blocks(
    query: Tensor, key: Tensor, bases: Sequence[str], n: int, blocks: Tensor | None = None, widths: Tensor | None = None
) -> tuple[list[Tensor], Tensor]:
    """Similarities of blocks for each base, and which blocks are known, ``(..., L, S, n)`` each; NaN is unknown.

    The sum of a block is divided by the known share of its dimensions, and a block without any is missing.
    """
    known = ~(query.isnan().unsqueeze(-2) | key.isnan().unsqueeze(-3))
    sizes = block_sums(torch.ones_like(query[..., :1, :].unsqueeze(-2)), n, blocks)
    counts = block_sums(known.to(query.dtype), n, blocks)
    share = (counts / sizes).clamp(min=torch.finfo(query.dtype).tiny)
    query, key = (each.masked_fill(each.isnan(), 0.0) for each in (query, key))
    values = (
        pair_values(query, key, base, _at(widths, index)).masked_fill(~known, 0.0) for index, base in enumerate(bases)
    )
    return [block_sums(each, n, blocks) / share for each in values], counts > 0


def missing_similarity(
    query: Tensor, key: Tensor, folded: Tensor, bases: Sequence[str], blocks: Tensor | None = None,
    widths: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Scores from folded weights, where NaN in the query or in the key is an unknown value.

    With ``q_1 >= ... >= q_m`` the similarities of the m :func:`known_blocks` and u the folded weight, as a function
    that is constant on ``(j - 1, j]``, a base contributes

        sum over r of  q_r * integral of u from (r - 1) n / m to r n / m

    A constant u gives ``n / m`` times the sum. Without a known block the score is -inf.
    """
    n = folded.shape[-1]
    blocked, present = known_blocks(query, key, bases, n, blocks, widths)
    count = present.sum(-1)
    scores = []
    for index, values in enumerate(blocked):
        values = values.masked_fill(~present, -torch.inf).sort(dim=-1, descending=True).values
        u = folded[..., index, :].unsqueeze(-2).unsqueeze(-2) if folded.ndim == 3 else folded[index]
        weight = stretched(u, count)
        ranks = torch.arange(n, device=query.device)
        scores.append((values.masked_fill(ranks >= count.unsqueeze(-1), 0.0) * weight).sum(-1))
    return torch.stack(scores).sum(0).masked_fill(count == 0, -torch.inf)


def stretched(folded: Tensor, count: Tensor) -> Tensor:
    """The weights of the first ``count (...)`` of n sorted similarities: the integrals of ``folded (..., n)``."""
    n = folded.shape[-1]
    place, rank = _places(count, n, folded.dtype)
    before = torch.nn.functional.pad(folded.cumsum(-1), (1, 0)).expand(*rank.shape[:-1], n + 1)
    reached = before.gather(-1, rank) + (place - rank) * folded.expand(*rank.shape[:-1], n).gather(-1, rank)
    return reached.diff(dim=-1)


def unstretched(slopes: Tensor, count: Tensor) -> Tensor:
    """The transpose of :func:`stretched`: slopes ``(..., n)`` of its weights to those of ``folded``, for each pair."""
    place, rank = _places(count, slopes.shape[-1], slopes.dtype)
    reached = -torch.nn.functional.pad(slopes, (1, 1)).diff(dim=-1)
    inside, before = (torch.zeros_like(slopes).scatter_add_(-1, rank, x) for x in (reached * (place - rank), reached))
    return inside + fold(before) - before


def _places(count: Tensor, n: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """The ends of ``count (...)`` equal parts of n ranks, from 0, and the rank that each is in: ``(..., n + 1)``."""
    ranks = torch.arange(n + 1, device=count.device)
    place = (n * ranks / count.unsqueeze(-1).clamp(min=1).to(dtype)).clamp(max=n)
    return place, (place.ceil().long() - 1).clamp(min=0)


def _at(widths: Tensor | None, index: int) -> Tensor | None:
    return None if widths is None else widths[index]


def fold(weight: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """Returns the folded weight ``u``, for which ``weight . cumsum(sorted) == u . sorted``, in ``dtype``."""
    return weight.flip(-1).cumsum(-1, dtype=dtype).flip(-1)


def unfold(folded: Tensor) -> Tensor:
    """Returns the weight whose :func:`fold` is ``folded``."""
    return folded - torch.nn.functional.pad(folded[..., 1:], (0, 1))


def folded_similarity(
    query: Tensor, key: Tensor, folded: Tensor, bases: Sequence[str], widths: Tensor | None = None,
    blocks: Tensor | None = None, products: Sequence[str] = ("dot",),
) -> Tensor:  # fmt: skip
    """The scores of :func:`adaptive_similarity` from folded weights, without the cumulative sum.

    Consecutive blocks of the bases ``products``, ``"dot"`` or ``"dis"``, are matrix products, which need no tensor of
    size L x S x d.
    """
    n, scores = folded.shape[-1], []
    for index, base in enumerate(bases):
        if base in products and n < query.shape[-1] and blocks is None:
            multiply = block_products if base == "dot" else _block_distances
            values = multiply(query, key, n).sort(dim=-1, descending=True).values
        else:
            values = sorted_similarities(query, key, base, n, blocks, _at(widths, index))
        scores.append(weigh(values, folded[..., index, :]))
    return torch.stack(scores).sum(0)


def _block_distances(query: Tensor, key: Tensor, n: int) -> Tensor:
    """Negative squared distances of n consecutive blocks: ``(..., L, S, n)``."""
    center = key.mean(-2, keepdim=True)  # to avoid cancellation far from the origin
    query, key = query - center, key - center
    of_query, of_key = (torch.unflatten(each, -1, (n, -1)).square().sum(-1) for each in (query, key))
    return 2 * block_products(query, key, n) - of_query.unsqueeze(-2) - of_key.unsqueeze(-3)


def weigh(features: Tensor, weight: Tensor) -> Tensor:
    """``(..., H, L, S, n) . (H, n) -> (..., H, L, S)``, or with one weight ``(n,)`` for all."""
    if weight.ndim == 1:
        return features @ weight
    return torch.einsum("...hlsn,hn->...hls", features, weight)
