"""The clock of a run: events of training are logged with the time at which the device finished the steps."""

from __future__ import annotations

from pathlib import Path

import pytest

from common.contract.evaluation import Score
from common.data.batches import Block
from common.mlperf.mllog import RunLog
from common.mlperf.rules import rules_for
from common.mlperf.schedules import Schedule
from common.run import timed_run
from common.run.timed_run import Moment, TimedRun
from tests import command_line
from tests.stopped_clock import Clock

EPOCH = 60
"""Training samples; a step has 20."""


def milliseconds(seconds: float) -> int:
    """Since the epoch, when the clocks show ``seconds``."""
    return round((1_700_000_000 + seconds) * 1e3)


@pytest.fixture
def clocks(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock(1000.0)
    monkeypatch.setattr(timed_run, "time", made)
    return made


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "mlperf.log"


@pytest.fixture
def clock(clocks: Clock, path: Path) -> TimedRun:
    rules = rules_for("resnet")
    made = TimedRun(RunLog(path, rank=0), rules, Schedule(1, 1, None, "epoch"), EPOCH)
    made.start(step=0)
    return made


def logged(path: Path, *keys: str) -> list[tuple[str, int, int | None]]:
    """Key, time and epoch of the events of these keys."""
    number = ("first_epoch_num", "epoch_num", "step")
    return [
        (line["key"], line["time_ms"], next((line["metadata"][n] for n in number if n in line["metadata"]), None))
        for line in command_line.logged(path, *keys)
    ]


def rates(path: Path) -> list[float]:
    return [line["value"]["throughput"] for line in command_line.logged(path, "tracked_stats")]


def block(index: int, epochs: int = 1) -> Block:
    return Block(index, 1 + index * epochs, epochs, index * epochs * EPOCH, epochs * EPOCH)


def begin(clock: TimedRun, index: int, after: int, epochs: int = 1) -> None:
    given = block(index, epochs)
    clock.after(after, lambda at: clock.block_begins(given, given.start_sample, given.start_sample, at))


def end(clock: TimedRun, after: int, samples: int = EPOCH) -> None:
    clock.after(after, lambda at: clock.block_ends(samples, at))


SPANS = ("block_start", "block_stop", "epoch_start", "epoch_stop")


def test_a_block_ends_when_the_device_has_finished_its_last_step(clock, clocks, path):
    begin(clock, 0, after=0)
    clock.step_done(1, 20, ended=1001.0)
    end(clock, after=3)
    begin(clock, 1, after=3)
    clock.step_done(2, 40, ended=1002.0)
    assert [key for key, _, _ in logged(path, *SPANS)] == ["block_start", "epoch_start"]
    clocks.now = 1009.0  # the host looks late: it has waited for the reader
    clock.step_done(3, 60, ended=1003.0)
    at = milliseconds(1003.0)
    assert logged(path, *SPANS)[2:] == [
        ("epoch_stop", at, 1), ("block_stop", at, 1), ("block_start", at, 2), ("epoch_start", at, 2),
    ]  # fmt: skip
    clock.step_done(4, 80, ended=1004.0)
    clock.step_done(5, 100, ended=1005.0)
    clock.step_done(6, 120, ended=1006.0)
    assert rates(path) == pytest.approx([EPOCH / 3, EPOCH / 3])


def test_an_action_after_a_finished_step_runs_at_once(clock, clocks):
    clock.step_done(1, 20, ended=1000.0)
    clocks.now = 1007.0
    moments = []
    clock.after(1, moments.append)
    assert moments == [Moment(1007.0, None)]


def test_blocks_with_fewer_steps_than_are_in_flight_keep_order_and_times(clock, clocks, path):
    for index in range(3):
        begin(clock, index, after=index)
        end(clock, after=index + 1, samples=(index + 1) * EPOCH)
    clocks.now = 1010.0
    for step in (1, 2, 3):
        clock.step_done(step, step * EPOCH, ended=1000.0 + step)
    ended = [milliseconds(1000.0 + step) for step in range(4)]
    first, *others = logged(path, "block_start", "block_stop")
    assert (first[0], first[2]) == ("block_start", 1)
    assert others == [
        ("block_stop", ended[1], 1),
        ("block_start", ended[1], 2), ("block_stop", ended[2], 2),
        ("block_start", ended[2], 3), ("block_stop", ended[3], 3),
    ]  # fmt: skip


def test_epochs_that_end_in_one_step_share_its_time(clock, clocks, path):
    begin(clock, 0, after=0, epochs=3)
    clocks.now = 1003.0
    clock.step_done(1, 3 * EPOCH, ended=1002.0)
    assert [number for _, _, number in logged(path, "epoch_stop")] == [1, 2, 3]
    assert rates(path) == pytest.approx([3 * EPOCH / 2] * 3)


def test_a_run_resumed_within_a_block_logs_only_its_own_epochs_and_samples(clock, clocks, path):
    given = block(1, epochs=3)  # epochs 4 to 6
    done = given.start_sample + EPOCH + 20  # epoch 4 and a step of epoch 5
    clock.block_begins(given, done, done, Moment(1000.0))
    clocks.now = 1010.0
    for step, ended in ((1, 1001.0), (2, 1004.0), (3, 1005.0), (4, 1006.0), (5, 1007.0)):
        clock.step_done(step, done + step * 20, ended)
    assert [number for _, _, number in logged(path, "epoch_start")] == [5, 6]
    assert [number for _, _, number in logged(path, "epoch_stop")] == [5, 6]
    assert rates(path) == pytest.approx([40 / 4, 60 / 3])


def test_a_run_resumed_at_the_end_of_a_block_logs_none_of_its_epochs(clock, path):
    given = block(0, epochs=2)
    clock.block_begins(given, given.samples, given.samples, Moment(1000.0))
    assert logged(path, "epoch_start", "epoch_stop") == []


def test_the_clock_stops_once_with_the_time_of_the_score(clock, clocks):
    score = Score(60, {"accuracy": 1.0}, milliseconds(1005.0))
    clocks.now = 1006.0
    clock.stop("success", launched=100, counted=80, ending=(score, 1))
    clock.stop("aborted", launched=120, counted=120, ending=None)
    assert (clock.status, clock.stop_ms, clock.samples) == ("success", milliseconds(1005.0), 80)
    assert not clock.running


def test_a_ruleset_that_counts_tokens_gets_tokens_of_blocks_and_evaluations(clocks, path):
    """NVIDIA's submissions of GPT-3 log the first token and the number of tokens of a block."""
    schedule = Schedule(24_576, 24_576, None, "samples")
    made = TimedRun(RunLog(path, rank=0), rules_for("gpt3"), schedule, 20_000_000, 2048, sample_tokens=2048)
    made.start(step=0)
    given = Block(1, 1, 0, 24_576, 24_576)
    made.block_begins(given, 24_576, 24_576, Moment(1000.0))
    clocks.now = 1100.0
    made.block_ends(49_152, Moment(1100.0))
    point = made.evaluation_point(given, 49_152)
    made.events.eval_start(point)
    made.stop("aborted", 49_152, 49_152, None)
    interval = 24_576 * 2048
    lines = command_line.logged(path)
    found = {line["key"]: {k: v for k, v in line["metadata"].items() if "epoch" in k} for line in lines}
    assert found["block_start"] == {"first_epoch_num": interval, "epoch_count": interval}
    assert found["block_stop"] == {"first_epoch_num": interval}
    assert found["eval_start"] == found["run_stop"] == found["tracked_stats"] == {"epoch_num": 2 * interval}


def test_a_generation_is_an_epoch_that_ends_with_its_block(clocks, path):
    made = TimedRun(RunLog(path, rank=0), rules_for("minigo", "2.1.0"), Schedule(1, 1, None, "generation"), EPOCH)
    made.start(step=0)
    for number, steps in ((1, 2), (2, 3)):
        given = Block(number - 1, number, 1, 0, 0)
        done = 2 * (number - 1)
        made.after(done, lambda at, given=given, done=done: made.block_begins(given, 20 * done, 20 * done, at))
        for step in range(done + 1, done + steps + 1):
            made.step_done(step, 20 * step, ended=1000.0 + step)
        clocks.now = 1000.0 + done + steps
        made.block_ends(20 * (done + steps), Moment(clocks.now))
        assert made.evaluation_point(given, 20 * (done + steps)) == number
    made.stop("aborted", 100, 100, None)
    expected = [("epoch_start", 1), ("epoch_stop", 1), ("epoch_start", 2), ("epoch_stop", 2)]
    assert [(key, epoch) for key, _, epoch in logged(path, "epoch_start", "epoch_stop")] == expected
    assert rates(path) == [20.0, 20.0]
    (stop,) = command_line.logged(path, "run_stop")
    assert stop["metadata"]["epoch_num"] == 2
