"""The interfaces of kernels: scores of all pairs, and attention without a tensor of all scores."""

from collections.abc import Sequence
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from ahop_layers.ops.chunked import Need
from ahop_layers.ops.reference import accumulation_dtype

AttendNeed = tuple[bool, bool, bool, bool]
"""Which gradients of attention are needed: of query, key, value and weight."""


class Kernel(Protocol):
    """Interface of a kernel module.

    Tensors have any strides. Weights are folded (see :func:`ahop_layers.ops.reference.fold`). Half-precision inputs
    are accumulated in float32.
    """

    def unavailable(self) -> str | None:
        """Returns the reason why this kernel cannot run in this process, or None if it can."""
        ...

    def detail(self) -> str:
        """Returns one line on how this kernel runs here."""
        ...

    def serves(self, query: Tensor, bases: Sequence[str], blocks: int) -> bool:
        """Returns whether the kernel supports ``query``'s device, dtype and d, the bases, and this number of blocks."""
        ...

    def score(
        self, query: Tensor, key: Tensor, weight: Tensor, bases: Sequence[str], dtype: torch.dtype | None = None
    ) -> Tensor:
        """Computes ``(N, H, L, d), (N, H, S, d), (H, n_bases, n) -> (N, H, L, S)`` for n consecutive blocks.

        ``dtype`` is that of the scores: the dtype of the query or, by default, at least float32.
        """
        ...

    def score_backward(
        self, grad: Tensor, query: Tensor, key: Tensor, weight: Tensor, bases: Sequence[str], need: Need
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Computes the gradients of query, key and weight; gradients that ``need`` excludes are empty tensors.

        ``grad`` may have any dtype that :meth:`score` returns.
        """
        ...


@runtime_checkable
class SoftmaxKernel(Protocol):
    """Interface of a kernel that computes softmax, and whose backward pass computes its weights from what it sorts."""

    def softmax(self, scores: Tensor, dtype: torch.dtype, masked: bool) -> tuple[Tensor, Tensor]:
        """Computes what :func:`ahop_layers.ops.sliced.softmax` does, from contiguous scores."""
        ...

    def softmax_backward(
        self,
        grad: Tensor,
        query: Tensor,
        key: Tensor,
        weight: Tensor,
        bases: Sequence[str],
        shift: Tensor,
        mean: Tensor | None,
        need: Need,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Computes what :meth:`Kernel.score_backward` does for the scores of a softmax.

        Args:
            grad: ``(N, H, L, S)`` in the accumulation dtype, contiguous: the gradient of the weights. The kernel
                overwrites it with the weights ``exp(score - shift)``.
            query, key, weight, bases, need: as in :meth:`Kernel.score_backward`.
            shift: expanded to ``(N, H, L, S)``, in the accumulation dtype: the log-sum-exp of each query minus the
                values added to its scores; infinite for a blocked pair.
            mean: ``(N, H, L, 1)`` in the accumulation dtype, or None: the sum of weights times ``grad``. The gradient
                of a score is its weight times ``grad - mean``.
        """
        ...


class Attention(Protocol):
    """Interface of an implementation of ``ahop::attend``.

    Tensors have the shapes and meanings that :mod:`ahop_layers.ops.attend` documents, with any strides; weights are
    not folded. The results of :func:`empty_results` show the dtype and memory layout of the results of :meth:`attend`.
    """

    def attend(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        weight: Tensor,
        bases: Sequence[str],
        mask: Tensor | None,
        causal: bool,
        dropout: float,
        seed: Tensor | None,
    ) -> tuple[Tensor, Tensor]:
        """Computes the readout and the logarithm of the sum of ``exp(score)`` of each query."""
        ...

    def attend_backward(
        self,
        grad: Tensor,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        weight: Tensor,
        bases: Sequence[str],
        mask: Tensor | None,
        causal: bool,
        dropout: float,
        seed: Tensor | None,
        out: Tensor,
        log_sum: Tensor,
        need: AttendNeed,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Computes the gradients of query, key, value and weight; those that ``need`` excludes are empty tensors.

        The gradients of query, key and value have the dtypes of these tensors and are contiguous.
        """
        ...


def empty_results(query: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    """Allocates the results of ``ahop::attend``: the readout ``(N, H, L, e)`` and the log-sum-exp ``(N, H, L)``.

    The readout has the dtype of ``value`` and the memory layout of a contiguous ``(N, L, H, e)``, so that layers
    concatenate its heads without a copy.
    """
    n, heads, length, _ = query.shape
    out = value.new_empty(n, length, heads, value.shape[-1]).transpose(1, 2)
    return out, query.new_empty(n, heads, length, dtype=accumulation_dtype(query.dtype))
