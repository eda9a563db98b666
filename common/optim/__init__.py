"""Optimizers that work on flat buffers: update rules, gradient reduction, sharding and loss scaling.

Read in this order; one step enters all but ``groups``:

1. ``optimizer``: the steps of an update, from ``begin`` to ``write``, and clipping of the mean gradient.
2. ``groups``: parameter groups, and the ranks that share their parameters.
3. ``buffers``: parameters and gradients in flat tensors; buckets; this rank's shard.
4. ``communication``: reduction of buckets during the backward pass, gathers during the forward pass.
5. ``rules``: interfaces of update rules; their runs of elements.
6. ``momentum`` (LARS, SGD) or ``adaptive`` (LAMB, Adam, AdamW, Adagrad): formula and reference implementation.
7. ``learning_rate``: schedules.

Kernels are in ``update_triton`` and ``rules_triton``, with sizes for tests and bench in ``update_cases``. ``updater``
has the interface by which a step uses optimizers. The other modules are needed only sometimes: ``precision`` (loss
scale for fp16), ``clip`` (each micro-batch), ``ema`` (averaged weights), ``state`` (checkpoints), ``hparams``
(configuration).
"""
