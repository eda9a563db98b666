"""Shortening curves keeps extremes and totals; metrics files are read whole or refused."""

import json

import numpy as np
import pytest
from report_runs import RUN_START, write_metrics

from common.errors import DataError
from common.report.curves import envelope, mean_over_time, rate, step_times
from common.report.steps import read_steps


def test_an_envelope_keeps_a_single_spike():
    y = np.ones(100_000)
    y[54_321] = 99.0
    short = envelope(np.arange(100_000.0), y, bins=400)
    assert len(short.x) == 400
    assert (short.high.max(), short.low.min()) == (99.0, 1.0)


def test_the_mean_of_an_envelope_is_the_mean_of_its_points():
    y = np.random.default_rng(0).normal(size=4_000)
    short = envelope(np.arange(4_000.0), y, bins=40)
    np.testing.assert_allclose(short.mean, y.reshape(40, 100).mean(axis=1), rtol=1e-12)


def test_a_short_curve_is_left_as_it_is_but_for_what_is_not_finite():
    short = envelope(np.array([1.0, 2.0, 3.0]), np.array([5.0, np.nan, 7.0]))
    assert (short.x.tolist(), short.low.tolist(), short.high.tolist()) == ([1.0, 3.0], [5.0, 7.0], [5.0, 7.0])


def test_no_points_make_an_empty_envelope():
    assert len(envelope(np.empty(0), np.empty(0)).x) == 0


def test_rates_times_their_spans_are_all_samples():
    seconds = np.array([1.0, 2.0, 3.0, 7.0, 8.0])  # a pause of four seconds
    samples = np.array([10.0, 20.0, 30.0, 40.0, 50.0])
    _, rates = rate(seconds, samples, 0.0, 8.0, bins=8)
    assert rates.sum() * 1.0 == pytest.approx(50.0)
    assert rates[4] == pytest.approx(2.5)  # within the pause


def test_means_over_time_leave_out_parts_without_a_figure():
    seconds = np.array([0.5, 0.6, 3.5])
    middle, means = mean_over_time(seconds, np.array([1.0, 3.0, np.nan]), 0.0, 4.0, bins=4)
    assert (middle.tolist(), means.tolist()) == ([0.5], [2.0])


def test_the_unmeasured_first_step_of_a_block_is_no_step_time():
    found = step_times(np.array([0.0, 10.0, 10.0, 20.0]))
    assert (found.steps, found.p50, found.longest) == (3, 10.0, 20.0)


def test_no_measured_step_has_no_distribution():
    assert step_times(np.array([0.0, np.nan])) is None


def test_steps_of_another_run_in_the_same_folder_are_left_out(tmp_path):
    path = write_metrics(tmp_path, 0, steps=10, seconds=100)
    earlier = json.dumps({"step": 1, "samples": 1, "loss": 1.0, "step_ms": 5.0, "time": RUN_START - 50})
    path.write_text(earlier + "\n" + path.read_text())
    (rank,) = read_steps(tmp_path, RUN_START, RUN_START + 200)
    assert len(rank) == 10


def test_a_torn_last_line_is_left_out(tmp_path):
    path = write_metrics(tmp_path, 0, steps=10, seconds=100)
    with path.open("a") as file:
        file.write('{"step": 11, "samp')
    (rank,) = read_steps(tmp_path, RUN_START, RUN_START + 200)
    assert len(rank) == 10


@pytest.mark.parametrize("damage", ["{", "3", '{"a": 1}, {"b": 2}', ""])
def test_a_damaged_line_is_named(tmp_path, damage):
    path = write_metrics(tmp_path, 3, steps=10, seconds=100)
    lines = path.read_text().splitlines()
    path.write_text("\n".join([*lines[:4], damage, *lines[4:]]) + "\n")
    with pytest.raises(DataError, match=r"metrics_rank3\.jsonl, line 5"):
        read_steps(tmp_path, RUN_START, RUN_START + 200)


def test_ranks_come_in_numerical_order(tmp_path):
    for rank in (10, 9, 1):
        write_metrics(tmp_path, rank, steps=4, seconds=10)
    assert [rank.rank for rank in read_steps(tmp_path, RUN_START, RUN_START + 20)] == [1, 9, 10]


def test_a_figure_that_only_some_lines_have_is_nan_in_the_others(tmp_path):
    write_metrics(tmp_path, 0, steps=20, seconds=100)
    (rank,) = read_steps(tmp_path, RUN_START, RUN_START + 200)
    assert np.isfinite(rank["power_w"]).sum() == 2
    assert rank.has("power_w")
    assert not rank.has("temperature_c")
