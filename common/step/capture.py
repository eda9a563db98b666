"""Capture of CUDA graphs."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator
from typing import Any

import torch


@contextlib.contextmanager
def capturing(graph: torch.cuda.CUDAGraph, stream: torch.cuda.Stream, pool: Any = None) -> Iterator[None]:
    """Capture what this thread launches on ``stream``, which becomes the current one, into ``graph``.

    Other threads may call CUDA meanwhile, as NCCL's watchdog and a data reader's do. Garbage is collected before the
    capture and not during it: what is freed may call CUDA in a way that ends the capture, and memory that other GPUs
    have mapped ends the process.

    Args:
        graph: an empty one.
        stream: not the default stream.
        pool: memory pool to share with other graphs (``torch.cuda.CUDAGraph.pool``).
    """
    gc.collect()
    enabled = gc.isenabled()
    gc.disable()
    try:
        with torch.cuda.graph(graph, pool=pool, stream=stream, capture_error_mode="thread_local"):
            yield
    finally:
        if enabled:
            gc.enable()
