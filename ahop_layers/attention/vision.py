"""Adaptive forms of the attention modules of timm and transformers.

:mod:`ahop_layers.convert` combines each class of this file with the class that it makes adaptive: the submodules and
parameters are those of the original class, ``forward`` is defined here. Neither library is imported.
"""

from typing import Any

import torch
from einops import rearrange
from torch import Tensor, nn

from ahop_layers.association import Mask
from ahop_layers.attention.adaptive import Adaptive
from ahop_layers.errors import AHopError
from ahop_layers.ops.operators import has_hooks


def attend_mask(mask: Tensor | None, is_causal: bool) -> Mask | None:
    """Converts a mask of ``scaled_dot_product_attention``: True = attend, a float is added to the scores.

    With ``is_causal`` the result is the causal mask, whatever ``mask`` is.
    """
    if is_causal or mask is None:
        return Mask(causal=True) if is_causal else None
    return Mask(blocked=~mask) if mask.dtype == torch.bool else Mask(added=mask)


class TimmAttention(Adaptive):
    """Adaptive form of ``timm.layers.Attention``."""

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
        """Returns the number of heads and the dimension of one head."""
        return self.num_heads, self.head_dim

    def forward(self, x: Tensor, attn_mask: Tensor | None = None, is_causal: bool = False) -> Tensor:
        """Computes self-attention within ``x (N, L, dim)``."""
        query, key, value = rearrange(self.qkv(x), "n l (three h d) -> three n h l d", three=3, h=self.num_heads)
        query, key = self.q_norm(query), self.k_norm(key)
        mask, dropout = attend_mask(attn_mask, is_causal), self.attn_drop.p
        output, _ = self.associate(
            query, key, value, scaling=self.scale, mask=mask, dropout=dropout, need_weights=False
        )
        # Older releases have no norm, and only recent ones have a gate.
        norm, gate = getattr(self, "norm", None), getattr(self, "gate", None)
        output = output if norm is None else norm(output)
        output = output if gate is None else output * gate(x).sigmoid()
        projected: Tensor = self.proj_drop(self.proj(output))
        return projected


class TransformersAttention(Adaptive):
    """Adaptive form of an attention module of transformers; subclasses name its attributes.

    Attributes:
        projections: names of the query, key and value projections.
        out: name of the output projection, or None.
        heads: name of the number of heads.
        width: name of the dimension of one head.
        drop: name of the dropout module or probability.
    """

    projections: tuple[str, str, str]
    out: str | None
    heads: str
    width: str = "head_dim"
    drop: str

    def head_shape(self) -> tuple[int, int]:
        """Returns the number of heads and the dimension of one head."""
        return getattr(self, self.heads), getattr(self, self.width)

    def _attend(
        self, hidden_states: Tensor, attention_mask: Tensor | None, is_causal: bool, output_attentions: bool | None
    ) -> tuple[Tensor, Tensor | None]:
        heads, dim = self.head_shape()
        query, key, value = (
            rearrange(getattr(self, name)(hidden_states), "n l (h d) -> n h l d", h=heads) for name in self.projections
        )
        drop = getattr(self, self.drop)
        output, weights = self.associate(
            query,
            key,
            value,
            scaling=dim**-0.5,
            mask=attend_mask(attention_mask, is_causal and attention_mask is None),
            dropout=drop.p if isinstance(drop, nn.Dropout) else drop,
            need_weights=bool(output_attentions) or self._weights_requested(),
        )
        return output if self.out is None else getattr(self, self.out)(output), weights

    def _weights_requested(self) -> bool:
        """Returns whether the configuration of the model or a hook on this module asks for weights.

        The eager attention of transformers returns weights, as did the releases whose modules have no configuration.
        Models record attentions with a forward hook or, before transformers 5, by replacing ``forward``.
        """
        config = getattr(self, "config", None)
        eager = config is None or getattr(config, "_attn_implementation", None) == "eager"
        watched = has_hooks(self) or "forward" in self.__dict__
        return eager or bool(getattr(config, "output_attentions", False)) or watched


class ViTAttention(TransformersAttention):
    """Adaptive form of ``ViTAttention``, ``DeiTAttention`` and ``Dinov2Attention`` since transformers 5."""

    projections, out = ("q_proj", "k_proj", "v_proj"), "o_proj"
    heads, drop = "num_attention_heads", "attention_dropout"

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Tensor | None = None,
        is_causal: bool = False,
        output_attentions: bool | None = False,
        **_: Any,
    ) -> tuple[Tensor, Tensor | None]:
        """Computes self-attention within ``hidden_states (N, L, hidden)``; returns it with weights ``(N, H, L, L)``.

        The weights are None unless an argument, the configuration or a hook asks for them.
        """
        return self._attend(hidden_states, attention_mask, is_causal, output_attentions)


class CLIPAttention(TransformersAttention):
    """Adaptive form of ``CLIPAttention``, which has a separate causal mask before transformers 5."""

    projections, out = ("q_proj", "k_proj", "v_proj"), "out_proj"
    heads, drop = "num_heads", "dropout"

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Tensor | None = None,
        causal_attention_mask: Tensor | None = None,
        output_attentions: bool | None = False,
        is_causal: bool = False,
        **_: Any,
    ) -> tuple[Tensor, Tensor | None]:
        """Computes self-attention within ``hidden_states``; see :class:`ViTAttention`."""
        if attention_mask is None or causal_attention_mask is None:
            mask = causal_attention_mask if attention_mask is None else attention_mask
        else:
            mask = attention_mask + causal_attention_mask
        return self._attend(hidden_states, mask, is_causal, output_attentions)


class ViTSelfAttention(TransformersAttention):
    """Adaptive form of ``ViTSelfAttention``, ``DeiTSelfAttention``, ``Dinov2SelfAttention`` before transformers 5."""

    projections, out = ("query", "key", "value"), None
    heads, width = "num_attention_heads", "attention_head_size"

    @property
    def drop(self) -> str:  # type: ignore[override]
        """Name of the dropout probability; the oldest releases have a dropout module instead."""
        return "dropout_prob" if hasattr(self, "dropout_prob") else "dropout"

    def forward(
        self, hidden_states: Tensor, head_mask: Tensor | None = None, output_attentions: bool | None = False
    ) -> tuple[Tensor, Tensor | None]:
        """Computes self-attention within ``hidden_states``; see :class:`ViTAttention`."""
        if head_mask is not None:
            raise AHopError("head_mask must be None in an adapted model, got a mask")
        return self._attend(hidden_states, None, False, output_attentions)
