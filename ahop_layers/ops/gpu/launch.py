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
from ahop_layers.ops.gpu import ptx_kernels
from ahop_layers.ops.gpu.ptx import WARP, Layout, choose_layout

MAX_DIMENSIONS = 1024
IMPLEMENTED_BASES = ("dis", "dot", "l1")
"""Kernels treat a base other than ``dis`` and ``dot`` as ``l1``, so :func:`serves` rejects bases not listed here."""

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
    """Returns whether this kernel supports the tensor and implements the bases; every dimension must be a block."""
    device = "cpu" if _interpreted() else "cuda"
    fits = query.device.type == device and query.shape[-1] <= MAX_DIMENSIONS and query.dtype in PTX_NAMES
    return fits and blocks == query.shape[-1] and all(base in IMPLEMENTED_BASES for base in bases)


def score(query: Tensor, key: Tensor, weight: Tensor, bases: Sequence[str]) -> Tensor:
    """Computes ``(N, H, L, d), (N, H, S, d), (H, n_bases, d) -> (N, H, L, S)`` in float32."""
    out = torch.empty(*query.shape[:-1], key.shape[-2], dtype=torch.float32, device=query.device)
    if out.numel() == 0:
        return out
    heads = query.shape[0] * query.shape[1]
    if heads * key.shape[-2] < 32 * WARP and query.shape[-2] > key.shape[-2]:
        # Few keys leave lanes idle. All bases are symmetric, so queries and keys can be swapped.
        _launch_score(key, query, weight, out.mT, bases)
    else:
        _launch_score(query, key, weight, out, bases)
    return out


def score_backward(
    grad: Tensor, query: Tensor, key: Tensor, weight: Tensor, bases: Sequence[str], need: Need
) -> tuple[Tensor, Tensor, Tensor]:
    """Computes the gradients of :func:`score`; gradients that ``need`` excludes are empty tensors."""
    if query.numel() * key.numel() == 0:
        return chunked.score_backward(grad, query, key, weight, bases, need)
    pairs = _backward_plan(query.device, query.dtype, query.shape[-1], tuple(bases)).keys
    if _filled(query.shape[-2], pairs) > 1.1 * _filled(key.shape[-2], pairs):
        key_grad, query_grad, weight_grad = _launch_backward(grad.mT, key, query, weight, bases)
    else:
        query_grad, key_grad, weight_grad = _launch_backward(grad, query, key, weight, bases)
    grads = (query_grad.to(query.dtype), key_grad.to(key.dtype), weight_grad.to(weight.dtype))
    query_grad, key_grad, weight_grad = (
        each.contiguous() if wanted else each.new_empty(0) for each, wanted in zip(grads, need, strict=True)
    )
    return query_grad, key_grad, weight_grad


class Plan(NamedTuple):
    """Parameters of a launch: the kernel, the dtype and number of dimensions it reads, and the keys per tile."""

    kernel: Any
    dtype: torch.dtype
    dims: int
    alignment: int
    keys: int
    constants: dict[str, Any]


@lru_cache(maxsize=None)
def _score_plan(device: torch.device, dtype: torch.dtype, d: int, bases: tuple[str, ...]) -> Plan:
    kernels = _kernels()
    if not _runs_ptx(device):
        return _portable_plan(kernels.score_portable, dtype, d, bases)
    layout = choose_layout(d, alone=96, shared=64)
    dtype = _packed_dtype(device, dtype, d, layout)
    pack, threads = (1 if dtype == torch.float32 else 2), 4 * WARP
    constants = {
        "BODY": ptx_kernels.score(layout, bases, PTX_NAMES[dtype]),
        "CONSTRAINTS": ptx_kernels.SCORE_CONSTRAINTS,
        "GROUP": layout.group,
        "CHUNK": layout.chunk,
        "PACK": pack,
        "THREADS": threads,
        "num_warps": threads // WARP,
    }
    keys = pack * threads // layout.group
    return Plan(kernels.score_ptx, dtype, layout.dims, _alignment(layout, dtype), keys, constants)


@lru_cache(maxsize=None)
def _backward_plan(device: torch.device, dtype: torch.dtype, d: int, bases: tuple[str, ...]) -> Plan:
    kernels = _kernels()
    if not _runs_ptx(device):
        return _portable_plan(kernels.score_backward_portable, dtype, d, bases)
    layout = choose_layout(d, alone=32, shared=32)
    dtype = _packed_dtype(device, dtype, d, layout)
    constants = {
        "BODY": ptx_kernels.score_backward(layout, bases, PTX_NAMES[dtype]),
        "CONSTRAINTS": ptx_kernels.BACKWARD_CONSTRAINTS,
        "GROUP": layout.group,
        "CHUNK": layout.chunk,
        "BASES": len(bases),
        "num_warps": 1,
    }
    return Plan(kernels.score_backward_ptx, dtype, layout.dims, _alignment(layout, dtype), layout.pairs, constants)


