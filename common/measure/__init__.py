"""Measure the training step of every workload on some GPUs of a node and on all of them, in one table."""
