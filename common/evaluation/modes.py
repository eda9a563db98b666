"""Choice of the evaluation mode by the configuration."""

from __future__ import annotations

from common.config.schema import RunConfig
from common.contract.evaluation import Evaluations
from common.contract.workload import Workload
from common.distributed.layout import Layout
from common.distributed.weights import senders_for
from common.errors import ConfigError
from common.evaluation.background import BackgroundEvaluation
from common.evaluation.inline import InlineEvaluation
from common.evaluation.offline import OfflineEvaluation, OfflineRun
from common.evaluation.ranks import RankedEvaluation
from common.evaluation.scorer_process import ScorerProcess


def evaluation_mode(
    run: RunConfig,
    workload: Workload,
    layout: Layout,
    scorer: ScorerProcess | None = None,
    offline: OfflineRun | None = None,
) -> Evaluations:
    """Return the evaluation mode of the training ranks: inline, background, evaluation ranks or offline.

    Only inline and background build the workload's evaluation here.

    Args:
        scorer: process on rank 0, for background scoring.
        offline: run that writes checkpoints; None to write none and evaluate offline-scored benchmarks inline.

    Raises:
        ConfigError: the layout has pipeline parallelism, and the mode sends or writes the weights.
    """
    if layout.size("pp") > 1 and (run.evaluation.ranks or (run.evaluation.offline and offline is not None)):
        raise ConfigError(
            f"layout.pp={layout.size('pp')}: no training rank has all weights to hand on; evaluate on the stages "
            "themselves: evaluation.ranks=0 and no offline scoring"
        )
    if run.evaluation.offline and offline is not None:
        return OfflineEvaluation(run.evaluation, run.benchmark.reached, workload, layout, offline)
    if run.evaluation.ranks:
        return RankedEvaluation(layout, weight_senders(run), run.evaluation.ranks, workload.tensor_splits())
    if run.evaluation.scoring == "background":
        assert scorer is not None or layout.rank, "rank 0 has started a scorer"
        return BackgroundEvaluation(workload.evaluation(layout), scorer)
    return InlineEvaluation(workload.evaluation(layout), layout)


def weight_senders(run: RunConfig) -> int:
    """Return how many training ranks of the first node send weights."""
    return senders_for(run.evaluation.ranks, min(run.training_ranks, run.ranks_per_node))
