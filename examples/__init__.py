"""Runnable examples; each also runs as ``python -m examples.NAME`` from a checkout."""
