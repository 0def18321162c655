"""Adaptive Hopfield layers: a learned similarity in place of the dot product of attention and Hopfield layers."""

from ahop_layers.errors import AHopError
from ahop_layers.layers import AdaptiveHopfield, AdaptiveHopfieldLayer, AdaptiveHopfieldPooling, similarity_parameters
from ahop_layers.ops import adaptive_similarity, footprint, register_base
from ahop_layers.ops.backend import backends
from ahop_layers.similarity import AdaptiveSimilarity
from ahop_layers.version import __version__ as __version__

__all__ = [
    "AHopError",
    "AdaptiveHopfield",
    "AdaptiveHopfieldLayer",
    "AdaptiveHopfieldPooling",
    "AdaptiveSimilarity",
    "adaptive_similarity",
    "backends",
    "footprint",
    "register_base",
    "similarity_parameters",
]
