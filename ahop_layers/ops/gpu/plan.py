"""The choice of a GPU kernel and its parameters for a dtype, a number of dimensions and blocks, and bases."""

from functools import lru_cache
from math import gcd
from typing import Any, NamedTuple

import torch

from ahop_layers.ops.gpu import mma, mma_kernels, ptx_backward, ptx_kernels
from ahop_layers.ops.gpu.mma_gradients import TileExchange
from ahop_layers.ops.gpu.ptx import WARP, Layout, choose_layout

PTX_NAMES = {torch.float32: "f32", torch.float16: "f16", torch.bfloat16: "bf16"}

MMA_WARPS = (1, 4)
"""Warps per program of the kernels for tensor cores: forward, and at most in the backward pass."""

SHARED_BYTES = 48 * 2**10
"""Shared memory that a program may declare."""


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
def score_plan(
    device: torch.device, dtype: torch.dtype, d: int, n: int, bases: tuple[str, ...], out: torch.dtype
) -> Plan:
    """Returns the plan of the forward pass; ``out`` is the dtype of the scores."""
    kernels = _kernels()
    if not runs_ptx(device) or ("near" in bases and n < d):
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
def backward_plan(
    device: torch.device,
    dtype: torch.dtype,
    d: int,
    n: int,
    bases: tuple[str, ...],
    may_skip: bool,
    grad: torch.dtype,
) -> Plan:
    """Returns the plan of the backward pass; ``grad`` is the dtype of the scores' gradient.

    ``may_skip`` says that the gradient of the weights is not needed.
    """
    kernels = _kernels()
    if not runs_ptx(device):
        return _portable_plan(kernels.score_backward_portable, dtype, d, n, bases)
    if dtype != torch.float32 and mma.serves(n, d // n, bases):
        warps = MMA_WARPS[1]
        while mma.shared_bytes(n, d, warps) + TileExchange.bytes(d, warps) > SHARED_BYTES:
            warps //= 2
        body = mma_kernels.score_backward(n, d // n, bases, PTX_NAMES[dtype], warps, PTX_NAMES[grad])
        plan = _mma_plan(kernels.score_backward_ptx, dtype, n, d, warps, body, ptx_backward.BACKWARD_CONSTRAINTS)
        return plan._replace(constants=plan.constants | _lane_constants(plan.layout) | {"BASES": len(bases)})
    layout = choose_layout(n, d // n, alone=32, shared=32)
    dtype = _padded_dtype(dtype, layout, n)
    # With wide rows and little to sort, adding up gradients takes most of the time: warps share it.
    shares = 4 if n < d and layout.pairs <= 4 else 1
    warps = next(
        each
        for each in (4, 2, 1)
        if each <= shares and ptx_backward.shared_bytes(layout, len(bases), each) <= SHARED_BYTES
    )
    tagged = n == d and dtype != torch.float32
    body = ptx_backward.score_backward(layout, n, bases, PTX_NAMES[dtype], warps, tagged, may_skip, PTX_NAMES[grad])
    constants = {
        "BODY": body,
        "CONSTRAINTS": ptx_backward.BACKWARD_CONSTRAINTS,
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


def runs_ptx(device: torch.device) -> bool:
    """Returns whether the device is an NVIDIA GPU that supports all instructions of the PTX bodies."""
    if torch.compiler.is_compiling():  # the compiler traces the function behind a cache, with a warning
        return _has_instructions(device)
    return _runs_ptx(device)


def _has_instructions(device: torch.device) -> bool:
    if device.type != "cuda" or torch.version.hip is not None:
        return False
    return torch.cuda.get_device_capability(device) >= (8, 0)


_runs_ptx = lru_cache(maxsize=None)(_has_instructions)


@lru_cache(maxsize=None)
def _kernels() -> Any:
    from ahop_layers.ops.gpu import triton_kernels

    return triton_kernels
