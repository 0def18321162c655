"""Host code of scores in CUDA C++: lanes that sort blocks of any size, and tensor cores for a few wide blocks."""

from collections.abc import Sequence
from functools import lru_cache
from math import e, gcd, log2
from struct import Struct
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from ahop_layers.ops.gpu import attend, division, nvrtc
from ahop_layers.ops.gpu.division import aligned
from ahop_layers.ops.gpu.layout import WARP, Layout, choose_layout
from ahop_layers.ops.protocols import AttentionCall

KINDS = ("dis", "dot", "l1", "near")
DTYPES = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 2}
MIN_FLAT = 9  # from this number of blocks on, the sort is skipped where the weights make the order irrelevant
PAD_QUERY, PAD_KEY = -1e19, 1e18  # of padding blocks: less similar than all others in every base, so they sort last
SHARED_BYTES = 99 * 2**10  # that a block may use on every GPU of compute capability 8.0 or newer
THREADS = 4 * WARP  # of the forward kernel

SCORE = Struct("<15q2I4i")
BACKWARD = Struct("<18q8i")
TILES = Struct("<17q6i")


class Plan(NamedTuple):
    """A kernel for a dtype, a number of dimensions and blocks, and bases.

    Attributes:
        kernel: the kernel.
        dtype: dtype it reads.
        layout: blocks and dimensions it processes.
        pack: keys of a group of lanes.
        warps: warps per program.
        shared: bytes of shared memory.
    """

    kernel: nvrtc.Kernel
    dtype: torch.dtype
    layout: Layout
    pack: int
    warps: int
    shared: int = 0


def serves(query: Tensor, bases: Sequence[str], blocks: int) -> bool:
    """Returns whether the kernels support a call; ``near`` of wide blocks is a sum that no lane keeps."""
    return nvrtc.runs(query.device) and not ("near" in bases and blocks < query.shape[-1])


