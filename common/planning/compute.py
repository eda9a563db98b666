"""Computation of a step: time of a micro-batch by its size, and time of the update.

The time ``c(b)`` of a micro-batch of b samples is known at measured sizes (:mod:`common.planning.measured_curves`).
Between them, ``c`` is interpolated linearly. With a single size b0, ``c(b) = c(b0) (f + (1 - f) b / b0)`` below b0: a
fraction f does not depend on the batch (launches, weights to read, kernels too small for the GPU). Above the largest
size, ``c`` is taken as proportional to b, because the suite measures batches that fill a GPU.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from common.config.loading import build
from common.config.ranges import NotNegative, Positive
from common.config.schema import RunConfig
from common.config.sections import used_layers
from common.config.system import Hardware
from common.config.yaml_files import read_small_yaml
from common.errors import ConfigError
from common.language.architecture import Architecture
from common.planning.constants import CURVED, FIXED, FIXED_DEVIATION, FORWARD, FROZEN_FORWARD, UPDATE_BYTES

SIZES = Path(__file__).with_name("workload_sizes.yaml")


@dataclass(frozen=True)
class WorkloadSizes:
    """Sizes of a benchmark.

    Attributes:
        parameters: trained parameters, of all ranks of tp and pp together.
        exchange_bytes: bytes per sample that a rank sends to the ranks with the embeddings' rows, in both directions.
        windows: forward passes of a training sample for an evaluated sample.
        sample_bytes: bytes of a sample in the prepared data; None if unknown, or if the data are read only once.
        layers, hidden: layers and width of a decoder; 0 for other networks.
        row_tokens: tokens of a sample of a decoder; 0 for other networks.
        not_modelled: parts that estimates of the benchmark lack; empty if none is known.
    """

    parameters: Annotated[float, Positive]
    exchange_bytes: Annotated[float, NotNegative] = 0.0
    windows: Annotated[float, Positive] = 1.0
    sample_bytes: Annotated[float, Positive] | None = None
    layers: int = 0
    hidden: int = 0
    row_tokens: int = 0
    not_modelled: str = ""


@functools.cache
def _table() -> dict[str, WorkloadSizes]:
    content = read_small_yaml(SIZES, "the sizes of workloads")
    return {name: build(WorkloadSizes, values, name) for name, values in content.items()}


def not_modelled(benchmark: str) -> str:
    """Return what estimates of a benchmark lack; empty if nothing is known."""
    known = _table().get(benchmark)
    return "" if known is None else known.not_modelled


def sample_bytes_of(benchmark: str) -> float | None:
    """Return the bytes of a sample in the prepared data; None if unknown, or if the data are read only once."""
    known = _table().get(benchmark)
    return None if known is None else known.sample_bytes


def decoder_of(run: RunConfig) -> Architecture | None:
    """Return the layers of a decoder that a run uses; None for other networks."""
    facts: Any = getattr(run.workload, "facts", None)
    if not isinstance(facts, Architecture):
        return None
    used: Architecture = used_layers(facts, run.workload.model, "network", "layers")
    return used


def sizes_of(run: RunConfig) -> WorkloadSizes:
    """Return the sizes of the benchmark of a run.

    Raises:
        ConfigError: they are not known.
    """
    decoder, name = decoder_of(run), run.benchmark.name
    known = _table().get(name)
    if decoder is None:
        if known is None:
            raise ConfigError(f"estimate: {name}: the number of its parameters is not in {SIZES.name}")
        return known
    return WorkloadSizes(
        parameters=float(decoder.parameters if known is None else known.parameters),
        layers=decoder.layers,
        hidden=decoder.hidden,
        row_tokens=run.workload.facts.row_length,
    )


def forward_share(run: RunConfig) -> float:
    """Return the forward pass as a fraction of a micro-batch's time."""
    return FROZEN_FORWARD if hasattr(run.workload.facts, "lora_rank") else FORWARD


def update_seconds(run: RunConfig, parts: int, shards: int, hardware: Hardware) -> float:
    """Return the seconds of the optimizer's update.

    Args:
        parts: ranks of tp and pp, which have different weights.
        shards: ranks that share the update of the same weights.
    """
    rule = run.workload.hparams.optimizer
    moved = sizes_of(run).parameters * UPDATE_BYTES[rule] / (parts * shards)
    return moved / (hardware.memory_gbs * 1e9)


@dataclass(frozen=True)
class ComputeCurve:
    """Seconds of a micro-batch by its size.

    Attributes:
        batches: measured sizes, ascending.
        seconds: times of these sizes.
        error: standard deviation of all times, as a fraction, besides the distance from the measured sizes.
    """

    batches: tuple[int, ...]
    seconds: tuple[float, ...]
    error: float = 0.0

    def at(self, batch: float) -> float:
        """Return the seconds of a micro-batch of ``batch`` samples; never shorter for a larger one."""
        sizes, times = self.batches, self.seconds
        if batch >= sizes[-1]:
            return times[-1] * batch / sizes[-1]
        if len(sizes) == 1:
            return times[0] * (FIXED + (1 - FIXED) * batch / sizes[0])
        high = max(next(index for index, size in enumerate(sizes) if size >= batch), 1)
        low = high - 1
        slope = max(0.0, (times[high] - times[low]) / (sizes[high] - sizes[low]))
        # Below the smallest batch, a segment that does not start at 0 may not fall below the proportional time.
        return max(times[low] + slope * (batch - sizes[low]), times[low] * min(1.0, batch / sizes[low]))

    def deviation(self, batch: float) -> float:
        """Return the standard deviation of :meth:`at` as a fraction."""
        nearest = min(self.batches, key=lambda size: abs(math.log(batch / size)))
        if self.batches[0] < batch < self.batches[-1]:
            low = max(size for size in self.batches if size <= batch)
            high = min(size for size in self.batches if size >= batch)
            part = 0.0 if low == high else (batch - low) / (high - low)
            distance = 4 * CURVED * part * (1 - part)
        else:
            ratio = batch / nearest
            distance = FIXED_DEVIATION * abs(1 - ratio) / (FIXED + (1 - FIXED) * ratio)
        return math.hypot(self.error, distance)

    def scaled(self, factor: float, error: float = 0.0) -> ComputeCurve:
        """Return the curve with all times multiplied by ``factor``, and a further ``error``."""
        return ComputeCurve(self.batches, tuple(factor * each for each in self.seconds), math.hypot(self.error, error))
