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
"""Files that are on the way to every operation that is captured."""


class Recorded(Protocol):
    """Work that was recorded once and can be done again, on the same memory."""

    def replay(self) -> None:
        """Do it, on the current stream."""

    def reset(self) -> None:
        """Forget it, and free its memory."""


class Recorder(Protocol):
    """Records work."""

    def record(self, work: Callable[[], Result], what: str, pool: Hashable) -> tuple[Recorded, Result]:
        """Record what ``work`` launches. It need not be done yet; every replay does it.

        Args:
            work: called once, and again by nobody but stand-ins for graphs.
            what: is recorded, for messages.
            pool: name of the memory that the work allocates from. Work of the same pool uses the same memory for what
                is freed when it has been recorded: its result holds until work of that pool is replayed.

        Returns:
            The recorded work, and the result of ``work``, whose tensors a replay writes.

        Raises:
            CaptureError: naming the operation that can't be recorded.
        """


class PassGraphs(Protocol):
    """Graphs that the passes of a step over its micro-batches have: :class:`common.step.chunk_graphs.ChunkGraphs`."""

    @property
    def enough(self) -> int:
        """Micro-batches of an iteration that replays every kind of graph, at most those of training."""

    @property
    def count(self) -> int:
        """How many graphs there are."""

    def recording(self, recorder: Recorder) -> AbstractContextManager[None]:
        """The iteration within records its passes before it replays them. Its updaters must write nothing."""

    def serves(self, keys: Sequence[Hashable]) -> bool:
        """Whether micro-batches of these keys are those that were recorded."""

    def close(self) -> None:
        """Free the graphs."""


class CudaRecorder:
    """Records CUDA graphs.

    Args:
        stream: that work is captured on; not the default one.
    """

    def __init__(self, stream: torch.cuda.Stream) -> None:
        self._stream = stream
        self._pools: dict[Hashable, Any] = {}

    def record(self, work: Callable[[], Result], what: str, pool: Hashable) -> tuple[Recorded, Result]:
        """See :class:`Recorder`."""
        graph = torch.cuda.CUDAGraph()
        with explained(what) as watched, capturing(graph, self._stream, self._pools.get(pool)), watched:
            result = work()
        self._pools[pool] = graph.pool()
        return graph, result


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


@contextlib.contextmanager
def explained(what: str) -> Iterator[AbstractContextManager[Any]]:
    """Let a capture that fails say where and at which operation; yields what watches the operations, for within it.

    Raises:
        CaptureError: in the place of the RuntimeError that PyTorch raises.
    """
    last = _LastOperation()
    try:
        yield last
    except RuntimeError as error:
        raise CaptureError(_explain(error, last.name, what)) from error


class _LastOperation(TorchDispatchMode):
    """Remembers the last operation that was dispatched, so that a failed capture can name it."""

    def __init__(self) -> None:
        super().__init__()
        self.name = "none"

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.name = str(func)
        return func(*args, **(kwargs or {}))


def _explain(error: BaseException, operation: str, what: str) -> str:
    while isinstance(error.__context__, RuntimeError):  # the end of a capture that failed raises once more
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
    """Bytes that PyTorch has taken of a GPU, without what lies unused outside graphs; 0 elsewhere."""
    if device.type != "cuda":
        return 0
    gc.collect()  # as a capture does, whose memory would seem less by what that frees
    torch.cuda.empty_cache()
    return torch.cuda.memory_reserved(device)
