"""Runs of the toy whose layers are together on one rank: what those of several are held against."""

from __future__ import annotations

import json
from pathlib import Path

import torch

from common import cli
from common.config.composition import compose
from common.distributed.rank_info import RankInfo
from common.run.trainer import Trainer
from tests import toy
from tests.command_line import training
from tests.toy.workload import CosmoFlow

EPOCHS, STEPS_OF_AN_EPOCH = 3, 16
TOLERANCE = 1e-9  # of float64 sums in another order
FIXED = ("precision=fp64", f"benchmark.schedule.last_epoch={EPOCHS}", "benchmark.targets.mean_absolute_error.value=0")


def errors(log: Path) -> list[float]:
    """The values of the evaluations."""
    lines = [json.loads(line.removeprefix(":::MLLOG ")) for line in log.read_text().splitlines()]
    return [line["value"] for line in lines if line["key"] == "eval_error"]


def on_one_rank(data: Path, output: Path, *overrides: str) -> list[float]:
    """The same of a run on this process alone."""
    with toy.known():
        _, *arguments = training(data, output, *FIXED, *overrides)
        run, session = cli.load(compose(arguments))
        done = Trainer(CosmoFlow, run, session, RankInfo(0, 1, 0, 1, 0, "single"), torch.device("cpu")).train()
    return errors(done.log)
