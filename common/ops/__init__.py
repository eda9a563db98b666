"""Operations: a PyTorch reference and faster implementations.

Every operation is a package. Its ``__init__`` declares it (:class:`common.ops.operation.Operation`) and has the
reference in plain PyTorch, ``triton`` has the Triton kernels, their launches and the autograd function, and ``cases``
the sizes and inputs of tests and bench (:mod:`common.ops.cases`). Large operations have modules ``reference`` and
``kernels`` of their own.

Shapes of transformers: T tokens of the flat buffer, S sequences, M masked tokens (all three are capacities), H heads,
D head dimension, E hidden size, F feed-forward size, V rows of the word table. Arithmetic is fp32, or fp64 for fp64
inputs; results have the dtype of the first input. Shapes are static, all work is enqueued on the current stream, and
the host never waits for the device, so that a CUDA graph can capture every implementation.
"""
