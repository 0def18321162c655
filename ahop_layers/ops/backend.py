"""Which kernel runs where: the table of backends, and the choice among them."""

import warnings
from collections.abc import Sequence
from functools import lru_cache
from types import ModuleType
from typing import NamedTuple, Protocol, cast

from torch import Tensor

from ahop_layers.errors import AHopError
from ahop_layers.ops import chunked, cpu
from ahop_layers.ops.chunked import Need
from ahop_layers.ops.gpu import launch as gpu


class Kernel(Protocol):
    """What a kernel module provides, in the form :mod:`ahop_layers.ops.chunked` describes."""

    def score(self, query: Tensor, key: Tensor, weight: Tensor, bases: Sequence[str]) -> Tensor:
        """(N, H, L, d), (N, H, S, d), folded (H, n_bases, d) -> (N, H, L, S)."""
        ...

    def score_backward(
        self, grad: Tensor, query: Tensor, key: Tensor, weight: Tensor, bases: Sequence[str], need: Need
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Gradients of query, key and weight; those that ``need`` does not ask for are empty."""
        ...


class Status(NamedTuple):
    """Whether a backend can run here, and how, or why not."""

    available: bool
    detail: str


KERNELS: dict[str, ModuleType] = {"chunked": chunked, "cpu": cpu, "triton": gpu}
BACKENDS = ("reference", *KERNELS)


def backends() -> dict[str, Status]:
    """The backends of :func:`ahop_layers.adaptive_similarity`: which can run here, and why not.

    Returns:
        For the name of each backend whether it is ``available``, and in ``detail`` how it runs or why it cannot.

    >>> import ahop_layers as ah
    >>> ah.backends()["reference"]
    Status(available=True, detail='plain PyTorch, any device')
    """
    return {
        "reference": Status(True, "plain PyTorch, any device"),
        "chunked": Status(True, "plain PyTorch in blocks of bounded memory, any device"),
        "cpu": Status(cpu.unavailable() is None, cpu.unavailable() or cpu.detail()),
        "triton": Status(gpu.unavailable() is None, gpu.unavailable() or gpu.detail()),
    }


def kernel(backend: str, query: Tensor) -> Kernel:
    """The kernel that ``backend`` names for the device of ``query``."""
    if backend == "auto":
        return cast(Kernel, _fastest(query))
    module = KERNELS[backend]
    if module is not chunked:
        reason = module.unavailable()
        if reason is not None:
            raise AHopError(f"backend={backend!r} is not available here: {reason}")
        if not module.serves(query):
            got = f"{query.dtype} on {query.device.type} with d = {query.shape[-1]}"
            raise AHopError(f"backend={backend!r} does not take {got}")
    return cast(Kernel, module)


def _fastest(query: Tensor) -> ModuleType:
    device = query.device.type
    module = {"cpu": cpu, "cuda": gpu}.get(device)
    if module is not None and module.unavailable() is None and module.serves(query):
        return module
    if device == "cuda" and gpu.unavailable() is not None:
        _warn_slow_gpu()
    return chunked


@lru_cache(maxsize=None)  # once in a process
def _warn_slow_gpu() -> None:
    warnings.warn(f"scoring on a GPU without its kernel, which is much slower: {gpu.unavailable()}", stacklevel=2)
