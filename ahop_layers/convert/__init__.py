"""Conversion: makes the attention of an existing model adaptive in place, undoes it, and returns association maps."""

from ahop_layers.convert.adapt import adapt_, revert_
from ahop_layers.convert.maps import association_maps
from ahop_layers.convert.pretrained import load_adapted, save_adapted
from ahop_layers.convert.registry import register_converter
from ahop_layers.convert.report import Report
from ahop_layers.convert.saved import load_similarities, save_similarities

__all__ = [
    "Report",
    "adapt_",
    "association_maps",
    "load_adapted",
    "load_similarities",
    "register_converter",
    "revert_",
    "save_adapted",
    "save_similarities",
]
