"""``hflayers.activation``: the projections and the association of a Hopfield layer."""

from ahop_layers.hopfield.core import AssociationCore as HopfieldCore

__all__ = ["HopfieldCore"]
