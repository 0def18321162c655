"""Adaptive Hopfield layers: a learned similarity in place of the dot product of attention and Hopfield layers."""

from importlib import import_module
from importlib.util import find_spec
from types import ModuleType

from ahop_layers.attention import Adaptive, AdaptiveAttention
from ahop_layers.convert.adapt import Report, adapt_, revert_
from ahop_layers.convert.maps import association_maps
from ahop_layers.convert.registry import register_converter
from ahop_layers.convert.saved import load_similarities, save_similarities
from ahop_layers.errors import AHopError
from ahop_layers.hflayers import install_as_hflayers
from ahop_layers.hopfield import AdaptiveHopfield, AdaptiveHopfieldLayer, AdaptiveHopfieldPooling
from ahop_layers.hopfield.adaptive import hflayers_state_dict
from ahop_layers.memory import AssociativeMemory
from ahop_layers.memory import variants as variants
from ahop_layers.memory.images import ImageSimilarity
from ahop_layers.memory.repair import Repair
from ahop_layers.ops import adaptive_similarity, footprint, register_base
from ahop_layers.ops.backend import backends
from ahop_layers.separation import Separation
from ahop_layers.similarity.adaptive import AdaptiveSimilarity
from ahop_layers.similarity.associator import similarity_parameters
from ahop_layers.similarity.blocks import Blocks, patches
from ahop_layers.training import extended_optimizer_state, parameter_groups

__version__ = "0.1.0"

__all__ = [
    "AHopError", "Adaptive", "AdaptiveAttention", "AdaptiveHopfield", "AdaptiveHopfieldLayer",
    "AdaptiveHopfieldPooling", "AdaptiveSimilarity", "AssociativeMemory", "Blocks", "ImageSimilarity", "Repair",
    "Report", "Separation", "adapt_", "adaptive_similarity", "association_maps", "backends", "extended_optimizer_state",
    "footprint", "hflayers_state_dict", "install_as_hflayers", "load_similarities", "parameter_groups", "patches",
    "register_base", "register_converter", "revert_", "save_similarities", "similarity_parameters", "variants",
]  # fmt: skip

# Modules that are imported on first access, and the package that each one needs then.
_ON_DEMAND = {"neighbors": "sklearn", "plots": "torch", "torchmil": "torch"}


def __getattr__(name: str) -> ModuleType:
    """Imports a module with further dependencies on first access."""
    if name in _ON_DEMAND:
        return import_module(f"ahop_layers.{name}")
    raise AttributeError(f"module 'ahop_layers' has no attribute {name!r}")


def __dir__() -> list[str]:
    """Lists the public names, with those modules that can be imported here: ``help`` imports all of them."""
    return sorted([*__all__, *(name for name, needed in _ON_DEMAND.items() if find_spec(needed)), "__version__"])
