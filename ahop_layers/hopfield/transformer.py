"""HopfieldEncoderLayer and HopfieldDecoderLayer: transformer layers whose attention is a Hopfield layer."""

from copy import deepcopy
from typing import Any

import torch
from torch import Tensor, nn

from ahop_layers.errors import AHopError, check_module
from ahop_layers.hopfield.layers import HopfieldInterface, Patterns, reads
from ahop_layers.similarity.associator import reset


def _associate(association: Any, input: Patterns, padding: Tensor | None, mask: Tensor | None, causal: bool) -> Tensor:
    """Calls a Hopfield layer; the layers of hflayers take no floating-point padding mask."""
    if causal and mask is None:
        raise AHopError("is_causal=True describes a mask, got no mask")
    if padding is not None and padding.is_floating_point() and not isinstance(association, HopfieldInterface):
        padding = padding.isneginf()
    return association(input, stored_pattern_padding_mask=padding, association_mask=mask)


class _Layer(nn.Module):
    """The feed-forward part of both layers, and what ``nn.TransformerEncoder`` and ``nn.TransformerDecoder`` read."""

    self_attn: Any

    def __init__(self, dim_feedforward: int, dropout: float, activation: str, **associations: nn.Module) -> None:
        super().__init__()
        for name, association in associations.items():
            check_module(**{name: association})
            if getattr(association, "state_pattern_dim", None) is None:
                raise AHopError(f"{name} must be a Hopfield layer with an input_size, got {type(association).__name__}")
            setattr(self, name, deepcopy(association))
        width: int = self.self_attn.state_pattern_dim
        self.linear_residual = nn.Linear(width, dim_feedforward)
        self.dropout_residual = nn.Dropout(dropout)
        self.linear_output = nn.Linear(dim_feedforward, width)
        self.dropout_output = nn.Dropout(dropout)
        self.activation_residual: Any = getattr(torch, activation, None) if isinstance(activation, str) else None
        if not callable(self.activation_residual):
            raise AHopError(f"activation must name a function of torch, got {activation!r}")

    def reset_parameters(self) -> None:
        for module in self.children():
            reset(module)

    def _feed_forward(self, x: Tensor) -> Tensor:
        hidden = self.dropout_residual(self.activation_residual(self.linear_residual(x)))
        return x + self.dropout_output(self.linear_output(hidden))

    batch_first = reads("self_attn.batch_first")
    input_size = reads("self_attn.input_size")
    output_size = reads("linear_output.out_features")


class HopfieldEncoderLayer(_Layer):
    """A transformer encoder layer around a Hopfield layer, with the arguments of ``hflayers.transformer``.

    It works inside ``nn.TransformerEncoder``, alone, and in a loop.

    Args:
        hopfield_association: an adaptive or plain Hopfield layer, which is copied and reset.
        dim_feedforward: width of the feed-forward part.
        dropout: probability of dropout after each association and in the feed-forward part.
        activation: name of a function of torch.

    >>> import ahop_layers as ah
    >>> layer = HopfieldEncoderLayer(ah.AdaptiveHopfield(16, num_heads=2), dim_feedforward=32)
    >>> nn.TransformerEncoder(layer, num_layers=2, enable_nested_tensor=False)(torch.randn(3, 5, 16)).shape
    torch.Size([3, 5, 16])
    """

    self_attn = reads("hopfield_association")

    def __init__(
        self, hopfield_association: nn.Module, dim_feedforward: int = 2048, dropout: float = 0.1,
        activation: str = "relu",
    ) -> None:  # fmt: skip
        super().__init__(dim_feedforward, dropout, activation, hopfield_association=hopfield_association)
        self.norm_residual, self.norm_output = nn.LayerNorm(self.input_size), nn.LayerNorm(self.input_size)
        self.dropout_hopfield_association = nn.Dropout(dropout)
        self.reset_parameters()

    def forward(
        self, src: Tensor, src_mask: Tensor | None = None, src_key_padding_mask: Tensor | None = None,
        is_causal: bool = False,
    ) -> Tensor:  # fmt: skip
        """Encodes a sequence, as ``nn.TransformerEncoderLayer``; ``is_causal`` states that the given mask is causal."""
        associated = _associate(self.hopfield_association, src, src_key_padding_mask, src_mask, is_causal)
        src = self.norm_residual(src + self.dropout_hopfield_association(associated))
        return self.norm_output(self._feed_forward(src))

    def get_association_matrix(self, input: Patterns) -> Tensor:
        """Computes the weights ``(N, heads, L, S)`` of the Hopfield layer."""
        return self.self_attn.get_association_matrix(input)


