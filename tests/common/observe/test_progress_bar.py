"""Progress on a terminal and on another stream."""

import io
import re

import pytest

from common.observe import progress_bar
from common.observe.progress_bar import ProgressBar
from tests.stopped_clock import Clock


class Terminal(io.StringIO):
    def isatty(self):
        return True


@pytest.fixture
def clock(monkeypatch):
    clock = Clock(0.0)
    monkeypatch.setattr(progress_bar, "time", clock)
    return clock


def test_plain_lines_come_every_five_seconds(clock, capsys):
    progress = ProgressBar(0)
    progress.block(0, 1000, "epochs 1-4")
    for second in range(1, 10):
        clock.now = float(second)
        progress.update(100, 2.5)
    assert capsys.readouterr().err == (
        "block 1, epochs 1-4: 500/1,000 samples, 100 samples/s, loss 2.5, evaluation in 0:05\n"
    )


def test_the_end_of_a_block_is_a_line(clock, capsys):
    progress = ProgressBar(0)
    progress.block(2, 64, "")
    clock.now = 4.0
    progress.update(64)
    progress.close()
    assert capsys.readouterr().err == "block 3: 64/64 samples, 16 samples/s\n"


@pytest.mark.parametrize("kind", [io.StringIO, Terminal])
@pytest.mark.parametrize(
    ("total", "steps"),
    [(100, [64, 64]), (96, [128]), (60, [16, 16, 16, 16, 16])],
    ids=["padded", "one-step", "more-steps"],
)
def test_never_more_samples_than_there_are(kind, total, steps, clock, monkeypatch):
    stream = kind()
    monkeypatch.setattr("sys.stderr", stream)
    progress = ProgressBar(0)
    progress.block(0, total, "epoch 1")
    for samples in steps:
        clock.now += progress_bar.LINE_SECONDS
        progress.update(samples)
    progress.close()
    shown = [float(count) for count in re.findall(r"([\d.]+)/[\d.]+ samples", stream.getvalue())]
    assert shown[-1] == total
    assert max(shown) == total


def test_other_ranks_are_silent(capsys):
    progress = ProgressBar(3)
    progress.block(0, 10, "x")
    progress.update(10, 1.0)
    progress.line("text")
    progress.clear()
    progress.close()
    assert capsys.readouterr().err == ""


def test_a_terminal_gets_a_bar_and_whole_lines_above_it(monkeypatch):
    stream = Terminal()
    monkeypatch.setattr("sys.stderr", stream)
    progress = ProgressBar(0)
    progress.block(0, 100, "epoch 1")
    progress.update(40, 1.25)
    progress.line("accuracy 0.5")
    progress.clear()
    assert "block 1, epoch 1" in stream.getvalue()
    assert "accuracy 0.5\n" in stream.getvalue()
    progress.close()
    progress.block(1, 100, "epoch 2")
    progress.close()
    assert "evaluation in" in stream.getvalue()


def test_a_block_without_samples_prints_nothing(capsys):
    progress = ProgressBar(0)
    progress.block(0, 100, "x")
    progress.close()
    assert capsys.readouterr().err == ""


def test_a_block_of_unknown_size_has_lines_without_a_total(clock, capsys):
    bar = ProgressBar(0)
    bar.block(2, 0, "epochs 3-3")
    clock.now += 2.0
    bar.update(600)
    bar.close()
    assert capsys.readouterr().err == "block 3, epochs 3-3: 600 samples, 300 samples/s\n"
