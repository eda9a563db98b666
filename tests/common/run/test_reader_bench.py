"""``bench bench.only=reader`` times what a training step would wait for its data, of every workload's reader."""

from __future__ import annotations

import json
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from benchmarks import WORKLOADS
from common import cli
from common.config.schema import BenchConfig
from common.data.batches import Batch, Block, HostBatch
from common.errors import DataError
from common.planning.points import read_measurements
from common.run import reader_bench
from common.run.reader_bench import time_reader
from tests.conftest import one_of_each_family, suite
from tests.stopped_clock import Clock


class Scripted:
    """A workload and its reader: opening takes 5 s, and each micro-batch its entry of ``seconds``, and 0.25 s."""

    def __init__(self, clock: Clock, seconds: list[float]) -> None:
        self.clock, self.seconds, self.layout = clock, seconds, SimpleNamespace(device=torch.device("cpu"))
        self.done: list[Any] = []

    def warm_up_reader(self) -> None:
        self.clock.sleep(1000)
        self.done.append("warm up")

    def open_data(self, root: Path) -> Scripted:
        self.clock.sleep(5)
        self.done.append(root)
        return self

    def batches(self, block: Block):
        self.done.append(block.samples)
        for position, seconds in enumerate(self.seconds):
            self.clock.sleep(seconds)
            yield HostBatch({"x": torch.zeros(position)}, 8, position)

    def prepare(self, batch: HostBatch) -> Batch:
        self.clock.sleep(0.25)
        return Batch({"x": batch.tensors["x"].double()}, batch.samples)

    def close(self) -> None:
        self.done.append("closed")


@pytest.fixture
def clock(monkeypatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(reader_bench, "time", clock)
    return clock


def test_steps_are_timed_without_their_pauses_and_after_the_warm_up(clock):
    workload = Scripted(clock, [3, 2, 7, 1, 1, 4, 2, 1])
    options = BenchConfig(steps=2, warmup_steps=1, pause_ms=60_000)
    timing = time_reader(workload, Path("data"), 2, 16, options)
    assert workload.done == ["warm up", Path("data"), 4 * 16, "closed"]
    assert timing.first == 5 + 3 + 2 + 0.5  # the libraries are loaded before run_start
    assert timing.longest_warm_up == 7 + 1 + 0.5
    assert (timing.waited, timing.longest) == (1 + 4 + 2 + 1 + 2 * 0.5, 1 + 4 + 0.5)
    assert (timing.samples, timing.bytes) == (32, 8 * (4 + 5 + 6 + 7))


def test_the_warm_up_may_be_left_out(clock):
    timing = time_reader(Scripted(clock, [1, 1]), Path("data"), 1, 8, BenchConfig(steps=1, warmup_steps=0))
    assert (timing.longest_warm_up, timing.waited) == (0, 1.25)


def test_rates_count_all_samples_and_the_bytes_of_one_rank(clock):
    options = BenchConfig(steps=4, warmup_steps=2, pause_ms=40)
    timing = time_reader(Scripted(clock, [0.75] * 7), Path("data"), 1, 1024, options)
    assert timing.bytes == 8 * (3 + 4 + 5 + 6)
    rows = timing.rows(options, 2)
    assert rows["reader"] == "1000.000 ms, 1,024 samples/s (512 a rank), 0.0 MB/s of tensors a rank"
    assert rows["reader: longest wait"] == "1000.0 ms, of 4 steps, 40 ms apart"
    assert re.match(r"6000 ms .* of 2 more before the measured ones .* 1000\.0 ms$", rows["reader: first step"])


def test_the_report_has_the_processor_time_of_one_rank_for_a_sample_that_it_reads(clock, monkeypatch):
    used = iter([3.0, 11.0])  # before and after the measured steps
    monkeypatch.setattr(reader_bench, "_processor_seconds", lambda: next(used))
    options = BenchConfig(steps=4, warmup_steps=2)
    report = time_reader(Scripted(clock, [0.75] * 7), Path("data"), 1, 1024, options).report(options, 2)
    assert report["samples_per_second"] == pytest.approx(1024)  # each step takes 0.75 and 0.25 s
    assert report["processor_seconds"] == pytest.approx(8 / 4096 / 2)


def test_a_reader_that_fails_is_closed(clock):
    workload = Scripted(clock, [1])
    with pytest.raises(AssertionError, match="ended early"):
        time_reader(workload, Path("data"), 1, 8, BenchConfig(steps=1, warmup_steps=0))
    assert workload.done[-1] == "closed"


def only_reader(workload: str, data_dir: Path, *more: str) -> list[str]:
    """A command line that measures the reader of a test recipe over a few steps."""
    options = ["bench.only=reader", "bench.steps=3", "bench.warmup_steps=1", f"data_dir={data_dir}"]
    return ["bench", f"benchmark={workload}", "scale=test", "device=cpu", *options, *more]


# MiniGo reads the games that it plays: test_generation_bench.py.
@pytest.mark.parametrize("workload", one_of_each_family(sorted(WORKLOADS.keys() - {"minigo"})))
def test_every_workload_s_reader_is_measured_and_nothing_else(workload, data_of, capsys):
    assert cli.run(only_reader(workload, data_of(workload))) == 0
    printed = capsys.readouterr().out
    assert re.search(r"^reader +[\d.]+ ms, [\d,]+ samples/s \([\d,]+ a rank\), [\d,.]+ MB/s", printed, re.MULTILINE)
    assert "of 3 steps" in printed
    assert not re.search(r"^(step|run)", printed, re.MULTILINE)


def test_estimates_read_the_report(data_of, tmp_path):
    report = tmp_path / "reader.json"
    assert cli.run(only_reader("resnet", data_of("resnet"), f"bench.report={report}")) == 0
    reader = read_measurements([report], "resnet", "CPU", cli.load).reader
    written = json.loads(report.read_text())["reader"]
    assert reader.rate == written["samples_per_second"] > 0
    assert reader.processor_seconds > 0


def test_volumes_that_stay_in_host_memory_are_read_as_well(data_of, capsys):
    assert cli.run(only_reader("unet3d", data_of("unet3d"), "reader.cache=host", "bench.accumulate=true")) == 0
    assert "samples/s" in capsys.readouterr().out


def test_missing_data_are_one_message(tmp_path, capsys):
    assert cli.run(only_reader("unet3d", tmp_path / "none")) == DataError.exit_code
    assert f"data folder {tmp_path / 'none'} does not exist" in capsys.readouterr().err


def test_one_rank_prints_the_rate_of_all_ranks(data_of):
    done = suite(*only_reader("resnet", data_of("resnet"), "scale.gpus_per_node=2"))
    assert done.code == 0, done.errors
    rates = re.findall(r"^reader +[\d.]+ ms, ([\d,]+) samples/s \(([\d,]+) a rank\)", done.output, re.MULTILINE)
    assert len(rates) == 1
    every, each = (int(rate.replace(",", "")) for rate in rates[0])
    assert every == pytest.approx(2 * each, abs=1)
