"""Logs of MiniGo in the layout of published ones: generations have other numbers in training than in evaluation."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from handwritten_logs import END, POINT, START, Line, replaced, resnet_lines

from common.mlperf.compliance import check_lines
from common.mlperf.parsed_log import read_log
from common.mlperf.rcp import convergence_of
from common.mlperf.result_verdict import judge_together
from common.mlperf.rules import rules_for
from common.mlperf.verdict import judge

WriteLog = Callable[..., Path]
RATES = (0.1, 0.3, 0.49, 0.55)
"""The published runs score their generations in order, and stop after the first that passes."""
FIRST = 18
"""Number of the first generation in its training; evaluations count from 1."""
RULES = rules_for("minigo", "2.1.0")
KEYS = {
    "lr_rates": [0.016, 0.16, 0.016, 0.0016], "lr_boundaries": [128, 10000, 20000], "train_batch_size": 4096,
    "num_readouts": 800, "window_size": 5, "gradient_accumulation_steps": 1,
}  # fmt: skip


def lines_of(
    rates: Sequence[float] = RATES,
    division: str = "closed",
    minimum: int = 8192,
    games: int = 8250,
    seed: int = 7,
    numbers: Sequence[int] = (1, 2, 3, 4),
    ended_with: int = 4,
) -> list[Line]:
    """Return a run of six generations of 300 s that ends with the fourth, after which all are scored.

    Args:
        numbers: generations that the evaluations state.
        ended_with: generation, from 1, at whose end the run stops.
    """
    head = replaced(
        replaced(resnet_lines(seed=seed), "submission_benchmark", "minigo"), "submission_division", division
    )
    generations: list[Line] = []
    for index in range(6):
        number, begun = {"epoch_num": FIRST + index}, 61 + 300 * index
        counts = [games + older for older in range(5)]
        generations += [
            (START, "epoch_start", None, number, begun),
            *((POINT, "actual_selfplay_games_per_generation", count, number, begun + 250) for count in counts),
            (POINT, "save_model", {"iteration": FIRST + index}, {}, begun + 300),
            (END, "epoch_stop", None, number, begun + 300),
        ]
    evaluations = [
        line
        for number, rate in zip(numbers, rates, strict=False)
        for line in (
            (START, "eval_start", None, {"epoch_num": number}, 9000),
            (POINT, "eval_accuracy", rate, {"epoch_num": number}, 9000),
            (END, "eval_stop", None, {"epoch_num": number}, 9000),
        )
    ]
    return [
        *(line for line in head if line[4] < 3),
        *((POINT, key, value, {}, 3) for key, value in KEYS.items()),
        (POINT, "min_selfplay_games_per_generation", minimum, {}, 3),
        (END, "init_stop", None, {}, 60),
        (START, "run_start", None, {}, 61),
        (POINT, "train_samples", 40_960, {}, 61),
        (POINT, "eval_samples", 256, {}, 61),
        *generations,
        *evaluations,
        (END, "run_stop", None, {"status": "success"}, 61 + ended_with * 300),
    ]


def accepted_by_the_checker(path: Path) -> bool:
    """Return whether MLCommons' compliance checker accepts a log."""
    return not check_lines([event.text for event in read_log(path).events], "training", "2.1.0")


def test_a_log_in_the_published_layout_is_a_valid_run(write_log: WriteLog):
    path = write_log(lines_of())
    verdict = judge(path, "2.1.0")
    assert accepted_by_the_checker(path)
    assert verdict.kind == "valid run", verdict.reasons
    assert verdict.minutes == 20
    assert convergence_of(read_log(path), RULES) == 4


NUMBERINGS = {
    "evaluations count from 1": (1, 2, 3, 4),
    "evaluations count from 0": (0, 1, 2, 3),
    "evaluations have the numbers of the training": (18, 19, 20, 21),
}
"""In published logs by submitter: NVIDIA's, those of the reference's default, and Intel's. Training counts from 18."""


@pytest.mark.parametrize("numbers", NUMBERINGS.values(), ids=NUMBERINGS)
@pytest.mark.parametrize(("ended_with", "refused"), [(3, True), (4, False), (5, False)])
def test_a_run_does_not_end_before_its_first_passing_generation_was_saved(write_log, numbers, ended_with, refused):
    verdict = judge(write_log(lines_of(numbers=numbers, ended_with=ended_with)), "2.1.0")
    assert (verdict.kind == "refused") is refused
    early = [each for each in verdict.reasons if "run_stop is 300.0 s earlier than epoch_stop" in each]
    assert bool(early) is refused


@pytest.mark.parametrize(("ended_with", "refused"), [(2, True), (3, True), (4, False)])
def test_skipped_early_evaluations_do_not_change_which_generation_passed(write_log, ended_with, refused):
    verdict = judge(write_log(lines_of((0.49, 0.55), numbers=(3, 4), ended_with=ended_with)), "2.1.0")
    assert (verdict.kind == "refused") is refused, verdict.reasons
    assert not any("longer than needed" in note for note in verdict.notes)


