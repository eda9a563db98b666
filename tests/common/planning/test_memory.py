"""Memory of layouts: the decoders' own plans, measured bytes, and their limits."""

import dataclasses

import pytest

from common.cli import load
from common.config.composition import compose
from common.doctor.limits import hardware_of
from common.errors import ConfigError
from common.language.memory import FrozenWorkspace
from common.planning.estimates import RunLayout
from common.planning.memory import memory_of, micro_batches
from common.planning.points import RESULTS, read_measurements

HARDWARE = hardware_of("h200")


def run_of(benchmark, scale, *overrides):
    return load(compose([f"benchmark={benchmark}", f"scale={scale}", *overrides]))[0]


def test_the_planned_bytes_of_llama_cover_the_measured_ones():
    """`docs/results` has the bytes that PyTorch reserved; the plan also counts what others reserve."""
    for point in read_measurements(sorted(RESULTS.rglob("*.json")), "llama31_8b", HARDWARE.gpu, load).points:
        layout = RunLayout(point.gpus, point.run.global_batch, 1, point.accumulation)
        needed = memory_of(point.run, layout, (), HARDWARE)
        assert 0.9 * point.memory < needed < HARDWARE.memory_gb * 1e9


def test_a_decoder_that_does_not_fit_is_refused():
    run = run_of("llama31_8b", "1xH200")
    with pytest.raises(ConfigError, match=r"^this layout needs .* GB are missing"):
        memory_of(run, RunLayout(1, 64, 64, 1), (), HARDWARE)


def test_context_parallelism_divides_the_tokens():
    run = run_of("llama2_70b_lora", "8xH200")
    whole, halved = (memory_of(run, RunLayout(8, 8, 1, 1, cp=cp), (), HARDWARE) for cp in (1, 2))
    assert halved < whole


def test_the_plan_of_frozen_weights_is_the_one_of_the_workload():
    """The sizes below are those of one row of 8,192 tokens on 8 GPUs with cp=2, by hand from the configuration."""
    run = run_of("llama2_70b_lora", "8xH200")
    facts, model = run.workload.facts, run.workload.model
    sizes = FrozenWorkspace(
        architecture=facts, tokens=4096, ranks=1, sharers=2, eval_tokens=run.workload.reader.eval_rows * 4096,
        itemsize=2, fp8=model.linear == "fp8", head_chunk=model.head_chunk, alone=False, rank=facts.lora_rank,
    )  # fmt: skip
    needed = memory_of(run, RunLayout(8, 8, 1, 1, cp=2), (), HARDWARE)
    least, most = (sum(sizes.parts(0, layers).values()) for layers in (0, facts.layers))
    assert least <= needed <= most


def test_stages_of_a_pipeline_have_their_part_of_the_layers():
    run = run_of("gpt3", "512xH100")
    layout = RunLayout(512, 2048, 1, 128, pp=8, tp=4)
    assert memory_of(run, layout, (), HARDWARE) < memory_of(run, dataclasses.replace(layout, tp=2), (), HARDWARE)
    with pytest.raises(ConfigError, match=r"^layout\.pp=2, layout\.tp=1: a stage needs .* use more stages"):
        memory_of(run, RunLayout(8, 2048, 1, 512, pp=2), (), HARDWARE)


def test_measured_bytes_grow_with_the_micro_batch():
    points = read_measurements(sorted(RESULTS.rglob("*.json")), "resnet", HARDWARE.gpu, load).points
    run, measured = points[0].run, min(point.memory for point in points if point.run.micro_batch == 400)
    assert memory_of(run, RunLayout(1, 400, 400, 1), points, HARDWARE) == measured
    assert memory_of(run, RunLayout(1, 800, 800, 1), points, HARDWARE) == 2 * measured
    with pytest.raises(ConfigError, match=r"^micro_batch=8000 needs about .* GB, and a GPU has 150 GB"):
        memory_of(run, RunLayout(1, 8000, 8000, 1), points, HARDWARE)
    assert memory_of(run, RunLayout(1, 400, 400, 1), (), HARDWARE) is None


def test_micro_batches_divide_the_batch_of_a_replica():
    assert micro_batches(768, 8, 2, 512) == [96, 48, 32, 24, 16, 12, 8, 6, 4, 2]
    assert micro_batches(768, 8, 1, 6) == [6, 4, 3, 2, 1]
    assert micro_batches(768, 5, 2, 512) == []
