"""A decoder whose base is frozen and whose adapters are trained, in a memory that is known before anything is built.

Of each layer and token the backward pass keeps the residual stream before both norms (2 * 2 E bytes in 16 bits), query,
key and value (2 N), the attention's result (2 H D) and log-sum-exp (4 H), SwiGLU's input (2 F bytes in FP8, 4 F in 16
bits), and a few numbers: the norms' inverse roots and the adapters' u. Nothing of a frozen product's input is kept,
since no weight has a gradient. The backward pass recomputes the adapters' inputs from the residual stream and the
attention's result, and their dropout from its seed. The first ``recomputed_qkv`` layers also recompute query, key and
value.

:mod:`.products` are the frozen products, :mod:`.operations` chooses all else, :mod:`.blocks` are the halves of a block
with their backward passes written out, :mod:`.adapter` and :mod:`.passing` what they take, :mod:`.decoder` puts them
together, :mod:`.memory` plans.
"""
