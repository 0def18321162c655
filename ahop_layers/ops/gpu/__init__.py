"""CUDA C++ kernels for NVIDIA GPUs, and the host code that launches them."""
