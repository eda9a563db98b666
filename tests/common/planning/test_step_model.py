"""The parts of a step: against measurements of one and two GPUs, against formulas, and as properties."""

import dataclasses
import functools
import random

import numpy as np
import pytest

from common.cli import load
from common.config.system import Link
from common.doctor.limits import hardware_of
from common.errors import ConfigError
from common.planning.compute import ComputeCurve, sizes_of
from common.planning.constants import FIXED
from common.planning.estimates import RunLayout
from common.planning.measured_curves import curve_for
from common.planning.points import RESULTS, kind_of, read_measurements
from common.planning.step_model import step_times, straggling

HARDWARE = hardware_of("h200")


@functools.cache
def points_of(benchmark):
    return tuple(read_measurements(sorted(RESULTS.rglob("*.json")), benchmark, HARDWARE.gpu, load).points)


def point_on(benchmark, gpus):
    return next(point for point in points_of(benchmark) if point.gpus == gpus)


def layout_of(point):
    run = point.run
    axes = {axis: run.layout[axis] for axis in ("pp", "cp", "tp")}
    return RunLayout(point.gpus, run.global_batch, run.micro_batch, point.accumulation, **axes)


def curve_of(point, benchmark):
    return curve_for(point.run, point.axes, points_of(benchmark), HARDWARE)


@pytest.mark.parametrize("benchmark", ["bert", "resnet", "llama31_8b", "gpt3"])
def test_one_gpu_takes_the_measured_time(benchmark):
    point = point_on(benchmark, 1)
    found = step_times(point.run, layout_of(point), curve_of(point, benchmark), HARDWARE)
    assert found.total == pytest.approx(point.seconds, rel=1e-9)


def test_a_replica_on_two_gpus_takes_the_measured_time():
    point = next(point for point in points_of("unet3d") if point.axes == (1, 2, 1))
    found = step_times(point.run, layout_of(point), curve_of(point, "unet3d"), HARDWARE)
    assert found.total == pytest.approx(point.seconds, rel=1e-6)


@pytest.mark.parametrize("benchmark", ["bert", "resnet", "llama31_8b", "stable_diffusion"])
def test_two_gpus_are_predicted_from_one(benchmark):
    point = point_on(benchmark, 2)
    assert all(kind_of(each.run) == kind_of(point.run) for each in points_of(benchmark))
    found = step_times(point.run, layout_of(point), curve_of(point, benchmark), HARDWARE)
    assert found.total == pytest.approx(point.seconds, rel=0.015)


@pytest.mark.parametrize("benchmark", ["bert", "llama31_8b", "dlrm_dcnv2"])
def test_better_links_never_slow_a_step(benchmark):
    point, draw = point_on(benchmark, 2), random.Random(1)
    curve = curve_of(point, benchmark)
    for _ in range(100):
        node = Link(draw.uniform(0, 10), draw.uniform(5, 500))
        network = Link(draw.uniform(0, 50), draw.uniform(1, 100))
        worse = dataclasses.replace(
            HARDWARE, node_link=node, network_link=network, overlap_slowdown=draw.random(), collective_us=20.0
        )
        better = dataclasses.replace(
            worse,
            node_link=Link(node.latency_us, node.gbs * draw.uniform(1, 3)),
            network_link=Link(network.latency_us, network.gbs * draw.uniform(1, 3)),
        )
        layout = RunLayout(16, 16 * point.run.micro_batch, point.run.micro_batch, 1)
        found = [step_times(point.run, layout, curve, hardware).total for hardware in (better, worse)]
        assert found[0] <= found[1] * (1 + 1e-12)


def test_gradients_that_are_clipped_first_are_reduced_alone():
    point = point_on("bert", 2)
    assert point.run.workload.hparams.clip == "before_reduction"
    weights = 2 * sizes_of(point.run).parameters
    found = step_times(point.run, layout_of(point), curve_of(point, "bert"), HARDWARE)
    assert found.exposed > weights / 2 / (HARDWARE.node_link.gbs * 1e9)


