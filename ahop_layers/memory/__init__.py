"""Associative memories: retrieval of stored patterns from corrupted queries."""

from ahop_layers.memory.kernel import KernelModulation
from ahop_layers.memory.memory import AssociativeMemory
from ahop_layers.memory.table import AdaptiveTableSimilarity, TableSimilarity

__all__ = ["AdaptiveTableSimilarity", "AssociativeMemory", "KernelModulation", "TableSimilarity"]
