"""AdaptiveAttention, ``nn.MultiheadAttention`` with a learned similarity, and Adaptive, the base of such modules."""

from collections.abc import Sequence
from typing import Any

import torch
from einops import rearrange
from torch import Tensor, nn
from torch.nn import functional

from ahop_layers.association import Mask, Padded, associate, combine_masks, hide
from ahop_layers.errors import AHopError, check_floating, check_numbers, check_sizes, describe
from ahop_layers.separation import Separation
from ahop_layers.similarity.adaptive import Init
from ahop_layers.similarity.associator import Associator
from ahop_layers.similarity.blocks import BlocksArgument
from ahop_layers.similarity.options import SimilarityOptions, SimilaritySource
from ahop_layers.similarity.protocol import dot_product


def attend_mask(mask: Tensor | None, is_causal: bool) -> Mask | None:
    """Converts the masks of ``scaled_dot_product_attention``: True = attend, a float is added to the scores."""
    if mask is None:
        return Mask(causal=True) if is_causal else None
    blocked, added = (~mask, None) if mask.dtype == torch.bool else (None, mask)
    return Mask(blocked, added, bool(is_causal))


class Adaptive(Associator):
    """Base class that makes an attention module adaptive.

    A subclass defines ``head_shape()`` and a ``forward`` that calls :meth:`associate`;
    :func:`~ahop_layers.register_converter` shows a complete example.

    Attributes:
        similarity: scores ``(N, H, L, d)`` against ``(N, H, S, d)``: an :class:`AdaptiveSimilarity`, any module with
            these shapes, or None for the dot product.
        separation: turns scores into weights. A forward hook on it receives the association matrix ``(N, H, L, S)``.

    >>> import ahop_layers as ah
    >>> attention = nn.MultiheadAttention(8, 2)
    >>> report = ah.adapt_(attention)
    >>> isinstance(attention, ah.Adaptive), attention.head_shape()
    (True, (2, 4))
    """

    similarity: nn.Module | None
    separation: Separation
    _added = ("similarity", "separation")

    def head_shape(self) -> tuple[int, int]:
        """Returns the number of heads and the dimension of one head."""
        raise NotImplementedError

    def make_adaptive(self, options: SimilarityOptions) -> None:
        """Adds the similarity and the separation, with the device, dtype and training mode of the module."""
        heads, dim = self.head_shape()
        self.add_parts(options.make_similarity(dim, heads), options.make_separation(heads))

    def add_parts(self, similarity: nn.Module, separation: Separation, dtype_source: Tensor | None = None) -> None:
        """Adds both; ``dtype_source`` has the device and dtype for a module without parameters."""
        default = torch.empty(0) if dtype_source is None else dtype_source
        own = next((p for p in self.parameters() if p.is_floating_point()), default)
        self.similarity = similarity.to(own).train(self.training)
        self.separation = separation.to(own).train(self.training)

    def associate(
        self, query: Tensor, key: Tensor, value: Tensor, *, scaling: float, mask: Mask | None, dropout: float,
        need_weights: bool = True,
    ) -> tuple[Tensor, Any]:  # fmt: skip
        """Attends with the module's similarity and separation, and drops weights in training mode.

        See :func:`ahop_layers.association.associate` and :class:`~ahop_layers.association.Padded` for the arguments.
        Returns the output ``(N, L, H * e)``, and the weights ``(N, H, L, S)`` or, if they are not needed, None.
        """
        output, weights = associate(
            query, Padded(key, value, mask), score=dot_product if self.similarity is None else self.similarity,
            separation=self.separation, scaling=scaling, dropout=dropout if self.training else 0.0,
            need_weights=need_weights,
        )  # fmt: skip
        return output.transpose(1, 2).flatten(2), weights


