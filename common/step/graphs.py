"""Runs a TrainStep: as one CUDA graph for each kind of iteration on a GPU, eagerly elsewhere.

A step that has graphs of its chunks' passes (:mod:`common.step.chunk_graphs`) replays these, and the rest is eager.

What tells iterations apart is which keys their micro-batches have, and how many have each. Micro-batches are brought
into one order of the keys first, captured or not, so that few graphs serve all iterations; the gradients, which are
sums, are the same. Ranks may be at different keys in the same iteration: which collectives a step issues, and in which
order, does not depend on the keys.

Capture happens before ``run_start`` only, on synthetic batches and with the step's ``skip`` flag set, and leaves no
trace: updaters write nothing under the flag, and buffers, but for frozen ones, and random state are put back.
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
REHEARSALS = 2  # what the first leaves behind, such as scales, the second begins from

MOST_GRAPHS = 16
"""Graphs of one warm-up up to which micro-batches of different keys are captured together.

Two keys and 8 micro-batches make 9 graphs, four keys and one micro-batch 4. Beyond it only iterations whose
micro-batches all have the same key are captured, and others run eagerly.
"""


@dataclass(frozen=True)
class CaptureCost:
    """What the graphs of an iteration have taken.

    Attributes:
        graphs: their number.
        seconds: in which they were captured, the warm-up before not among them.
        memory: bytes of their pools and static inputs.
    """

    graphs: int = 0
    seconds: float = 0.0
    memory: int = 0


@dataclass
class _Captured:
    graph: torch.cuda.CUDAGraph
    inputs: list[dict[str, Tensor]]
    result: DeviceResult


def combinations(keys: Sequence[Hashable], micro_batches: int) -> list[tuple[Hashable, ...]]:
    """The keys of the micro-batches of each iteration that is captured, in the order of ``keys``; see MOST_GRAPHS."""
    alike = [(key,) * micro_batches for key in keys]
    mixed = math.comb(len(keys) + micro_batches - 1, micro_batches) - len(alike)
    if len(alike) + mixed > MOST_GRAPHS:
        return alike
    return list(itertools.combinations_with_replacement(keys, micro_batches))


class StepRunner:
    """Warm up, capture and run a TrainStep.

    Args:
        step: the iteration.
        model: its buffers are put back after warm-up.
        micro_batches: micro-batches of one iteration.
        capture: capture CUDA graphs; False runs eagerly (always so without a GPU).
        recorder: of the passes of chunks, where the step has graphs of them; None for CUDA graphs, on a GPU.

    Attributes:
        stream: the stream that everything of the iteration runs on; None without a GPU.
        uncaptured: keys of the micro-batches of iterations that were not captured and ran eagerly, and how many did.
        cost: of the graphs.
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
        self._place: dict[Hashable, int] = {}
        self._pool: Any = None

    def warm_up(self, examples: Iterable[Batch], iterations: int = WARM_UP_ITERATIONS) -> None:
        """Run the iteration for every example key and capture it for their combinations; all state is as before then.

        Args:
            examples: micro-batches, one for each key.
            iterations: of each key before it is captured; fewer are enough where the step has been warmed up before.

        Raises:
            CaptureError: naming the operation that can't be captured.
        """
        with _restored(self.model, self.step.layout.device), self.on_stream():
            self.step.skip.fill_(1)
            samples: dict[Hashable, int] = {}
            for example in examples:
                samples[example.key] = example.samples
                self._place.setdefault(example.key, len(self._place))
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
                    for keys in combinations(list(samples), self.micro_batches):
                        self._captured[keys] = self._record(keys, samples)
            self.step.skip.fill_(0)

    def _rehearse(self, example: Batch) -> None:
        """Iterations whose passes wait for no other stage of a pipeline."""
        if self.step.rehearsing is None:
            return
        with self.step.rehearsing():
            for _ in range(REHEARSALS):
                self.step([example] * (self.micro_batches if self._chunks is None else self._chunks.enough))

    def _warm_up_chunks(self, chunks: PassGraphs, example: Batch, iterations: int) -> None:
        """As many micro-batches as have all passes; all of training's may be thousands."""
        assert self._recorder is not None
        iteration = [example] * chunks.enough
        for _ in range(iterations):
            self.step(iteration)
        alone = self.step.rehearsing or contextlib.nullcontext
        with self._counted(), chunks.recording(self._recorder), alone():  # replays have kernels of their own: copies
            self.step(iteration)

    @contextlib.contextmanager
    def _counted(self) -> Iterator[None]:
        """Add what is captured within to ``cost``."""
        device = self.step.layout.device
        before, began = memory_reserved(device), time.perf_counter()
        yield
        seconds = time.perf_counter() - began
        graphs = len(self._captured) if self._chunks is None else self._chunks.count
        memory = self.cost.memory + memory_reserved(device) - before
        self.cost = CaptureCost(graphs, self.cost.seconds + seconds, memory)

    def __call__(self, micro_batches: Sequence[Batch]) -> DeviceResult:
        """Launch one iteration; returns its result, valid until the next iteration of the same keys.

        Everything is queued on ``stream``; nothing waits for the device.
        """
        ordered = sorted(micro_batches, key=lambda batch: self._place.get(batch.key, len(self._place)))
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
        """Copy a step's batches into a graph's static inputs, on the current stream."""
        for static, batch in zip(inputs, micro_batches, strict=True):
            torch._foreach_copy_(list(static.values()), [batch.tensors[name] for name in static], non_blocking=True)

    def close(self) -> None:
        """Free the graphs; :meth:`warm_up` may make others. NCCL takes no communicator down while a graph uses it."""
        for captured in self._captured.values():
            captured.graph.reset()
        self._captured.clear()
        self._inputs.clear()
        self._pool, self.cost = None, CaptureCost()
        if self._chunks is not None:
            self._chunks.close()

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

    def _record(self, keys: tuple[Hashable, ...], samples: Mapping[Hashable, int]) -> _Captured:
        """Capture an iteration. Its inputs are those of other graphs too: a replay follows on its own copies."""
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
    """The keys of an iteration in words."""
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
