"""Associative memories: retrieval of stored patterns from damaged queries."""

from ahop_layers.memory.confidence import Hits
from ahop_layers.memory.memory import AssociativeMemory
from ahop_layers.memory.presets import KernelModulation
from ahop_layers.similarity.table import AdaptiveTableSimilarity, TableSimilarity

__all__ = ["AdaptiveTableSimilarity", "AssociativeMemory", "Hits", "KernelModulation", "TableSimilarity"]
