"""Ranks that train and ranks that evaluate: who is who, who is blamed, and what a configuration may ask."""

from __future__ import annotations

from dataclasses import replace

import pytest

from common import cli
from common.config.composition import compose
from common.config.schema import EvaluationConfig, RunConfig
from common.distributed.diagnosis import View, diagnose
from common.distributed.rank_info import RankInfo, Role
from common.errors import ConfigError
from common.mlperf.admission import admit

TRAINS = View(0, step=7, device_step=6, phase="train", beat_age=0.1, silence=0.1, allowance=4.0)
WAITS = replace(TRAINS, beat_age=5.0, waiting=True, where="all_reduce from a/b.py:3 (step)")
EVALUATES = replace(TRAINS, step=1, phase="evaluation", role="evaluate")
RESTS = replace(EVALUATES, beat_age=900.0, waiting=True, idle=True)


def ranks(*views):
    numbered = [replace(view, rank=rank) for rank, view in enumerate(views)]
    diagnosis = diagnose(numbered, timeout_seconds=4.0)
    return None if diagnosis is None else diagnosis.ranks


@pytest.mark.parametrize(
    ("rank", "role"),
    [(0, Role("train", 0, 5, 0)), (4, Role("train", 4, 5, 0)), (5, Role("play", 0, 1, 5)),
     (6, Role("evaluate", 0, 2, 6)), (7, Role("evaluate", 1, 2, 6))],
)  # fmt: skip
def test_the_first_ranks_train_and_the_last_ones_evaluate(rank, role):
    assert Role.of(RankInfo(rank, 8, rank, 8, 0, "torchrun"), {"play": 1, "evaluate": 2}) == role


def test_all_ranks_train_where_none_only_evaluates():
    assert Role.of(RankInfo(3, 4, 3, 4, 0, "torchrun"), {}) == Role("train", 3, 4, 0)


def test_a_rank_that_waits_for_weights_is_left_alone():
    assert ranks(TRAINS, TRAINS, RESTS) is None


def test_a_rank_that_waits_for_weights_does_not_excuse_training_that_hangs():
    assert ranks(WAITS, replace(WAITS, waiting=False), RESTS) == (1,)


def test_training_ranks_that_wait_for_one_another_do_not_blame_a_rank_that_evaluates():
    assert ranks(WAITS, replace(WAITS, step=8), WAITS, EVALUATES) == (1,)


def test_an_evaluation_that_hangs_is_named_while_training_waits_for_it():
    patient = replace(TRAINS, beat_age=60.0, allowance=1000.0, extended=True, waiting=True)
    stuck = replace(EVALUATES, beat_age=5.0)
    assert ranks(patient, WAITS, stuck) == (2,)


def test_a_silent_evaluation_rank_is_named():
    assert ranks(TRAINS, TRAINS, replace(RESTS, silence=5.0)) == (2,)


def test_a_playing_rank_that_hangs_is_named_while_training_waits_for_it():
    stuck = replace(EVALUATES, role="play", beat_age=5.0)
    assert ranks(TRAINS, stuck, EVALUATES) == (1,)


def composed(*overrides: str) -> RunConfig:
    fixed = ["benchmark=resnet", "scale=test", "device=cpu", "micro_batch=1"]
    return cli.load(compose([*fixed, *overrides]))[0]


def test_layouts_and_batches_count_the_ranks_of_each_role():
    run = composed("scale.gpus_per_node=6", "evaluation.ranks=2", "evaluation.layout.cp=2")
    assert run.layout == {"pp": 1, "cp": 1, "tp": 1, "dp": 4}
    assert run.evaluation.layout == {"pp": 1, "cp": 2, "tp": 1, "dp": 1}
    assert (run.world_size, run.training_ranks) == (6, 4)
    assert run.grad_accumulation_steps == run.global_batch // 4


def test_ranks_that_play_belong_to_no_layout():
    run = composed("scale.gpus_per_node=7", "evaluation.ranks=2", "selfplay.ranks=1")
    assert run.layout == {"pp": 1, "cp": 1, "tp": 1, "dp": 4}
    assert (run.world_size, run.training_ranks) == (7, 4)
    assert run.other_ranks == {"play": 1, "evaluate": 2}


def test_a_recipes_evaluation_layout_rests_while_no_rank_only_evaluates():
    assert composed("evaluation.layout.cp=8").evaluation == EvaluationConfig()


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["evaluation.ranks=1"], "evaluation.ranks=1: of the 1 ranks"),
        (["scale.gpus_per_node=4", "evaluation.ranks=4"], "at least 1 trains"),
        (["evaluation.ranks=-1"], "evaluation.ranks=-1"),
        (
            ["scale.gpus_per_node=4", "evaluation.ranks=3", "evaluation.layout.cp=2"],
            "evaluation.layout: pp=1 x cp=2",
        ),
        (["scale.gpus_per_node=4", "evaluation.ranks=2", "layout.cp=4"], "does not divide 2 ranks"),
        (["scale.gpus_per_node=4", "selfplay.ranks=4"], "selfplay.ranks=4: of the 4 ranks of scale (1 nodes x 4), 0"),
        (["scale.gpus_per_node=4", "evaluation.ranks=2", "selfplay.ranks=2"], "2 ranks of scale (1 nodes x 4) that do"),
        (["selfplay.ranks=-1"], "selfplay.ranks=-1"),
        (["selfplay.training_ranks_play=false"], "with selfplay.ranks=0 no rank would play"),
    ],
)
def test_impossible_roles_are_refused_by_name(overrides, message):
    with pytest.raises(ConfigError) as refused:
        composed(*overrides)
    assert message in str(refused.value)


def test_only_workloads_with_generations_have_ranks_that_play():
    fixed = ["benchmark=resnet", "scale=test", "device=cpu", "micro_batch=1", "scale.gpus_per_node=2"]
    run, session = cli.load(compose([*fixed, "selfplay.ranks=1"]))
    with pytest.raises(ConfigError, match=r"selfplay\.ranks=1: resnet does not learn by self-play"):
        admit(run, session)
