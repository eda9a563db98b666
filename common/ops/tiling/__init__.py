"""How kernels cut tensors into tiles, read and write them, and add up what their programs leave."""
