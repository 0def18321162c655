"""Uses of Hopfield layers in published projects, rewritten with small synthetic data.

A module per project defines ``PROJECT``: how the project builds and calls the layers, with its arguments.
"""
