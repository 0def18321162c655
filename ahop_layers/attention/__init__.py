"""Adaptive attention: a drop-in for ``nn.MultiheadAttention``, and the base class of adaptive attention modules."""

from ahop_layers.attention.adaptive import Adaptive, AdaptiveAttention

__all__ = ["Adaptive", "AdaptiveAttention"]
