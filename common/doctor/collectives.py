"""Measure bandwidth and latency of collectives: inside each node, between neighbouring nodes, and over all ranks.

All times are those of the slowest rank. Bandwidths are bus bandwidths, which do not depend on the number of ranks n:
bytes of the whole buffer / time, times 2 (n - 1) / n for an all-reduce and (n - 1) / n for an all-gather or a
reduce-scatter (NCCL tests, "Performance reported by NCCL tests").
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial

import torch
import torch.distributed as dist

from common.distributed.rank_info import RankInfo
from common.doctor.reading import Reading, Readings, first_line
from common.step.capture import capturing

SMALL, MEDIUM, LARGE = 32 << 10, 64 << 20, 1 << 30
PAIR_BYTES = 256 << 20
CAPTURED = 50
WATCHDOG_LIMIT = timedelta(days=1)
POLL_SECONDS = 0.1


@dataclass
class CollectiveProgress:
    """Current stage and results of the measuring thread, which the main thread reads.

    Attributes:
        stage: name of the current stage; empty before the first and after the last.
        since: start of the stage by the monotonic clock.
        node, job: measurements of this rank's node and of all ranks.
        failed: error message; empty if nothing failed.
    """

    stage: str = ""
    since: float = field(default_factory=time.monotonic)
    node: Readings = field(default_factory=dict)
    job: Readings = field(default_factory=dict)
    failed: str = ""

    def enter(self, stage: str) -> None:
        """Set the current stage and its start time."""
        self.stage, self.since = stage, time.monotonic()


@dataclass(frozen=True)
class CollectiveOptions:
    """Options of the measurements.

    Attributes:
        nodes: the ranks of each node, in the order of the nodes.
        seconds: approximate upper limit of one measurement.
        large: whether to measure pairs of nodes with larger buffers and, on GPUs, all collectives with 1 GB.
        timeout_seconds: longest time that one stage may take.
    """

    rank_info: RankInfo
    nodes: Sequence[Sequence[int]]
    device: torch.device
    seconds: float
    large: bool
    timeout_seconds: float


def run(
    plan: CollectiveOptions, work: Callable[[CollectiveOptions, CollectiveProgress], None] | None = None
) -> CollectiveProgress:
    """Measure in a thread and return the results.

    If the thread hangs, ``failed`` has a message and ``stage`` is still set; after an error, only ``failed`` is set.

    Args:
        work: function that measures; default :func:`measure`.
    """
    progress = CollectiveProgress()

    def body() -> None:
        try:
            (work or measure)(plan, progress)
            progress.enter("")
        except (RuntimeError, OSError) as error:  # from NCCL, Gloo or the device
            progress.failed = f"{progress.stage}: {first_line(error)}"
            progress.enter("")

    thread = threading.Thread(target=body, name="collectives", daemon=True)
    thread.start()
    while thread.is_alive():
        thread.join(POLL_SECONDS)
        if thread.is_alive() and time.monotonic() - progress.since > plan.timeout_seconds:
            progress.failed = f"no answer for {plan.timeout_seconds:.0f} s in: {progress.stage}"
            break
    return progress


def measure(plan: CollectiveOptions, progress: CollectiveProgress) -> None:
    """Write measurements to ``progress``: each node alone, then (from three on) pairs of nodes, then all ranks."""
    if plan.device.type == "cuda":
        torch.cuda.set_device(plan.device)
    own = next(ranks for ranks in plan.nodes if plan.rank_info.rank in ranks)
    progress.enter("collectives inside the node")
    group = _group(own, plan)
    if len(own) > 1:
        progress.node |= _figures(group, len(own), plan, "node_")
    if len(plan.nodes) > 2:
        _measure_pairs(plan, progress)
    if len(plan.nodes) > 1:
        progress.enter("collectives over all ranks")
        everyone = _group([rank for ranks in plan.nodes for rank in ranks], plan)
        progress.job |= _figures(everyone, plan.rank_info.world_size, plan, "")


def ring_rounds(count: int) -> list[list[tuple[int, int]]]:
    """Return the pairs of neighbours on a ring of ``count`` nodes, in rounds with at most one pair per node."""
    pairs = [(node, (node + 1) % count) for node in range(count)]
    even = count - count % 2
    rounds = [pairs[0:even:2], pairs[1:even:2], pairs[even:]]
    return [found for found in rounds if found]


def _measure_pairs(plan: CollectiveOptions, progress: CollectiveProgress) -> None:
    """Record the better bandwidth of a node's two pairs: only a bad node is slow with both of its neighbours."""
    best = 0.0
    for pairs in ring_rounds(len(plan.nodes)):
        mine = next((pair for pair in pairs if any(plan.rank_info.rank in plan.nodes[node] for node in pair)), None)
        if mine is None:
            # Gloo numbers the groups of a process, and ranks connect only if their numbers agree.
            _group([plan.rank_info.rank], plan)
            continue
        progress.enter(f"collectives of the nodes {mine[0]} and {mine[1]} alone")
        ranks = sorted([*plan.nodes[mine[0]], *plan.nodes[mine[1]]])
        buffer = torch.zeros(PAIR_BYTES if plan.large else MEDIUM, dtype=torch.uint8, device=plan.device)
        group = _group(ranks, plan)
        seconds = _time(partial(dist.all_reduce, buffer, group=group), group, plan)
        best = max(best, _bus_gbs(buffer.numel(), seconds, len(ranks), 2))
    progress.node["pair_all_reduce_gbs"] = Reading(best)


