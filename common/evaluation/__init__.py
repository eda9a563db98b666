"""Modes of evaluation: inline, scored in the background, on separate ranks, or offline from checkpoints."""
