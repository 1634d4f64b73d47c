"""Kernels for what blending does beyond an ordinary prefill, each beside the plain PyTorch code that defines it."""
