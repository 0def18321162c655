"""``hflayers.auxiliary``: the data sets of hopfield-layers' examples, in :mod:`ahop_layers.hflayers.auxiliary.data`."""
