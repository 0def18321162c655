"""Host code of the GPU kernels. Triton is imported when the first kernel runs."""

import os
from collections.abc import Iterator, Sequence
from functools import lru_cache
from importlib.util import find_spec
from itertools import product
from math import e, log2
from typing import Any

import torch
from torch import Tensor

from ahop_layers.ops import chunked, sliced
from ahop_layers.ops.chunked import SCRATCH_BYTES, Need
from ahop_layers.ops.gpu import missing as unknown
from ahop_layers.ops.gpu import nvrtc, ptx_backward
from ahop_layers.ops.gpu.plan import PTX_NAMES, Plan, backward_plan, runs_ptx, score_plan
from ahop_layers.ops.gpu.ptx import WARP

MAX_DIMENSIONS = 1024
MAX_BASES = 8
IMPLEMENTED_BASES = ("dis", "dot", "l1", "near")
"""Kernels treat a base that they do not know as ``l1``, so :func:`serves` rejects bases not listed here."""

PROGRAMS_PER_SLOT = 8
"""Maximum number of programs in a backward launch per concurrently running warp."""

PAD_QUERY, PAD_KEY = -1e19, 1e18
"""Values of padding dimensions: less similar than all others in every base, so they sort last."""


def unavailable() -> str | None:
    """Returns the reason why this kernel cannot run here, or None if it can."""
    if not _triton_installed():
        return "Triton is not installed"
    if not (torch.cuda.is_initialized() or torch.cuda.is_available() or _interpreted()):  # type: ignore[no-untyped-call]
        return "Apple GPUs (mps) run plain PyTorch" if torch.backends.mps.is_available() else "no CUDA device"
    return None


def detail() -> str:
    """Returns one line on how this kernel runs here."""
    if not torch.cuda.is_available():
        return "Triton's interpreter"
    name = torch.cuda.get_device_name()
    if not runs_ptx(torch.device("cuda")):
        return f"{name}, portable kernels" + (", not tested on ROCm" if torch.version.hip else "")
    reason = nvrtc.unavailable()
    attention = f"attention is not fused: {reason}" if reason else f"CUDA C++ kernels in {nvrtc.cache_directory()}"
    return f"{name}, PTX kernels, {attention}"


def serves(query: Tensor, bases: Sequence[str], blocks: int, missing: bool = False) -> bool:
    """Returns whether this kernel supports the tensor, implements the bases and can hold the blocks."""
    if missing:
        return len(bases) <= MAX_BASES and unknown.serves(query, bases, blocks)
    if len(bases) > MAX_BASES:
        return False
    device = "cpu" if _interpreted() else "cuda"
    largest = MAX_DIMENSIONS if blocks == query.shape[-1] else 2 * MAX_DIMENSIONS
    fits = query.device.type == device and query.shape[-1] <= largest and query.dtype in PTX_NAMES
    return fits and blocks <= MAX_DIMENSIONS and all(base in IMPLEMENTED_BASES for base in bases)


def score(
    query: Tensor,
    key: Tensor,
    weight: Tensor,
    bases: Sequence[str],
    dtype: torch.dtype | None = None,
    widths: Tensor | None = None,
    missing: bool = False,
) -> Tensor:
    """Computes ``(N, H, L, d), (N, H, S, d), (H, n_bases, n) -> (N, H, L, S)`` in ``dtype``, by default float32."""
    if missing:
        return unknown.score(query, key, weight, bases, widths).to(dtype or torch.float32)
    out = torch.empty(*query.shape[:-1], key.shape[-2], dtype=dtype or torch.float32, device=query.device)
    if out.numel() == 0:
        return out
    heads = query.shape[0] * query.shape[1]
    plan = score_plan(query.device, query.dtype, query.shape[-1], weight.shape[-1], tuple(bases), out.dtype)
    if "near" not in bases:
        widths = None
    elif widths is None:
        widths = weight.new_ones(len(bases))
    few = heads * key.shape[-2] < 32 * WARP and query.shape[-2] > key.shape[-2]
    if few or plan.rows > 1:
        # Few keys leave lanes idle, and tiles that own queries store adjacent scores. All bases are symmetric, so
        # queries and keys can be swapped.
        _launch_score(key, query, weight, out.mT, plan, widths)
    else:
        _launch_score(query, key, weight, out, plan, widths)
    return out


