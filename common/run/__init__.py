"""Runs: start of the ranks, trainer, checkpoints, scoring, conclusion, and ``bench``."""
