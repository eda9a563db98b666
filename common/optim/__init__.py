"""Optimizers that work on flat buffers: update rules, gradient reduction, sharding and loss scaling."""
