"""Memory of a GPU for a layout and a micro-batch: from the decoders' own plans, else from measured steps."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from common.config.schema import RunConfig
from common.config.system import Hardware
from common.distributed.layout import Layout
from common.errors import ConfigError
from common.language.memory import FrozenWorkspace, StageWorkspace, TrainedWorkspace, Workspace
from common.ops.linear import IN_FP8
from common.optim.memory_plan import RESERVED, plan, trained_weights
from common.optim.precision import DTYPES
from common.planning.compute import decoder_of
from common.planning.estimates import RunLayout
from common.planning.points import MeasuredPoint, kind_of


def memory_of(run: RunConfig, layout: RunLayout, points: Sequence[MeasuredPoint], hardware: Hardware) -> float | None:
    """Return the bytes of a GPU that a layout needs, as far as it is known; None if it is not.

    Decoders with hand-written passes plan their memory (:mod:`common.language.memory`); for stages of a pipeline, the
    plan has no scratch buffers. For other networks, the bytes of a measured step grow in proportion to the
    micro-batch, and do not fall with it: an upper estimate.

    Raises:
        ConfigError: the layout does not fit.
    """
    capacity = hardware.memory_gb * 1e9
    if decoder_of(run) is not None and run.workload.model.blocks != "autograd":
        if layout.pp == 1:
            return plan(_workspace(run, layout), int(capacity), *_requested(run)).total
        needed = sum(_stage(run, layout).parts(0, 0).values())
        if needed > capacity - RESERVED:
            raise ConfigError(
                f"layout.pp={layout.pp}, layout.tp={layout.tp}: a stage needs {needed / 1e9:.1f} GB and some of "
                f"scratch, and a GPU has {hardware.memory_gb:g} GB: use more stages, or more ranks of tp"
            )
        return needed
    bounds = [
        point.memory * max(1.0, layout.micro_batch / point.run.micro_batch)
        for point in points
        if point.memory is not None and point.axes == (layout.pp, layout.cp, layout.tp) and _alike(point, run)
    ]
    if not bounds:
        return None
    needed = min(bounds)
    if needed > capacity - RESERVED:
        raise ConfigError(
            f"micro_batch={layout.micro_batch} needs about {needed / 1e9:.1f} GB, and a GPU has "
            f"{hardware.memory_gb:g} GB, of which {RESERVED / 1e9:g} are reserved: use a smaller one"
        )
    return needed


def _alike(point: MeasuredPoint, run: RunConfig) -> bool:
    return kind_of(point.run) == kind_of(run) and decoder_of(point.run) == decoder_of(run)


def _workspace(run: RunConfig, layout: RunLayout) -> Workspace:
    """Return the sizes of a training rank of the whole network, as its workload computes them."""
    sizes = _sizes(run, layout)
    if hasattr(run.workload.facts, "lora_rank"):
        cast_apart = run.workload.model.linear == "te"
        return FrozenWorkspace(**sizes, rank=run.workload.facts.lora_rank, cast_apart=cast_apart)
    return TrainedWorkspace(**{**sizes, **_trained(run, layout)})


def _stage(run: RunConfig, layout: RunLayout) -> StageWorkspace:
    """Return the sizes of a rank of the first stage, which has the most micro-batches in flight."""
    sizes, model = _sizes(run, layout), run.workload.model
    own = {
        "own_parameters": sizes["architecture"].parameters // (layout.pp * layout.tp),
        "stage": 0,
        "stages": layout.pp,
        "chunks": model.chunks,
        "micro_batches": layout.accumulation,
        "deferred_head": model.put_off_head,
    }
    return StageWorkspace(**{**sizes, **_trained(run, layout), **own})


def _trained(run: RunConfig, layout: RunLayout) -> dict[str, Any]:
    ranks = Layout({"pp": layout.pp, "dp": layout.replicas, "cp": layout.cp, "tp": layout.tp})
    return {**trained_weights(run, ranks, DTYPES[run.precision]), "chunk_graphs": run.chunk_graphs}


def _sizes(run: RunConfig, layout: RunLayout) -> dict[str, Any]:
    """Return the arguments that all workspaces have."""
    decoder, model, facts = decoder_of(run), run.workload.model, run.workload.facts
    assert decoder is not None
    tokens = layout.micro_batch * facts.row_length // layout.cp
    evaluated = 0 if layout.evaluation_ranks else run.workload.reader.eval_rows * facts.row_length // layout.cp
    return {
        "architecture": decoder,
        "tokens": tokens,
        "ranks": layout.tp,
        "sharers": layout.cp,
        "eval_tokens": evaluated,
        "itemsize": DTYPES[run.precision].itemsize,
        "fp8": model.linear in IN_FP8,
        "head_chunk": model.head_chunk,
        "alone": layout.training_gpus == 1,
    }


def _requested(run: RunConfig) -> tuple[int | None, int | None]:
    """Return the numbers of layers that recompute, and that keep their weights transposed; None for ``auto``."""
    model = run.workload.model
    counts = []
    for names in (("recomputed_qkv", "recomputed_gate_up"), ("transposed_layers",)):
        asked = next((getattr(model, name) for name in names if hasattr(model, name)), 0)
        counts.append(int(asked) if isinstance(asked, int) else None)
    return counts[0], counts[1]


def micro_batches(batch: int, replicas: int, multiple: int, largest: int) -> list[int]:
    """Return the micro-batches by which each of ``replicas`` can divide its part of a global batch, largest first.

    Args:
        multiple: number of samples that cannot be separated.
        largest: upper limit.
    """
    if batch % replicas:
        return []
    own = batch // replicas
    divisors = {each for low in range(1, math.isqrt(own) + 1) if own % low == 0 for each in (low, own // low)}
    return sorted((each for each in divisors if each % multiple == 0 and each <= largest), reverse=True)
