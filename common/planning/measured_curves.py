"""Time of a micro-batch from measured steps: the time with which the model gives the measured step.

On one GPU a step is ``accumulation x c(b) + update``. The update moves a known number of bytes, so a measured step
gives ``c(b)``. If several GPUs share a replica (pp, cp, tp), all other parts of the model are subtracted, too.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from common.config.schema import RunConfig
from common.config.system import Hardware
from common.errors import ConfigError
from common.planning.compute import ComputeCurve, decoder_of
from common.planning.constants import OTHER_PRECISION_DEVIATION, SPLIT_DEVIATION, SPLIT_LOSS
from common.planning.estimates import RunLayout
from common.planning.points import MeasuredPoint, kind_of
from common.planning.step_model import step_times

ROUNDS = 12
"""Corrections of ``c(b)``. Each leaves a few percent of the difference: the parts that grow with ``c(b)``."""


def curve_for(
    run: RunConfig, axes: tuple[int, int, int], points: Sequence[MeasuredPoint], hardware: Hardware
) -> ComputeCurve:
    """Return the time of a micro-batch for a layout with sizes ``axes`` of pp, cp and tp, per GPU.

    Points of the same axes count. For decoders without such points, those of one GPU are divided by the number of
    ranks that share a replica; their number of layers may differ. Points of the same precision are preferred.

    Args:
        points: measured steps; those with several replicas are ignored.

    Raises:
        ConfigError: there are no points for this layout.
    """
    replicas = [point for point in points if point.gpus == math.prod(point.axes)]
    alike = [point for point in replicas if kind_of(point.run) == kind_of(run)]
    for usable, error in ((alike, 0.0), (replicas, OTHER_PRECISION_DEVIATION)):
        if own := [point for point in usable if point.axes == axes]:
            return _curve(run, own, hardware).scaled(1.0, error)
        single = [point for point in usable if point.gpus == 1]
        if single and decoder_of(run) is not None:
            ranks, halvings = math.prod(axes), math.log2(math.prod(axes))
            lost = 1 + SPLIT_LOSS * math.log2(axes[1] * axes[2])
            return _curve(run, single, hardware).scaled(lost / ranks, math.hypot(error, SPLIT_DEVIATION * halvings))
    named = ", ".join(f"layout.{axis}={size}" for axis, size in zip(("pp", "cp", "tp"), axes, strict=True))
    raise ConfigError(
        f"{run.benchmark.name} has no measured step with {named} on {hardware.gpu}: measure one with `mlperf-suite "
        f"measure {run.benchmark.name}`, and name its results with --measured"
    )


def _curve(run: RunConfig, points: Sequence[MeasuredPoint], hardware: Hardware) -> ComputeCurve:
    times: dict[int, list[float]] = {}
    for point in points:
        each = _micro_batch_seconds(point, hardware) * _more_layers(run, point.run)
        times.setdefault(point.run.micro_batch, []).append(each)
    batches = tuple(sorted(times))
    return ComputeCurve(batches, tuple(sum(times[batch]) / len(times[batch]) for batch in batches))


def _micro_batch_seconds(point: MeasuredPoint, hardware: Hardware) -> float:
    run, (pp, cp, tp) = point.run, point.axes
    layout = RunLayout(point.gpus, run.global_batch, run.micro_batch, point.accumulation, pp, cp, tp)
    each = point.seconds / point.accumulation
    for _ in range(ROUNDS):
        found = step_times(run, layout, ComputeCurve((run.micro_batch,), (each,)), hardware).total
        each += (point.seconds - found) / point.accumulation
        if each <= 0:
            raise ConfigError(f"{point.source}: a step of {point.seconds:.3g} s is shorter than its update")
    return each


def _more_layers(run: RunConfig, measured: RunConfig) -> float:
    """Return the computation of a micro-batch of ``run`` as a multiple of ``measured``, which may have fewer layers."""
    wanted, had = decoder_of(run), decoder_of(measured)
    if wanted is None or had is None or wanted.layers == had.layers:
        return 1.0
    head = wanted.vocabulary * wanted.hidden
    layer = wanted.products_per_layer
    return (wanted.layers * layer + head) / (had.layers * layer + head)
