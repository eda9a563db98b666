"""Which way a run evaluates, as its configuration says."""

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


def way_to_evaluate(
    run: RunConfig,
    workload: Workload,
    layout: Layout,
    scorer: ScorerProcess | None = None,
    offline: OfflineRun | None = None,
) -> Evaluations:
    """The training ranks' side: in line, in the background, by the job's evaluation ranks, or offline.

    Only where the training ranks predict during the training an evaluation is built here.

    Args:
        run: the configuration.
        workload, layout: of the training ranks.
        scorer: rank 0's process, where it has one.
        offline: what checkpoints are written for; None where nobody is to write any: then what is scored offline is
            evaluated in line.

    Raises:
        ConfigError: a pipeline's weights are to be handed to others.
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
    """How many of the training ranks of the first node send weights."""
    return senders_for(run.evaluation.ranks, min(run.training_ranks, run.scale.gpus_per_node))
