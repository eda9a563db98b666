"""Which way a run evaluates, as its configuration says."""

from __future__ import annotations

from common.config.schema import RunConfig
from common.contract.evaluation import Evaluations
from common.contract.workload import Workload
from common.distributed.layout import Layout
from common.distributed.weights import senders_for
from common.evaluation.inline import InlineEvaluation
from common.evaluation.ranks import RankedEvaluation


def way_to_evaluate(run: RunConfig, workload: Workload, layout: Layout) -> Evaluations:
    """The training ranks' side: in line, or by the job's evaluation ranks. Only in line an evaluation is built here."""
    if not run.evaluation.ranks:
        return InlineEvaluation(workload.evaluation(layout), layout)
    return RankedEvaluation(layout, weight_senders(run), run.evaluation.ranks, workload.tensor_splits())


def weight_senders(run: RunConfig) -> int:
    """How many of the training ranks of the first node send weights."""
    return senders_for(run.evaluation.ranks, min(run.training_ranks, run.scale.gpus_per_node))
