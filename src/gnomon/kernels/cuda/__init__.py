"""Kernels for NVIDIA GPUs, compiled at run time by MLX itself (`mx.fast.cuda_kernel`)."""
