"""Runs with layers on two stages or split over ``tp`` score as one rank does, and one rank can resume them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import ClassVar

import pytest

from common import cli
from common.config.composition import compose
from common.distributed.layout import Layout
from common.errors import ConfigError
from common.evaluation.modes import evaluation_mode
from common.optim.optimizer import ClipNorm
from tests import toy
from tests.command_line import finish, logged, ranked, started, training
from tests.conftest import SECONDS
from tests.toy.workload import Toy

EPOCHS, STEPS_OF_AN_EPOCH = 3, 16
TOLERANCE = 1e-9  # of float64 sums in another order
FIXED = ("precision=fp64", f"benchmark.schedule.last_epoch={EPOCHS}", "benchmark.targets.mean_absolute_error.value=0")
STAGES = ("scale.gpus_per_node=2", "layout.pp=2")
COMMAND = ranked("tests.common.run.staged_toy", 2)


def errors(log: Path) -> list[float]:
    """The values of the evaluations."""
    return [event["value"] for event in logged(log, "eval_error")]


def on_one_rank(data: Path, output: Path, *overrides: str) -> list[float]:
    """The values of the evaluations of a run in this process alone."""
    with toy.known():
        _, *arguments = training(data, output, *FIXED, *overrides)
        return errors(toy.trainer(arguments, Toy).train().log)


@pytest.mark.slow
def test_a_run_on_two_stages_scores_as_one_rank_and_each_resumes_the_other(data_of, tmp_path):
    data = data_of(toy.NAME)
    saving = [f"checkpoint_every={STEPS_OF_AN_EPOCH}", f"keep_checkpoints={EPOCHS}"]
    with started(training(data, tmp_path / "staged", *FIXED, *STAGES, *saving), command=COMMAND) as process:
        ended = finish(process, SECONDS)
    assert ended.code == 10, ended.errors
    wanted = on_one_rank(data, tmp_path / "whole", *saving)
    assert len(wanted) == len(set(wanted)) == EPOCHS
    assert errors(tmp_path / "staged" / "mlperf.log") == pytest.approx(wanted, rel=TOLERANCE)

    saved = f"checkpoints/step_{STEPS_OF_AN_EPOCH:08d}"
    resumed = on_one_rank(data, tmp_path / "together", f"resume={tmp_path / 'staged' / saved}")
    assert resumed[-2:] == pytest.approx(wanted[-2:], rel=TOLERANCE)
    apart = training(data, tmp_path / "apart", *FIXED, *STAGES, f"resume={tmp_path / 'whole' / saved}")
    with started(apart, command=COMMAND) as process:
        ended = finish(process, SECONDS)
    assert ended.code == 10, ended.errors
    (log,) = (tmp_path / "apart").glob("mlperf*.log")
    assert errors(log)[-2:] == pytest.approx(wanted[-2:], rel=TOLERANCE)


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


class Admitting(Toy):
    """The toy, which accepts stages but computes everything on each."""

    axes: ClassVar[Mapping[str, str]] = {**Toy.axes, "pp": "do nothing here"}


def admitted(tmp_path: Path, *overrides: str) -> Admitting:
    with toy.known():
        _, *arguments = training(tmp_path, tmp_path, *FIXED, *STAGES, *overrides)
        run, _ = cli.load(compose(arguments))
    return Admitting(run, Layout({"pp": 2}))


def test_a_pipeline_refuses_to_clip_each_micro_batch(tmp_path):
    workload = admitted(tmp_path)
    with pytest.raises(ConfigError, match=r"layout\.pp=2: .* clip after it"):
        workload.step_with(workload.own.hparams.sgd(), lambda step: step, clip=ClipNorm(1.0, "before_reduction"))


def test_a_pipeline_refuses_evaluation_ranks(tmp_path):
    workload = admitted(tmp_path, "scale.gpus_per_node=3", "evaluation.ranks=1")
    with pytest.raises(ConfigError, match=r"layout\.pp=2: no training rank has all weights"):
        evaluation_mode(workload.cfg, workload, Layout({"pp": 2}))
