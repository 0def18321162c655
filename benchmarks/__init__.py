"""Measurements behind the figures in the documentation; each module says how to run it."""
