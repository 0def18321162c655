"""Triton and PTX kernels for GPUs, and the host code that launches them."""
