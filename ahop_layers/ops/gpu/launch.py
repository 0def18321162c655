"""Host code of the GPU kernels. Triton is imported when the first kernel runs."""

import os
from collections.abc import Iterator, Sequence
from functools import lru_cache
from importlib.util import find_spec
from itertools import product
from math import gcd
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ahop_layers.ops import chunked
from ahop_layers.ops.chunked import Need
from ahop_layers.ops.gpu import mma, mma_kernels, ptx_kernels
from ahop_layers.ops.gpu.ptx import WARP, Layout, choose_layout

MAX_DIMENSIONS = 1024
IMPLEMENTED_BASES = ("dis", "dot", "l1")
"""Kernels treat a base other than ``dis`` and ``dot`` as ``l1``, so :func:`serves` rejects bases not listed here."""

MMA_WARPS = (1, 4)
"""Warps per program of the kernels for tensor cores: forward, and at most in the backward pass."""

SHARED_BYTES = 48 * 2**10
"""Shared memory that a program may declare."""

SCRATCH_BYTES = 64 * 2**20
"""Memory limit of the partial sums of one backward launch."""

PROGRAMS_PER_SLOT = 8
"""Maximum number of programs in a backward launch per concurrently running warp."""

PAD_QUERY, PAD_KEY = -1e19, 1e18
"""Values of padding dimensions: less similar than all others in every base, so they sort last."""

PTX_NAMES = {torch.float32: "f32", torch.float16: "f16", torch.bfloat16: "bf16"}


def unavailable() -> str | None:
    """Returns the reason why this kernel cannot run here, or None if it can."""
    if not _triton_installed():
        return "Triton is not installed"
    if not torch.cuda.is_available() and not _interpreted():
        return "no CUDA device"
    return None


def detail() -> str:
    """Returns one line on how this kernel runs here."""
    if not torch.cuda.is_available():
        return "Triton's interpreter"
    body = "PTX" if _runs_ptx(torch.device("cuda")) else "portable"
    return f"{torch.cuda.get_device_name()}, {body} kernels"


def serves(query: Tensor, bases: Sequence[str], blocks: int) -> bool:
    """Returns whether this kernel supports the tensor, implements the bases and can hold the blocks."""
    device = "cpu" if _interpreted() else "cuda"
    largest = MAX_DIMENSIONS if blocks == query.shape[-1] else 2 * MAX_DIMENSIONS
    fits = query.device.type == device and query.shape[-1] <= largest and query.dtype in PTX_NAMES
    return fits and blocks <= MAX_DIMENSIONS and all(base in IMPLEMENTED_BASES for base in bases)


def score(query: Tensor, key: Tensor, weight: Tensor, bases: Sequence[str], dtype: torch.dtype | None = None) -> Tensor:
    """Computes ``(N, H, L, d), (N, H, S, d), (H, n_bases, n) -> (N, H, L, S)`` in ``dtype``, by default float32."""
    out = torch.empty(*query.shape[:-1], key.shape[-2], dtype=dtype or torch.float32, device=query.device)
    if out.numel() == 0:
        return out
    heads = query.shape[0] * query.shape[1]
    plan = _score_plan(query.device, query.dtype, query.shape[-1], weight.shape[-1], tuple(bases), out.dtype)
    few = heads * key.shape[-2] < 32 * WARP and query.shape[-2] > key.shape[-2]
    if few or plan.rows > 1:
        # Few keys leave lanes idle, and tiles that own queries store adjacent scores. All bases are symmetric, so
        # queries and keys can be swapped.
        _launch_score(key, query, weight, out.mT, plan)
    else:
        _launch_score(query, key, weight, out, plan)
    return out


def score_backward(
    grad: Tensor, query: Tensor, key: Tensor, weight: Tensor, bases: Sequence[str], need: Need
) -> tuple[Tensor, Tensor, Tensor]:
    """Computes the gradients of :func:`score`; gradients that ``need`` excludes are empty tensors."""
    if query.numel() * key.numel() == 0:
        return chunked.score_backward(grad, query, key, weight, bases, need)
    plan = _backward_plan(
        query.device, query.dtype, query.shape[-1], weight.shape[-1], tuple(bases), not need[2], grad.dtype
    )
    if _filled(query.shape[-2], plan.keys) > 1.1 * _filled(key.shape[-2], plan.keys):
        key_grad, query_grad, weight_grad = _launch_backward(grad.mT, key, query, weight, plan)
    else:
        query_grad, key_grad, weight_grad = _launch_backward(grad, query, key, weight, plan)
    grads = (query_grad.to(query.dtype), key_grad.to(key.dtype), weight_grad.to(weight.dtype))
    query_grad, key_grad, weight_grad = (
        each.contiguous() if wanted else each.new_empty(0) for each, wanted in zip(grads, need, strict=True)
    )
    return query_grad, key_grad, weight_grad