def _portable_plan(kernel: Any, dtype: torch.dtype, d: int, bases: tuple[str, ...]) -> Plan:
    dims = max(2, 1 << (d - 1).bit_length())
    keys = max(1, min(32, 2048 // dims))
    constants = {"BASES": bases, "KEYS": keys, "DIMS": dims, "num_warps": 4}
    return Plan(kernel, dtype, d, dtype.itemsize, keys, constants)


def _packed_dtype(device: torch.device, dtype: torch.dtype, d: int, layout: Layout) -> torch.dtype:
    """Returns half precision if rows consist of full words of two values and the GPU supports it, else float32."""
    fits = layout.dims == d and layout.chunk % 2 == 0
    has = dtype == torch.float16 or torch.cuda.get_device_capability(device) >= (9, 0)
    return dtype if fits and has else torch.float32


def _alignment(layout: Layout, dtype: torch.dtype) -> int:
    """Returns the alignment of rows in bytes that the widest loads of a chunk need."""
    return 4 * gcd(layout.chunk * dtype.itemsize // 4, 4)


def _rows(tensor: Tensor, plan: Plan, fill: float) -> Tensor:
    """Returns the tensor with aligned rows of ``plan.dims`` adjacent values. Copies only if necessary."""
    tensor = tensor.to(plan.dtype)
    if tensor.shape[-1] < plan.dims:
        return torch.nn.functional.pad(tensor, (0, plan.dims - tensor.shape[-1]), value=fill)
    return _aligned(tensor, plan.alignment)


def _aligned(tensor: Tensor, alignment: int) -> Tensor:
    places = [tensor.data_ptr(), *(stride * tensor.element_size() for stride in tensor.stride()[:-1])]
    fits = tensor.stride(-1) == 1 and all(place % alignment == 0 for place in places)
    # clone() instead of contiguous(), which returns a contiguous tensor as it is, even if it is not aligned.
    return tensor if fits else tensor.clone(memory_format=torch.contiguous_format)


def _weights(weight: Tensor, plan: Plan) -> Tensor:
    """Returns weights ``(H, n_bases, plan.dims)``; weights of padding dimensions, which sort last, are 0."""
    added = plan.dims - weight.shape[-1]
    if added:
        return torch.nn.functional.pad(weight, (0, added))
    return _aligned(weight, 16) if weight.stride(1) == plan.dims else weight.contiguous()


def _launch_score(query: Tensor, key: Tensor, weight: Tensor, out: Tensor, bases: Sequence[str]) -> None:
    plan = _score_plan(query.device, query.dtype, query.shape[-1], tuple(bases))
    query, key = _rows(query, plan, PAD_QUERY), _rows(key, plan, PAD_KEY)
    weight = _weights(weight, plan)
    (n, heads, length, d), count = query.shape, key.shape[-2]
    strides = (*query.stride()[:3], *key.stride()[:3], weight.stride(0), *out.stride())
    if "BODY" in plan.constants:
        total = n * heads * -(-count // plan.constants["PACK"])
        programs = -(-total * plan.constants["GROUP"] // plan.constants["THREADS"])
        sizes = [total]
    else:
        tiles = -(-count // plan.keys)
        programs, sizes = n * heads * tiles, [tiles, d]
    warps = programs * plan.constants["num_warps"]
    rows = max(_even_split(length, warps, _slots(query.device)), -(-length // 65535))
    with _device(query):
        plan.kernel[(programs, -(-length // rows))](
            query, key, weight, out, *strides, heads, length, count, rows, *sizes, **plan.constants
        )


def _launch_backward(
    grad: Tensor, query: Tensor, key: Tensor, weight: Tensor, bases: Sequence[str]
) -> tuple[Tensor, Tensor, Tensor]:
    """Computes gradients in float32, in launches whose partial sums fit in ``SCRATCH_BYTES``."""
    d = query.shape[-1]
    plan = _backward_plan(query.device, query.dtype, d, tuple(bases))
    query, key = _rows(query, plan, PAD_QUERY), _rows(key, plan, PAD_KEY)
    weight = _weights(weight, plan)
    blocks = list(_backward_blocks(query, key, plan))
    if len(blocks) == 1:
        parts = _launch_backward_block(grad, query, key, weight, plan)
        query_grad, key_grad = (part[0] if len(part) == 1 else part.sum(0) for part in parts[:2])
        weight_grad = parts[2].sum((0, 1, 2))
    else:
        query_grad, key_grad = (torch.zeros(each.shape, device=grad.device) for each in (query, key))
        weight_grad = torch.zeros(weight.shape, device=grad.device)
        for n, rows in blocks:
            parts = _launch_backward_block(grad[n, :, rows], query[n, :, rows], key[n], weight, plan)
            query_grad[n, :, rows] = parts[0].sum(0)
            key_grad[n] += parts[1].sum(0)
            weight_grad += parts[2].sum((0, 1, 2))
    return query_grad[..., :d], key_grad[..., :d], weight_grad[..., :d]


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

    Query: ``(strips, N, H, L, d)``; key: ``(chunks, N, H, S, d)``; weight: ``(strips, chunks, N, H, n_bases, d)``.
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
    rows = max(
        _even_split(length, programs * plan.constants["num_warps"], slots), -(-length // min(65535, most_chunks))
    )
    chunks = -(-length // rows)
    parts = (
        torch.empty(strips, *query.shape, device=grad.device),
        torch.empty(chunks, *key.shape, device=grad.device),
        torch.empty(strips, chunks, n, *weight.shape, device=grad.device),
    )
    strides = (*grad.stride(), *query.stride()[:3], *key.stride()[:3], weight.stride(0))
    with _device(query):
        plan.kernel[(programs, chunks)](
            grad, query, key, weight, *parts, *strides, heads, length, count, rows, span, d, **plan.constants
        )
    return parts


@lru_cache(maxsize=None)
def _slots(device: torch.device) -> int:
    """Returns the number of concurrent warps: eight per multiprocessor, the limit set by the kernels' registers."""
    return 8 * torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 8


@lru_cache(maxsize=4096)
def _even_split(length: int, warps: int, slots: int) -> int:
    """Returns the number of queries per program that fills the last wave well and rarely reloads keys."""

    def time(rows: int) -> float:
        waves = -(-(warps * -(-length // rows)) // slots)
        return waves * (rows + 0.5)  # loading the keys takes about as long as half a query

    most = length * warps // (6 * slots)  # at least six waves, to balance programs of different duration
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
