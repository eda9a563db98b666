"""Whole runs whose layers are split over ``tp``, in training and in evaluation, do as one rank does."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch

from common import cli
from common.config.composition import compose
from common.distributed.rank_info import RankInfo
from common.run.trainer import Trainer
from tests import toy
from tests.command_line import finish, started, training
from tests.conftest import SECONDS
from tests.toy.workload import CosmoFlow

EPOCHS, STEPS_OF_AN_EPOCH = 3, 16
TOLERANCE = 1e-9  # of float64 sums in another order
FIXED = ("precision=fp64", f"benchmark.schedule.last_epoch={EPOCHS}", "benchmark.targets.mean_absolute_error.value=0")


def errors(log: Path) -> list[float]:
    """The values of the evaluations."""
    lines = [json.loads(line.removeprefix(":::MLLOG ")) for line in log.read_text().splitlines()]
    return [line["value"] for line in lines if line["key"] == "eval_error"]


def on_one_rank(data: Path, output: Path, *overrides: str) -> list[float]:
    """The same of the toy whose layers are whole."""
    with toy.known():
        _, *arguments = training(data, output, *FIXED, *overrides)
        run, session = cli.load(compose(arguments))
        done = Trainer(CosmoFlow, run, session, RankInfo(0, 1, 0, 1, 0, "single"), torch.device("cpu")).train()
    return errors(done.log)


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
