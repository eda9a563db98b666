"""What the paths of the command line stand for, and which runs are not put side by side."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from report_runs import before_the_clock, resnet_run, write_log, write_metrics, write_series

from common.errors import ConfigError, DataError
from common.report.collect import gather


def run_in(folder: Path, name: str = "mlperf.log", **changes) -> Path:
    return write_log(folder / name, resnet_run(**changes))


def test_an_output_dir_is_one_run_with_its_metrics(tmp_path):
    run_in(tmp_path / "first")
    write_metrics(tmp_path / "first", 0, steps=10, seconds=640)
    (subject,) = gather([tmp_path / "first"])
    assert (subject.name, subject.score, len(subject.runs), len(subject.runs[0].ranks)) == ("first", None, 1, 1)


def test_the_log_of_an_output_dir_finds_the_metrics_beside_it(tmp_path):
    log = run_in(tmp_path)
    write_metrics(tmp_path, 0, steps=10, seconds=640)
    (subject,) = gather([log])
    assert len(subject.runs[0].ranks[0]) == 10


def test_a_log_of_another_program_has_no_metrics(tmp_path):
    log = run_in(tmp_path, name="result_0.txt")
    write_metrics(tmp_path, 0, steps=10, seconds=640)
    (subject,) = gather([log])
    assert subject.runs[0].ranks == ()


def test_a_series_is_its_runs_with_their_metrics_and_its_score(tmp_path):
    write_series(tmp_path, [35, 36, 35, 37, 39], [60, 61, 62, 63, 64])
    (subject,) = gather([tmp_path])
    assert [run.name for run in subject.runs] == [f"run {number}" for number in range(1, 6)]
    assert [len(run.ranks) for run in subject.runs] == [1] * 5
    # Nine or ten blocks, each of its seconds and 2 more, and a second before: the mean of the middle three. No run
    # converges faster than the reference on average, so nothing is scaled.
    seconds = [9 * 62 + 1, 9 * 63 + 1, 9 * 64 + 1, 10 * 65 + 1, 10 * 66 + 1]
    assert subject.score.minutes == pytest.approx(sum(sorted(seconds)[1:4]) / 3 / 60)


def test_a_folder_of_results_of_any_program_is_a_set(tmp_path):
    for number in range(5):
        run_in(tmp_path / "set", name=f"result_{number}.txt", seed=number)
    (subject,) = gather([tmp_path / "set"])
    assert (subject.name, len(subject.runs)) == ("set", 5)


def test_a_damaged_run_of_a_series_is_left_out_and_named(tmp_path):
    write_series(tmp_path, [35, 36, 35], [60, 61, 62])
    (tmp_path / "20260101-000000_2.log").write_text("Segmentation fault\n")
    (subject,) = gather([tmp_path])
    assert [run.name for run in subject.runs] == ["run 1", "run 3"]
    assert any("20260101-000000_2.log" in text for text in subject.left_out)


def test_chips_and_system_come_from_doctor(tmp_path):
    write_series(tmp_path, [35], [60])
    facts = {"accelerators_per_node": "8", "accelerator_model_name": "NVIDIA H200"}
    report = {"nodes": {name: {"facts": facts, "measurements": {}} for name in ("a", "b")}}
    (tmp_path / "20260101-000000_doctor.json").write_text(json.dumps(report))
    (subject,) = gather([tmp_path])
    assert subject.chips == 16


def test_a_resumed_run_is_drawn_from_its_own_log(tmp_path):
    run_in(tmp_path, name="mlperf_resumed_at_90.log")
    run_in(tmp_path, name="mlperf_resumed_at_100.log", resumed_from="x")
    (subject,) = gather([tmp_path])
    assert subject.runs[0].log.path.name == "mlperf_resumed_at_100.log"


def test_runs_of_one_name_are_numbered(tmp_path):
    run_in(tmp_path / "a" / "run")
    run_in(tmp_path / "b" / "run")
    assert [subject.name for subject in gather([tmp_path / "a/run", tmp_path / "b/run"])] == ["run (1)", "run (2)"]


def test_the_target_of_synthetic_data_is_the_logs_own_or_none(tmp_path):
    run_in(tmp_path / "a", data_set="stand-in")
    run_in(tmp_path / "b", data_set="stand-in", quality_target=0.95)
    a, b = gather([tmp_path / "a", tmp_path / "b"])
    assert a.runs[0].targets == ()
    assert [(target.value, target.direction) for target in b.runs[0].targets] == [(0.95, "at_least")]


def test_the_ruleset_of_the_log_holds_unless_another_is_given(tmp_path):
    run_in(tmp_path, ruleset="3.1.0")
    assert gather([tmp_path])[0].rules.ruleset == "3.1.0"
    assert gather([tmp_path], "4.0.0")[0].rules.ruleset == "4.0.0"


def refusal(tmp_path, one, other):
    run_in(tmp_path / "a", **one)
    run_in(tmp_path / "b", **other)
    with pytest.raises(ConfigError, match=r"cannot be compared") as raised:
        gather([tmp_path / "a", tmp_path / "b"])
    return str(raised.value)


def test_different_benchmarks_are_refused(tmp_path):
    assert "resnet and bert" in refusal(tmp_path, {}, {"submission_benchmark": "bert"})


def test_rulesets_with_different_targets_are_refused(tmp_path):
    bert = {"submission_benchmark": "bert"}
    said = refusal(tmp_path, {**bert, "ruleset": "0.7.0"}, {**bert, "ruleset": "5.0.0"})
    assert "targets of rulesets 0.7.0 and 5.0.0 differ" in said


def test_rulesets_with_the_same_targets_are_compared(tmp_path):
    run_in(tmp_path / "a", ruleset="3.1.0")
    run_in(tmp_path / "b", ruleset="4.0.0")
    assert len(gather([tmp_path / "a", tmp_path / "b"])) == 2


def test_rulesets_that_count_in_different_units_are_refused(tmp_path):
    unet = {"submission_benchmark": "unet3d"}
    said = refusal(tmp_path, {**unet, "ruleset": "3.0.0"}, {**unet, "ruleset": "4.0.0"})
    assert "rulesets 3.0.0 and 4.0.0 count in epoch and samples" in said


def test_closed_beside_open_is_refused(tmp_path):
    assert "division" in refusal(tmp_path, {}, {"division": "open"})


@pytest.mark.parametrize("others", ["imagenet-1k", "stand-in"])
def test_custom_data_are_compared_with_custom_data_alone(tmp_path, others):
    assert "the data are custom" in refusal(tmp_path, {"data_set": "custom"}, {"data_set": others})


def test_synthetic_beside_real_data_is_refused(tmp_path):
    assert "synthetic" in refusal(tmp_path, {}, {"data_set": "stand-in"})


def test_a_set_of_different_benchmarks_is_refused(tmp_path):
    run_in(tmp_path, name="result_0.txt")
    run_in(tmp_path, name="result_1.txt", submission_benchmark="bert")
    with pytest.raises(ConfigError, match=r"resnet and bert"):
        gather([tmp_path])


def test_an_empty_folder_says_what_was_looked_for(tmp_path):
    with pytest.raises(DataError, match=r"mlperf\.log.*runs\.jsonl.*result_"):
        gather([tmp_path])


def test_a_path_that_is_not_there_is_named(tmp_path):
    with pytest.raises(DataError, match=r"nowhere: no such file"):
        gather([tmp_path / "nowhere"])


def test_a_run_that_never_started_is_nothing_to_report(tmp_path):
    log = write_log(tmp_path / "mlperf.log", before_the_clock()[:-1])
    with pytest.raises(DataError, match=r"no run_start"):
        gather([log])


def test_a_clock_of_another_age_is_refused(tmp_path):
    lines = resnet_run()
    log = write_log(tmp_path / "mlperf.log", [*lines[:-1], (*lines[-1][:4], 1e15)])
    with pytest.raises(DataError, match=r"no run did that"):
        gather([log])


def test_a_run_without_an_end_lasts_to_its_last_event(tmp_path):
    log = write_log(tmp_path / "mlperf.log", resnet_run()[:-1])
    (subject,) = gather([log])
    assert subject.runs[0].status == "no run_stop"
    assert subject.runs[0].minutes == pytest.approx(649 / 60)
