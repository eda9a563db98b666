"""The throughput of HPC rounds: M instances of a benchmark train on parts of one system.

Each instance trains one model on S of the system's T accelerators, writes its own log, and reaches the target. A
submitter may prune slow instances: the M' others count, at least as many as a time to solution has runs. The score is
the tuple (T, S, M', TTTa). The time TTTa to train all is the time from the first ``run_start`` to the last ``run_stop``
of the instances that count (HPC rules, throughput; result summarizer of mlperf-logging).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from common.mlperf.parsed_log import ParsedLog, distinct_names
from common.mlperf.progress import is_finite
from common.mlperf.refusals import Refusal
from common.mlperf.result_verdict import invalid_runs
from common.mlperf.verdict import Verdict


@dataclass(frozen=True)
class Throughput:
    """The score of the instances of one benchmark.

    Attributes:
        accelerators: T, the largest number of accelerators on which instances ran at the same time.
        instance_accelerators: S, the accelerators of one instance.
        instances: M', the instances that count.
        launched: M, which includes the pruned instances.
        minutes: TTTa.
    """

    accelerators: int
    instance_accelerators: int
    instances: int
    launched: int
    minutes: float

    def __str__(self) -> str:
        """Return the score as a phrase for reports."""
        score = f"({self.accelerators}, {self.instance_accelerators}, {self.instances}, {self.minutes:.3f} minutes)"
        return f"(T, S, M', TTTa) = {score}, {self.launched - self.instances} of {self.launched} instances pruned"


def accelerators_of(log: ParsedLog) -> int | None:
    """Return the number of accelerators in a log, where a node without accelerators counts as one.

    None if the log does not state a number of nodes and of accelerators per node.
    """
    nodes, per_node = log.value("number_of_nodes"), log.value("accelerators_per_node")
    if not is_finite(nodes) or not is_finite(per_node):
        return None
    return int(nodes) * max(int(per_node), 1)


def busy_accelerators(logs: Sequence[ParsedLog]) -> int:
    """Return the largest number of accelerators on which the runs of the logs were timed at the same moment."""
    changes = []
    for log in logs:
        size, span = accelerators_of(log), _span(log)
        if size is not None and span is not None:
            changes += [(span[0], size), (span[1], -size)]
    busy = most = 0
    for _, change in sorted(changes):  # at the same moment, an end comes before a start
        busy += change
        most = max(most, busy)
    return most


def _span(log: ParsedLog) -> tuple[float, float] | None:
    """Return the times of ``run_start`` and ``run_stop`` in milliseconds since 1970; None if one is missing."""
    starts, stops = log.all("run_start"), log.all("run_stop")
    return (starts[0].time_ms, stops[-1].time_ms) if starts and stops else None


def throughput_of(kept: Sequence[ParsedLog], pruned: Sequence[ParsedLog]) -> Throughput:
    """Return the score of instances without refusals.

    Args:
        kept: logs of the instances that count; at least one.
        pruned: logs of the other instances.
    """
    spans = [span for log in kept if (span := _span(log)) is not None]
    size = accelerators_of(kept[0])
    assert size is not None
    return Throughput(
        accelerators=busy_accelerators([*kept, *pruned]),
        instance_accelerators=size,
        instances=len(kept),
        launched=len(kept) + len(pruned),
        minutes=(max(stop for _, stop in spans) - min(start for start, _ in spans)) / 60_000,
    )


def instance_refusals(verdicts: Sequence[Verdict]) -> list[Refusal]:
    """Return why instances cannot count, apart from what forbids any set of runs.

    Args:
        verdicts: verdicts on the instances that are not pruned.
    """
    judged = [(verdict, verdict.log) for verdict in verdicts if verdict.log is not None and verdict.kind != "refused"]
    logs = [log for _, log in judged]
    found = invalid_runs(logs, [verdict for verdict, _ in judged])
    for verdict, log in judged:
        if not verdict.converged:
            text = f"{log.path}: did not converge; an instance that counts has to: prune it, in pruned_results"
            found.append(Refusal("instance-not-converged", text))
    sizes: dict[int | None, ParsedLog] = {}
    for log in logs:
        sizes.setdefault(accelerators_of(log), log)
    if None in sizes:
        text = f"{sizes[None].path}: does not state number_of_nodes and accelerators_per_node of its instance"
        found.append(Refusal("instance-size", text))
    elif len(sizes) > 1 and logs[0].division != "closed":  # in the closed division, all settings are compared
        named = distinct_names(log.path for log in logs)
        listed = ", ".join(f"{size} in {named[log.path]}" for size, log in sizes.items())
        found.append(Refusal("instance-size", f"the instances have different numbers of accelerators: {listed}"))
    return found
