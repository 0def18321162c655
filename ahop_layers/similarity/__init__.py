"""Similarities: AdaptiveSimilarity, how layers build one, and how to find those of a model."""

from ahop_layers.similarity.adaptive import INITS, AdaptiveSimilarity, BlocksArgument, Init, without_bias
from ahop_layers.similarity.layers import (
    Associator,
    LazyAdaptiveSimilarity,
    SimilarityList,
    SimilarityOptions,
    SimilaritySource,
    named_similarities,
    similarity_parameters,
)

__all__ = [
    "INITS",
    "AdaptiveSimilarity",
    "Associator",
    "BlocksArgument",
    "Init",
    "LazyAdaptiveSimilarity",
    "SimilarityList",
    "SimilarityOptions",
    "SimilaritySource",
    "named_similarities",
    "similarity_parameters",
    "without_bias",
]
