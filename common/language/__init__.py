"""Decoders, and the base of the workloads that train them.

:mod:`.network` holds the weights and runs under autograd; :mod:`.decoder` runs the same modules with hand-written
backward passes. :mod:`.architecture` chooses norm, activation, positions, biases and head.

Per layer and token, hand-written passes keep the residual stream before both norms (2 * 2 E bytes in 16 bits), query,
key and value (2 N), the attention's result (2 H D) and log-sum-exp (4 H), and the MLP's first product (2 F' bytes, or
F' in FP8, with F' = 2 F for SwiGLU and F for GELU).

- Trained weights in FP8 also keep the activation's result (F) and the norms' results (2 E), as the products read them.
  In 16 bits, the backward pass recomputes the results of norms and activation. Llama 3.1 8B keeps 0.77 GB per layer of
  8,192 tokens in 16 bits, and 0.72 GB in FP8; GPT-3 keeps 20 E bytes per token in 16 bits, and 22 E in FP8.
- Frozen weights have no gradient, so inputs of their products are not kept. The backward pass recomputes the adapters'
  inputs from the residual stream and the attention's result, and their dropout from its seed.

Some layers can recompute query, key and value, or the MLP's first product. :mod:`.memory` plans how many.
"""
