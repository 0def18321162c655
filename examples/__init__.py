"""Runnable examples; ``python -m examples.NAME`` runs one from a checkout."""
