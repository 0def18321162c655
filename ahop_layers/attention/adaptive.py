"""AdaptiveAttention: ``nn.MultiheadAttention`` with a learned similarity, and what every adaptive attention shares."""

from collections.abc import Sequence
from typing import Any

import torch
from einops import rearrange
from torch import Tensor, nn
from torch.nn import functional

from ahop_layers.association import Mask, Padded, associate, combine_masks, dot_product
from ahop_layers.errors import AHopError, check_floating, describe
from ahop_layers.separation import Separation
from ahop_layers.similarity import AdaptiveSimilarity, Associator, add_warm_start


class Adaptive(Associator):
    """What turns an attention module into an adaptive one: inherit this first, and attend by :meth:`associate`.

    :func:`~ahop_layers.register_converter` has an example.

    Attributes:
        similarity: scores ``(N, H, L, d)`` against ``(N, H, S, d)``: an :class:`AdaptiveSimilarity`, any module with
            its shapes, or None for the dot product.
        separation: turns scores into weights. A hook on it sees the association matrix ``(N, H, L, S)``.
    """

    similarity: nn.Module | None
    separation: Separation

    def head_shape(self) -> tuple[int, int]:
        """The number of heads, and the dimension of each."""
        raise NotImplementedError

    def make_adaptive(
        self,
        bases: Sequence[str] = ("dis", "dot"),
        init: str | Tensor = "dot",
        debias: bool = False,
        separation: str | Separation = "softmax",
    ) -> None:
        """Add similarity and separation, where and in the precision that the module's own parameters have."""
        heads, dim = self.head_shape()
        like = next((p for p in self.parameters() if p.is_floating_point()), torch.empty(0))
        # A module that is not in training gets no part that is.
        self.similarity = AdaptiveSimilarity(dim, heads, bases, init, debias).to(like).train(self.training)
        separation = separation if isinstance(separation, Separation) else Separation(separation, heads)
        self.separation = separation.to(like).train(self.training)

    def associate(
        self, query: Tensor, key: Tensor, value: Tensor, *, scaling: float, mask: Mask | None, dropout: float
    ) -> tuple[Tensor, Tensor]:
        """From heads ``(N, H, L, d)``, ``(N, H, S, d)``, ``(N, H, S, e)`` to output ``(N, L, H * e)`` and weights."""
        output, weights = associate(
            query,
            Padded(key, value, mask),
            score=dot_product if self.similarity is None else self.similarity,
            separation=self.separation,
            scaling=scaling,
            dropout=dropout if self.training else 0.0,
        )
        return rearrange(output, "n h l e -> n l (h e)"), weights

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        """Take a checkpoint of the module that this one replaced."""
        add_warm_start(self, state_dict, prefix)
        super()._load_from_state_dict(state_dict, prefix, *args)


