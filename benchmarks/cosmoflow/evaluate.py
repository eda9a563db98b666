"""Evaluation of CosmoFlow: mean absolute error of all parameters over the validation cubes (HPC rules)."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from torch import Tensor

from benchmarks.cosmoflow.model import CosmoFlow
from benchmarks.cosmoflow.samples import PARAMETERS
from common.data.batches import EvalSource
from common.distributed.layout import Layout
from common.evaluation.counts import CountedEvaluation, Counts, MeanScorer

SCORER = MeanScorer("mean_absolute_error", "error", "cubes", each=PARAMETERS)
"""Scorer of the mean over all parameters of all cubes."""


def evaluation_of(
    model: CosmoFlow,
    example: dict[str, Tensor],
    open_source: Callable[[Path], EvalSource],
    layout: Layout,
    capture: bool,
) -> CountedEvaluation:
    """Return the evaluation of the network that is being trained; see :class:`CountedEvaluation`.

    Args:
        example: a batch on the device: ``x`` (N, D, H, W, C) int16, ``y`` (N, P), ``weight`` (N,), 0 for padding.
    """
    counts = Counts(layout, ("cubes",), ("error",))

    def count(batch: dict[str, Tensor]) -> None:
        weight_N = batch["weight"].double()
        error_N = (model(batch["x"]).double() - batch["y"].double()).abs().sum(1)
        counts.add(weight_N.sum(), (error_N * weight_N).sum())

    return CountedEvaluation(SCORER, model, count, counts, example, open_source, capture)
