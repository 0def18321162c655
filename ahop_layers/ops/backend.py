"""The table of kernels and the choice of one for a call."""

import warnings
from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

from torch import Tensor

from ahop_layers.errors import AHopError
from ahop_layers.ops import chunked, cpu
from ahop_layers.ops.gpu import attend as fused
from ahop_layers.ops.gpu import launch as gpu
from ahop_layers.ops.protocols import Attention, AttentionCall, KernelModule
from ahop_layers.ops.sliced import Sliced


class Status(NamedTuple):
    """Whether a backend is available, and how it runs or why it cannot."""

    available: bool
    detail: str


KERNELS: dict[str, KernelModule] = {"chunked": chunked, "cpu": cpu, "cuda": gpu}
BACKENDS = ("reference", *KERNELS)


def backends() -> dict[str, Status]:
    """Returns the status of each backend of :func:`ahop_layers.adaptive_similarity` by name.

    ``available`` says whether it can be used, and ``detail`` how it runs or why it cannot.

    >>> import ahop_layers as ah
    >>> ah.backends()["reference"]
    Status(available=True, detail='plain PyTorch, any device')
    """
    statuses = {"reference": Status(True, "plain PyTorch, any device")}
    for name, module in KERNELS.items():
        reason = module.unavailable()
        statuses[name] = Status(reason is None, reason or module.detail())
    return statuses


def choose_kernel(
    backend: str, query: Tensor, bases: Sequence[str], blocks: int, missing: bool = False
) -> KernelModule:
    """Returns the kernel named ``backend``, or for ``"auto"`` the fastest one that supports the call."""
    if backend == "auto":
        device = query.device.type
        fastest = KERNELS.get(device)
        if fastest is not None and fastest.unavailable() is None and fastest.serves(query, bases, blocks, missing):
            return fastest
        if device == "cuda" and gpu.unavailable() is not None:
            _warn_slow_gpu()
        return chunked
    module = KERNELS[backend]
    reason = module.unavailable()
    if reason is not None:
        raise AHopError(f"backend={backend!r} is not available here: {reason}")
    if not module.serves(query, bases, blocks, missing):
        sizes = f"d = {query.shape[-1]}, {blocks} blocks"
        got = f"{query.dtype} on {query.device.type} with {sizes} and bases {', '.join(bases)}"
        got += " and missing values" if missing else ""
        raise AHopError(f"backend={backend!r} does not support {got}")
    return module


def choose_attention(backend: str, call: AttentionCall) -> Attention:
    """Returns the implementation of ``ahop::attend`` for a call: fused, or on top of the kernel ``backend`` names."""
    kernel = choose_kernel(backend, call.query, call.bases, call.weight.shape[-1])
    return fused.plan(call) if kernel is gpu and fused.serves(call) else Sliced(kernel)


@lru_cache(maxsize=None)  # once per process
def _warn_slow_gpu() -> None:
    warnings.warn(f"the GPU kernel is not available and scores are slow: {gpu.unavailable()}", stacklevel=2)
