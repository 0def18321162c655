"""Associative memories: search of stored patterns by damaged queries."""

from ahop_layers.memory.confidence import Hits
from ahop_layers.memory.memory import AssociativeMemory

__all__ = ["AssociativeMemory", "Hits"]
