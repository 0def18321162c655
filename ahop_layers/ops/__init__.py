"""The mathematics, the registered operators and the kernels behind them."""

from ahop_layers.ops.operators import adaptive_similarity
from ahop_layers.ops.reference import footprint, register_base

__all__ = ["adaptive_similarity", "footprint", "register_base"]