def score_backward(
    grad: Tensor,
    query: Tensor,
    key: Tensor,
    weight: Tensor,
    bases: Sequence[str],
    need: Need,
    widths: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Computes the gradients of :func:`score`; gradients that ``need`` excludes are empty tensors."""
    if query.numel() * key.numel() == 0 or "near" in bases:
        return chunked.score_backward(grad, query, key, weight, bases, need, widths)
    plan = backward_plan(
        query.device, query.dtype, query.shape[-1], weight.shape[-1], tuple(bases), not need[2], grad.dtype
    )
    if _filled(query.shape[-2], plan.keys) > 1.1 * _filled(key.shape[-2], plan.keys):
        key_grad, query_grad, weight_grad = _launch_backward(grad.mT, key, query, weight, plan)
    else:
        query_grad, key_grad, weight_grad = _launch_backward(grad, query, key, weight, plan)
    return _needed((query_grad.to(query.dtype), key_grad.to(key.dtype), weight_grad.to(weight.dtype)), need)


def _needed(grads: tuple[Tensor, Tensor, Tensor], need: Need) -> tuple[Tensor, Tensor, Tensor]:
    """Returns contiguous gradients; those that ``need`` excludes are empty tensors."""
    query_grad, key_grad, weight_grad = (
        each.contiguous() if wanted else each.new_empty(0) for each, wanted in zip(grads, need, strict=True)
    )
    return query_grad, key_grad, weight_grad


def softmax(scores: Tensor, dtype: torch.dtype, masked: bool) -> tuple[Tensor, Tensor]:
    """Computes the softmax of scores ``(N, H, L, S)`` in a dtype, and the log-sum-exp ``(N, H, L)``, in one kernel."""
    if not scores.is_cuda or scores.dtype != torch.float32:
        return sliced.softmax(scores, dtype, masked)
    weights, log_sum = torch.empty_like(scores, dtype=dtype), scores.new_empty(scores.shape[:-1])
    rows = 4
    with _on_device(scores):
        _softmax_kernel()[(-(-log_sum.numel() // rows),)](
            scores, weights, log_sum, log_sum.numel(), scores.shape[-1], ROWS=rows, BLOCK=256
        )
    return weights, log_sum


def _rows(tensor: Tensor, plan: Plan, n: int, fill: float) -> Tensor:
    """Returns the tensor with aligned rows of the plan's dimensions. Copies only if necessary.

    Blocks are padded with zeros, which add nothing to a sum. Padding blocks hold ``fill``, once, and sort last.
    """
    tensor = tensor.to(plan.dtype)
    layout, size = plan.layout, tensor.shape[-1] // n
    if layout.dims == tensor.shape[-1]:
        return aligned(tensor, plan.alignment)
    padded = tensor.new_zeros(*tensor.shape[:-1], layout.blocks, layout.block_size)
    padded[..., :n, :size] = torch.unflatten(tensor, -1, (n, size))
    padded[..., n:, 0] = fill
    return padded.flatten(-2)


def _in_order(grad: Tensor, plan: Plan, n: int, size: int) -> Tensor:
    """Returns gradients ``(..., n * size)``, without padding, from rows that the lanes stored in turns."""
    layout, unit = plan.layout, ptx_backward.grad_unit(plan.layout)
    as_read = unit == layout.stretch and (layout.parts == 1 or (layout.copies == 1 and layout.width == unit))
    if layout.lanes > 1 and not as_read:
        outer = list(range(grad.dim() - 1))
        lanes = torch.unflatten(grad, -1, (-1, layout.lanes, unit)).transpose(-2, -3).flatten(-2)
        stretch = layout.width if layout.parts == 1 else layout.stretch
        inner = layout.held // layout.run, layout.run, layout.width // stretch, stretch
        parts = torch.unflatten(lanes.flatten(-2), -1, (layout.copies, layout.readers, layout.split, *inner))
        order = (3, 1, 4, 5, 0, 2, 6)  # runs, readers, blocks of a run; stretches, copies, split, dimensions
        grad = parts.permute(*outer, *(len(outer) + axis for axis in order)).flatten(-7)
    if grad.shape[-1] == n * size:
        return grad
    return torch.unflatten(grad, -1, (layout.blocks, layout.block_size))[..., :n, :size].flatten(-2)


def aligned(tensor: Tensor, alignment: int) -> Tensor:
    """Returns the tensor with rows of adjacent numbers at aligned addresses. Copies only if necessary."""
    places = [tensor.data_ptr(), *(stride * tensor.element_size() for stride in tensor.stride()[:-1])]
    fits = tensor.stride(-1) == 1 and all(place % alignment == 0 for place in places)
    # clone() instead of contiguous(), which returns a contiguous tensor as it is, even if it is not aligned.
    return tensor if fits else tensor.clone(memory_format=torch.contiguous_format)


def _weights(weight: Tensor, plan: Plan, widths: Tensor | None = None) -> Tensor:
    """Returns weights ``(H, n_bases, blocks)``; weights of padding blocks, which sort last, are 0.

    With ``widths`` the kernel reads as many further rows. They hold the rate of each ``near``, which is
    ``exp(-x / width) = 2 ** (rate * x)``.
    """
    if widths is not None:
        weight = _weights(weight, plan)
        return torch.cat((weight, (-log2(e) / widths)[:, None].expand_as(weight)), 1)
    added = plan.layout.blocks - weight.shape[-1]
    if added:
        return torch.nn.functional.pad(weight, (0, added))
    return aligned(weight, 16) if weight.stride(1) == weight.shape[-1] else weight.contiguous()


def _launch_score(query: Tensor, key: Tensor, weight: Tensor, out: Tensor, plan: Plan, widths: Tensor | None) -> None:
    n_blocks, d = weight.shape[-1], query.shape[-1]
    query, key = _rows(query, plan, n_blocks, PAD_QUERY), _rows(key, plan, n_blocks, PAD_KEY)
    weight = _weights(weight, plan, widths)
    (n, heads, length, _), count = query.shape, key.shape[-2]
    strides = (*query.stride()[:3], *key.stride()[:3], weight.stride(0), *out.stride())
    tiles = -(-count // plan.keys)
    if "PACK" in plan.constants:
        total = n * heads * -(-count // plan.constants["PACK"])
        programs = -(-total * plan.layout.lanes // plan.constants["THREADS"])
        sizes = [total]
    else:
        programs = n * heads * tiles
        sizes = [tiles] if "BODY" in plan.constants else [tiles, n_blocks, d // n_blocks]
    warps = programs * plan.constants["num_warps"]
    rows = _rows_per_program(length, warps, query.device, plan)
    with _on_device(query):
        plan.kernel[(programs, -(-length // rows))](
            query, key, weight, out, *strides, heads, length, count, rows, *sizes, **plan.constants
        )


def _launch_backward(
    grad: Tensor, query: Tensor, key: Tensor, weight: Tensor, plan: Plan
) -> tuple[Tensor, Tensor, Tensor]:
    """Computes gradients in float32, in launches whose partial sums fit in ``SCRATCH_BYTES``."""
    n_blocks, size = weight.shape[-1], query.shape[-1] // weight.shape[-1]
    query, key = _rows(query, plan, n_blocks, PAD_QUERY), _rows(key, plan, n_blocks, PAD_KEY)
    weight = _weights(weight, plan)
    blocks = list(_backward_blocks(query, key, plan))
    if len(blocks) == 1:
        parts = _launch_backward_block(grad, query, key, weight, plan)
        query_grad, key_grad = (part[0] if len(part) == 1 else part.sum(0) for part in parts[:2])
        weight_grad = parts[2].sum((0, 1, 2, 4))
    else:
        query_grad, key_grad = (torch.zeros(each.shape, device=grad.device) for each in (query, key))
        weight_grad = torch.zeros(weight.shape, device=grad.device)
        for n, rows in blocks:
            parts = _launch_backward_block(grad[n, :, rows], query[n, :, rows], key[n], weight, plan)
            query_grad[n, :, rows] = parts[0].sum(0)
            key_grad[n] += parts[1].sum(0)
            weight_grad += parts[2].sum((0, 1, 2, 4))
    query_grad, key_grad = (_in_order(each, plan, n_blocks, size) for each in (query_grad, key_grad))
    return query_grad, key_grad, weight_grad[..., :n_blocks]


def _backward_blocks(query: Tensor, key: Tensor, plan: Plan) -> Iterator[tuple[slice, slice]]:
    """Yields slices over N and L, as large as the partial sums of the query gradient allow."""
    n, heads, length, d = query.shape
    room = max(1, SCRATCH_BYTES // (4 * d * heads * -(-key.shape[-2] // plan.keys)))
    step = min(length, room)
    outer = max(1, min(n, room // step))
    return product(*([slice(i, i + by) for i in range(0, size, by)] for size, by in ((n, outer), (length, step))))


def _launch_backward_block(
    grad: Tensor, query: Tensor, key: Tensor, weight: Tensor, plan: Plan
) -> tuple[Tensor, Tensor, Tensor]:
    """Computes partial sums of the gradients.

    Query: ``(strips, N, H, L, d)``; key: ``(chunks, N, H, S, d)``;
    weight: ``(strips, chunks, N, H, warps, n_bases, n)``.
    """
    (n, heads, length, d), count = query.shape, key.shape[-2]
    slots = _slots(query.device)
    tiles = -(-count // plan.keys)
    # Enough programs to fill the GPU several times. Beyond that, a program processes several tiles and writes fewer
    # partial sums.
    span = max(1, n * heads * tiles // (PROGRAMS_PER_SLOT * slots))
    strips = -(-tiles // span)
    programs = n * heads * strips
    most_chunks = max(1, SCRATCH_BYTES // (4 * key.shape[:-1].numel() * d))
    warps = programs * plan.constants["num_warps"]
    rows = _rows_per_program(length, warps, query.device, plan, most_chunks)
    chunks = -(-length // rows)
    parts = (
        torch.empty(strips, *query.shape, device=grad.device),
        torch.empty(chunks, *key.shape, device=grad.device),
        torch.empty(strips, chunks, n, heads, plan.warps, *weight.shape[1:], device=grad.device),
    )
    strides = (*grad.stride(), *query.stride()[:3], *key.stride()[:3], weight.stride(0))
    sizes = [] if "BODY" in plan.constants else [weight.shape[-1], d // weight.shape[-1]]
    with _on_device(query):
        plan.kernel[(programs, chunks)](
            grad,
            query,
            key,
            weight,
            *parts,
            *strides,
            heads,
            length,
            count,
            rows,
            span,
            *sizes,
            **plan.constants,
        )
    return parts


@lru_cache(maxsize=None)
def _slots(device: torch.device) -> int:
    """Returns the number of concurrent warps: eight per multiprocessor, the limit set by the kernels' registers."""
    return 8 * torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 8


def _rows_per_program(length: int, warps: int, device: torch.device, plan: Plan, most_chunks: int = 65535) -> int:
    """Returns the number of queries per program, a multiple of those that the kernel processes at a time."""
    units = -(-length // plan.rows)
    # Loading the keys takes about as long as half a query, or as two tiles of queries.
    start, waves = (0.5, 6) if plan.rows == 1 else (2, 1)
    return plan.rows * max(
        _even_split(units, warps, _slots(device), start, waves), -(-units // min(65535, most_chunks))
    )


@lru_cache(maxsize=4096)
def _even_split(length: int, warps: int, slots: int, start: float, least_waves: int) -> int:
    """Returns the number of queries per program that fills the last wave well and rarely reloads keys.

    ``start`` is the time to load the keys, in queries. Several waves balance programs of different duration.
    """

    def time(rows: int) -> float:
        waves = -(-(warps * -(-length // rows)) // slots)
        return waves * (rows + start)

    most = length * warps // (least_waves * slots)
    return min(range(1, max(1, min(length, most)) + 1), key=time)


def _filled(count: int, tile: int) -> float:
    """Returns the fraction of lanes that ``count`` keys in tiles of ``tile`` keys occupy."""
    return count / (-(-count // tile) * tile)


@lru_cache(maxsize=None)
def _softmax_kernel() -> Any:
    from ahop_layers.ops.gpu.triton_softmax import softmax_rows

    return softmax_rows


def _on_device(tensor: Tensor) -> Any:
    """Makes the tensor's device the current device, on which Triton launches kernels."""
    return torch.cuda.device(tensor.device if tensor.is_cuda else -1)


@lru_cache(maxsize=None)
def _triton_installed() -> bool:
    return find_spec("triton") is not None


def _interpreted() -> bool:
    return os.environ.get("TRITON_INTERPRET") == "1"
