"""Time that a step waits for input: what the readers deliver, against what the rest of the step needs.

A replica receives at most the smallest of three rates, in samples per second:

- *reader*: the measured rate of a rank's reader, with the threads or processes of its recipe.
- *processor cores*: the physical cores of a rank divided by the processor seconds of a sample. The ranks of a node
  share its cores.
- *storage*: the bytes per second of a node, divided by the bytes of a sample and by the replicas on the node.

A reader works beside the step, so a step waits only for the time by which reading is longer than the rest of the step.
Copies and kernels of the reader also disturb the step. A run through the reader measures this as a longer step. The
larger of both times counts.
"""

from __future__ import annotations

from dataclasses import dataclass

from common.config.system import Hardware
from common.planning.compute import sample_bytes_of
from common.planning.estimates import RunLayout


@dataclass(frozen=True)
class MeasuredReader:
    """Measurements of the reader of a benchmark on a kind of GPU; None: not measured.

    Attributes:
        rate: samples per second that a replica receives from the reader alone.
        processor_seconds: processor time of a rank per sample, in seconds, or an upper limit of it.
        slowdown: time of a step through the reader, divided by the time of the same step without reader.
    """

    rate: float | None = None
    processor_seconds: float | None = None
    slowdown: float | None = None


NOTHING_MEASURED = MeasuredReader()


def reader_limits(benchmark: str, layout: RunLayout, reader: MeasuredReader, hardware: Hardware) -> dict[str, float]:
    """Return the samples per second that a replica receives at most, by limit; without limits that are not known."""
    ranks = min(layout.training_gpus, hardware.gpus_per_node)
    replicas = max(1.0, ranks / (layout.pp * layout.cp * layout.tp))
    limits = {}
    if reader.rate is not None:
        limits["reader"] = reader.rate
    if reader.processor_seconds and hardware.cores_per_node is not None:
        limits["processor cores"] = hardware.cores_per_node / ranks / reader.processor_seconds
    size = sample_bytes_of(benchmark)
    if size is not None and hardware.storage_gbs is not None:
        limits["storage"] = hardware.storage_gbs * 1e9 / size / replicas
    return limits


def input_seconds(
    benchmark: str, layout: RunLayout, reader: MeasuredReader, hardware: Hardware, computed: float, rest: float
) -> float | None:
    """Return the seconds that a step waits for input; None if nothing about the input is known.

    Args:
        computed: seconds of the computation, which the reader disturbs.
        rest: seconds of the whole step without input.
    """
    limits = reader_limits(benchmark, layout, reader, hardware)
    if not limits and reader.slowdown is None:
        return None
    disturbed = max(0.0, (reader.slowdown or 1.0) - 1.0) * computed
    samples = layout.global_batch / layout.replicas
    return max([disturbed, *(samples / rate - rest for rate in limits.values())])
