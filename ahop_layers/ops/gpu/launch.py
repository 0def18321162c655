"""The kernels for NVIDIA GPUs as one backend, with the interface of :mod:`ahop_layers.ops.chunked`."""

from collections.abc import Sequence

import torch
from torch import Tensor

from ahop_layers.ops import chunked
from ahop_layers.ops.gpu import missing as unknown
from ahop_layers.ops.gpu import nvrtc
from ahop_layers.ops.gpu import score as lanes
from ahop_layers.ops.protocols import Need
from ahop_layers.ops.reference import fold

MAX_DIMENSIONS = 1024
MAX_BASES = 8


def unavailable() -> str | None:
    """Returns the reason why no GPU runs these kernels here, or None if one can."""
    if not (torch.cuda.is_initialized() or torch.cuda.is_available()):  # type: ignore[no-untyped-call]
        return "Apple GPUs (mps) run plain PyTorch" if torch.backends.mps.is_available() else "no CUDA device"
    if torch.version.hip:
        return "AMD GPUs run plain PyTorch"
    return nvrtc.unavailable()


def detail() -> str:
    """Returns one line on how these kernels run here."""
    name, capability = torch.cuda.get_device_name(), nvrtc.capability(torch.device("cuda"))
    fused = "" if capability >= (8, 0) else ", attention is not fused: compute capability below 8.0"
    return f"{name}, CUDA C++ kernels{fused}"


def serves(query: Tensor, bases: Sequence[str], blocks: int, missing: bool = False) -> bool:
    """Returns whether these kernels support the tensor, implement the bases and can hold the blocks."""
    capability = nvrtc.capability(query.device)
    supported = query.dtype in lanes.DTYPES and capability >= ((8, 0) if query.dtype == torch.bfloat16 else (7, 0))
    if not supported or len(bases) > MAX_BASES or not all(base in lanes.KINDS for base in bases):
        return False
    if missing:
        return blocks <= (unknown.MAX_BLOCKS if capability >= (8, 0) else unknown.MAX_BLOCKS // 2)
    most = MAX_DIMENSIONS if blocks == query.shape[-1] else 2 * MAX_DIMENSIONS
    return query.shape[-1] <= most and blocks <= MAX_DIMENSIONS


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
        return unknown.score(query, key, fold(weight, torch.float32), bases, widths).to(dtype or torch.float32)
    if query.shape[:2].numel() * max(query.shape[-2], key.shape[-2]) >= 2**31:  # indices have 32 bits
        return chunked.score(query, key, weight, bases, dtype, widths)
    out = torch.empty(*query.shape[:-1], key.shape[-2], dtype=dtype or torch.float32, device=query.device)
    if out.numel():
        lanes.score(query, key, weight.float(), tuple(bases), out, widths)
    return out


def score_backward(
    grad: Tensor,
    query: Tensor,
    key: Tensor,
    weight: Tensor,
    bases: Sequence[str],
    need: Need,
    widths: Tensor | None = None,
    missing: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    """Computes the gradients of :func:`score`; gradients that ``need`` excludes are empty tensors."""
    if query.numel() * key.numel() == 0 or missing or "near" in bases:
        return chunked.score_backward(grad, query, key, weight, bases, need, widths, missing)
    return lanes.score_backward(grad, query, key, weight.float(), tuple(bases), need)


def compile_ahead(query: Tensor, weight: Tensor, bases: tuple[str, ...], scores: torch.dtype) -> None:
    """Compiles the kernels of a training step with scores in a dtype."""
    if "near" not in bases:
        sizes = query.shape[-1], weight.shape[-1]
        lanes.compile_ahead(query.device, query.dtype, *sizes, bases, scores, weight.requires_grad)