def score(query: Tensor, key: Tensor, weight: Tensor, bases: tuple[str, ...], out: Tensor, widths: Tensor) -> None:
    """Computes the scores into ``out``; arguments are those of :func:`ahop_layers.ops.chunked.score`."""
    if _use_tiles(query, weight, bases):
        return _score_tiles(query, key, weight, bases, out)
    plan = _score_plan(query.device, query.dtype, query.shape[-1], weight.shape[-1], bases, out.dtype)
    if query.shape[:2].numel() * key.shape[-2] < 32 * WARP and query.shape[-2] > key.shape[-2]:
        query, key, out = key, query, out.mT  # few keys leave lanes idle, and all bases are symmetric
    query, key = _rows(query, plan, weight.shape[-1], PAD_QUERY), _rows(key, plan, weight.shape[-1], PAD_KEY)
    weight = _weights(weight, plan)
    if "near" in bases:  # exp(-x / width) is 2 ** (rate * x)
        weight = torch.cat((weight, (-log2(e) / widths)[:, None].expand_as(weight)), 1)
    (n, heads, length, _), count = query.shape, key.shape[-2]
    slots = n * heads * -(-count // plan.pack)
    programs = -(-slots * plan.layout.lanes // THREADS)
    rows = division.rows_per_program(length, programs * plan.warps, query.device)
    arguments = SCORE.pack(
        *_place(query)[:4], *_place(key)[:4], *_place(out), weight.data_ptr(), weight.stride(0), slots, programs,
        heads, length, count, rows,
    )  # fmt: skip
    nvrtc.run(query.device, [(plan.kernel, programs * -(-length // rows), THREADS, 0)], arguments)


def score_backward(
    grad: Tensor, query: Tensor, key: Tensor, weight: Tensor, bases: tuple[str, ...], needs_weights: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Computes the gradients of query, key and weight, in the dtype of a tensor or float32."""
    if _use_tiles(query, weight, bases):
        return attend.score_gradients(_tile_call(query, key, weight, bases, grad))
    flat = not needs_weights and weight.shape[-1] >= MIN_FLAT
    shape = query.dtype, query.shape[-1], weight.shape[-1]
    plan = _backward_plan(query.device, *shape, bases, flat, grad.dtype)
    keys = plan.warps * plan.layout.pairs
    if _filled(query.shape[-2], keys) > 1.1 * _filled(key.shape[-2], keys):
        key_grad, query_grad, weight_grad = _launch_backward(grad.mT, key, query, weight, plan)
    else:
        query_grad, key_grad, weight_grad = _launch_backward(grad, query, key, weight, plan)
    return query_grad, key_grad, weight_grad


def _launch_backward(
    grad: Tensor, query: Tensor, key: Tensor, weight: Tensor, plan: Plan
) -> tuple[Tensor, Tensor, Tensor]:
    """Computes gradients in float32, in launches whose partial sums fit in ``SCRATCH_BYTES``."""
    n, size = weight.shape[-1], query.shape[-1] // weight.shape[-1]
    query, key = _rows(query, plan, n, PAD_QUERY), _rows(key, plan, n, PAD_KEY)
    weight = _weights(weight, plan)
    parts = list(division.launches(query, key, plan.warps * plan.layout.pairs))
    if len(parts) == 1:
        query_grad, key_grad, weight_grad = _launch_part(grad, query, key, weight, plan)
    else:
        query_grad, key_grad = (torch.zeros(each.shape, device=grad.device) for each in (query, key))
        weight_grad = torch.zeros(weight.shape, device=grad.device)
        for batch, rows in parts:
            sums = _launch_part(grad[batch, :, rows], query[batch, :, rows], key[batch], weight, plan)
            query_grad[batch, :, rows] = sums[0]
            key_grad[batch] += sums[1]
            weight_grad += sums[2]
    query_grad, key_grad = (_without_padding(each, plan.layout, n, size) for each in (query_grad, key_grad))
    return query_grad, key_grad, weight_grad[..., :n]


def _launch_part(grad: Tensor, query: Tensor, key: Tensor, weight: Tensor, plan: Plan) -> tuple[Tensor, Tensor, Tensor]:
    (n, heads, length, _), count = query.shape, key.shape[-2]
    work = division.BackwardDivision(query, key, plan.warps * plan.layout.pairs, plan.warps)
    parts = work.partial_sums(query, key, weight, plan.warps)
    arguments = BACKWARD.pack(
        *_place(grad)[:4], *_place(query)[:4], *_place(key)[:4], _place(grad)[4], weight.data_ptr(), weight.stride(0),
        *(part.data_ptr() for part in parts),
        heads, n * heads, length, count, work.rows, work.span, work.strips, work.chunks,
    )  # fmt: skip
    blocks = work.programs * work.chunks
    nvrtc.run(query.device, [(plan.kernel, blocks, WARP * plan.warps, plan.shared)], arguments)
    query_grad, key_grad = (part[0] if len(part) == 1 else part.sum(0) for part in parts[:2])
    return query_grad, key_grad, parts[2].sum((0, 1, 2, 4))


def _use_tiles(query: Tensor, weight: Tensor, bases: Sequence[str]) -> bool:
    """Returns whether the blocks suit tensor cores: half precision, few blocks of 8, 16, 32... dimensions."""
    n, d = weight.shape[-1], query.shape[-1]
    whole = attend.kernel_shape(n, d // n, attend.CHUNK) == (n, d // n, attend.CHUNK)
    fits = whole and n <= attend.MAX_BLOCKS and d <= attend.MAX_DIMENSIONS
    return fits and query.dtype != torch.float32 and set(bases) <= {"dis", "dot"}


def _tile_call(query: Tensor, key: Tensor, weight: Tensor, bases: tuple[str, ...], scores: Tensor) -> AttentionCall:
    """Returns a call of attention with the scores, or their gradient, as the mask, and values that are not used."""
    return AttentionCall(query, key, key[..., : attend.CHUNK], weight, scores, bases=bases)


def _score_tiles(query: Tensor, key: Tensor, weight: Tensor, bases: tuple[str, ...], out: Tensor) -> None:
    plan = attend.plan(_tile_call(query, key, weight, bases, out), scores=True)
    weight = weight.contiguous()
    (n, heads, length, _), count = query.shape, key.shape[-2]
    blocks, keys_at_once = -(-plan.tiles // attend.SCORE_WARPS), attend.SCORE_WARPS * attend.ROWS
    programs = n * heads * blocks
    rows = division.rows_per_program(count, programs * attend.SCORE_WARPS, query.device, keys_at_once)
    chunks = -(-count // rows)
    queries, keys = plan.rows(query, 0, 1, False), plan.rows(key, 0, 1, False)
    arguments = TILES.pack(
        *queries.place, *keys.place, *_place(out), weight.data_ptr(), 0, weight.stride(0), 0,
        heads, length, count, rows, blocks, chunks,
    )  # fmt: skip
    plan.run({"score_tiles": (programs * chunks, WARP * attend.SCORE_WARPS, plan.score_bytes)}, arguments)


@lru_cache(maxsize=None)
def _score_plan(
    device: torch.device, dtype: torch.dtype, d: int, n: int, bases: tuple[str, ...], out: torch.dtype
) -> Plan:
    """Returns the plan of the forward pass; ``out`` is the dtype of the scores."""
    # Two keys at a time: single dimensions in half precision, if the GPU has the instructions.
    packed = n == d and dtype != torch.float32
    packed = packed and (dtype == torch.float16 or torch.cuda.get_device_capability(device) >= (9, 0))
    layout = choose_layout(n, d // n, alone=96, shared=64, step=1 + packed)
    dtype = _padded_dtype(dtype, layout, n)
    packed = packed and dtype != torch.float32 and layout.chunk % 2 == 0
    flat = n >= MIN_FLAT and "near" not in bases
    constants = {**_constants(layout, n, bases, dtype, out, flat), "packed": packed}
    kernel = nvrtc.Kernel("score.cu", "score", constants, _index(device))
    return Plan(kernel, dtype, layout, 1 + packed, THREADS // WARP)


@lru_cache(maxsize=None)
def _backward_plan(
    device: torch.device,
    dtype: torch.dtype,
    d: int,
    n: int,
    bases: tuple[str, ...],
    flat: bool,
    grad: torch.dtype,
) -> Plan:
    """Returns the plan of the backward pass; ``grad`` is the dtype of the scores' gradient.

    ``flat`` says that the sort is skipped where weights are constant: their gradient is not computed then.
    """
    layout = choose_layout(n, d // n, alone=32, shared=32)
    dtype = _padded_dtype(dtype, layout, n)

    def shared_bytes(warps: int) -> int:
        rows = 2 * warps * 4 * layout.dims if warps > 1 else 0
        return warps * len(bases) * layout.chunk * 4 * WARP + rows

    # Wide rows have few keys in a warp: warps that add up their gradients of a query leave fewer partial sums.
    most = 4 if layout.pairs <= (8 if n == d else 4) else 1
    warps = next(each for each in (4, 2, 1) if each == 1 or (each <= most and shared_bytes(each) <= SHARED_BYTES))
    tagged = n == d and dtype != torch.float32
    constants = {**_constants(layout, n, bases, dtype, grad, flat), "tagged": tagged, "warps": warps}
    kernel = nvrtc.Kernel("score_backward.cu", "score_backward", constants, _index(device))
    return Plan(kernel, dtype, layout, 1, warps, shared_bytes(warps))


def _constants(
    layout: Layout, n: int, bases: tuple[str, ...], dtype: torch.dtype, scores: torch.dtype, flat: bool
) -> dict[str, int]:
    kinds = sum(KINDS.index(base) << 2 * place for place, base in enumerate(bases))
    dtypes = {"dtype": DTYPES[dtype], "score_dtype": DTYPES[scores]}
    return {**layout.constants(), **dtypes, "n": n, "bases": len(bases), "kinds": kinds, "may_be_flat": flat}


def _index(device: torch.device) -> int:
    return device.index or 0


def _padded_dtype(dtype: torch.dtype, layout: Layout, n: int) -> torch.dtype:
    """Returns float32 if blocks are padded with values that the dtype cannot hold, else the dtype."""
    return torch.float32 if layout.blocks > n and dtype == torch.float16 else dtype


def _rows(tensor: Tensor, plan: Plan, n: int, fill: float) -> Tensor:
    """Returns the tensor with aligned rows of the plan's dimensions. Copies only if necessary.

    Blocks are padded with zeros, which add nothing to a sum. Padding blocks hold ``fill``, once, and sort last.
    """
    tensor = tensor.to(plan.dtype)
    layout, size = plan.layout, tensor.shape[-1] // n
    if layout.dims == tensor.shape[-1]:
        stretch = plan.dtype.itemsize * layout.stretch  # bytes of adjacent dimensions that a lane reads
        return aligned(tensor, 4 * gcd(stretch // 4, 4) if stretch % 4 == 0 else plan.dtype.itemsize)
    padded = tensor.new_zeros(*tensor.shape[:-1], layout.blocks, layout.block_size)
    padded[..., :n, :size] = torch.unflatten(tensor, -1, (n, size))
    padded[..., n:, 0] = fill
    return padded.flatten(-2)


def _without_padding(grad: Tensor, layout: Layout, n: int, size: int) -> Tensor:
    if grad.shape[-1] == n * size:
        return grad
    return torch.unflatten(grad, -1, (layout.blocks, layout.block_size))[..., :n, :size].flatten(-2)


def _weights(weight: Tensor, plan: Plan) -> Tensor:
    """Returns weights ``(H, n_bases, blocks)``; weights of padding blocks, which sort last, are 0."""
    added = plan.layout.blocks - weight.shape[-1]
    if added:
        return functional.pad(weight, (0, added))
    return aligned(weight, 16) if weight.stride(1) == weight.shape[-1] else weight.contiguous()


def _place(tensor: Tensor) -> list[int]:
    """Returns the address of a tensor ``(N, H, L, d)`` and its strides in bytes."""
    return [tensor.data_ptr(), *(tensor.element_size() * stride for stride in tensor.stride())]


def _filled(count: int, tile: int) -> float:
    """Returns the fraction of lanes that ``count`` keys in tiles of ``tile`` keys occupy."""
    return count / (-(-count // tile) * tile)
