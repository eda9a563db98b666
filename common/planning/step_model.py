"""Time of one optimizer step on many GPUs, by cause.

Computation comes from measured points (:mod:`common.planning.compute`), communication from link constants
(:mod:`common.planning.collectives`). Of the time of a micro-batch, a third is the forward pass, or a half if
the weights are frozen.

- **Reduction.** Gradients are reduced in buckets during the last backward pass. The last bucket is exposed, and so is
  the time by which all buckets take longer than that pass. Clipping before the reduction exposes all of it.
- **Gathering.** With shards, new weights are gathered during the first forward pass; the first bucket is exposed.
- **Overlap.** Communication beside computation takes memory bandwidth, multiprocessors and power from it. This adds
  ``hardware.overlap_slowdown`` times the time that the overlapped bytes take inside a node: slower links disturb less.
- **Pipeline.** With m micro-batches and v chunks on each of p stages, ``(p - 1) / (m v)`` of the computation is idle
  (Narayanan et al., arXiv:2104.04473, section 2.2).
- **Input.** See :mod:`common.planning.input_model`.
- **Stragglers.** All ranks wait for the slowest. Its step is the largest of N draws from a normal distribution with the
  measured spread; the expected largest value is Blom's approximation.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from statistics import NormalDist

from common.config.schema import RunConfig
from common.config.system import Hardware
from common.planning.collectives import (
    RankGroup,
    all_reduce,
    all_to_all,
    group_of,
    inside_node,
    reduce_scatter,
    transfer,
)
from common.planning.compute import ComputeCurve, forward_share, sizes_of, update_seconds
from common.planning.constants import EXPOSED_SPLIT, TP_COLLECTIVES
from common.planning.estimates import RunLayout, StepTimes
from common.planning.input_model import NOTHING_MEASURED, MeasuredReader, input_seconds


@dataclass(frozen=True)
class Traffic:
    """Seconds of the communication of gradients and weights in a step.

    Attributes:
        reduction, gather: seconds of all buckets.
        last_bucket, first_gather: the parts that nothing can hide.
    """

    reduction: float
    gather: float
    last_bucket: float
    first_gather: float

    @property
    def total(self) -> float:
        """Seconds of all communication."""
        return self.reduction + self.gather


def step_times(
    run: RunConfig,
    layout: RunLayout,
    curve: ComputeCurve,
    hardware: Hardware,
    spread: float | None = None,
    reader: MeasuredReader = NOTHING_MEASURED,
) -> StepTimes:
    """Return the parts of a step.

    Args:
        run: settings of the workload and its optimizer; number of ranks, layout and batch are those of ``layout``.
        curve: seconds of a micro-batch on one GPU of this layout, its own tp and cp collectives excluded if the
            layout has not been measured.
        spread: measured standard deviation of the step time over GPUs, as a fraction; it counts if it is larger than
            that of ``hardware``.
        reader: measurements of the reader; without any, the part ``input`` is not known.
    """
    micro = curve.at(layout.micro_batch)
    computed = layout.accumulation * micro
    parts, shards = layout.pp * layout.tp, shard_group(run, layout, hardware)
    update = update_seconds(run, parts, shards.ranks, hardware)
    together = layout.training_gpus > 1
    slowdown = hardware.node_slowdown * computed if together else 0.0
    traffic = traffic_of(run, layout, shards, hardware)
    exposed, hidden = _exposed(run, traffic, micro)
    sending = traffic_of(run, layout, shards, inside_node(hardware))
    hidden *= sending.total / traffic.total if traffic.total else 0.0
    model, bubble = _model_communication(run, layout, hardware), 0.0
    if layout.pp > 1:
        chunks = getattr(run.workload.model, "chunks", 1)
        bubble = (layout.pp - 1) / (layout.accumulation * chunks) * computed
    busy = computed + slowdown
    step = StepTimes(
        compute=computed,
        update=update,
        node_slowdown=slowdown,
        overlap_slowdown=hardware.overlap_slowdown * hidden,
        exposed=exposed,
        model_communication=model,
        bubble=bubble,
        straggler=busy * straggling(layout.training_gpus, hardware, spread),
    )
    waiting = input_seconds(run.benchmark.name, layout, reader, hardware, computed + update, step.total)
    return replace(step, input=waiting)


def straggling(gpus: int, hardware: Hardware, spread: float | None = None) -> float:
    """Return by which fraction the slowest of ``gpus`` GPUs is slower than the mean."""
    # Few copies can agree by chance, so their spread does not replace a larger one of the system.
    deviation = math.hypot(max(hardware.gpu_spread, spread or 0.0), hardware.step_spread)
    return deviation * NormalDist().inv_cdf((gpus - 0.375) / (gpus + 0.25)) if gpus > 1 else 0.0


def shard_group(run: RunConfig, layout: RunLayout, hardware: Hardware) -> RankGroup:
    """Return the ranks that share the update of the same weights (``optimizer.shard``)."""
    same = layout.replicas * layout.cp
    everyone = group_of(same, layout.tp, hardware.gpus_per_node)
    if run.optimizer.shard == "all":
        return everyone
    if run.optimizer.shard == "node":
        return RankGroup(everyone.per_node, everyone.per_node)
    return RankGroup(1, 1)


def traffic_of(run: RunConfig, layout: RunLayout, shards: RankGroup, hardware: Hardware) -> Traffic:
    """Return the times of reduction and gathering."""
    everyone = group_of(layout.replicas * layout.cp, layout.tp, hardware.gpus_per_node)
    if everyone.ranks == 1:
        return Traffic(0.0, 0.0, 0.0, 0.0)
    item = 4 if run.precision in ("fp32", "fp64") else 2
    weights = sizes_of(run).parameters / (layout.pp * layout.tp)
    gradients = weights * (4 if run.optimizer.gradients == "fp32" else item)
    bucket = run.optimizer.bucket_mb * 2**20
    buckets = max(1, math.ceil(gradients / bucket))
    size = gradients / buckets
    if shards.ranks == 1 or run.optimizer.reduction == "all_reduce":
        each = all_reduce(size, everyone, hardware)
    else:
        others = RankGroup(everyone.ranks // shards.ranks, 1)
        each = reduce_scatter(size, shards, hardware) + all_reduce(size / shards.ranks, others, hardware)
    gathers = max(1, math.ceil(weights * item / bucket)) if shards.ranks > 1 else 0
    gather = reduce_scatter(weights * item / gathers, shards, hardware) if gathers else 0.0
    return Traffic(buckets * each, gathers * gather, each, gather)


def _exposed(run: RunConfig, traffic: Traffic, micro: float) -> tuple[float, float]:
    """Return the exposed and the hidden seconds of the traffic; ``micro``: seconds of a micro-batch."""
    if not run.optimizer.overlap:
        return traffic.total, 0.0
    gather = max(traffic.first_gather, traffic.gather - forward_share(run) * micro)
    if getattr(run.workload.hparams, "clip", "") == "before_reduction":
        reduction = traffic.reduction
    else:
        reduction = max(traffic.last_bucket, traffic.reduction - (1 - forward_share(run)) * micro)
    exposed = reduction + gather
    return exposed, traffic.total - exposed


def _model_communication(run: RunConfig, layout: RunLayout, hardware: Hardware) -> float:
    """Return the seconds of exchanges of embeddings, and of the collectives of a decoder's tp, cp and pp."""
    sizes, seconds = sizes_of(run), 0.0
    if sizes.exchange_bytes and layout.replicas > 1:
        ranks = group_of(layout.replicas, 1, hardware.gpus_per_node)
        seconds += 3 * all_to_all(sizes.exchange_bytes * layout.micro_batch / 3, ranks, hardware)
    if not sizes.layers:
        return seconds * layout.accumulation
    tokens = layout.micro_batch * sizes.row_tokens / layout.cp
    hidden = tokens * sizes.hidden * 2
    layers = sizes.layers / layout.pp
    if layout.tp > 1:
        ranks = group_of(layout.tp, 1, hardware.gpus_per_node)
        seconds += EXPOSED_SPLIT * layers * TP_COLLECTIVES * reduce_scatter(hidden, ranks, hardware)
    if layout.cp > 1:  # keys and values of whole rows: gathered forward and backward, their gradients scattered
        ranks = group_of(layout.cp, layout.tp, hardware.gpus_per_node)
        decoder = run.workload.facts
        both = 2 * (decoder.qkv_features - decoder.attention_features) * tokens * layout.cp / layout.tp
        seconds += EXPOSED_SPLIT * layers * 3 * reduce_scatter(both, ranks, hardware)
    if layout.pp > 1:
        stride = layout.replicas * layout.cp * layout.tp
        # Each chunk receives and sends one activation forward and one gradient backward per micro-batch.
        chunks = getattr(run.workload.model, "chunks", 1)
        seconds += 2 * chunks * transfer(hidden / layout.tp, stride >= hardware.gpus_per_node, hardware)
    return seconds * layout.accumulation
