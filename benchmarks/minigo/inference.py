"""Inference on batches of leaves, and the server that gives them to the self-play workers of a GPU.

On a GPU, a batch is padded to the next of a few sizes, each of which is a captured graph. Up to two batches are in
flight on the device, while the host distributes the results of an earlier one.

Shapes: B positions, K bytes of packed planes, A moves.
"""

from __future__ import annotations

import contextlib
import selectors
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from benchmarks.minigo.channel import Request, ServerEnd
from benchmarks.minigo.measures import ServerCounts
from benchmarks.minigo.model import InferenceNetwork
from benchmarks.minigo.models import Models
from common.errors import CheckpointError
from common.evaluation.forward import ForwardPass

SIZES = (32, 64, 128, 256, 512, 1024, 2048, 4096)
"""Numbers of positions for which graphs are captured; :func:`sizes_up_to` chooses among them."""
RUNNING = 2
"""Batches in flight on the device."""
MODEL_SECONDS = 0.5
"""Interval at which the server looks for a newer model, in seconds."""


def sizes_up_to(most: int) -> list[int]:
    """Return the sizes of graphs for batches of at most ``most`` positions, ascending. The last one is ``most``."""
    return [*(size for size in SIZES if size < most), most]


class Flight:
    """Host buffers of one batch, and its completion.

    Attributes:
        bits_BK: packed planes to evaluate, uint8; the caller fills them before the launch.
        policy_BA, value_B: probabilities and values, fp32; valid after :meth:`wait`.
    """

    def __init__(self, positions: int, position_bytes: int, moves: int, pinned: bool) -> None:
        self.bits = torch.zeros(positions, position_bytes, dtype=torch.uint8, pin_memory=pinned)
        self.policy = torch.zeros(positions, moves, pin_memory=pinned)
        self.value = torch.zeros(positions, pin_memory=pinned)
        self.bits_BK: NDArray[np.uint8] = self.bits.numpy()
        self.policy_BA: NDArray[np.float32] = self.policy.numpy()
        self.value_B: NDArray[np.float32] = self.value.numpy()
        # A blocking event: the waiting thread sleeps.
        self.event = torch.cuda.Event(blocking=True) if pinned else None

    def wait(self) -> None:
        """Wait for the results."""
        if self.event is not None:
            self.event.synchronize()


class BatchedInference:
    """Runs the network on batches from the host.

    Args:
        sizes: sizes of the captured graphs, ascending. The last one is the largest batch, also without graphs.
        capture: capture graphs on a GPU. Without them, and on a CPU, batches run eagerly and are not padded.
        flights: number of :class:`Flight` objects.
    """

    def __init__(
        self, network: InferenceNetwork, sizes: Sequence[int], capture: bool = True, flights: int = RUNNING + 1
    ) -> None:
        architecture = network.architecture
        self.network, self.largest = network, sizes[-1]
        self._device = network.value.weight.device
        cuda = self._device.type == "cuda"
        self._stream = torch.cuda.Stream(self._device) if cuda else None
        shape = (self.largest, architecture.position_bytes)
        self._bits = torch.zeros(shape, dtype=torch.uint8, device=self._device)
        self.flights = [
            Flight(self.largest, architecture.position_bytes, architecture.moves, cuda) for _ in range(flights)
        ]
        self._passes: dict[int, ForwardPass[tuple[Tensor, Tensor]]] = {}
        with self._in_order():  # the current stream fills the network and the buffer
            pool = torch.cuda.graph_pool_handle() if cuda and capture else None
            for size in reversed(sizes) if pool else ():  # the largest first, so that the others fit into its memory
                inputs = {"bits": self._bits[:size]}
                captured = ForwardPass(network, lambda given: network(given["bits"]), inputs, True, pool)
                captured.warm_up()
                self._passes[size] = captured

    def padded(self, count: int) -> int:
        """Return the number of positions that the device evaluates for a batch of ``count``."""
        return min((size for size in self._passes if size >= count), default=count)

    def load(self, weights: Mapping[str, Tensor]) -> None:
        """Use other weights from the next launch on; see :meth:`InferenceNetwork.load`.

        Args:
            weights: work on the current stream may still be writing them, and the caller may free or overwrite them.
        """
        with self._in_order():
            self.network.load(weights)

    @torch.no_grad()
    def launch(self, flight: Flight, count: int) -> None:
        """Evaluate the first ``count`` positions of ``flight``. On a GPU it returns before the results are there."""
        with self._on_stream():
            self._bits[:count].copy_(flight.bits[:count], non_blocking=True)
            size = self.padded(count)
            policy_BA, value_B = self._passes[size]() if self._passes else self.network(self._bits[:size])
            flight.policy[:count].copy_(policy_BA[:count], non_blocking=True)
            flight.value[:count].copy_(value_B[:count], non_blocking=True)
            if flight.event is not None:
                flight.event.record()

    def __call__(self, bits_BK: NDArray[np.uint8]) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
        """Return probabilities (B, A) and values (B,) of at most ``largest`` positions, valid until the next call."""
        flight, count = self.flights[0], len(bits_BK)
        flight.bits_BK[:count] = bits_BK
        self.launch(flight, count)
        flight.wait()
        return flight.policy_BA[:count], flight.value_B[:count]

    def close(self) -> None:
        """Release the graphs."""
        for captured in self._passes.values():
            captured.close()

    @contextlib.contextmanager
    def _on_stream(self) -> Iterator[None]:
        if self._stream is None:
            yield
            return
        with torch.cuda.stream(self._stream):
            yield

    @contextlib.contextmanager
    def _in_order(self) -> Iterator[None]:
        """Use the stream after the current stream's earlier work, and before its later work."""
        if self._stream is None:
            yield
            return
        current = torch.cuda.current_stream(self._device)
        self._stream.wait_stream(current)
        with self._on_stream():
            yield
        current.wait_stream(self._stream)


