"""Operations, each in plain PyTorch and in faster ways.

A folder each: ``__init__`` with the visible choice among implementations, ``plain`` PyTorch, ``triton`` launches and
autograd function, ``kernels``, and ``bench_cases`` that measure them. Imports run in this order only.

Legend of a transformer's: T tokens of the flat buffer, S sequences, M masked tokens (capacities all), H heads, D head
dimension, E hidden, F feed-forward, V rows of the word table. Arithmetic is fp32 inside, fp64 for fp64 inputs; results
have the dtype of the first input. Shapes are static and nothing waits for the device, so every version can be captured
in a CUDA graph.
"""