def test_without_overlap_all_traffic_is_exposed():
    point = point_on("resnet", 2)
    run = dataclasses.replace(point.run, optimizer=dataclasses.replace(point.run.optimizer, overlap=False))
    found = step_times(run, layout_of(point), curve_of(point, "resnet"), HARDWARE)
    assert found.overlap_slowdown == 0
    assert found.exposed > 2 * sizes_of(run).parameters / (HARDWARE.node_link.gbs * 1e9)


def test_stages_of_a_pipeline_wait():
    point = point_on("gpt3", 1)
    curve = curve_for(point.run, (4, 1, 1), points_of("gpt3"), HARDWARE)
    found = step_times(point.run, RunLayout(4, 64, 2, 32, pp=4), curve, HARDWARE)
    assert found.bubble == pytest.approx(3 / (32 * point.run.workload.model.chunks) * found.compute)


def test_each_chunk_of_a_stage_sends_its_activations():
    run = point_on("gpt3", 1).run
    layout = RunLayout(4, 64, 2, 32, pp=4)
    found = []
    for chunks in (1, 3):
        model = dataclasses.replace(run.workload.model, chunks=chunks)
        of_chunks = dataclasses.replace(run, workload=dataclasses.replace(run.workload, model=model))
        found.append(step_times(of_chunks, layout, ComputeCurve((2,), (1.0,)), HARDWARE).model_communication)
    size = 2 * run.workload.facts.row_length * run.workload.facts.hidden * 2
    one = HARDWARE.node_link.latency_us * 1e-6 + size / (HARDWARE.node_link.gbs * 1e9)
    assert found == pytest.approx([32 * 2 * one, 32 * 6 * one])


def test_the_slowest_of_many_gpus_is_the_largest_of_as_many_draws():
    hardware = dataclasses.replace(HARDWARE, gpu_spread=0.01, step_spread=0.0)
    generator = np.random.default_rng(0)
    for gpus in (2, 8, 512):
        drawn = generator.normal(0.0, 0.01, (4000, gpus)).max(axis=1).mean()
        assert straggling(gpus, hardware) == pytest.approx(drawn, rel=0.06)
    assert straggling(1, hardware) == 0.0
    assert straggling(8, hardware, spread=0.001) == straggling(8, hardware)  # two copies can agree by chance
    assert straggling(8, hardware, spread=0.02) == pytest.approx(2 * straggling(8, hardware))


def test_between_measured_batches_the_time_is_linear():
    curve = ComputeCurve((8, 32), (2.0, 5.0))
    assert [curve.at(batch) for batch in (8, 20, 32, 64)] == [2.0, 3.5, 5.0, 10.0]
    assert curve.at(4) == pytest.approx(1.5)
    assert curve.deviation(8) == curve.deviation(32) == 0.0
    assert 0.0 < curve.deviation(20) < curve.deviation(2)


def test_below_a_single_measured_batch_a_part_of_the_time_stays():
    curve = ComputeCurve((32,), (1.0,))
    assert curve.at(16) == pytest.approx(FIXED + (1 - FIXED) / 2)
    assert curve.at(64) == 2.0


def test_a_larger_micro_batch_is_never_faster():
    for curve in (
        ComputeCurve((32,), (1.0,)),
        ComputeCurve((8, 16, 32), (1.0, 1.1, 1.9)),
        ComputeCurve((8, 9), (1, 4)),
    ):
        times = [curve.at(batch) for batch in range(1, 70)]
        assert times == sorted(times)


def test_a_layout_without_measurements_is_named():
    point = point_on("resnet", 1)
    with pytest.raises(
        ConfigError, match=r"^resnet has no measured step with layout\.pp=1, layout\.cp=2, layout\.tp=1"
    ):
        curve_for(point.run, (1, 2, 1), points_of("resnet"), HARDWARE)
