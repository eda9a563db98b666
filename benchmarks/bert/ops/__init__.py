"""The operations of BERT: each file holds the plain PyTorch version and the visible choice among the faster ones.

Legend: T tokens of the flat buffer, S sequences, M masked tokens (capacities all), H heads, D head dimension, E hidden,
F feed-forward, V rows of the word table. Arithmetic is fp32 inside, fp64 for fp64 inputs; results have the dtype of
the first input. Shapes are static and nothing waits for the device, so every version can be captured in a CUDA graph.
"""