def _group(ranks: Sequence[int], plan: CollectiveOptions) -> dist.ProcessGroup:
    on_gpus = plan.device.type == "cuda"
    # After the timeout Gloo raises an error, but NCCL's watchdog would end the process before it can report anything.
    limit = timedelta(seconds=plan.timeout_seconds) if not on_gpus else WATCHDOG_LIMIT
    group = dist.new_group(
        list(ranks),
        timeout=limit,
        backend="nccl" if on_gpus else "gloo",
        use_local_synchronization=True,
    )
    assert isinstance(group, dist.ProcessGroup)
    return group


def _figures(group: dist.ProcessGroup, ranks: int, plan: CollectiveOptions, prefix: str) -> Readings:
    _require_right_sum(group, ranks, plan.device)
    small = torch.zeros(SMALL, dtype=torch.uint8, device=plan.device)
    medium = torch.zeros(MEDIUM, dtype=torch.uint8, device=plan.device)
    latency = _latency(lambda: dist.all_reduce(small, group=group), group, plan)
    seconds = _time(lambda: dist.all_reduce(medium, group=group), group, plan)
    readings = {
        f"{prefix}all_reduce_32kb_us": Reading(latency * 1e6),
        f"{prefix}all_reduce_64mb_gbs": Reading(_bus_gbs(MEDIUM, seconds, ranks, 2)),
    }
    if plan.large and plan.device.type == "cuda":
        readings |= _large_figures(group, ranks, plan, prefix)
    return readings


def _large_figures(group: dist.ProcessGroup, ranks: int, plan: CollectiveOptions, prefix: str) -> Readings:
    size = LARGE // ranks * ranks
    whole = torch.zeros(size, dtype=torch.uint8, device=plan.device)
    part = torch.zeros(size // ranks, dtype=torch.uint8, device=plan.device)
    readings = {}
    for name, factor, collective in (
        ("all_reduce", 2, lambda: dist.all_reduce(whole, group=group)),
        ("all_gather", 1, lambda: dist.all_gather_into_tensor(whole, part, group=group)),
        ("reduce_scatter", 1, lambda: dist.reduce_scatter_tensor(part, whole, group=group)),
    ):
        seconds = _time(collective, group, plan)
        readings[f"{prefix}{name}_1gb_gbs"] = Reading(_bus_gbs(size, seconds, ranks, factor))
    return readings


def _bus_gbs(size: int, seconds: float, ranks: int, factor: int) -> float:
    return size / seconds * factor * (ranks - 1) / ranks / 1e9


def _require_right_sum(group: dist.ProcessGroup, ranks: int, device: torch.device) -> None:
    ones = torch.ones(1 << 20, dtype=torch.float32, device=device)
    dist.all_reduce(ones, group=group)
    wrong = int((ones != ranks).sum())
    if wrong:
        raise RuntimeError(f"an all-reduce of ones over {ranks} ranks gave {wrong} wrong sums of {ones.numel()}")


def _latency(collective: Callable[[], object], group: dist.ProcessGroup, plan: CollectiveOptions) -> float:
    """Return the seconds per call; on a GPU from a captured graph, as in training, without the overhead of Python."""
    if plan.device.type != "cuda":
        return _time(collective, group, plan)
    stream = torch.cuda.Stream(plan.device)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.stream(stream):
        for _ in range(2):
            collective()
        # `capturing` allows NCCL's watchdog thread to query events during the capture.
        with capturing(graph, stream):
            for _ in range(CAPTURED):
                collective()
    return _time(graph.replay, group, plan) / CAPTURED


def _time(collective: Callable[[], object], group: dist.ProcessGroup, plan: CollectiveOptions) -> float:
    """Return the seconds per call on the slowest rank; all ranks make the same number of calls."""
    for _ in range(2):
        once = _slowest(_timed(collective, 1, plan.device), group, plan.device)
    repetitions = min(1000, max(2, int(plan.seconds / once)))
    return _slowest(_timed(collective, repetitions, plan.device), group, plan.device)


def _timed(collective: Callable[[], object], repetitions: int, device: torch.device) -> float:
    _synchronize(device)
    started = time.perf_counter()
    for _ in range(repetitions):
        collective()
    _synchronize(device)
    return (time.perf_counter() - started) / repetitions


def _slowest(seconds: float, group: dist.ProcessGroup, device: torch.device) -> float:
    value = torch.tensor([seconds], dtype=torch.float64, device=device)
    dist.all_reduce(value, op=dist.ReduceOp.MAX, group=group)
    return float(value.item())


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
