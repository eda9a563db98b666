"""Evaluation of OpenCatalyst: the mean absolute error of the forces, over all components of free atoms (HPC rules)."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from torch import Tensor

from benchmarks.oc20.model import DimeNetPlusPlus, force_errors
from common.data.batches import EvalSource
from common.distributed.layout import Layout
from common.evaluation.counts import CountedEvaluation, Counts, MeanScorer

SCORER = MeanScorer("force_mae", "error", "structures", "free", each=3)
"""Scorer of the mean over the three components of all free atoms, in eV/angstrom."""


def evaluation_of(
    model: DimeNetPlusPlus,
    force_std: float,
    example: dict[str, Tensor],
    open_source: Callable[[Path], EvalSource],
    layout: Layout,
    capture: bool,
) -> CountedEvaluation:
    """Return the evaluation of the network that is being trained; see :class:`CountedEvaluation`.

    Args:
        force_std: the network's unit of forces, in eV/angstrom.
        example: a batch on the device, as :mod:`benchmarks.oc20.data` describes it.
    """
    counts = Counts(layout, ("structures", "free"), ("error",))

    def count(batch: dict[str, Tensor]) -> None:
        free_A = batch["free"].double()
        error = force_errors(model(batch).double() * force_std, batch["force"].double(), free_A)
        counts.add(batch["samples"].double(), free_A.sum(), error)

    return CountedEvaluation(SCORER, model, count, counts, example, open_source, capture)
