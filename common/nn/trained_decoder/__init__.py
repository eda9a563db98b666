"""A decoder that is trained as a whole, with backward passes written out.

Of each layer and token the backward pass keeps the residual stream before both norms (2 * 2 E bytes in 16 bits), query,
key and value (2 N), the attention's result (2 H D) and log-sum-exp (4 H), and the MLP's first product (4 F). With
products in FP8 it keeps that one as FP8 (2 F), the result of SwiGLU (F), and the norms' results (2 E), all as the
products have read them. What else products have read is made again: norms' results and SwiGLU's in 16 bits. So Llama
3.1 8B keeps 0.77 GB a layer of 8,192 tokens in 16 bits, and 0.72 GB in FP8. ``recomputed_gate_up`` layers drop the
MLP's part and multiply once more.

Products add their weights' gradients to the main ones (:mod:`common.nn.main_gradient`), and move tokens between the
ranks that share a layer (tensor parallelism with sequence parallelism), in FP8 where they multiply in it.

:mod:`.products` are the products, :mod:`.movement` is of their tokens, :mod:`.casts` says when their weights are cast,
:mod:`.operations` chooses all else, :mod:`.blocks` are the halves of a block, :mod:`.head` head and loss,
:mod:`.decoder` puts them together, :mod:`.memory` plans.
Weights are those of a :class:`common.nn.decoder.Decoder`.
"""
