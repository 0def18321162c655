"""The GPU kernels as one backend: CUDA C++ on NVIDIA GPUs, Triton on others. Triton is imported when it first runs."""

import os
from collections.abc import Sequence
from functools import lru_cache
from importlib.util import find_spec
from math import e, log2
from typing import Any

import torch
from torch import Tensor

from ahop_layers.ops import chunked, sliced
from ahop_layers.ops.chunked import Need
from ahop_layers.ops.gpu import division, nvrtc
from ahop_layers.ops.gpu import missing as unknown
from ahop_layers.ops.gpu import score as cuda
from ahop_layers.ops.gpu.division import aligned

MAX_DIMENSIONS = 1024
MAX_BASES = 8
IMPLEMENTED_BASES = cuda.KINDS
"""Kernels treat a base that they do not know as ``l1``, so :func:`serves` rejects bases not listed here."""


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
    if nvrtc.runs(torch.device("cuda")):
        return f"{name}, CUDA C++ kernels in {nvrtc.cache_directory()}"
    if torch.version.hip:
        return f"{name}, portable kernels, not tested on ROCm"
    return f"{name}, portable kernels, attention is not fused: {nvrtc.unavailable() or 'compute capability below 8.0'}"


def serves(query: Tensor, bases: Sequence[str], blocks: int, missing: bool = False) -> bool:
    """Returns whether this kernel supports the tensor, implements the bases and can hold the blocks."""
    if missing:
        return len(bases) <= MAX_BASES and unknown.serves(query, bases, blocks)
    if len(bases) > MAX_BASES:
        return False
    device = "cpu" if _interpreted() else "cuda"
    largest = MAX_DIMENSIONS if blocks == query.shape[-1] else 2 * MAX_DIMENSIONS
    fits = query.device.type == device and query.shape[-1] <= largest and query.dtype in cuda.DTYPES
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
    widths = weight.new_ones(len(bases)) if widths is None else widths
    few = query.shape[:2].numel() * max(query.shape[-2], key.shape[-2]) < 2**31  # indices of 32 bits
    kernel = cuda.score if few and cuda.serves(query, bases, weight.shape[-1]) else _portable_score
    kernel(query, key, weight, tuple(bases), out, widths)
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
    if cuda.serves(query, bases, weight.shape[-1]):
        grads = cuda.score_backward(grad, query, key, weight, tuple(bases), need[2])
    else:
        grads = _portable_backward(grad, query, key, weight, tuple(bases))
    query_grad, key_grad, weight_grad = (
        each.to(tensor.dtype).contiguous() if wanted else tensor.new_empty(0)
        for each, tensor, wanted in zip(grads, (query, key, weight), need, strict=True)
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


def _portable_constants(d: int, n: int, bases: tuple[str, ...]) -> dict[str, Any]:
    blocks, size = (max(least, 1 << (number - 1).bit_length()) for number, least in ((n, 2), (d // n, 1)))
    keys = max(1, min(32, 2048 // (blocks * size)))
    # With several warps, sums over the dimensions of a block lose digits (seen with Triton 3.6).
    return {"BASES": bases, "KEYS": keys, "BLOCKS": blocks, "SIZE": size, "num_warps": 4 if size == 1 else 1}


def _portable_score(
    query: Tensor, key: Tensor, weight: Tensor, bases: tuple[str, ...], out: Tensor, widths: Tensor
) -> None:
    n, d, (batch, heads, length, _), count = weight.shape[-1], query.shape[-1], query.shape, key.shape[-2]
    constants = _portable_constants(d, n, bases)
    query, key, weight = (aligned(each, each.element_size()) for each in (query, key, weight.contiguous()))
    if "near" in bases:  # exp(-x / width) is 2 ** (rate * x)
        weight = torch.cat((weight, (-log2(e) / widths)[:, None].expand_as(weight)), 1)
    tiles = -(-count // constants["KEYS"])
    programs = batch * heads * tiles
    rows = division.rows_per_program(length, programs * constants["num_warps"], query.device)
    strides = (*query.stride()[:3], *key.stride()[:3], weight.stride(0), *out.stride())
    with _on_device(query):
        _portable_kernels().score_portable[(programs, -(-length // rows))](
            query, key, weight, out, *strides, heads, length, count, rows, tiles, n, d // n, **constants
        )


def _portable_backward(
    grad: Tensor, query: Tensor, key: Tensor, weight: Tensor, bases: tuple[str, ...]
) -> tuple[Tensor, Tensor, Tensor]:
    """Computes gradients in float32, in launches whose partial sums have a bounded size."""
    constants = _portable_constants(query.shape[-1], weight.shape[-1], bases)
    query, key, weight = (aligned(each, each.element_size()) for each in (query, key, weight.contiguous()))
    grads = [torch.zeros(each.shape, device=grad.device) for each in (query, key, weight)]
    for batch, rows in division.launches(query, key, constants["KEYS"]):
        part = query[batch, :, rows], key[batch], weight
        sums = _launch_portable_backward(grad[batch, :, rows], *part, constants)
        grads[0][batch, :, rows] = sums[0].sum(0)
        grads[1][batch] += sums[1].sum(0)
        grads[2] += sums[2].sum((0, 1, 2, 4))
    return grads[0], grads[1], grads[2]


def _launch_portable_backward(
    grad: Tensor, query: Tensor, key: Tensor, weight: Tensor, constants: dict[str, Any]
) -> tuple[Tensor, Tensor, Tensor]:
    (_, heads, length, d), count, n = query.shape, key.shape[-2], weight.shape[-1]
    work = division.BackwardDivision(query, key, constants["KEYS"], constants["num_warps"])
    parts = work.partial_sums(query, key, weight, 1)
    strides = (*grad.stride(), *query.stride()[:3], *key.stride()[:3], weight.stride(0))
    sizes = heads, length, count, work.rows, work.span, n, d // n
    with _on_device(query):
        _portable_kernels().score_backward_portable[(work.programs, work.chunks)](
            grad, query, key, weight, *parts, *strides, *sizes, **constants
        )
    return parts


@lru_cache(maxsize=None)
def _portable_kernels() -> Any:
    from ahop_layers.ops.gpu import triton_kernels

    return triton_kernels


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
