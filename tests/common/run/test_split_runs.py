"""Whole runs whose layers are split over ``tp``, in training and in evaluation, do as one rank does."""

from __future__ import annotations

import pytest

from tests import toy
from tests.command_line import finish, ranked, started, training
from tests.common.run.whole_runs import EPOCHS, FIXED, STEPS_OF_AN_EPOCH, TOLERANCE, errors, on_one_rank
from tests.conftest import SECONDS


def test_a_run_split_over_tp_scores_as_one_rank_and_one_rank_resumes_it(data_of, tmp_path):
    data = data_of(toy.NAME)
    ranks = ["scale.gpus_per_node=4", "layout.tp=2", "evaluation.ranks=2", "evaluation.layout.tp=2"]
    saving = [f"checkpoint_every={STEPS_OF_AN_EPOCH}", f"keep_checkpoints={EPOCHS}"]
    arguments = training(data, tmp_path / "split", *FIXED, *ranks, *saving)
    with started(arguments, command=ranked("tests.common.run.split_toy", 4)) as process:
        ended = finish(process, SECONDS)
    assert ended.code == 10, ended.errors
    found = errors(tmp_path / "split" / "mlperf.log")
    wanted = on_one_rank(data, tmp_path / "whole")
    assert len(wanted) == len(set(wanted)) == EPOCHS
    assert found == pytest.approx(wanted, rel=TOLERANCE)

    saved = tmp_path / "split" / "checkpoints" / f"step_{STEPS_OF_AN_EPOCH:08d}"
    resumed = on_one_rank(data, tmp_path / "resumed", f"resume={saved}")
    assert resumed[-2:] == pytest.approx(wanted[-2:], rel=TOLERANCE)
