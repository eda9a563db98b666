"""Operations: a PyTorch reference and faster implementations.

Every operation is a package. Its ``__init__`` declares it (:class:`common.ops.operation.Operation`), ``reference`` is
plain PyTorch, ``triton`` has launches and the autograd function, ``kernels`` the Triton kernels, ``cases`` sizes and
inputs for tests and bench (:mod:`common.ops.cases`).

Legend of a transformer's: T tokens of the flat buffer, S sequences, M masked tokens (capacities all), H heads, D head
dimension, E hidden, F feed-forward, V rows of the word table. Arithmetic is fp32 inside, fp64 for fp64 inputs; results
have the dtype of the first input. Shapes are static and nothing waits for the device, so that every implementation can
be captured in a CUDA graph.
"""
