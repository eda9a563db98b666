"""A decoder whose weights are all trained, with hand-written backward passes.

Per layer and token, the backward pass keeps the residual stream before both norms (2 * 2 E bytes in 16 bits), query,
key and value (2 N), the attention's result (2 H D) and log-sum-exp (4 H), and the MLP's first product (4 F). With FP8
products, it keeps the first product in FP8 (2 F), SwiGLU's result (F) and the norms' results (2 E), as the products
read them. It recomputes the other inputs of products: in 16 bits, the results of norms and SwiGLU. Llama 3.1 8B keeps
0.77 GB per layer of 8,192 tokens in 16 bits, and 0.72 GB in FP8. The first ``recomputed_gate_up`` layers recompute
the MLP's part instead of keeping it.

Products add their weight gradients to the main gradients (:mod:`common.nn.main_gradient`). Under tensor parallelism
with sequence parallelism, they also move tokens between the ranks, in FP8 if the product is in FP8.

:mod:`.products` has the products, :mod:`.movement` the transfer of their tokens, :mod:`.casts` the times when weights
are cast, :mod:`.operations` the choice of the other operations, :mod:`.blocks` the two halves of a block,
:mod:`.head` head and loss, :mod:`.decoder` the whole decoder, and :mod:`.memory` the memory plan. The weights are
those of a :class:`common.nn.decoder.Decoder`.
"""
