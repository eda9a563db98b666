"""Tensor parallelism (``tp``): one layer over several ranks; between layers, tokens are sharded over the same ranks."""
