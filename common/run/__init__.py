"""One run: start, trainer, checkpoints, conclusion, bench."""
