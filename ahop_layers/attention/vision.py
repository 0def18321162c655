"""Adaptive forms of the attention modules of timm and transformers.

:mod:`ahop_layers.convert` combines each class of this file with the class that it makes adaptive: the original class
has the submodules and parameters, ``forward`` is defined here. Neither library is imported.
"""

from typing import Any

from einops import rearrange
from torch import Tensor

from ahop_layers.attention.adaptive import Adaptive, attend_mask
from ahop_layers.errors import AHopError
from ahop_layers.ops.operators import has_hooks


class TimmAttention(Adaptive):
    """Adaptive form of ``timm.layers.Attention``."""

    num_heads: int
    head_dim: int

    def head_shape(self) -> tuple[int, int]:
        """Returns the number of heads and the dimension of one head."""
        return self.num_heads, self.head_dim

    def forward(self, x: Tensor, attn_mask: Tensor | None = None, is_causal: bool = False) -> Tensor:
        """Computes self-attention within ``x (N, L, dim)``; the causal mask replaces a given one."""
        own: Any = self  # with the attributes of timm's class
        query, key, value = own.qkv(x).unflatten(-1, (3, self.num_heads, -1)).permute(2, 0, 3, 1, 4).unbind(0)
        query, key, scale, drop = own.q_norm(query), own.k_norm(key), own.scale, own.attn_drop.p
        mask = attend_mask(None if is_causal else attn_mask, is_causal)
        output, _ = self.associate(query, key, value, scaling=scale, mask=mask, dropout=drop, need_weights=False)
        # Older releases have no norm, and only recent ones have a gate.
        norm, gate = getattr(self, "norm", None), getattr(self, "gate", None)
        output = output if norm is None else norm(output)
        output = output if gate is None else output * gate(x).sigmoid()
        return own.proj_drop(own.proj(output))


class CLIPAttention(Adaptive):
    """Adaptive form of ``CLIPAttention`` of transformers; a subclass names the attributes of other classes."""

    projections: tuple[str, str, str] = ("q_proj", "k_proj", "v_proj")
    out: str | None = "out_proj"
    heads, width, drop = "num_heads", "head_dim", "dropout"

    def head_shape(self) -> tuple[int, int]:
        """Returns the number of heads and the dimension of one head."""
        return getattr(self, self.heads), getattr(self, self.width)

    def forward(
        self, hidden_states: Tensor, attention_mask: Tensor | None = None, causal_attention_mask: Tensor | None = None,
        output_attentions: bool | None = False, is_causal: bool = False, **_: Any,
    ) -> tuple[Tensor, Tensor | None]:  # fmt: skip
        """Computes self-attention within ``hidden_states (N, L, hidden)``; returns it with weights ``(N, H, L, L)``.

        The weights are None unless an argument, the configuration or a hook asks for them; the eager attention of
        transformers returns them. Before transformers 5, the causal mask is separate.
        """
        config: Any = self.config
        given = [mask for mask in (attention_mask, causal_attention_mask) if mask is not None]
        heads, dim = self.head_shape()
        query, key, value = (
            rearrange(getattr(self, name)(hidden_states), "n l (h d) -> n h l d", h=heads) for name in self.projections
        )
        mask = attend_mask(sum(given[1:], given[0]) if given else None, is_causal and not given)
        # Models record attentions with a forward hook or, before transformers 5, by replacing ``forward``.
        watched = has_hooks(self) or "forward" in vars(self)
        wanted = output_attentions or config.output_attentions or config._attn_implementation == "eager"
        output, weights = self.associate(
            query, key, value, scaling=dim**-0.5, mask=mask, dropout=getattr(self, self.drop),
            need_weights=bool(wanted or watched),
        )  # fmt: skip
        return output if self.out is None else getattr(self, self.out)(output), weights


class ViTAttention(CLIPAttention):
    """Adaptive form of ``ViTAttention``, ``DeiTAttention`` and ``Dinov2Attention`` of transformers."""

    heads, out, drop = "num_attention_heads", "o_proj", "attention_dropout"


class ViTSelfAttention(CLIPAttention):
    """Adaptive form of ``ViTSelfAttention``, ``DeiTSelfAttention``, ``Dinov2SelfAttention`` of earlier releases."""

    projections, out = ("query", "key", "value"), None
    heads, width, drop = "num_attention_heads", "attention_head_size", "dropout_prob"

    def forward(  # type: ignore[override]
        self, hidden_states: Tensor, head_mask: Tensor | None = None, output_attentions: bool | None = False, **_: Any
    ) -> tuple[Tensor, Tensor | None]:
        """Computes self-attention within ``hidden_states``; see :class:`CLIPAttention`."""
        if head_mask is not None:
            raise AHopError("head_mask must be None in an adapted model, got a mask")
        return super().forward(hidden_states, output_attentions=output_attentions)
