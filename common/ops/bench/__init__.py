"""Measurement of operations on a GPU: stopwatch, worker processes and their supervisor, and the printed table."""
