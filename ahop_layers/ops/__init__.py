"""The registered operators, the kernels that compute them, and their specification in plain PyTorch."""

from ahop_layers.ops.operators import adaptive_similarity
from ahop_layers.ops.reference import footprint, register_base

__all__ = ["adaptive_similarity", "footprint", "register_base"]
