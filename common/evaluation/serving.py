"""Evaluation of weights that training ranks send: the evaluation ranks' side of :mod:`common.evaluation.ranks`."""

from __future__ import annotations

import time
from datetime import timedelta
from pathlib import Path

from common.config.schema import RunConfig
from common.contract.evaluation import Evaluation, Weights
from common.contract.workload import Workload
from common.distributed import job_store
from common.distributed.tensor_split import own_parts
from common.distributed.weights import Arrived, Template, Transfer, WeightReceiver
from common.evaluation.modes import weight_senders
from common.evaluation.ranks import ScoreSender


class WeightEvaluation:
    """Receives weights from the training ranks, evaluates them and sends the scores to training rank 0.

    The constructor waits until the training ranks have prepared a
    :class:`~common.evaluation.ranks.RankedEvaluation`. Collective over the evaluation ranks.

    Args:
        workload: workload on the layout of the evaluation ranks.
        evaluation: its evaluation, warmed up; the caller closes it.
        timeout: time limit of the wait.

    Attributes:
        reporter: sender of the scores on evaluation rank 0; None on the others.
    """

    def __init__(self, run: RunConfig, workload: Workload, evaluation: Evaluation, timeout: timedelta) -> None:
        layout = workload.layout
        self._evaluation, self._splits = evaluation, workload.tensor_splits()
        transfer = Transfer(job_store.from_rank_0("transfer", "", timeout), weight_senders(run), run.evaluation.ranks)
        template = Template.decode(job_store.from_rank_0("weights", "", timeout))
        self.receiver = WeightReceiver(transfer, layout.rank, template, layout.device)
        self.reporter = ScoreSender(transfer.token) if layout.rank == 0 else None

    def open_data(self, root: Path) -> None:
        """Open the evaluation data, and on evaluation rank 0 those of the scorer."""
        self._evaluation.open_data(root)
        if self.reporter is not None:
            self._evaluation.scorer.open_data(root)

    def evaluate(self, arrived: Arrived) -> dict[str, float] | None:
        """Evaluate weights. Return the metrics, which are sent too; None on ranks other than 0. Collective."""
        began = time.perf_counter()
        predictions = self._evaluation.predict(Weights(own_parts(self.receiver.assemble(arrived), self._splits)))
        if self.reporter is None:
            return None
        assert predictions is not None, "rank 0 predicts"
        values = self._evaluation.scorer.score(predictions)
        self.reporter.report(arrived.samples, values, time.perf_counter() - began + arrived.seconds)
        return values

    def end(self) -> None:
        """Send the message that no more scores follow."""
        if self.reporter is not None:
            self.reporter.end()
