"""Hopfield layers with the interface of hopfield-layers, plain and adaptive."""

from ahop_layers.hopfield.adaptive import AdaptiveHopfield, AdaptiveHopfieldLayer, AdaptiveHopfieldPooling
from ahop_layers.hopfield.layers import Hopfield, HopfieldLayer, HopfieldPooling

__all__ = [
    "AdaptiveHopfield", "AdaptiveHopfieldLayer", "AdaptiveHopfieldPooling", "Hopfield", "HopfieldLayer",
    "HopfieldPooling",
]  # fmt: skip