@pytest.mark.parametrize(("ended_with", "kind"), [(3, "refused"), (4, "valid run")])
def test_evaluations_may_be_logged_while_later_generations_are_trained(write_log, ended_with, kind):
    lines = lines_of(ended_with=ended_with)
    evaluations = [line for line in lines if line[1].startswith("eval_") and line[4] == 9000]
    others = [line for line in lines if line not in evaluations]
    merged: list[Line] = []
    for line in others:
        number = line[3]["epoch_num"] - FIRST if line[1] == "epoch_stop" else 0
        if 1 <= number <= 4:  # generation g + 1 ends within the evaluation of generation g
            begin, accuracy, end = evaluations[3 * number - 3 : 3 * number]
            merged += [begin, line, accuracy, end]
        else:
            merged.append(line)
    assert judge(write_log(merged), "2.1.0").kind == kind


def test_a_run_stop_after_the_next_generation_is_a_note(write_log: WriteLog):
    assert not [note for note in judge(write_log(lines_of()), "2.1.0").notes if "longer than needed" in note]
    late = judge(write_log(lines_of(ended_with=6)), "2.1.0").notes
    assert any("run_stop comes 300.0 s after epoch_stop" in note and "longer than needed" in note for note in late)


def test_early_generations_need_no_evaluation(write_log: WriteLog):
    late = {"numbers": (20, 21), "rates": (0.49, 0.55)}
    assert judge(write_log(lines_of(**late)), "2.1.0").kind == "valid run"
    assert judge(write_log(lines_of(**late, ended_with=3)), "2.1.0").kind == "refused"


def test_repeated_lines_of_a_generation_count_once(write_log: WriteLog):
    """Intel's logs repeat all lines of a generation, more often in later ones."""
    lines = [line for line in lines_of(ended_with=3) for _ in range(2 if line[1] == "epoch_stop" else 1)]
    assert any("run_stop is 300.0 s earlier" in each for each in judge(write_log(lines), "2.1.0").reasons)


def test_a_generation_that_was_not_trained_cannot_pass(write_log: WriteLog):
    reasons = judge(write_log(lines_of(numbers=(21, 22, 23, 24), ended_with=6)), "2.1.0").reasons
    assert any("epoch_num 24, and the log has no epoch_stop of that generation" in each for each in reasons)


def test_an_omitted_evaluation_is_refused(write_log: WriteLog):
    reasons = judge(write_log(lines_of(numbers=(1, 2, 4, 5), ended_with=5)), "2.1.0").reasons
    assert any("no evaluation between epoch_num 2 and 4: " in each for each in reasons)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"rates": (0.1, 1.0)}, "v['value'] >= 0.5 and v['value'] < 1.0"),
        ({"rates": (0.1, 0.49)}, "v['value'] >= 0.5 and v['value'] < 1.0"),
        ({"minimum": 4096}, "min_selfplay_games_per_generation"),
        ({"games": 8000}, "actual_selfplay_games_per_generation"),
    ],
)
def test_what_the_checker_refuses_is_refused_with_its_rule(write_log: WriteLog, changes, named):
    path = write_log(lines_of(**changes))
    verdict = judge(path, "2.1.0")
    assert not accepted_by_the_checker(path)
    assert verdict.kind == "refused"
    assert named in " ".join(verdict.reasons)


@pytest.mark.parametrize(("rates", "accepted"), [((1.0,), False), ((0.9, 1.0), True), ((0.1, 0.2), True)])
def test_the_open_division_needs_one_generation_that_does_not_win_every_game(write_log: WriteLog, rates, accepted):
    path = write_log(lines_of(rates, division="open"))
    assert accepted_by_the_checker(path) == accepted
    assert (judge(path, "2.1.0").kind == "refused") == (not accepted)


@pytest.mark.parametrize("rates", [(1.0,), (0.9, 1.0)])
def test_custom_data_with_a_rate_of_1_are_accepted_with_a_note_if_the_checker_refuses_them(write_log: WriteLog, rates):
    custom = [(POINT, "data_set", "custom", {}, 3), (POINT, "quality_target", 0.5, {}, 3)]
    path = write_log([*custom, *lines_of(rates, division="open")])
    verdict = judge(path, "2.1.0")
    assert verdict.kind == "format", verdict.reasons
    told = "the compliance checker refuses this log: no eval_accuracy meets the target" in " ".join(verdict.notes)
    assert told == (not accepted_by_the_checker(path))
    assert convergence_of(read_log(path), RULES) == 1


def test_runs_of_one_result_need_not_report_all_generations(write_log: WriteLog):
    """That is a rule for Stable Diffusion. Here the first two generations are not scored."""
    batch: Line = (POINT, "global_batch_size", 4096, {}, 3)
    late = [batch, *(line for line in lines_of() if line[3].get("epoch_num", 9) > 2)]
    verdict = judge_together([judge(write_log(late), "2.1.0")], "2.1.0")
    assert not [refusal for refusal in verdict.refusals if refusal.reason == "checkpoint-unreported"]


def test_only_offline_scores_of_other_benchmarks_come_in_any_order():
    assert not RULES.scored_in_any_order
    assert rules_for("stable_diffusion").scored_in_any_order
    assert not replace(rules_for("stable_diffusion"), scored_offline=False).scored_in_any_order
