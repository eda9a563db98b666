"""Verdicts of single logs and of sets, on hand-written logs."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from handwritten_logs import END, POINT, START, Line, lora_lines, replaced, resnet_lines, without

from common.mlperf.parsed_log import read_log
from common.mlperf.result_verdict import judge_together
from common.mlperf.rules import rules_for
from common.mlperf.run_refusals import seed_refusals
from common.mlperf.verdict import Verdict, format_verdict, judge
from tests.command_line import official_exit_code

WriteLog = Callable[..., Path]
SYNTHETIC: Line = (POINT, "data_set", "stand-in", {}, 0)
CUSTOM: Line = (POINT, "data_set", "custom", {}, 0)
of_other_data = pytest.mark.parametrize(
    ("data_set", "named"), [(SYNTHETIC, "synthetic"), (CUSTOM, "custom")], ids=["synthetic", "custom"]
)


def judge_set(paths: Sequence[Path]) -> Verdict:
    """The verdict of the logs of one result."""
    return judge_together([judge(path) for path in paths], None)


def with_last_epoch(lines: list[Line], epoch: object) -> list[Line]:
    """``lines`` with another ``epoch_num`` of the last evaluation."""
    last = max(index for index, line in enumerate(lines) if line[1] == "eval_accuracy")
    kind, key, value, _, seconds = lines[last]
    return [*lines[:last], (kind, key, value, {"epoch_num": epoch}, seconds), *lines[last + 1 :]]


def test_good_run_is_valid_and_the_official_command_agrees(write_log):
    path = write_log(resnet_lines())
    verdict = judge(path)
    assert (verdict.kind, verdict.reasons, verdict.ruleset) == ("valid run", (), "4.0.0")
    assert verdict.converged
    assert verdict.score == 10.0
    assert official_exit_code(path, "4.0.0") == 0


def test_the_message_about_a_retired_benchmark_has_its_last_round(write_log):
    assert "resnet can no longer be submitted: its last round was v4.0" in judge(write_log(resnet_lines())).notes


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda lines: without(lines, "lars_epsilon"), "lars_epsilon"),
        (lambda lines: without(lines, "submission_division"), "submission_division"),
        (lambda lines: without(lines, "eval_accuracy"), "eval_accuracy"),
        (lambda lines: without(lines, "run_start"), "there is no run_start"),
        (lambda lines: without(lines, "run_stop"), "cut short"),
        (lambda lines: without(lines, "submission_benchmark"), "does not name its benchmark"),
        (lambda lines: replaced(lines, "submission_benchmark", "alexnet"), "not known"),
        (lambda lines: replaced(lines, "seed", "x"), "not an integer"),
        (lambda lines: replaced(lines, "lars_epsilon", 1e-5), "breaks rule `v['value'] == 0.0`"),
        (lambda lines: replaced(lines, "eval_accuracy", None), "dies on this log with TypeError"),
        (lambda lines: replaced(lines, "eval_accuracy", "0.8"), 'is "0.8", not a number'),
        (lambda lines: with_last_epoch(lines, "35"), 'is "35", not a number'),
        (lambda lines: with_last_epoch(lines, float("nan")), "is NaN, not a number"),
        (lambda lines: replaced(lines, "seed", [7]), "seed [7] is not an integer"),
        (lambda lines: [*2 * [(POINT, "seed", 1, {"lineno": 7}, 2)], *without(lines, "seed")], "logged twice"),
        (lambda lines: replaced(lines, "eval_accuracy", float("nan")), "claims success"),
        (lambda lines: replaced(lines, "eval_accuracy", 0.7589), "claims success"),
        (lambda lines: [*lines, (POINT, "resumed_from", "step 10", {}, 700)], "resumed"),
        (lambda lines: [*lines, (START, "run_start", None, {}, 700)], "run_start occurs 2 times"),
        (lambda lines: [*lines, lines[-1]], "run_stop occurs 2 times"),
        (lambda lines: [*lines[:-1], (END, "run_stop", None, {}, 700)], "status"),
        (lambda lines: [*lines[:-1], (END, "run_stop", None, {"status": "done"}, 700)], 'has the status "done"'),
        (lambda lines: [*lines[:-1], (END, "run_stop", None, {"status": "success"}, 1)], "earlier than run_start"),
        (lambda lines: [line if line[1] != "init_stop" else (*line[:4], 1801) for line in lines], "took 30.0 minutes"),
        (
            lambda lines: moved(lines, "block_start", "block_stop", seconds=-3, after=50),
            "is 2.0 s earlier than block_start in line 49: the clock goes back",
        ),
        (lambda lines: moved(lines, "run_stop", seconds=-595), "run_stop is 5.0 s earlier than eval_accuracy"),
        (lambda lines: moved(lines, "eval_accuracy", seconds=-20), "eval_accuracy is 20.0 s earlier than eval_start"),
    ],
)
def test_bad_log_is_refused_with_its_reason(write_log, change, reason):
    verdict = judge(write_log(change(resnet_lines())))
    assert verdict.kind == "refused"
    assert any(reason in sentence for sentence in verdict.reasons), verdict.reasons


def moved(lines: list[Line], *keys: str, seconds: int, after: int = 0) -> list[Line]:
    """The lines of ``keys`` from line ``after`` on, logged ``seconds`` later or, if negative, earlier."""
    return [
        (*line[:4], line[4] + seconds) if line[1] in keys and index >= after else line
        for index, line in enumerate(lines)
    ]


def test_evaluation_during_training_may_end_the_run_before_its_last_block(write_log):
    block = {"first_epoch_num": 36, "epoch_count": 1}
    lines = resnet_lines()
    lines[-1:-1] = [(START, "block_start", None, block, 670), (END, "block_stop", None, {"first_epoch_num": 36}, 690)]
    assert judge(write_log(lines)).reasons == ()


def test_evaluation_after_the_passing_one_is_refused(write_log):
    lines = resnet_lines(accuracies=(0.76, 0.75))
    lines[-1] = (END, "run_stop", None, {"status": "success"}, 700)
    assert "follows the evaluation that reached the target" in judge(write_log(lines)).reasons[0]


def evaluated_after(*epochs: float) -> list[Line]:
    """A converged ResNet run with evaluations after ``epochs``."""
    lines = [line for line in resnet_lines() if not line[1].startswith(("block_", "eval_s")) or line[4] < 63]
    lines = without(lines, "eval_accuracy")
    before = 1
    for index, epoch in enumerate(epochs):
        accuracy = 0.76 if epoch == epochs[-1] else 0.1
        block, second = {"first_epoch_num": before}, 63 + index
        lines[-1:-1] = [
            (START, "block_start", None, {**block, "epoch_count": epoch - before + 1}, second),
            (END, "block_stop", None, block, second),
            (START, "eval_start", None, {"epoch_num": epoch}, second),
            (POINT, "eval_accuracy", accuracy, {"epoch_num": epoch}, second),
            (END, "eval_stop", None, {"epoch_num": epoch}, second),
        ]
        before = int(epoch) + 1
    return lines


# training_rules, evaluation frequency of ResNet: every 4 epochs with offset 0, 1, 2 or 3.
@pytest.mark.parametrize("epochs", [(1, 5, 9), (2, 6), (3, 7, 11, 15), (4,)])
def test_evaluations_every_4_epochs_from_one_of_the_first_4_are_the_rules(write_log, epochs):
    assert judge(write_log(evaluated_after(*epochs))).kind == "valid run"


@pytest.mark.parametrize(
    ("epochs", "reason"),
    [
        ((3, 7, 15), "line .*: no evaluation between epoch_num 7 and 15: .* one every 4, so after 11 at the latest"),
        ((3, 7, 7), "a block of training between them ends without progress"),
        ((31, 35), "the first evaluation is after epoch_num 31, and the first one .* is after 4"),
    ],
)
def test_missing_evaluations_are_refused(write_log, epochs, reason):
    verdict = judge(write_log(evaluated_after(*epochs)))
    assert verdict.kind == "refused"
    assert any(re.search(reason, sentence) for sentence in verdict.reasons), verdict.reasons


def test_synthetic_data_and_the_open_division_have_no_evaluation_schedule(write_log):
    lines = evaluated_after(1, 9)
    assert judge(write_log([*lines, SYNTHETIC])).kind == "format"
    reasons = judge(write_log(replaced(lines, "submission_division", "open"))).reasons
    assert not [reason for reason in reasons if "schedule" in reason]


def test_truncated_log_is_refused_naming_the_line(write_log):
    path = write_log(resnet_lines())
    text = path.read_text()
    path.write_text(text[: len(text) - 40])
    verdict = judge(path)
    assert verdict.kind == "refused"
    assert f"line {len(text.splitlines())}" in verdict.reasons[0]


def test_file_that_is_not_there_is_refused(tmp_path):
    assert "cannot be read" in judge(tmp_path / "absent").reasons[0]


def test_run_below_its_target_has_the_format_only(write_log):
    verdict = judge(write_log(resnet_lines(accuracies=(0.1, 0.2))))
    assert verdict.kind == "format"
    assert not verdict.converged
    assert "did not reach the target" in verdict.reasons[0]


@of_other_data
def test_other_data_have_the_format_only(write_log, data_set, named):
    verdict = judge(write_log([*resnet_lines(), data_set]))
    assert verdict.kind == "format"
    assert f"the data are {named}" in verdict.limits[0]
    assert "not an MLPerf result of any division" in format_verdict(verdict)


@of_other_data
def test_other_data_may_miss_target_and_values_but_not_keys_or_order(write_log, data_set, named):
    lines = [*replaced(resnet_lines(accuracies=(0.1,)), "lars_opt_weight_decay", 3e-5), data_set]
    verdict = judge(write_log(lines))
    assert verdict.kind == "format"
    assert any("lars_opt_weight_decay" in note for note in verdict.notes)
    assert judge(write_log(without(lines, "lars_opt_weight_decay"))).kind == "refused"
    assert judge(write_log([line for line in lines if line[1] != "init_start"])).kind == "refused"


def test_judging_prints_nothing_and_restores_logging(write_log, capfd):
    handlers = logging.getLogger().handlers[:]
    judge(write_log(resnet_lines()))
    judge(write_log(without(resnet_lines(), "lars_epsilon")))
    assert logging.getLogger().handlers == handlers
    assert capfd.readouterr() == ("", "")


def test_crash_on_one_log_does_not_touch_the_next(write_log):
    judge(write_log(replaced(resnet_lines(), "eval_accuracy", None), "bad.txt"))
    assert judge(write_log(resnet_lines(), "good.txt")).kind == "valid run"


def stable_diffusion_lines() -> list[Line]:
    keys = {
        "global_batch_size": 512,
        "gradient_accumulation_steps": 1,
        "opt_name": "adamw",
        "opt_adamw_beta_1": 0.9,
        "opt_adamw_beta_2": 0.999,
        "opt_adamw_epsilon": 1e-08,
        "opt_adamw_weight_decay": 0.01,
        "opt_base_learning_rate": 6.4e-05,
        "opt_learning_rate_warmup_steps": 1000,
    }
    scores = [(512000, 120.0, 0.10), (1024000, 80.0, 0.16)]
    return [
        *[line for line in replaced(resnet_lines(), "submission_benchmark", "stable_diffusion") if line[4] < 3],
        *((POINT, key, value, {}, 3) for key, value in keys.items()),
        (END, "init_stop", None, {}, 60),
        (START, "run_start", None, {}, 61),
        (POINT, "train_samples", 6513144, {}, 62),
        (POINT, "eval_samples", 30000, {}, 62),
        (START, "block_start", None, {"samples_count": 0}, 63),
        (END, "block_stop", None, {"samples_count": 1024000}, 64),
        *(
            (POINT, "eval_accuracy", value, {"metric": metric, "samples_count": samples}, 70)
            for samples, fid, clip in scores
            for metric, value in (("FID", fid), ("CLIP", clip))
        ),
        (END, "run_stop", None, {"status": "success"}, 64),
    ]


def test_stable_diffusion_may_repeat_the_same_run_stop(write_log):
    lines = stable_diffusion_lines()
    path = write_log(lines)
    assert judge(path).kind == "valid run"
    path.write_text(path.read_text() + path.read_text().splitlines(keepends=True)[-1])
    assert judge(path).kind == "valid run"
    path.write_text(path.read_text() + path.read_text().splitlines()[-1].replace("64000", "65000") + "\n")
    assert judge(path).kind == "refused"


@pytest.mark.parametrize("first", [0, 4])
def test_runs_of_two_divisions_are_no_result(write_log, first):
    paths = resnet_set(write_log)
    paths[first].write_text(paths[first].read_text().replace('"closed"', '"open"'))
    verdict = judge_set(paths)
    assert [each.reason for each in verdict.refusals] == ["division-differs"]
    assert f"'open' in result_{first}.txt, line " in verdict.refusals[0]


def test_stable_diffusion_checkpoint_with_one_metric_is_a_reason_not_a_crash(write_log):
    lines = [line for line in stable_diffusion_lines() if line[2] != 0.16]
    verdict = judge(write_log(lines))
    assert verdict.kind == "refused"
    assert any("KeyError" in reason for reason in verdict.reasons)


def resnet_set(write_log: WriteLog, **changes: object) -> list[Path]:
    return [
        write_log(resnet_lines(seed=100 + i, last_epoch=e, minutes=10.0 + i), f"result_{i}.txt")
        for i, e in enumerate((35, 35, 36, 37, 39))
    ]


def test_full_set_is_submittable_with_its_olympic_score(write_log):
    verdict = judge_set(resnet_set(write_log))
    assert (verdict.kind, verdict.reasons) == ("submittable", ())
    assert verdict.score == pytest.approx(12.0)
    report = format_verdict(verdict)
    assert "not verified by MLCommons Association" in report
    assert "its last round was v4.0" in report


@pytest.mark.parametrize(("ruleset", "refused"), [("4.0.0", False), ("4.1.0", True), ("5.0.0", True)])
def test_a_seed_is_required_from_v41_on(write_log, ruleset, refused):
    log = read_log(write_log(without(resnet_lines(), "seed")))
    found = seed_refusals(log, rules_for("bert", ruleset))
    assert [refusal.sentence for refusal in found] == ["no seed is logged"] * refused


def test_a_result_of_v40_needs_no_seeds(write_log):
    paths = resnet_set(write_log)
    for number, epoch in enumerate((35, 35, 36, 37, 39)):
        write_log(without(resnet_lines(last_epoch=epoch, minutes=10.0 + number), "seed"), f"result_{number}.txt")
    assert judge_set(paths).kind == "submittable"
    assert any("no seed is logged: the rules allow this up to v4.0" in note for note in judge(paths[0]).notes)


def test_one_run_below_target_counts_as_the_slowest(write_log):
    paths = resnet_set(write_log)
    write_log(resnet_lines(seed=7, accuracies=(0.1, 0.2), minutes=1.0), "result_0.txt")
    verdict = judge_set(paths)
    assert verdict.kind == "submittable"
    assert verdict.score == pytest.approx(13.0)  # 11 is now the fastest, the failed run the slowest


def test_converging_a_little_faster_scales_the_score(write_log):
    paths = [
        write_log(resnet_lines(seed=i, last_epoch=e, minutes=10.0), f"result_{i}.txt")
        for i, e in enumerate((31, 34, 35, 35, 39))
    ]
    verdict = judge_set(paths)
    assert verdict.kind == "submittable"
    assert verdict.score is not None
    assert verdict.score > 10.0


SET_FAULTS: dict[str, tuple[list[Line], str]] = {
    "second run below target": (resnet_lines(seed=1, accuracies=(0.1, 0.2)), "2 runs did not converge"),
    "seed of another run": (resnet_lines(seed=101), "same seed 101"),
    "no seed": (without(resnet_lines(seed=1), "seed"), "result_4.txt logs no seed, and other runs"),
    "another batch size": (replaced(resnet_lines(seed=1), "global_batch_size", 3200), "global_batch_size"),
    "another momentum": (replaced(resnet_lines(seed=1), "lars_opt_momentum", 0.8), "lars_opt_momentum"),
    "another submitter": (replaced(resnet_lines(seed=1), "submission_org", "other"), "submission_org"),
    "synthetic data": ([*resnet_lines(seed=1), SYNTHETIC], "synthetic"),
    "synthetic data below target": ([*resnet_lines(seed=1, accuracies=(0.1,)), SYNTHETIC], "synthetic"),
    "custom data": ([*resnet_lines(seed=1), CUSTOM], "the data are custom"),
    "warm cache": (replaced(resnet_lines(seed=1), "cache_clear", False), "cache"),
    "resumed": ([*resnet_lines(seed=1), (POINT, "resumed_from", "x", {}, 0)], "resumed"),
    "another benchmark": (stable_diffusion_lines(), "different benchmarks"),
}


@pytest.mark.parametrize("fault", SET_FAULTS)
def test_fault_in_one_log_refuses_the_set(write_log, fault):
    lines, reason = SET_FAULTS[fault]
    paths = resnet_set(write_log)
    write_log(resnet_lines(seed=9, accuracies=(0.1, 0.2)), "result_0.txt")  # the one that is allowed
    write_log(lines, "result_4.txt")
    verdict = judge_set(paths)
    assert verdict.kind == "refused"
    assert any(reason in sentence for sentence in verdict.reasons), verdict.reasons


@pytest.mark.parametrize("count", [1, 4, 6])
def test_set_of_the_wrong_size_is_refused(write_log, count):
    paths = [write_log(resnet_lines(seed=i), f"result_{i}.txt") for i in range(count)]
    verdict = judge_set(paths)
    assert verdict.kind == "refused"
    assert f"exactly 5 runs, these are {count}" in verdict.reasons[0]


def test_set_that_converges_faster_than_chance_is_refused(write_log):
    paths = [write_log(resnet_lines(seed=i, last_epoch=27), f"result_{i}.txt") for i in range(5)]
    verdict = judge_set(paths)
    assert verdict.kind == "refused"
    assert "RCP" in verdict.reasons[0]


def test_run_killed_before_its_first_evaluation_has_the_format(write_log):
    lines = [line for line in resnet_lines() if line[4] < 63]
    lines += [(START, "block_start", None, {"first_epoch_num": 1, "epoch_count": 3}, 63)]
    verdict = judge(write_log([*lines, (END, "run_stop", None, {"status": "aborted"}, 64)]))
    assert (verdict.kind, verdict.converged, verdict.minutes) == ("format", False, None)
    assert any("aborted early" in note and "'block_stop'" in note for note in verdict.notes)


def test_aborted_run_without_its_configuration_is_refused(write_log):
    lines = without(resnet_lines(accuracies=(0.1, 0.2)), "lars_epsilon")
    assert judge(write_log(lines)).kind == "refused"


def test_momentum_that_only_the_rules_table_forbids_is_refused(write_log):
    reasons = judge(write_log(replaced(resnet_lines(), "lars_opt_momentum", 0.95))).reasons
    table = "0.9 if the global batch is below 32k, which published results read as 32,000"
    (reason,) = reasons
    assert reason.startswith(f"line 18: lars_opt_momentum = 0.95 breaks the rules' table: {table}")


@pytest.mark.parametrize("batch", [32256, 32768])  # published with momentum 0.95, and the rules' "32k"
def test_momentum_is_free_from_32k_on(write_log, batch):
    large = replaced(resnet_lines(), "lars_opt_momentum", 0.95)
    assert judge(write_log(replaced(large, "global_batch_size", batch))).kind == "valid run"


def test_every_value_of_a_hyperparameter_that_is_logged_twice_is_judged(write_log):
    lines = lora_lines(0)
    later = [(POINT, "opt_adamw_beta_1", value, {}, 59) for value in (0.9, 0.5, float("nan"))]
    at = next(index for index, line in enumerate(lines) if line[1] == "init_stop")
    verdict = judge(write_log([*lines[:at], *later, *lines[at:]]), "5.1.0")
    assert [each.reason for each in verdict.refusals] == ["hyperparameter-rule", "not-finite"]


@pytest.mark.parametrize("value", ["NaN", "-inf", {"group": float("nan")}, [0.1, float("inf")]], ids=repr)
def test_a_hyperparameter_that_is_not_finite_in_any_form_is_refused(write_log, value):
    verdict = judge(write_log(replaced(lora_lines(0), "opt_base_learning_rate", value)), "5.1.0")
    assert "not-finite" in [each.reason for each in verdict.refusals]


def test_evaluations_that_go_backwards_are_refused(write_log):
    lines = [line for line in resnet_lines() if line[1] != "submission_benchmark"]
    lines.insert(0, (POINT, "submission_benchmark", "maskrcnn", {}, 0))
    first = next(index for index, line in enumerate(lines) if line[1] == "eval_accuracy")
    lines[first] = (*lines[first][:3], {"epoch_num": 20}, lines[first][4])
    reasons = judge(write_log(lines)).reasons
    assert "line 32: an evaluation after epoch_num 7 follows one after 20: progress goes backwards" in reasons


def test_optimizer_without_a_rule_file_is_refused_with_its_line(write_log):
    verdict = judge(write_log(replaced(resnet_lines(), "opt_name", "adam")))
    assert verdict.kind == "refused"
    assert verdict.reasons == ('line 10: opt_name = "adam" is nothing that ruleset 4.0.0 knows',)


def test_echo_after_run_stop_is_a_note_and_not_judged(write_log):
    path = write_log(resnet_lines())
    text = path.read_text()
    blocks = [line for line in text.splitlines(keepends=True) if '"block_start"' in line]
    path.write_text(text + "".join(f"Processing {line}" for line in blocks))
    verdict = judge(path)
    assert verdict.kind == "valid run"
    assert any(note.startswith(f"{len(blocks)} lines after run_stop") for note in verdict.notes)


@pytest.mark.parametrize("value", [None, "True", "true", "yes", {}, 2])
def test_cache_that_is_not_stated_is_a_note(write_log, value):
    verdict = judge(write_log(replaced(resnet_lines(), "cache_clear", value)))
    assert verdict.kind == "valid run"
    assert any("does not state whether the page cache was cleared" in note for note in verdict.notes)


@pytest.mark.parametrize("value", [False, 0, 0.0, "false", "False ", "no"])
def test_run_without_a_cleared_cache_has_the_format_only(write_log, value):
    verdict = judge(write_log(replaced(resnet_lines(), "cache_clear", value)))
    assert verdict.kind == "format"
    assert "was not cleared before the run (cache_clear is false)" in verdict.reasons[0]


@pytest.mark.parametrize(
    ("seconds", "kind"), [((65,), "refused"), ((0,), "valid run"), ((0, 65), "valid run"), ((65, 70), "refused")]
)
def test_cache_is_cleared_before_the_run_starts(write_log, seconds, kind):
    """The times of the events count: some programs write them at the end of the log. The run starts at second 61."""
    lines = without(resnet_lines(), "cache_clear")
    clears = [(POINT, "cache_clear", True, {}, second) for second in seconds]
    verdict = judge(write_log([*lines[:-1], *clears, lines[-1]]))
    assert verdict.kind == kind
    assert [each.reason for each in verdict.refusals] == (["cache-cleared-late"] if kind == "refused" else [])
