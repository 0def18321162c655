"""Attention modules of timm and transformers, made adaptive.

Each class here is combined with the class it makes adaptive (see :mod:`ahop_layers.convert`): the parts and their names
stay those of the other library, only ``forward`` is ours. So neither library is imported here.
"""

from typing import Any

import torch
from einops import rearrange
from torch import Tensor, nn

from ahop_layers.association import Mask
from ahop_layers.attention.adaptive import Adaptive
from ahop_layers.errors import AHopError


def attend_mask(mask: Tensor | None, is_causal: bool, query: Tensor, key: Tensor) -> Mask | None:
    """Read a mask as ``scaled_dot_product_attention`` does: True = attend, a float is added, causal wins."""
    if is_causal:
        shape = (query.shape[-2], key.shape[-2])
        return Mask(blocked=torch.ones(shape, dtype=torch.bool, device=query.device).triu(1))
    if mask is None:
        return None
    return Mask(blocked=~mask) if mask.dtype == torch.bool else Mask(added=mask)


class TimmAttention(Adaptive):
    """``timm.layers.Attention``."""

    num_heads: int
    head_dim: int
    scale: float
    qkv: nn.Module
    q_norm: nn.Module
    k_norm: nn.Module
    attn_drop: nn.Dropout
    proj: nn.Module
    proj_drop: nn.Module

    def head_shape(self) -> tuple[int, int]:
        """The number of heads, and the dimension of each."""
        return self.num_heads, self.head_dim

    def forward(self, x: Tensor, attn_mask: Tensor | None = None, is_causal: bool = False) -> Tensor:
        """Attend within ``x (N, L, dim)``."""
        query, key, value = rearrange(self.qkv(x), "n l (three h d) -> three n h l d", three=3, h=self.num_heads)
        query, key = self.q_norm(query), self.k_norm(key)
        mask = attend_mask(attn_mask, is_causal, query, key)
        output, _ = self.associate(query, key, value, scaling=self.scale, mask=mask, dropout=self.attn_drop.p)
        # Older releases have no norm here, and only the newest know a gate.
        norm, gate = getattr(self, "norm", None), getattr(self, "gate", None)
        output = output if norm is None else norm(output)
        output = output if gate is None else output * gate(x).sigmoid()
        projected: Tensor = self.proj_drop(self.proj(output))
        return projected


class TransformersAttention(Adaptive):
    """Attention of the ViT family in transformers; subclasses say what its parts are called."""

    projections: tuple[str, str, str]
    out: str | None
    heads: str
    width: str = "head_dim"
    drop: str

    def head_shape(self) -> tuple[int, int]:
        """The number of heads, and the dimension of each."""
        return getattr(self, self.heads), getattr(self, self.width)

    def _attend(self, hidden_states: Tensor, attention_mask: Tensor | None, is_causal: bool) -> tuple[Tensor, Tensor]:
        heads, dim = self.head_shape()
        query, key, value = (
            rearrange(getattr(self, name)(hidden_states), "n l (h d) -> n h l d", h=heads) for name in self.projections
        )
        mask = attend_mask(attention_mask, is_causal and attention_mask is None, query, key)
        drop = getattr(self, self.drop)
        dropout = drop.p if isinstance(drop, nn.Dropout) else drop
        output, weights = self.associate(query, key, value, scaling=dim**-0.5, mask=mask, dropout=dropout)
        return output if self.out is None else getattr(self, self.out)(output), weights


class ViTAttention(TransformersAttention):
    """``ViTAttention``, ``DeiTAttention``, ``Dinov2Attention`` since transformers 5."""

    projections, out = ("q_proj", "k_proj", "v_proj"), "o_proj"
    heads, drop = "num_attention_heads", "attention_dropout"

    def forward(
        self, hidden_states: Tensor, attention_mask: Tensor | None = None, is_causal: bool = False, **_: Any
    ) -> tuple[Tensor, Tensor]:
        """Attend within ``hidden_states (N, L, hidden)``; output and weights ``(N, H, L, L)``."""
        return self._attend(hidden_states, attention_mask, is_causal)


class CLIPAttention(TransformersAttention):
    """``CLIPAttention``, which before transformers 5 took a causal mask of its own."""

    projections, out = ("q_proj", "k_proj", "v_proj"), "out_proj"
    heads, drop = "num_heads", "dropout"

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Tensor | None = None,
        causal_attention_mask: Tensor | None = None,
        output_attentions: bool = False,
        is_causal: bool = False,
        **_: Any,
    ) -> tuple[Tensor, Tensor]:
        """Attend within ``hidden_states (N, L, hidden)``; output and weights ``(N, H, L, L)``."""
        if attention_mask is None or causal_attention_mask is None:
            mask = causal_attention_mask if attention_mask is None else attention_mask
        else:
            mask = attention_mask + causal_attention_mask
        return self._attend(hidden_states, mask, is_causal)


class ViTSelfAttention(TransformersAttention):
    """``ViTSelfAttention``, ``DeiTSelfAttention``, ``Dinov2SelfAttention`` before transformers 5, and their kin."""

    projections, out = ("query", "key", "value"), None
    heads, width = "num_attention_heads", "attention_head_size"

    @property
    def drop(self) -> str:  # type: ignore[override]
        """The probability, in the oldest releases the module."""
        return "dropout_prob" if hasattr(self, "dropout_prob") else "dropout"

    def forward(
        self, hidden_states: Tensor, head_mask: Tensor | None = None, output_attentions: bool = False
    ) -> tuple[Tensor, Tensor]:
        """Attend within ``hidden_states (N, L, hidden)``; output and weights ``(N, H, L, L)``."""
        if head_mask is not None:
            raise AHopError("head_mask must be None in an adapted model, got a mask")
        return self._attend(hidden_states, None, False)
