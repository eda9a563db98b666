"""The time budget of hand-written runs, worked out by hand."""

import pytest
from report_runs import END, RUN_START, START, before_the_clock, resnet_run, write_log, write_metrics

from common.mlperf.parsed_log import read_log
from common.report.budget import budget_of
from common.report.steps import read_steps


def budget(tmp_path, lines, stop, ranks=True):
    log = read_log(write_log(tmp_path / "mlperf.log", lines))
    start, end = round(1000 * RUN_START), round(1000 * (RUN_START + stop))
    return budget_of(log, start, end, read_steps(tmp_path, start / 1000, end / 1000) if ranks else ())


def bracket(name, begin, end):
    return [(START, f"{name}_start", None, {}, begin), (END, f"{name}_stop", None, {}, end)]


def test_parts_of_a_measured_run_are_those_worked_out_by_hand(tmp_path):
    # A second to the first block, 9 blocks of 70 s, each followed by 2 s of evaluation: 649 s.
    write_metrics(tmp_path, 0, steps=100, seconds=630)
    found = budget(tmp_path, resnet_run(), 649)
    assert (found.init, found.run, found.other, found.evaluation) == (58_000, 649_000, 1_000, 18_000)
    assert found.data_wait == pytest.approx(0.03 * 630_000, abs=1)
    assert found.communication == pytest.approx(0.12 * 630_000, abs=1)
    assert found.compute == pytest.approx(0.85 * 630_000, abs=2)


def test_parts_add_up_to_the_run_exactly(tmp_path):
    for rank in range(3):
        write_metrics(tmp_path, rank, steps=97, seconds=629.123, slower=0.01 * rank)
    found = budget(tmp_path, resnet_run(block_seconds=70.0617), 649.7773)
    assert sum(found.parts.values()) == found.run


def test_data_wait_is_the_mean_over_the_ranks(tmp_path):
    write_metrics(tmp_path, 0, steps=10, seconds=600)
    write_metrics(tmp_path, 1, steps=10, seconds=600, data_wait_ms=12_000)
    assert budget(tmp_path, resnet_run(), 649).data_wait == (10 * 1_800 + 10 * 12_000) // 2


def test_evaluation_beside_training_is_hidden_and_not_counted_twice(tmp_path):
    lines = [*before_the_clock(), *bracket("block", 0, 60), *bracket("block", 60, 100), *bracket("eval", 55, 75)]
    found = budget(tmp_path, sorted(lines, key=lambda line: line[4]), 100, ranks=False)
    assert (found.hidden_evaluation, found.evaluation, found.compute) == (20_000, 0, 100_000)


def test_an_evaluation_is_split_where_training_ends(tmp_path):
    lines = [*before_the_clock(), *bracket("block", 0, 60), *bracket("eval", 50, 75)]
    found = budget(tmp_path, sorted(lines, key=lambda line: line[4]), 100, ranks=False)
    assert (found.hidden_evaluation, found.evaluation, found.other) == (10_000, 15_000, 25_000)


def test_overlapping_evaluations_count_once(tmp_path):
    lines = [*before_the_clock(), *bracket("eval", 10, 30), *bracket("eval", 20, 40)]
    found = budget(tmp_path, sorted(lines, key=lambda line: line[4]), 100, ranks=False)
    assert found.evaluation == 30_000


def test_what_lasts_beyond_run_stop_is_cut_there(tmp_path):
    lines = [*before_the_clock(), *bracket("block", 0, 90), *bracket("eval", 90, 130)]
    found = budget(tmp_path, lines, 100, ranks=False)
    assert (found.evaluation, found.run) == (10_000, 100_000)


def test_a_block_that_never_ended_lasts_to_the_end(tmp_path):
    lines = [*before_the_clock(), (START, "block_start", None, {}, 40)]
    found = budget(tmp_path, lines, 100, ranks=False)
    assert (found.compute, found.other) == (60_000, 40_000)


def test_epochs_stand_in_for_blocks(tmp_path):
    found = budget(tmp_path, [*before_the_clock(), *bracket("epoch", 5, 65)], 70, ranks=False)
    assert (found.compute, found.other) == (60_000, 10_000)


def test_without_blocks_and_epochs_all_but_evaluation_is_training(tmp_path):
    found = budget(tmp_path, [*before_the_clock(), *bracket("eval", 50, 60)], 100, ranks=False)
    assert (found.compute, found.evaluation, found.other) == (90_000, 10_000, 0)
    assert any("no blocks and no epochs" in note for note in found.notes)


def test_without_metrics_the_page_says_what_is_not_known(tmp_path):
    found = budget(tmp_path, resnet_run(), 649, ranks=False)
    assert list(found.parts) == ["training, undivided", "evaluation", "other"]
    assert any("Without metrics" in note for note in found.notes)


def test_unmeasured_communication_is_called_a_part_of_compute(tmp_path):
    for rank in range(2):
        write_metrics(tmp_path, rank, steps=10, seconds=630, comm_wait_ms=None)
    found = budget(tmp_path, resnet_run(), 649)
    assert list(found.parts) == ["data wait", "compute and communication", "evaluation", "other"]


def test_waits_longer_than_training_cannot_make_compute_negative(tmp_path):
    write_metrics(tmp_path, 0, steps=10, seconds=630, data_wait_ms=1e6)
    found = budget(tmp_path, resnet_run(), 649)
    assert (found.compute, found.data_wait) == (0, 630_000)
