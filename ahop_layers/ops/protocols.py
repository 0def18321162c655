"""The interfaces of kernels: scores of all pairs, and attention without a tensor of all scores."""

from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

from torch import Tensor

from ahop_layers.ops.reference import accumulation_dtype


class Kernel(Protocol):
    """A kernel module has the functions of :mod:`ahop_layers.ops.chunked`; ``softmax`` as in ``sliced`` is optional."""

    unavailable: Callable[[], str | None]
    detail: Callable[[], str]
    serves: Callable[..., bool]
    score: Callable[..., Tensor]
    score_backward: Callable[..., tuple[Tensor, Tensor, Tensor]]


class AttentionCall(NamedTuple):
    """The inputs of ``ahop::attend``, in the order of its schema.

    Attributes:
        query, key, value: ``(N, H, L, d)``, ``(N, Hk, S, d)`` and ``(N, Hk, S, e)``. Hk divides H, and query head h
            uses key head ``h // (H // Hk)``. ``value`` has the dtype of ``query``, or is half precision beside a
            float32 query.
        weight: ``(H, n_bases, n)``, the weights of ``ahop::score``, multiplied by the scaling of the scores.
        mask: None, or a tensor of 4 dimensions that broadcasts to ``(N, H, L, S)``: bool, where True blocks a pair, or
            floating point, which is added to the scores. It gets no gradient.
        seed: None without dropout, else the int64 tensor ``(1,)`` that :mod:`ahop_layers.ops.dropout` derives the
            dropped weights from.
        bases: names of the base similarities.
        causal: whether to block every key j > i of query i.
        dropout: the probability of dropping a weight.
    """

    query: Tensor
    key: Tensor
    value: Tensor
    weight: Tensor
    mask: Tensor | None = None
    seed: Tensor | None = None
    bases: tuple[str, ...] = ()
    causal: bool = False
    dropout: float = 0.0

    def empty_results(self) -> tuple[Tensor, Tensor]:
        """Allocates the results: the readout ``(N, H, L, e)`` and the log-sum-exp of the scores ``(N, H, L)``.

        The readout has the dtype of ``value`` and the memory layout of a contiguous ``(N, L, H, e)``, so that layers
        concatenate its heads without a copy.
        """
        n, heads, length, _ = self.query.shape
        out = self.value.new_empty(n, length, heads, self.value.shape[-1]).transpose(1, 2)
        return out, self.query.new_empty(n, heads, length, dtype=accumulation_dtype(self.query.dtype))


class Attention(Protocol):
    """Interface of an implementation of ``ahop::attend``; tensors have any strides, and weights are not folded."""

    def forward(self, call: AttentionCall) -> tuple[Tensor, Tensor]:
        """Computes what :meth:`AttentionCall.empty_results` allocates."""

    def backward(
        self, call: AttentionCall, grad: Tensor, out: Tensor, log_sum: Tensor, need: Sequence[bool]
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Computes contiguous gradients of query, key, value and weight; those that ``need`` excludes are empty."""