class AdaptiveAttention(Adaptive, nn.MultiheadAttention):
    """``nn.MultiheadAttention`` with a learned similarity.

    With the default ``init="dot"`` it computes the same function as ``nn.MultiheadAttention`` until it is trained, and
    it loads state dicts of ``nn.MultiheadAttention``.

    It differs in four ways: the output of a fully masked query is zero instead of NaN; ``is_causal=True`` without
    ``attn_mask`` applies the causal mask; the two masks may have different dtypes; weights are returned before
    dropout.

    Args:
        embed_dim, num_heads, dropout, bias, add_bias_kv, add_zero_attn, kdim, vdim, batch_first, device, dtype: see
            ``nn.MultiheadAttention``.
        bases, init, debias, blocks, separation, similarity: see :class:`~ahop_layers.AdaptiveHopfield`.

    Shapes: query and output ``(N, L, embed_dim)``, key ``(N, S, kdim)``, value ``(N, S, vdim)``, weights ``(N, L, S)``,
    or ``(N, H, L, S)`` with ``average_attn_weights=False``. With ``batch_first=False``, the default, N is the second
    dimension. Unbatched inputs have no N. Nested inputs give a nested output. Masks are bool, True = ignore, or added.

    >>> import ahop_layers as ah
    >>> attention = ah.AdaptiveAttention(8, num_heads=2, batch_first=True)
    >>> x = torch.randn(3, 5, 8)
    >>> output, weights = attention(x, x, x)
    >>> output.shape, weights.shape
    (torch.Size([3, 5, 8]), torch.Size([3, 5, 5]))
    """

    # fmt: off
    def __init__(
        self, embed_dim: int, num_heads: int, dropout: float = 0.0, bias: bool = True, add_bias_kv: bool = False,
        add_zero_attn: bool = False, kdim: int | None = None, vdim: int | None = None, batch_first: bool = False,
        device: torch.device | str | None = None, dtype: torch.dtype | None = None,
        *, bases: Sequence[str] | None = None, init: Init | None = None, debias: bool = False,
        separation: str | Separation = "softmax", similarity: SimilaritySource | None = None,
        blocks: BlocksArgument = "auto",
    ) -> None:
        # fmt: on
        check_sizes(embed_dim=embed_dim, num_heads=num_heads)
        if embed_dim % num_heads:
            raise AHopError(f"embed_dim must be a multiple of num_heads, got {embed_dim} and {num_heads}")
        check_numbers("a number between 0 and 1", dropout=dropout)
        super().__init__(
            embed_dim, num_heads, dropout, bias, add_bias_kv, add_zero_attn, kdim, vdim, batch_first, device, dtype
        )
        self.make_adaptive(SimilarityOptions(bases, init, debias, separation, similarity, blocks))

    def head_shape(self) -> tuple[int, int]:
        """Returns the number of heads and the dimension of one head."""
        return self.num_heads, self.head_dim

    def make_adaptive(self, options: SimilarityOptions) -> None:
        """Adds the similarity and the separation; see :meth:`Adaptive.make_adaptive`."""
        super().make_adaptive(options)
        # With this flag nn.TransformerEncoderLayer has a fast path in eval mode that never calls the attention module.
        self._qkv_same_embed_dim = False

    def _reset_parameters(self) -> None:
        # The base class reads from this flag which projections exist.
        flag, self._qkv_same_embed_dim = self._qkv_same_embed_dim, self.in_proj_weight is not None
        super()._reset_parameters()
        self._qkv_same_embed_dim = flag

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, key_padding_mask: Tensor | None = None,
        need_weights: bool = True, attn_mask: Tensor | None = None, average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> tuple[Tensor, Tensor | None]:  # fmt: skip
        """Attends, with the arguments and results of ``nn.MultiheadAttention``: the output, and weights or None.

        Without weights, attention takes less time and memory. With an ``attn_mask``, ``is_causal`` is only a hint.
        """
        check_floating(query=query, key=key, value=value)
        if query.is_nested:
            if key_padding_mask is not None:
                raise AHopError("key_padding_mask must be None for nested tensors, got a mask")
            return self._forward_nested(query, key, value, need_weights, attn_mask, average_attn_weights, is_causal)
        batched = query.ndim == 3
        if not batched:
            query, key, value = (x.unsqueeze(0) for x in (query, key, value))
            key_padding_mask = None if key_padding_mask is None else key_padding_mask.unsqueeze(0)
        elif not self.batch_first:
            query, key, value = (x.transpose(0, 1) for x in (query, key, value))
        self._check_shapes(query, key, value)
        q, k, v = self._project(query, *hide(key_padding_mask, key, value))
        shape = (q.shape[0], self.num_heads, q.shape[2], k.shape[2])
        mask = combine_masks(key_padding_mask, attn_mask, shape, ("key_padding_mask", "attn_mask"))
        if is_causal and attn_mask is None:
            mask = (mask or Mask())._replace(causal=True)
        for extra_k, extra_v in self._extra_keys():
            mask = None if mask is None else mask.grow(q, k)
            k, v = (torch.cat([x, extra.expand(shape[0], -1, -1, -1)], 2) for x, extra in ((k, extra_k), (v, extra_v)))
        output, weights = self.associate(
            q, k, v, scaling=self.head_dim**-0.5, mask=mask, dropout=self.dropout, need_weights=need_weights
        )
        output = self.out_proj(output)
        if not batched:
            output = output.squeeze(0)
        elif not self.batch_first:
            output = output.transpose(0, 1)
        if not need_weights:
            return output, None
        weights = weights if batched else weights.squeeze(0)
        return output, weights.mean(-3) if average_attn_weights else weights

    def _check_shapes(self, query: Tensor, key: Tensor, value: Tensor) -> None:
        """Raises unless the shapes are ``(N, L, embed_dim)``, ``(N, S, kdim)``, ``(N, S, vdim)``."""
        widths = ((query, self.embed_dim), (key, self.kdim), (value, self.vdim))
        fits = all(x.ndim == 3 and x.shape[-1] == width for x, width in widths)
        if not fits or not query.shape[0] == key.shape[0] == value.shape[0] or key.shape[1] != value.shape[1]:
            got = ", ".join(describe(x) for x in (query, key, value))
            sizes = f"(N, L, {self.embed_dim}), (N, S, {self.kdim}), (N, S, {self.vdim})"
            raise AHopError(f"query, key and value must have the shapes {sizes} with the batch first, got {got}")

    def _project(self, query: Tensor, key: Tensor, value: Tensor) -> list[Tensor]:
        joint: Tensor | None = self.in_proj_weight
        weights = (self.q_proj_weight, self.k_proj_weight, self.v_proj_weight) if joint is None else joint.chunk(3)
        biases = (None,) * 3 if self.in_proj_bias is None else self.in_proj_bias.chunk(3)
        if joint is not None and query is key and key is value:
            projected = functional.linear(query, joint, self.in_proj_bias).chunk(3, -1)
        else:
            projected = tuple(map(functional.linear, (query, key, value), weights, biases))
        return [rearrange(x, "n l (h d) -> n h l d", h=self.num_heads) for x in projected]

    def _extra_keys(self) -> list[tuple[Tensor, Tensor]]:
        """Keys and values ``(1, H, 1, d)`` that ``add_bias_kv`` and ``add_zero_attn`` append to every sequence."""
        extra = [] if self.bias_k is None or self.bias_v is None else [(self.bias_k, self.bias_v)]
        extra += [(self.out_proj.weight.new_zeros(1, 1, self.embed_dim),) * 2] if self.add_zero_attn else []
        pattern, h = "1 1 (h d) -> 1 h 1 d", self.num_heads
        return [(rearrange(k, pattern, h=h), rearrange(v, pattern, h=h)) for k, v in extra]

    def _forward_nested(
        self, query: Tensor, key: Tensor, value: Tensor, need_weights: bool, *rest: Any
    ) -> tuple[Tensor, Tensor | None]:
        """Attends within each sample of a nested tensor; ``attn_mask`` has the size of the longest sample."""
        if query is not key or key is not value or not self.batch_first:
            raise AHopError(
                f"nested tensors need batch_first=True and the same tensor as query, key and value, got"
                f" batch_first={self.batch_first} and {len({id(query), id(key), id(value)})} tensors"
            )
        sizes = [len(sample) for sample in query.unbind()]
        padded = query.to_padded_tensor(0.0)
        position = torch.arange(padded.shape[1], device=padded.device)
        ignored = position >= torch.tensor(sizes, device=padded.device)[:, None]
        output, weights = self(padded, padded, padded, ignored, need_weights, *rest)
        rows = [row[:size] for row, size in zip(output, sizes, strict=True)]
        return torch.nested.as_nested_tensor(rows, layout=query.layout), weights
