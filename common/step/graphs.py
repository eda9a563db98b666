"""Runs a TrainStep: as one CUDA graph for each kind of batch on a GPU, eagerly elsewhere.

Capture happens before ``run_start`` only, on synthetic batches and with the step's ``skip`` flag set, and leaves no
trace: updaters write nothing under the flag, and buffers, but for frozen ones, and random state are put back.
"""

from __future__ import annotations

import contextlib
import os
import traceback
from collections.abc import Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from common.data.batches import Batch
from common.errors import CaptureError
from common.nn.frozen import frozen_names
from common.step.capture import capturing
from common.step.train_step import DeviceResult, TrainStep

WARM_UP_ITERATIONS = 3  # autotuning, NCCL and the allocator settle within three iterations


@dataclass
class _Captured:
    graph: torch.cuda.CUDAGraph
    inputs: list[dict[str, Tensor]]
    result: DeviceResult


class StepRunner:
    """Warm up, capture and run a TrainStep.

    Args:
        step: the iteration.
        model: its buffers are put back after warm-up.
        micro_batches: micro-batches of one iteration.
        capture: capture CUDA graphs; False runs eagerly (always so without a GPU).

    Attributes:
        stream: the stream that everything of the iteration runs on; None without a GPU.
        uncaptured: keys met in training that warm-up had not seen; these run eagerly.
    """

    def __init__(self, step: TrainStep, model: nn.Module, micro_batches: int, capture: bool = True) -> None:
        self.step = step
        self.model = model
        self.micro_batches = micro_batches
        device = step.layout.device
        self.cuda = device.type == "cuda"
        self.capture = capture and self.cuda
        self.stream = torch.cuda.Stream(device) if self.cuda else None
        self.uncaptured: dict[Hashable, int] = {}
        self._captured: dict[Hashable, _Captured] = {}
        self._pool: Any = None

    def warm_up(self, examples: Iterable[Batch]) -> None:
        """Run and capture the iteration for every example key; all state is as before afterwards.

        Raises:
            CaptureError: naming the operation that can't be captured.
        """
        with _restored(self.model, self.step.layout.device), self.on_stream():
            self.step.skip.fill_(1)
            for example in examples:
                for _ in range(WARM_UP_ITERATIONS):
                    self.step([example] * self.micro_batches)
                if self.capture:
                    self._captured[example.key] = self._record(example)
            self.step.skip.fill_(0)

    def __call__(self, micro_batches: Sequence[Batch]) -> DeviceResult:
        """Launch one iteration; returns its result, valid until the next iteration of the same key.

        Everything is queued on ``stream``; nothing waits for the device.
        """
        key = micro_batches[0].key
        same = all(batch.key == key for batch in micro_batches) and len(micro_batches) == self.micro_batches
        captured = self._captured.get(key) if same else None
        if captured is None:
            if self.capture:
                self.uncaptured[key] = self.uncaptured.get(key, 0) + 1
            return self.step(micro_batches)
        self.fill(captured.inputs, micro_batches)
        captured.graph.replay()
        return captured.result

    @staticmethod
    def fill(inputs: Sequence[dict[str, Tensor]], micro_batches: Sequence[Batch]) -> None:
        """Copy a step's batches into a graph's static inputs, on the current stream."""
        for static, batch in zip(inputs, micro_batches, strict=True):
            torch._foreach_copy_(list(static.values()), [batch.tensors[name] for name in static], non_blocking=True)

    def close(self) -> None:
        """Free the graphs. NCCL takes no communicator down while a graph holds collectives of it."""
        for captured in self._captured.values():
            captured.graph.reset()
        self._captured.clear()

    @contextlib.contextmanager
    def on_stream(self) -> Iterator[None]:
        """Make ``stream`` the current one; it first waits for what is queued on the caller's."""
        if self.stream is None:
            yield
            return
        self.stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.stream):
            yield
        torch.cuda.current_stream().wait_stream(self.stream)

    def _record(self, example: Batch) -> _Captured:
        inputs = [{name: t.clone() for name, t in example.tensors.items()} for _ in range(self.micro_batches)]
        batches = [Batch(static, example.samples, example.key) for static in inputs]
        graph = torch.cuda.CUDAGraph()
        last = _LastOperation()
        try:
            assert self.stream is not None
            with capturing(graph, self.stream, self._pool), last:
                result = self.step(batches)
        except RuntimeError as error:
            raise CaptureError(_explain(error, last.name, example.key)) from error
        self._pool = graph.pool()
        return _Captured(graph, inputs, result)


class _LastOperation(TorchDispatchMode):
    """Remembers the last operation that was dispatched, so that a failed capture can name it."""

    def __init__(self) -> None:
        super().__init__()
        self.name = "none"

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.name = str(func)
        return func(*args, **(kwargs or {}))


def _explain(error: BaseException, operation: str, key: Hashable) -> str:
    while isinstance(error.__context__, RuntimeError):  # the end of a capture that failed raises once more
        error = error.__context__
    here = str(Path(__file__).resolve().parents[2]) + os.sep
    frames = [f for f in traceback.extract_tb(error.__traceback__) if f.filename.startswith(here)]
    frames = [f for f in frames if not f.filename.endswith("common/step/graphs.py")] or frames
    where = f"{os.path.relpath(frames[-1].filename, here)}:{frames[-1].lineno} ({frames[-1].line})" if frames else "?"
    reason = str(error).strip().splitlines()[0]
    return (
        f"the iteration for batch key {key!r} can't be captured in a CUDA graph: operation {operation} at {where}: "
        f"{reason}. Keep host reads and synchronising calls out of loss(), or run with cuda_graphs=false"
    )


@contextlib.contextmanager
def _restored(model: nn.Module, device: torch.device) -> Iterator[None]:
    frozen = frozen_names(model)
    buffers = {name: buffer.clone() for name, buffer in model.named_buffers() if name not in frozen}
    host = torch.get_rng_state()
    accelerator = torch.cuda.get_rng_state(device) if device.type == "cuda" else None
    yield
    with torch.no_grad():
        for name, buffer in model.named_buffers():
            if name not in frozen:
                buffer.copy_(buffers[name])
    torch.set_rng_state(host)
    if accelerator is not None:
        torch.cuda.set_rng_state(accelerator, device)
