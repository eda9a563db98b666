"""``bench.only=peer``: times other training software, in the process that has timed the workload's own step."""

from __future__ import annotations

import gc
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from common.config.schema import RunConfig
from common.contract.workload import Peer
from common.data.batches import Batch
from common.ops.bench.supervisor import failures

WARM_UP, MOST_STEPS = 5, 20
"""Number of iterations before the timed ones, and largest number of timed iterations, because peers are slow."""


@dataclass(frozen=True)
class PeerTiming:
    """Time and memory of a peer.

    Attributes:
        step_ms: mean milliseconds per iteration; None if the peer cannot run.
        bytes: peak of the allocated GPU memory; 0 on a CPU.
        reason: why the peer cannot run; empty if it can.
    """

    name: str
    step_ms: float | None
    samples: int
    bytes: int = 0
    reason: str = ""

    def text(self, own_throughput: float) -> str:
        """Return the timing as text; ``own_throughput`` is the workload's own samples per second."""
        if self.step_ms is None:
            return f"not measured: {self.reason}"
        rate, memory = self.samples / self.step_ms * 1e3, f", {self.bytes / 1e9:.1f} GB" if self.bytes else ""
        return (
            f"{self.step_ms:.1f} ms, {rate:,.1f} samples/s{memory}; ours is {own_throughput / rate:.2f} times as fast"
        )


def time_peers(
    peers: Sequence[Peer], run: RunConfig, example: Batch, device: torch.device, steps: int
) -> Iterator[PeerTiming]:
    """Time peers, one after the other.

    Args:
        run: recipe for one rank.
        example: micro-batch of the workload, on the device.
        steps: number of timed iterations; at most ``MOST_STEPS`` are used.
    """
    for peer in peers:
        gc.collect()
        torch._dynamo.reset()
        if device.type == "cuda":
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats(device)
        yield _timed(peer, run, example, device, min(steps, MOST_STEPS))


def _timed(peer: Peer, run: RunConfig, example: Batch, device: torch.device, steps: int) -> PeerTiming:
    """Time one peer. Its memory is free when this function has returned, also after an error."""
    try:
        step = peer.start(run, example, device)
        for _ in range(WARM_UP):
            step()
        _wait(device)
        began = time.perf_counter()
        for _ in range(steps):
            step()
        _wait(device)
        step_ms = (time.perf_counter() - began) / steps * 1e3
    except failures() as error:
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        return PeerTiming(peer.name, None, run.micro_batch, reason=reason)
    memory = torch.cuda.max_memory_allocated(device) if device.type == "cuda" else 0
    return PeerTiming(peer.name, step_ms, run.micro_batch, memory)


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
