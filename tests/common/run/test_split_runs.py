"""Whole runs whose layers are split over ``tp``, in training and in evaluation, do as one rank does."""

from __future__ import annotations

import sys

import pytest

from tests import toy
from tests.command_line import finish, started, training
from tests.common.run.whole_runs import EPOCHS, FIXED, STEPS_OF_AN_EPOCH, TOLERANCE, errors, on_one_rank
from tests.conftest import SECONDS


def test_layers_split_in_training_and_evaluation_score_as_whole_ones_and_whole_ones_go_on(data_of, tmp_path):
    data = data_of(toy.NAME)
    ranks = ["scale.gpus_per_node=4", "layout.tp=2", "evaluation.ranks=2", "evaluation.layout.tp=2"]
    saving = [f"checkpoint_every={STEPS_OF_AN_EPOCH}", f"keep_checkpoints={EPOCHS}"]
    arguments = training(data, tmp_path / "split", *FIXED, *ranks, *saving)
    with started(arguments, command=[sys.executable, "-m", "tests.common.run.split_toy", "4"]) as process:
        ended = finish(process, SECONDS)
    assert ended.code == 10, ended.errors
    found = errors(tmp_path / "split" / "mlperf.log")
    wanted = on_one_rank(data, tmp_path / "whole")
    assert len(wanted) == len(set(wanted)) == EPOCHS
    assert found == pytest.approx(wanted, rel=TOLERANCE)

    place = tmp_path / "split" / "checkpoints" / f"step_{STEPS_OF_AN_EPOCH:08d}"
    resumed = on_one_rank(data, tmp_path / "resumed", f"resume={place}")
    assert resumed[-2:] == pytest.approx(wanted[-2:], rel=TOLERANCE)
