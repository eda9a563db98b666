"""The training step: one iteration, its passes, and its capture in CUDA graphs."""