class HopfieldDecoderLayer(_Layer):
    """A transformer decoder layer around two Hopfield layers, with the arguments of ``hflayers.transformer``.

    Args:
        hopfield_association_self: the Hopfield layer that associates the target with itself. It is copied and reset.
        hopfield_association_cross: the one that associates the target with the memory. It is copied and reset.
        dim_feedforward, dropout, activation: see :class:`HopfieldEncoderLayer`.

    >>> import ahop_layers as ah
    >>> layer = HopfieldDecoderLayer(ah.AdaptiveHopfield(16), ah.AdaptiveHopfield(16), dim_feedforward=32)
    >>> nn.TransformerDecoder(layer, num_layers=2)(torch.randn(3, 5, 16), torch.randn(3, 7, 16)).shape
    torch.Size([3, 5, 16])
    """

    self_attn = reads("hopfield_association_self")
    hopfield_association_cross: Any

    def __init__(
        self, hopfield_association_self: nn.Module, hopfield_association_cross: nn.Module, dim_feedforward: int = 2048,
        dropout: float = 0.1, activation: str = "relu",
    ) -> None:  # fmt: skip
        super().__init__(
            dim_feedforward, dropout, activation,
            hopfield_association_self=hopfield_association_self, hopfield_association_cross=hopfield_association_cross,
        )  # fmt: skip
        width = self.input_size
        self.norm_residual_self, self.norm_residual_cross = nn.LayerNorm(width), nn.LayerNorm(width)
        self.norm_output = nn.LayerNorm(width)
        self.dropout_hopfield_association_self = nn.Dropout(dropout)
        self.dropout_hopfield_association_cross = nn.Dropout(dropout)
        self.reset_parameters()

    def forward(
        self, tgt: Tensor, memory: Tensor, tgt_mask: Tensor | None = None, memory_mask: Tensor | None = None,
        tgt_key_padding_mask: Tensor | None = None, memory_key_padding_mask: Tensor | None = None,
        tgt_is_causal: bool = False, memory_is_causal: bool = False,
    ) -> Tensor:  # fmt: skip
        """Decodes a target, as ``nn.TransformerDecoderLayer``; ``..._is_causal`` states that a given mask is causal."""
        associated = _associate(self.hopfield_association_self, tgt, tgt_key_padding_mask, tgt_mask, tgt_is_causal)
        tgt = self.norm_residual_self(tgt + self.dropout_hopfield_association_self(associated))
        cross, triple = self.hopfield_association_cross, (memory, tgt, memory)
        associated = _associate(cross, triple, memory_key_padding_mask, memory_mask, memory_is_causal)
        tgt = self.norm_residual_cross(tgt + self.dropout_hopfield_association_cross(associated))
        return self.norm_output(self._feed_forward(tgt))

    def get_association_matrix_self(self, input: Patterns) -> Tensor:
        """Computes the weights ``(N, heads, L, L)`` of the target with itself."""
        return self.self_attn.get_association_matrix(input)

    def get_association_matrix_cross(self, input: Patterns) -> Tensor:
        """Computes the weights ``(N, heads, L, S)`` of the target with the memory."""
        return self.hopfield_association_cross.get_association_matrix(input)
