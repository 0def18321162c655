"""Conversion: makes the attention of an existing model adaptive in place, undoes it, and returns association maps."""
