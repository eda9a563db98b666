"""Optimizers over flat buffers: rules, reduction, shards, loss scale."""
