"""Benchmarks that measure the figures of the documentation. ``--help`` describes each command."""
