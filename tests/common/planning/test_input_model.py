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


def decoder(path, layers, only="step", **figures):
    """Write a report of Llama 3.1 8B with some of its layers, and return its path."""
    command = f"benchmark=llama31_8b scale=1xH200 device=cpu model.layers={layers} bench.only={only}"
    own = {"benchmark": "llama31_8b", "ranks": 1, "micro_batch": 1, "samples": 1, "updated": only == "step"}
    return written(path, command, **{**own, **figures})


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


def test_a_step_without_traffic_is_no_point(tmp_path):
    alone = written(tmp_path / "alone.json", TWO, **STEP, traffic=False)
    assert measured(alone).points == []
    both = {"benchmark": "resnet", "device": "NVIDIA H200", "ranks": 2, "micro_batch": 400, "samples": 800, **STEP}
    figures = [
        {**both, "traffic": traffic, "provenance": {"command": f"bench bench {TWO}"}} for traffic in (True, False)
    ]
    results = tmp_path / "results.json"
    results.write_text(json.dumps({"results": [{"figures": each} for each in figures]}))
    assert measured(results).points[0].spread is None  # one copy


def test_steps_of_a_decoder_with_other_numbers_of_layers_are_different_steps(tmp_path):
    paths = [decoder(tmp_path / f"{layers}.json", layers, step_ms=100.0 * layers, samples_per_second=10.0 / layers)
             for layers in (2, 4)]  # fmt: skip
    run = decoder(tmp_path / "run.json", 4, only="run", run={"samples_per_second": 2.0})
    found = read_measurements([*paths, run], "llama31_8b", "NVIDIA H200", load)
    assert sorted(point.seconds for point in found.points) == [0.2, 0.4]
    assert found.reader.slowdown == pytest.approx(1.25)


def test_a_network_without_some_layers_has_no_slowdown(tmp_path):
    figures = {**STEP, "benchmark": "flux1", "run": {"samples_per_second": 16000.0}}
    command = "benchmark=flux1 scale=1xH200 device=cpu model.double_blocks=1"
    path = written(tmp_path / "flux1.json", command, **{**figures, "micro_batch": 1, "samples": 1})
    found = read_measurements([path], "flux1", "NVIDIA H200", load)
    assert (found.points, found.reader.slowdown) == ([], None)


def test_a_step_that_did_not_update_is_no_base_of_the_slowdown(tmp_path):
    both = {**STEP, "updated": False, "samples_per_second": 32000.0, "run": {"samples_per_second": 16000.0}}
    skipped = written(tmp_path / "skipped.json", TWO, **both)
    assert measured(skipped).reader.slowdown is None
    step = written(tmp_path / "step.json", TWO, **STEP)
    assert measured(skipped, step).reader.slowdown == pytest.approx(1.25)


@pytest.mark.parametrize(
    "faulty", [{"step_ms": 40.0, "updated": True}, {**STEP, "step_ms": 0}, {"run": {"evaluation_seconds": 1.0}}]
)
def test_the_error_about_incomplete_figures_names_their_file(tmp_path, faulty):
    whole = written(tmp_path / "whole.json", TWO, **STEP)
    with pytest.raises(ConfigError, match=r"faulty\.json: neither results"):
        measured(whole, written(tmp_path / "faulty.json", TWO, **faulty))


def test_an_evaluation_counts_without_a_step_in_its_report(tmp_path):
    step = written(tmp_path / "step.json", f"{TWO} bench.only=step", **STEP)
    runs = [
        written(tmp_path / f"{seconds}.json", f"{TWO} bench.only=run",
                run={"samples_per_second": 16000.0, "evaluation_seconds": seconds, "eval_samples": 50000})
        for seconds in (1.0, 2.0, 9.0)
    ]  # fmt: skip
    assert measured(step, *runs).evaluation == pytest.approx(2.0 * 2 / 50000)  # two replicas
    assert measured(step).evaluation is None


def test_an_evaluation_of_fewer_layers_does_not_count(tmp_path):
    run = {"samples_per_second": 2.0, "evaluation_seconds": 1.0, "eval_samples": 100}
    found = read_measurements([decoder(tmp_path / "run.json", 4, "run", run=run)], "llama31_8b", "NVIDIA H200", load)
    assert found.evaluation is None
