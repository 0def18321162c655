"""``hflayers.transformer``: transformer layers around Hopfield layers."""

from ahop_layers.hopfield.transformer import HopfieldDecoderLayer, HopfieldEncoderLayer

__all__ = ["HopfieldDecoderLayer", "HopfieldEncoderLayer"]
