"""Time that a step waits for input: the slowest of reader, processor cores and storage, and what is not known."""

from __future__ import annotations

import dataclasses
import json
import random

import pytest

from common.cli import load
from common.config.composition import compose
from common.doctor.limits import hardware_of
from common.errors import ConfigError
from common.planning.compute import ComputeCurve
from common.planning.estimates import RunLayout
from common.planning.input_model import MeasuredReader, input_seconds, reader_limits
from common.planning.points import read_measurements
from common.planning.step_model import step_times

HARDWARE = dataclasses.replace(hardware_of("h200"), cores_per_node=64, storage_gbs=None)
EIGHT = RunLayout(8, 3200, 400, 1)
SCALE = ["benchmark=resnet", "scale=8xH200", "device=cpu"]


def test_a_step_waits_for_the_slower_of_reader_and_rest():
    """400 images at 5,000 a second take 80 ms; the rest of the step takes 50 or 90 ms."""
    reader = MeasuredReader(rate=5000.0)
    assert input_seconds("resnet", EIGHT, reader, HARDWARE, 0.045, 0.05) == pytest.approx(0.03)
    assert input_seconds("resnet", EIGHT, reader, HARDWARE, 0.045, 0.09) == 0


def test_the_ranks_of_a_node_share_its_cores():
    """8 of 64 cores a rank, 2 ms of a core an image: 4,000 images a second; alone on the node, 32,000."""
    reader = MeasuredReader(1e6, processor_seconds=0.002)
    assert reader_limits("resnet", EIGHT, reader, HARDWARE)["processor cores"] == pytest.approx(4000)
    one = RunLayout(1, 400, 400, 1)
    assert reader_limits("resnet", one, reader, HARDWARE)["processor cores"] == pytest.approx(32000)
    many = RunLayout(64, 25600, 400, 1)
    assert reader_limits("resnet", many, reader, HARDWARE)["processor cores"] == pytest.approx(4000)


def test_the_replicas_of_a_node_share_its_storage():
    """A node reads 9.12 GB/s, a sample of DLRM-DCNv2 has 912 bytes: 10 million samples a second for all replicas."""
    hardware = dataclasses.replace(HARDWARE, storage_gbs=9.12)
    nothing = MeasuredReader()
    assert reader_limits("dlrm_dcnv2", RunLayout(8, 8, 1, 1), nothing, hardware) == {"storage": pytest.approx(1.25e6)}
    assert reader_limits("dlrm_dcnv2", RunLayout(8, 8, 4, 1, tp=4), nothing, hardware) == {
        "storage": pytest.approx(5e6)
    }


def test_a_reader_that_disturbs_the_step_makes_it_longer_although_it_keeps_up():
    reader = MeasuredReader(rate=1e6, slowdown=1.02)
    assert input_seconds("resnet", EIGHT, reader, HARDWARE, 0.05, 0.06) == pytest.approx(0.001)


def test_unknown_input_changes_nothing():
    run = load(compose(SCALE))[0]
    curve = ComputeCurve((400,), (0.04,))
    unknown = step_times(run, EIGHT, curve, HARDWARE)
    known = step_times(run, EIGHT, curve, HARDWARE, reader=MeasuredReader(rate=2000.0))
    assert unknown.input is None
    assert unknown.total == pytest.approx(known.total - known.input)
    assert dataclasses.replace(known, input=None) == unknown


def test_more_cores_and_faster_storage_never_slow_a_step():
    draw = random.Random(1)
    for _ in range(300):
        reader = MeasuredReader(draw.uniform(1e3, 1e5), draw.uniform(1e-5, 1e-2), draw.uniform(0.9, 1.2))
        cores, storage, rest = draw.randint(1, 200), draw.uniform(0.1, 20), draw.uniform(0.01, 0.2)
        worse = dataclasses.replace(HARDWARE, cores_per_node=cores, storage_gbs=storage)
        better = dataclasses.replace(
            worse, cores_per_node=cores + draw.randint(0, 100), storage_gbs=storage * draw.uniform(1, 4)
        )
        layout = RunLayout(draw.choice([1, 4, 8, 64]), 25600, 100, 1)
        slow, quick = (input_seconds("resnet", layout, reader, each, 0.9 * rest, rest) for each in (worse, better))
        assert 0 <= quick <= slow


def written(path, command, **figures):
    """Write a report of ``bench`` on an H200, and return its path."""
    common = {"benchmark": "resnet", "device": "NVIDIA H200", "ranks": 2, "micro_batch": 400, "samples": 800}
    path.write_text(json.dumps({**common, **figures, "provenance": {"command": f"mlperf-suite bench {command}"}}))
    return path


def measured(*paths):
    return read_measurements(paths, "resnet", "NVIDIA H200", load)


TWO = "benchmark=resnet scale=2xH200 device=cpu"
STEP = {"step_ms": 40.0, "samples_per_second": 20000.0, "updated": True}


def test_reports_of_bench_are_points_and_readers(tmp_path):
    step = written(tmp_path / "step.json", f"{TWO} bench.only=step", **STEP)
    run = written(tmp_path / "run.json", f"{TWO} bench.only=run", run={"samples_per_second": 16000.0})
    reader = {"samples_per_second": 30000.0, "processor_seconds": 0.001, "pause_ms": 0.0}
    alone = written(tmp_path / "reader.json", f"{TWO} bench.only=reader", reader=reader)
    found = measured(step, run, alone)
    assert [(point.gpus, point.seconds) for point in found.points] == [(2, 0.04)]
    assert found.reader == MeasuredReader(15000.0, 0.001, 1.25)  # two replicas


def test_a_run_is_compared_with_the_step_of_its_own_report(tmp_path):
    faster = {**STEP, "samples_per_second": 18000.0, "run": {"samples_per_second": 15000.0}}
    paths = [written(tmp_path / "step.json", TWO, **STEP), written(tmp_path / "both.json", TWO, **faster)]
    assert measured(*paths).reader.slowdown == pytest.approx(1.2)


def test_a_run_that_is_faster_than_the_reader_alone_shows_its_rate(tmp_path):
    reader = {"samples_per_second": 12000.0, "processor_seconds": 0.001, "pause_ms": 0.0}
    alone = written(tmp_path / "reader.json", TWO, reader=reader)
    run = written(tmp_path / "run.json", TWO, **STEP, run={"samples_per_second": 16000.0})
    assert measured(alone, run).reader.rate == 8000.0


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("[]", "not a JSON object"),
        ("{", "is no readable JSON"),
        ('{"results": [{"job": {}}]}', "neither results of `mlperf-suite measure` nor a report"),
        ('{"results": 3}', "neither results"),
        ('{"benchmark": "resnet"}', "no benchmark, device or provenance"),
        ('{"benchmark": "resnet", "device": "NVIDIA H200", "provenance": {}}', "KeyError 'command'"),
    ],
)  # fmt: skip
def test_other_files_are_one_clear_error(tmp_path, content, message):
    path = tmp_path / "other.json"
    path.write_text(content)
    with pytest.raises(ConfigError, match=message) as error:
        measured(path)
    assert str(path) in str(error.value)


def test_a_reader_that_was_measured_with_pauses_is_refused(tmp_path):
    reader = {"samples_per_second": 12000.0, "processor_seconds": 0.001, "pause_ms": 40.0}
    with pytest.raises(ConfigError, match=r"bench\.pause_ms: measure the reader without pauses"):
        measured(written(tmp_path / "reader.json", TWO, reader=reader))