class AdaptiveAttention(Adaptive, nn.MultiheadAttention):
    """``nn.MultiheadAttention`` with a learned similarity.

    It takes every argument of ``nn.MultiheadAttention``, then by keyword ``bases``, ``init``, ``debias`` (see
    :class:`~ahop_layers.AdaptiveSimilarity`; every head has weights of its own) and ``separation``. With the default
    ``init="dot"`` it computes what ``nn.MultiheadAttention`` computes, and loads its checkpoints.

    It differs in that a query with every key masked reads zeros and not NaN, that ``is_causal`` without a mask makes
    the causal mask, that the two masks may be of different kinds, and that the weights it returns are those before
    dropout.

    Shapes: query ``(N, L, embed_dim)``, key ``(N, S, kdim)``, value ``(N, S, vdim)``, output ``(N, L, embed_dim)``,
    weights ``(N, L, S)``, or ``(N, H, L, S)`` with ``average_attn_weights=False``. ``batch_first=False``, the default
    of ``nn.MultiheadAttention``: N second. Without N, unbatched. Nested tensors in, nested tensor out.

    Raises:
        AHopError: an argument that does not fit.

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
        *, bases: Sequence[str] = ("dis", "dot"), init: str | Tensor = "dot", debias: bool = False,
        separation: str | Separation = "softmax",
    ) -> None:
        # fmt: on
        if not num_heads >= 1 or embed_dim < 1 or embed_dim % num_heads:
            raise AHopError(f"embed_dim must be a multiple of num_heads, got {embed_dim} and {num_heads}")
        if not 0 <= dropout <= 1:
            raise AHopError(f"dropout must be between 0 and 1, got {dropout!r}")
        super().__init__(
            embed_dim, num_heads, dropout, bias, add_bias_kv, add_zero_attn, kdim, vdim, batch_first, device, dtype
        )
        self.make_adaptive(bases, init, debias, separation)

    def head_shape(self) -> tuple[int, int]:
        """The number of heads, and the dimension of each."""
        return self.num_heads, self.head_dim

    def make_adaptive(self, *args: Any, **keywords: Any) -> None:
        """Add similarity and separation."""
        super().make_adaptive(*args, **keywords)
        # nn.TransformerEncoderLayer has a fast path in eval mode that reads the projections and never calls the
        # attention. It takes it only where this flag is set.
        self._qkv_same_embed_dim = False

    def _reset_parameters(self) -> None:
        """Draw the projections anew; the flag tells ``nn.MultiheadAttention`` which of them there are."""
        flag, self._qkv_same_embed_dim = self._qkv_same_embed_dim, self.in_proj_weight is not None
        super()._reset_parameters()
        self._qkv_same_embed_dim = flag

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = True,
        attn_mask: Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        """Attend; arguments and results are those of ``nn.MultiheadAttention``."""
        if query.is_nested:
            if key_padding_mask is not None:
                raise AHopError("a nested tensor has no padding, got one with a key_padding_mask")
            return self._forward_nested(query, key, value, need_weights, attn_mask, average_attn_weights, is_causal)
        check_floating(query=query, key=key, value=value)
        batched = query.ndim == 3
        if not batched:
            query, key, value = (x.unsqueeze(0) for x in (query, key, value))
            key_padding_mask = None if key_padding_mask is None else key_padding_mask.unsqueeze(0)
        elif not self.batch_first:
            query, key, value = (x.transpose(0, 1) for x in (query, key, value))
        self._check_shapes(query, key, value)
        q, k, v = self._project(query, key, value)
        shape = (q.shape[0], self.num_heads, q.shape[2], k.shape[2])
        if is_causal and attn_mask is None:
            attn_mask = torch.ones(shape[2:], dtype=torch.bool, device=q.device).triu(1)
        mask = combine_masks(key_padding_mask, attn_mask, shape, ("key_padding_mask", "attn_mask"))
        for more_k, more_v in self._more_keys():
            k, v = (torch.cat([x, more.expand(shape[0], -1, -1, -1)], 2) for x, more in ((k, more_k), (v, more_v)))
            mask = None if mask is None else mask.grow()
        output, weights = self.associate(q, k, v, scaling=self.head_dim**-0.5, mask=mask, dropout=self.dropout)
        output = self.out_proj(output)
        if not batched:
            output, weights = output.squeeze(0), weights.squeeze(0)
        elif not self.batch_first:
            output = output.transpose(0, 1)
        if not need_weights:
            return output, None
        return output, weights.mean(-3) if average_attn_weights else weights

    def _check_shapes(self, query: Tensor, key: Tensor, value: Tensor) -> None:
        """Raise unless the shapes are ``(N, L, embed_dim)``, ``(N, S, kdim)``, ``(N, S, vdim)``."""
        fits = all(
            x.ndim == 3 and x.shape[-1] == width
            for x, width in ((query, self.embed_dim), (key, self.kdim), (value, self.vdim))
        )
        if not fits or not query.shape[0] == key.shape[0] == value.shape[0] or key.shape[1] != value.shape[1]:
            got = ", ".join(describe(x) for x in (query, key, value))
            sizes = f"(N, L, {self.embed_dim}), (N, S, {self.kdim}), (N, S, {self.vdim})"
            raise AHopError(f"query, key and value must be {sizes}, batch first, got {got}")

    def _project(self, query: Tensor, key: Tensor, value: Tensor) -> list[Tensor]:
        joint: Tensor | None = self.in_proj_weight
        weights = (self.q_proj_weight, self.k_proj_weight, self.v_proj_weight) if joint is None else joint.chunk(3)
        biases = (None,) * 3 if self.in_proj_bias is None else self.in_proj_bias.chunk(3)
        if joint is not None and query is key and key is value:
            projected = functional.linear(query, joint, self.in_proj_bias).chunk(3, -1)
        else:
            projected = tuple(map(functional.linear, (query, key, value), weights, biases))
        return [rearrange(x, "n l (h d) -> n h l d", h=self.num_heads) for x in projected]

    def _more_keys(self) -> list[tuple[Tensor, Tensor]]:
        """Keys and values ``(1, H, 1, d)`` that every query may use besides those given."""
        more = []
        if self.bias_k is not None and self.bias_v is not None:
            more.append((self.bias_k, self.bias_v))
        if self.add_zero_attn:
            zero = self.out_proj.weight.new_zeros(1, 1, self.embed_dim)
            more.append((zero, zero))
        h = self.num_heads
        return [(rearrange(k, "1 1 (h d) -> 1 h 1 d", h=h), rearrange(v, "1 1 (h d) -> 1 h 1 d", h=h)) for k, v in more]

    def _forward_nested(
        self, query: Tensor, key: Tensor, value: Tensor, need_weights: bool, *rest: Any
    ) -> tuple[Tensor, Tensor | None]:
        """Attend within each sample of a nested tensor; a mask is as large as for the longest of them."""
        if query is not key or key is not value or not self.batch_first:
            raise AHopError("nested tensors need batch_first=True and one tensor as query, key and value")
        sizes = [len(sample) for sample in query.unbind()]
        padded = query.to_padded_tensor(0.0)
        place = torch.arange(padded.shape[1], device=padded.device)
        ignored = place >= torch.tensor(sizes, device=padded.device)[:, None]
        output, weights = self(padded, padded, padded, ignored, need_weights, *rest)
        rows = [row[:size] for row, size in zip(output, sizes, strict=True)]
        return torch.nested.as_nested_tensor(rows, layout=query.layout), weights