class Plan(NamedTuple):
    """Parameters of a launch.

    Attributes:
        kernel: the Triton kernel.
        dtype: dtype it reads.
        layout: blocks and dimensions it processes.
        alignment: alignment of rows in bytes that its widest loads need.
        keys: keys per tile.
        constants: its compile-time constants.
        rows: queries that it processes at a time.
    """

    kernel: Any
    dtype: torch.dtype
    layout: Layout
    alignment: int
    keys: int
    constants: dict[str, Any]
    rows: int = 1

    @property
    def warps(self) -> int:
        """Warps per program that store gradients of the weights of their own."""
        return int(self.constants.get("WARPS", 1))


@lru_cache(maxsize=None)
def _score_plan(
    device: torch.device, dtype: torch.dtype, d: int, n: int, bases: tuple[str, ...], out: torch.dtype
) -> Plan:
    kernels = _kernels()
    if not _runs_ptx(device):
        return _portable_plan(kernels.score_portable, dtype, d, n, bases)
    if dtype != torch.float32 and mma.serves(n, d // n, bases):
        warps = MMA_WARPS[0]
        body = mma_kernels.score(n, d // n, bases, PTX_NAMES[dtype], warps, PTX_NAMES[out])
        return _mma_plan(kernels.score_mma, dtype, n, d, warps, body, mma_kernels.SCORE_CONSTRAINTS)
    packed = _packs(device, dtype, d, n)
    layout = choose_layout(n, d // n, alone=96, shared=64, step=1 + packed)
    dtype = _padded_dtype(dtype, layout, n)
    packed = packed and dtype != torch.float32 and layout.chunk % 2 == 0
    threads = 4 * WARP
    constants = {
        "BODY": ptx_kernels.score(layout, n, bases, PTX_NAMES[dtype], packed, PTX_NAMES[out]),
        "CONSTRAINTS": ptx_kernels.SCORE_CONSTRAINTS,
        **_lane_constants(layout),
        "PACK": 1 + packed,
        "THREADS": threads,
        "num_warps": threads // WARP,
    }
    keys = (1 + packed) * threads // layout.lanes
    return Plan(kernels.score_ptx, dtype, layout, _alignment(layout, dtype), keys, constants)


@lru_cache(maxsize=None)
def _backward_plan(
    device: torch.device,
    dtype: torch.dtype,
    d: int,
    n: int,
    bases: tuple[str, ...],
    may_skip: bool,
    grad: torch.dtype,
) -> Plan:
    kernels = _kernels()
    if not _runs_ptx(device):
        return _portable_plan(kernels.score_backward_portable, dtype, d, n, bases)
    if dtype != torch.float32 and mma.serves(n, d // n, bases):
        warps = MMA_WARPS[1]
        while mma.shared_bytes(n, d, warps, exchange=True) > SHARED_BYTES:
            warps //= 2
        body = mma_kernels.score_backward(n, d // n, bases, PTX_NAMES[dtype], warps, PTX_NAMES[grad])
        plan = _mma_plan(kernels.score_backward_ptx, dtype, n, d, warps, body, ptx_kernels.BACKWARD_CONSTRAINTS)
        return plan._replace(constants=plan.constants | _lane_constants(plan.layout) | {"BASES": len(bases)})
    layout = choose_layout(n, d // n, alone=32, shared=32)
    dtype = _padded_dtype(dtype, layout, n)
    # With wide rows and little to sort, adding up gradients takes most of the time: warps share it.
    shares = 4 if n < d and layout.pairs <= 4 else 1
    warps = next(
        each
        for each in (4, 2, 1)
        if each <= shares and ptx_kernels.backward_shared_bytes(layout, len(bases), each) <= SHARED_BYTES
    )
    constants = {
        "BODY": ptx_kernels.score_backward(
            layout, n, bases, PTX_NAMES[dtype], warps, n == d and dtype != torch.float32, may_skip, PTX_NAMES[grad]
        ),
        "CONSTRAINTS": ptx_kernels.BACKWARD_CONSTRAINTS,
        **_lane_constants(layout),
        "BASES": len(bases),
        "KEYS": warps * layout.pairs,
        "WARPS": warps,
        "num_warps": warps,
    }
    keys = warps * layout.pairs
    return Plan(kernels.score_backward_ptx, dtype, layout, _alignment(layout, dtype), keys, constants)


def _mma_plan(kernel: Any, dtype: torch.dtype, n: int, d: int, warps: int, body: str, constraints: str) -> Plan:
    """Returns the plan of a kernel for tensor cores, whose warps process a tile of keys each."""
    keys = warps * mma.ROWS
    constants = {"BODY": body, "CONSTRAINTS": constraints, "KEYS": keys, "WARPS": warps, "num_warps": warps}
    return Plan(kernel, dtype, Layout(1, n, d // n), 16, keys, constants, mma.ROWS)


def _portable_plan(kernel: Any, dtype: torch.dtype, d: int, n: int, bases: tuple[str, ...]) -> Plan:
    blocks, size = (max(least, 1 << (number - 1).bit_length()) for number, least in ((n, 2), (d // n, 1)))
    keys = max(1, min(32, 2048 // (blocks * size)))
    # With several warps, sums over the dimensions of a block lose digits (seen with Triton 3.6).
    constants = {"BASES": bases, "KEYS": keys, "BLOCKS": blocks, "SIZE": size, "num_warps": 4 if size == 1 else 1}
    return Plan(kernel, dtype, Layout(1, n, d // n), dtype.itemsize, keys, constants)


def _lane_constants(layout: Layout) -> dict[str, Any]:
    return dict(
        zip(("GROUP", "CHUNK", "WIDTH", "SPLIT", "COPIES"), layout, strict=True), RUN=layout.run, STRETCH=layout.stretch
    )


def _packs(device: torch.device, dtype: torch.dtype, d: int, n: int) -> bool:
    """Returns whether two keys are processed at a time: single dimensions in half precision, if the GPU supports it."""
    has = dtype == torch.float16 or torch.cuda.get_device_capability(device) >= (9, 0)
    return n == d and dtype != torch.float32 and has


def _padded_dtype(dtype: torch.dtype, layout: Layout, n: int) -> torch.dtype:
    """Returns float32 if blocks are padded with values that the dtype cannot hold, else the dtype."""
    return torch.float32 if layout.blocks > n and dtype == torch.float16 else dtype


def _alignment(layout: Layout, dtype: torch.dtype) -> int:
    """Returns the alignment of rows in bytes that the widest loads of a lane need."""
    stretch = dtype.itemsize * layout.stretch
    return 4 * gcd(stretch // 4, 4) if stretch % 4 == 0 else dtype.itemsize


def _rows(tensor: Tensor, plan: Plan, n: int, fill: float) -> Tensor:
    """Returns the tensor with aligned rows of the plan's dimensions. Copies only if necessary.

    Blocks are padded with zeros, which add nothing to a sum. Padding blocks hold ``fill``, once, and sort last.
    """
    tensor = tensor.to(plan.dtype)
    layout, size = plan.layout, tensor.shape[-1] // n
    if layout.dims == tensor.shape[-1]:
        return _aligned(tensor, plan.alignment)
    padded = tensor.new_zeros(*tensor.shape[:-1], layout.blocks, layout.block_size)
    padded[..., :n, :size] = torch.unflatten(tensor, -1, (n, size))
    padded[..., n:, 0] = fill
    return padded.flatten(-2)


def _in_order(grad: Tensor, plan: Plan, n: int, size: int) -> Tensor:
    """Returns gradients ``(..., n * size)``, without padding, from rows that the lanes stored in turns."""
    layout, unit = plan.layout, ptx_kernels.grad_unit(plan.layout)
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


def _aligned(tensor: Tensor, alignment: int) -> Tensor:
    places = [tensor.data_ptr(), *(stride * tensor.element_size() for stride in tensor.stride()[:-1])]
    fits = tensor.stride(-1) == 1 and all(place % alignment == 0 for place in places)
    # clone() instead of contiguous(), which returns a contiguous tensor as it is, even if it is not aligned.
    return tensor if fits else tensor.clone(memory_format=torch.contiguous_format)


def _weights(weight: Tensor, plan: Plan) -> Tensor:
    """Returns weights ``(H, n_bases, blocks)``; weights of padding blocks, which sort last, are 0."""
    added = plan.layout.blocks - weight.shape[-1]
    if added:
        return torch.nn.functional.pad(weight, (0, added))
    return _aligned(weight, 16) if weight.stride(1) == weight.shape[-1] else weight.contiguous()


def _launch_score(query: Tensor, key: Tensor, weight: Tensor, out: Tensor, plan: Plan) -> None:
    n_blocks, d = weight.shape[-1], query.shape[-1]
    query, key = _rows(query, plan, n_blocks, PAD_QUERY), _rows(key, plan, n_blocks, PAD_KEY)
    weight = _weights(weight, plan)
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
    with _device(query):
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
    with _device(query):
        plan.kernel[(programs, chunks)](
            grad, query, key, weight, *parts, *strides, heads, length, count, rows, span, *sizes, **plan.constants
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


def _device(tensor: Tensor) -> Any:
    """Makes the tensor's device the current device, on which Triton launches kernels."""
    return torch.cuda.device(tensor.device if tensor.is_cuda else -1)


@lru_cache(maxsize=None)
def _triton_installed() -> bool:
    return find_spec("triton") is not None


def _interpreted() -> bool:
    return os.environ.get("TRITON_INTERPRET") == "1"


@lru_cache(maxsize=None)
def _runs_ptx(device: torch.device) -> bool:
    """Returns whether the device is an NVIDIA GPU that supports all instructions of the PTX bodies."""
    if device.type != "cuda" or torch.version.hip is not None:
        return False
    return torch.cuda.get_device_capability(device) >= (8, 0)


@lru_cache(maxsize=None)
def _kernels() -> Any:
    from ahop_layers.ops.gpu import triton_kernels

    return triton_kernels
