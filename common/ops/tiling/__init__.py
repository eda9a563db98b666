"""Cutting of tensors into tiles, access to tiles in kernels, and sums of the partial results of programs."""
