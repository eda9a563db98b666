"""Operations: a PyTorch reference and faster implementations.

Every operation is a package. Its ``__init__`` declares it (:class:`common.ops.operation.Operation`), ``reference`` is
plain PyTorch, ``triton`` has launches and the autograd function, ``kernels`` the Triton kernels, ``cases`` the sizes
and inputs of tests and bench (:mod:`common.ops.cases`).

Shapes of transformers: T tokens of the flat buffer, S sequences, M masked tokens (all three are capacities), H heads,
D head dimension, E hidden size, F feed-forward size, V rows of the word table. Arithmetic is fp32, or fp64 for fp64
inputs; results have the dtype of the first input. Shapes are static and nothing waits for the device, so that every
implementation can be captured in a CUDA graph.
"""
