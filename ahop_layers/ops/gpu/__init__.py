"""Triton and PTX kernels for GPUs, and their launches."""
