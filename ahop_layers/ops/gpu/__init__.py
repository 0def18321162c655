"""CUDA C++ and Triton kernels for GPUs, and the host code that launches them."""