@dataclass(frozen=True)
class _Batch:
    """A batch in flight: its buffers, the requests in it, and the generation of the model."""

    flight: Flight
    requests: list[tuple[ServerEnd, Request]]
    generation: int


class InferenceServer:
    """Evaluates the leaves of the self-play workers of one device with the newest model.

    If no batch is in flight, all waiting leaves become one at once. The second batch in flight starts when ``enough``
    leaves wait, so that batches do not become small. Requests are answered in the order of their arrival.

    Args:
        enough: number of waiting leaves that start the second batch. Default: half of the largest batch.

    Attributes:
        generation: generation of the model for the next batch.
        ended: numbers of the workers whose processes have ended. The owner removes them, and may attach new ones.
        heard: numbers of the workers that have sent a request. The owner may clear it.

    Raises:
        CheckpointError: there is no model, or it is damaged or of another network.
    """

    def __init__(self, inference: BatchedInference, models: Models, enough: int | None = None) -> None:
        self._inference, self._models = inference, models
        self._enough = inference.largest // 2 if enough is None else enough
        self._device = inference.network.value.weight.device
        self._channels = selectors.DefaultSelector()
        self._waiting: deque[tuple[ServerEnd, Request]] = deque()
        self._running: deque[_Batch] = deque()
        self._free = list(inference.flights)
        self.ended: list[int] = []
        self.heard: set[int] = set()
        self.counts = ServerCounts()
        newest = models.newest()
        if newest is None:
            raise CheckpointError(f"{models.path(0).parent}: there is no model that could play")
        self._load(newest)

    def attach(self, channel: ServerEnd) -> None:
        """Serve another worker.

        Raises:
            ValueError: its requests may be larger than the largest batch.
        """
        if channel.ring.capacity > self._inference.largest:
            raise ValueError(f"requests of {channel.ring.capacity} leaves: at most {self._inference.largest}")
        self._channels.register(channel.connection, selectors.EVENT_READ, channel)

    def step(self, seconds: float) -> None:
        """Receive, evaluate and answer what is possible. Waits up to ``seconds`` if there is nothing to do.

        Raises:
            CheckpointError: a new model is damaged.
            SuiteError: a worker has failed, and reports this error.
            RankFailure: a worker has sent an invalid message.
        """
        began = time.perf_counter()
        if time.monotonic() >= self._next_look:
            self._look_for_model()
        finished = None
        if self._running and (len(self._running) == RUNNING or self._positions() < self._enough):
            finished = self._running.popleft()
            with self._inferring():
                finished.flight.wait()
        self._receive(seconds if finished is None and not self._running and not self._waiting else 0.0)
        while self._waiting and (not self._running or self._may_add()):
            self._launch()
        if finished is not None:  # the device is busy again
            self._answer(finished)
        self.counts.seconds += time.perf_counter() - began

    def close(self) -> None:
        """Close the channels to all workers."""
        for key in list(self._channels.get_map().values()):
            key.data.close()
        self._channels.close()

    @contextlib.contextmanager
    def _inferring(self) -> Iterator[None]:
        began = time.perf_counter()
        yield
        self.counts.inference_seconds += time.perf_counter() - began

    def _positions(self) -> int:
        return sum(request.leaves for _, request in self._waiting)

    def _may_add(self) -> bool:
        return len(self._running) < RUNNING and bool(self._free) and self._positions() >= self._enough

    def _load(self, generation: int) -> None:
        weights = self._models.read(generation, self._device)
        try:
            self._inference.load(weights)
        except CheckpointError as error:
            raise CheckpointError(f"{self._models.path(generation)} is {error}") from error
        self.generation = generation
        self._next_look = time.monotonic() + MODEL_SECONDS

    def _look_for_model(self) -> None:
        newest = self._models.newest()
        if newest is not None and newest != self.generation:
            self._load(newest)
        self._next_look = time.monotonic() + MODEL_SECONDS

    def _receive(self, seconds: float) -> None:
        """Receive all requests that have arrived; wait up to ``seconds`` for the first one."""
        if not self._channels.get_map():
            time.sleep(seconds)
            return
        began = time.perf_counter()
        ready = self._channels.select(seconds)
        self.counts.idle_seconds += time.perf_counter() - began
        for key, _ in ready:
            channel: ServerEnd = key.data
            request = channel.receive()
            if request is None:
                self._channels.unregister(channel.connection)
                self._waiting = deque(item for item in self._waiting if item[0] is not channel)
                channel.close()
                self.ended.append(channel.worker)
            else:
                self.heard.add(channel.worker)
                self._waiting.append((channel, request))
                self.counts.hits += request.done.hits
                self.counts.games += request.done.games
                self.counts.search_seconds += request.done.seconds

    def _launch(self) -> None:
        flight, requests, count = self._free.pop(), [], 0
        while self._waiting and count + self._waiting[0][1].leaves <= self._inference.largest:
            channel, request = self._waiting.popleft()
            flight.bits_BK[count : count + request.leaves] = channel.bits(request)
            requests.append((channel, request))
            count += request.leaves
        with self._inferring():  # on a CPU, the network runs here
            self._inference.launch(flight, count)
        self._running.append(_Batch(flight, requests, self.generation))
        self.counts.batches += 1
        self.counts.positions += count
        self.counts.computed += self._inference.padded(count)

    def _answer(self, batch: _Batch) -> None:
        start = 0
        for channel, request in batch.requests:
            rows = slice(start, start + request.leaves)
            channel.answer(request, batch.flight.policy_BA[rows], batch.flight.value_B[rows], batch.generation)
            start += request.leaves
        self._free.append(batch.flight)
