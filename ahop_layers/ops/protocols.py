"""The interfaces of kernels: scores of all pairs, and attention without a tensor of all scores."""

from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from ahop_layers.ops.reference import accumulation_dtype

Need = tuple[bool, bool, bool]
"""Whether the gradients of query, key and weight are needed."""


def allocate_grads(tensors: Sequence[Tensor], need: Sequence[bool], dtype: torch.dtype | None = None) -> list[Tensor]:
    """Allocates contiguous gradients of tensors in a dtype, by default their own; empty ones if they are not needed."""
    return [x.new_empty(x.shape if wanted else 0, dtype=dtype) for x, wanted in zip(tensors, need, strict=True)]


class KernelModule(Protocol):
    """A kernel module has the functions of :mod:`ahop_layers.ops.chunked`; ``compile_ahead`` is optional."""

    unavailable: Callable[[], str | None]
    detail: Callable[[], str]
    serves: Callable[..., bool]
    score: Callable[..., Tensor]
    score_backward: Callable[..., tuple[Tensor, Tensor, Tensor]]


class AttentionCall(NamedTuple):
    """The inputs of ``ahop::attend``, in the order of its schema.

    Hk divides H, and query head h uses key head ``h // (H // Hk)``. ``value`` has the dtype of ``query``, or is half
    precision beside a float32 query. A mask of 4 dimensions broadcasts to ``(N, H, L, S)`` and gets no gradient: True
    blocks a pair, and a float is added to its score.
    """

    query: Tensor  # (N, H, L, d)
    key: Tensor  # (N, Hk, S, d)
    value: Tensor  # (N, Hk, S, e)
    weight: Tensor  # (H, n_bases, n), with beta and scaling the weights of ``ahop::score``
    mask: Tensor | None = None
    seed: Tensor | None = None  # int64 (1,), from which ops/dropout.py derives what to drop; None without dropout
    bases: tuple[str, ...] = ()
    causal: bool = False  # whether to block every key j > i of query i
    dropout: float = 0.0  # probability of dropping a weight
    beta: Tensor | None = None  # (H, n_bases)
    scaling: float = 1.0

    def combined(self) -> "AttentionCall":
        """Returns the same call with one tensor of weights."""
        weight = self.weight if self.beta is None else self.weight * self.beta.unsqueeze(-1)
        return self._replace(weight=weight if self.scaling == 1 else weight * self.scaling, beta=None, scaling=1.0)

    def weight_grads(self, grad: Tensor) -> tuple[Tensor, Tensor]:
        """Computes the gradients of weight and beta, empty if it is None, from the gradient of the combined weight."""
        grad = grad if self.scaling == 1 else grad * self.scaling
        if self.beta is None:
            return grad, grad.new_empty(0)
        return grad * self.beta.unsqueeze(-1), (grad * self.weight).sum(-1)

    def empty_results(self) -> tuple[Tensor, Tensor]:
        """Allocates the results: the readout ``(N, H, L, e)`` and the log-sum-exp of the scores ``(N, H, L)``.

        The readout has the dtype of ``value`` and the memory layout of a contiguous ``(N, L, H, e)``, so that layers
        concatenate its heads without a copy.
        """
        (n, heads, length, _), width = self.query.shape, self.value.shape[-1]
        strides = length * heads * width, width, heads * width, 1
        out = self.value.new_empty_strided((n, heads, length, width), strides)
        return out, self.query.new_empty(n, heads, length, dtype=accumulation_dtype(self.query.dtype))


class Attention(Protocol):
    """Interface of an implementation of ``ahop::attend``; tensors have any strides, and weights are not folded."""

    def forward(self, call: AttentionCall) -> tuple[Tensor, Tensor]:
        """Computes what :meth:`AttentionCall.empty_results` allocates."""

    def backward(
        self, call: AttentionCall, grad: Tensor, out: Tensor, log_sum: Tensor, need: Sequence[bool]
    ) -> tuple[Tensor, ...]:
        """Computes contiguous gradients of query, key, value, weight and beta; empty ones where ``need`` is False."""
