"""Adaptive attention: a drop-in for ``nn.MultiheadAttention``, and a base class for other attention modules."""

from ahop_layers.attention.adaptive import Adaptive, AdaptiveAttention

__all__ = ["Adaptive", "AdaptiveAttention"]
