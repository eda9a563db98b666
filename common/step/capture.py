"""Capture of CUDA graphs."""

from __future__ import annotations

import contextlib
import gc
import os
import traceback
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, Protocol, TypeVar

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from common.errors import CaptureError

Result = TypeVar("Result")

_MACHINERY = tuple(f"common/step/{name}.py" for name in ("capture", "chunk_graphs", "graphs", "passes"))
"""Files of the capture code, which are in the stack of every captured operation; error messages skip them."""


class Recorded(Protocol):
    """Recorded work that can be replayed on the same memory."""

    def replay(self) -> None:
        """Run the recorded work on the current stream."""

    def reset(self) -> None:
        """Discard the recorded work and free its memory."""


class Recorder(Protocol):
    """Records work so that it can be replayed."""

    def record(self, work: Callable[[], Result], what: str, pool: Hashable) -> tuple[Recorded, Result]:
        """Record the operations that ``work`` launches. Recording need not execute them; each replay does.

        Args:
            work: called once; only test doubles of graphs call it again.
            pool: name of a memory pool. Recordings of one pool reuse the memory that is free after each of them, so a
                result is valid only until the next replay in its pool.

        Returns:
            The recorded work, and the result of ``work``, whose tensors each replay overwrites.

        Raises:
            CaptureError: an operation cannot be recorded; the message names it.
        """


class PassGraphs(Protocol):
    """What a training step needs of :class:`common.step.chunk_graphs.ChunkGraphs`, which it cannot import."""

    @property
    def enough(self) -> int: ...

    @property
    def count(self) -> int: ...

    def recording(self, recorder: Recorder) -> AbstractContextManager[None]: ...

    def serves(self, keys: Sequence[Hashable]) -> bool: ...

    def close(self) -> None: ...


class CudaRecorder:
    """Records CUDA graphs.

    Args:
        stream: capture stream; not the default stream.
    """

    def __init__(self, stream: torch.cuda.Stream) -> None:
        self._stream = stream
        self._pools: dict[Hashable, Any] = {}

    def record(self, work: Callable[[], Result], what: str, pool: Hashable) -> tuple[Recorded, Result]:
        """Capture ``work`` as a graph."""
        graph = torch.cuda.CUDAGraph()
        with explained(what) as watched, capturing(graph, self._stream, self._pools.get(pool)), watched:
            result = work()
        self._pools[pool] = graph.pool()
        return graph, result


@contextlib.contextmanager
def capturing(graph: torch.cuda.CUDAGraph, stream: torch.cuda.Stream, pool: Any = None) -> Iterator[None]:
    """Make ``stream`` the current stream and capture the work of this thread into ``graph``.

    Other threads, such as NCCL's watchdog and a data reader, may call CUDA during the capture. Garbage is collected
    before it and not during it: freeing an object may call CUDA in a way that ends the capture, and freeing memory that
    other GPUs have mapped ends the process. If the block fails, the capture ends and ``graph`` cannot be replayed.

    Args:
        stream: not the default stream.
        pool: memory pool shared with other graphs (``torch.cuda.CUDAGraph.pool``).
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


@contextlib.contextmanager
def explained(what: str) -> Iterator[AbstractContextManager[Any]]:
    """Turn a failed capture into an error with operation and source line. Enter the yielded context in the capture.

    Raises:
        CaptureError: instead of PyTorch's RuntimeError.
    """
    last = _LastOperation()
    try:
        yield last
    except RuntimeError as error:
        raise CaptureError(_explain(error, last.name, what)) from error


class _LastOperation(TorchDispatchMode):
    """Remembers the last dispatched operation, so that a failed capture can name it."""

    def __init__(self) -> None:
        super().__init__()
        self.name = "none"

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.name = str(func)
        return func(*args, **(kwargs or {}))


def _explain(error: BaseException, operation: str, what: str) -> str:
    while isinstance(error.__context__, RuntimeError):  # the end of a failed capture raises a second error
        error = error.__context__
    here = str(Path(__file__).resolve().parents[2]) + os.sep
    frames = [f for f in traceback.extract_tb(error.__traceback__) if f.filename.startswith(here)]
    frames = [f for f in frames if not f.filename.endswith(_MACHINERY)] or frames
    where = f"{os.path.relpath(frames[-1].filename, here)}:{frames[-1].lineno} ({frames[-1].line})" if frames else "?"
    reason = str(error).strip().splitlines()[0]
    return (
        f"{what} can't be captured in a CUDA graph: operation {operation} at {where}: {reason}. Keep host reads and "
        "synchronising calls out of loss(), or run with cuda_graphs=false"
    )


def memory_reserved(device: torch.device) -> int:
    """Collect garbage, free unused cached blocks, and return the bytes that PyTorch has reserved; 0 on a CPU."""
    if device.type != "cuda":
        return 0
    gc.collect()  # a capture also collects: garbage counted here would reduce the measured cost of the capture
    torch.cuda.empty_cache()
    return torch.cuda.memory_reserved(device)
