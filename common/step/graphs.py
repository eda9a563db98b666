"""Runs a TrainStep: on a GPU as one CUDA graph for each combination of batch keys, otherwise eagerly.

A step with separate graphs for its passes (:mod:`common.step.capture`) replays those and runs the rest eagerly.

Each iteration sorts its micro-batches by key, captured or not, so that few graphs serve all iterations; gradients are
sums and do not change. Ranks may have different keys in the same iteration, because the collectives of a step and their
order do not depend on the keys.

Capture runs on example batches before the first training iteration, with the step's ``skip`` flag set. It changes no
state: updaters write nothing, and random state and all buffers except frozen ones are restored.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import time
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from common.data.batches import Batch
from common.nn.frozen import frozen_names
from common.step.capture import CudaRecorder, PassGraphs, Recorder, capturing, explained, memory_reserved
from common.step.train_step import DeviceResult, TrainStep

WARM_UP_ITERATIONS = 3  # autotuning, NCCL and the allocator settle within three iterations
REHEARSALS = 2  # the second iteration starts from state that the first one leaves, such as scales

MOST_GRAPHS = 16
"""Largest number of graphs in one warm-up for which micro-batches with different keys are captured together.

Two keys and 8 micro-batches need 9 graphs; four keys and one micro-batch need 4. Above the limit, only iterations whose
micro-batches all have the same key are captured, and others run eagerly.
"""


@dataclass(frozen=True)
class CaptureCost:
    """Cost of the captured graphs.

    Attributes:
        seconds: capture time, without the warm-up before it.
        memory: bytes of the graphs' memory pools and static inputs.
    """

    graphs: int = 0
    seconds: float = 0.0
    memory: int = 0


@dataclass
class _Captured:
    graph: torch.cuda.CUDAGraph
    inputs: list[dict[str, Tensor]]
    result: DeviceResult


def combinations(keys: Sequence[Hashable], micro_batches: int, one_key: bool = False) -> list[tuple[Hashable, ...]]:
    """Return the keys of each iteration to capture, sorted as ``keys``.

    With ``one_key``, or if there were more than MOST_GRAPHS, only iterations with the same key throughout.
    """
    alike = [(key,) * micro_batches for key in keys]
    mixed = math.comb(len(keys) + micro_batches - 1, micro_batches) - len(alike)
    if one_key or len(alike) + mixed > MOST_GRAPHS:
        return alike
    return list(itertools.combinations_with_replacement(keys, micro_batches))


class StepRunner:
    """Warms up, captures and runs a TrainStep.

    Args:
        model: its buffers are restored after warm-up.
        capture: capture CUDA graphs; without a GPU or with False, the step runs eagerly.
        recorder: records the passes of chunks, if the step has graphs of them. Default on a GPU: CUDA graphs.

    Attributes:
        stream: the stream of the whole iteration; None without a GPU.
        uncaptured: batch keys of iterations that ran eagerly because no graph fits, and how many did.
        cost: cost of the captured graphs.
    """

    def __init__(
        self,
        step: TrainStep,
        model: nn.Module,
        micro_batches: int,
        capture: bool = True,
        recorder: Recorder | None = None,
    ) -> None:
        self.step = step
        self.model = model
        self.micro_batches = micro_batches
        device = step.layout.device
        self.cuda = device.type == "cuda"
        self.stream = torch.cuda.Stream(device) if self.cuda else None
        self._recorder = CudaRecorder(self.stream) if recorder is None and self.stream is not None else recorder
        self._chunks = step.chunk_graphs if capture and self._recorder is not None else None
        self.capture = capture and self.cuda and self._chunks is None
        self.cost = CaptureCost()
        self.uncaptured: dict[tuple[Hashable, ...], int] = {}
        self._captured: dict[tuple[Hashable, ...], _Captured] = {}
        self._inputs: dict[Hashable, list[dict[str, Tensor]]] = {}
        self._position: dict[Hashable, int] = {}
        self._pool: Any = None

    def warm_up(self, examples: Iterable[Batch], iterations: int = WARM_UP_ITERATIONS) -> None:
        """Run the iteration for every example key, then capture :func:`combinations` or chunks. All state is restored.

        Args:
            examples: micro-batches, one for each key.
            iterations: iterations per key before its capture; a step that was warmed up before needs fewer.

        Raises:
            CaptureError: an operation cannot be captured; the message names it.
        """
        with _restored(self.model, self.step.layout.device), self.on_stream():
            self.step.skip.fill_(1)
            samples: dict[Hashable, int] = {}
            for example in examples:
                samples[example.key] = example.samples
                self._position.setdefault(example.key, len(self._position))
                self._rehearse(example)
                if self._chunks is not None:
                    self._warm_up_chunks(self._chunks, example, iterations)
                    continue
                for _ in range(iterations):
                    self.step([example] * self.micro_batches)
                if self.capture:
                    with self._counted():
                        self._inputs[example.key] = [
                            {name: tensor.clone() for name, tensor in example.tensors.items()}
                            for _ in range(self.micro_batches)
                        ]
            if self.capture and samples:
                with self._counted():
                    for keys in combinations(list(samples), self.micro_batches, self.step.one_key):
                        self._captured[keys] = self._record(keys, samples)
            self.step.skip.fill_(0)

    def _rehearse(self, example: Batch) -> None:
        """Run iterations that do not wait for other pipeline stages, if there are any."""
        if self.step.rehearsing is None:
            return
        with self.step.rehearsing():
            for _ in range(REHEARSALS):
                self.step([example] * (self.micro_batches if self._chunks is None else self._chunks.enough))

    def _warm_up_chunks(self, chunks: PassGraphs, example: Batch, iterations: int) -> None:
        """Warm up and record with few micro-batches that cover all passes; a training step may have thousands."""
        assert self._recorder is not None
        iteration = [example] * chunks.enough
        for _ in range(iterations):
            self.step(iteration)
        alone = self.step.rehearsing or contextlib.nullcontext
        # The recording iteration also replays the graphs. This loads the kernels that only replays use (copies).
        with self._counted(), chunks.recording(self._recorder), alone():
            self.step(iteration)

    @contextlib.contextmanager
    def _counted(self) -> Iterator[None]:
        """Add the captures inside the context to ``cost``, unless the block fails."""
        device = self.step.layout.device
        before, began = memory_reserved(device), time.perf_counter()
        yield
        seconds = time.perf_counter() - began
        graphs = len(self._captured) if self._chunks is None else self._chunks.count
        memory = self.cost.memory + memory_reserved(device) - before
        self.cost = CaptureCost(graphs, self.cost.seconds + seconds, memory)

    def __call__(self, micro_batches: Sequence[Batch]) -> DeviceResult:
        """Queue one iteration on ``stream`` without waiting for the device.

        The returned result is valid until the next iteration with the same keys.
        """
        ordered = sorted(micro_batches, key=lambda batch: self._position.get(batch.key, len(self._position)))
        keys = tuple(batch.key for batch in ordered)
        captured = self._captured.get(keys)
        if captured is None:
            if self.capture or (self._chunks is not None and not self._chunks.serves(keys)):
                self.uncaptured[keys] = self.uncaptured.get(keys, 0) + 1
            return self.step(ordered)
        self.fill(captured.inputs, ordered)
        captured.graph.replay()
        return captured.result

    @staticmethod
    def fill(inputs: Sequence[dict[str, Tensor]], micro_batches: Sequence[Batch]) -> None:
        """Copy micro-batches into a graph's static inputs, on the current stream."""
        for static, batch in zip(inputs, micro_batches, strict=True):
            torch._foreach_copy_(list(static.values()), [batch.tensors[name] for name in static], non_blocking=True)

    def close(self) -> None:
        """Free the graphs, because NCCL cannot destroy a communicator that a graph uses. :meth:`warm_up` may follow."""
        for captured in self._captured.values():
            captured.graph.reset()
        self._captured.clear()
        self._inputs.clear()
        self._pool, self.cost = None, CaptureCost()
        if self._chunks is not None:
            self._chunks.close()

    @contextlib.contextmanager
    def on_stream(self) -> Iterator[None]:
        """Make ``stream`` current. It waits for the caller's stream before, and the caller's stream for it after.

        If the block fails, the caller's stream is current again, but does not wait.
        """
        if self.stream is None:
            yield
            return
        self.stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.stream):
            yield
        torch.cuda.current_stream().wait_stream(self.stream)

    def _record(self, keys: tuple[Hashable, ...], samples: Mapping[Hashable, int]) -> _Captured:
        """Capture an iteration. Graphs share static inputs, since each replay directly follows its input copies."""
        free = {key: iter(inputs) for key, inputs in self._inputs.items()}
        inputs = [next(free[key]) for key in keys]
        batches = [Batch(static, samples[key], key) for static, key in zip(inputs, keys, strict=True)]
        graph = torch.cuda.CUDAGraph()
        assert self.stream is not None
        what = f"the iteration for {named(keys)}"
        with explained(what) as watched, capturing(graph, self.stream, self._pool), watched:
            result = self.step(batches)
        self._pool = graph.pool()
        return _Captured(graph, inputs, result)


def named(keys: Sequence[Hashable]) -> str:
    """Return the keys of an iteration as words, for messages."""
    return f"batch key {keys[0]!r}" if len(set(keys)) == 1 else f"batch keys {', '.join(map(repr, keys))}"


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
