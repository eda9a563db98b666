"""A decoder with a frozen base and trained adapters, whose memory is planned before anything is allocated.

Per layer and token, the backward pass keeps the residual stream before both norms (2 * 2 E bytes in 16 bits), query,
key and value (2 N), the attention's result (2 H D) and log-sum-exp (4 H), SwiGLU's input (2 F bytes in FP8, 4 F in 16
bits), the norms' inverse roots and the adapters' u. Inputs of frozen products are not kept, because no frozen weight
has a gradient. The backward pass recomputes the adapters' inputs from the residual stream and the attention's result,
and their dropout from its seed. The first ``recomputed_qkv`` layers also recompute query, key and value.

:mod:`.products` has the frozen products, :mod:`.operations` the choice of the other operations, :mod:`.blocks` the
two halves of a block with hand-written backward passes, :mod:`.adapter` and :mod:`.passing` their arguments,
:mod:`.decoder` the whole decoder, and :mod:`.memory` the memory plan.
"""
