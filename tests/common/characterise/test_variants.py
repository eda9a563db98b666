"""Which measurements a workload gets."""

from __future__ import annotations

import pytest

from common import cli
from common.characterise.variants import VARIANTS, plan_of
from common.config.composition import compose, scales_of


def plan(benchmark, scale="8xH200", variants=VARIANTS, gpus=(1, 2), places=2, cpu=False):
    tree = compose([f"benchmark={benchmark}", f"scale={scale}"])
    return plan_of(benchmark, scales_of(benchmark), scale, tree, variants, gpus, places, cpu)


def names(found):
    return [(job.variant, job.gpus) for job in found.jobs]


def test_a_recipe_in_16_bits_is_compared_with_fp32_tf32_and_pytorch():
    found = plan("resnet")
    assert found.precision == "fp16"
    assert names(found) == [
        ("", 1),
        ("", 2),
        ("eager", 1),
        ("tf32", 1),
        ("host-links", 2),
        ("reference", 1),
        ("fp32", 1),
        ("compiled", 1),
    ]
    by_name = {job.variant: job for job in found.jobs[2:]}
    assert found.jobs[0].copies == 2  # one on each GPU, since two GPUs are compared with them
    assert {job.copies for job in by_name.values()} == {1}
    assert by_name["fp32"].environment == {"NVIDIA_TF32_OVERRIDE": "0"}
    assert by_name["tf32"].settings == by_name["fp32"].settings
    assert by_name["host-links"].environment["NCCL_P2P_DISABLE"] == "1"
    assert "cuda_graphs=false" in by_name["eager"].words()
    assert by_name["reference"].settings == ("model.implementations.batch_norm=reference",)
    assert by_name["compiled"].settings == (*by_name["reference"].settings, "bench.compiled=true")
    assert found.absent == {"counters": "ncu is not installed"}


@pytest.mark.parametrize(
    ("benchmark", "wide"),
    [("bert", "model.implementations.linear=reference"), ("llama2_70b_lora", "model.linear=torch")],
)
def test_a_recipe_in_fp8_is_compared_with_16_bits(benchmark, wide):
    found = plan(benchmark, gpus=(1,), places=1)
    assert found.precision == "fp8"
    by_name = {job.variant: job for job in found.jobs}
    assert "fp8" not in by_name
    assert by_name["bf16"].settings == ("precision=bf16", wide)
    assert wide in by_name["fp32"].settings


def test_a_recipe_in_16_bits_that_can_use_fp8_is_compared_with_it():
    by_name = {job.variant: job for job in plan("flux1").jobs}
    assert by_name["fp8"].settings == ("precision=bf16", "model.implementations.linear=fp8")


def test_what_a_cpu_cannot_measure_is_named():
    found = plan("resnet", "demo", gpus=(1,), places=1, cpu=True)
    assert names(found) == [("", 1), ("bf16", 1)]
    assert found.precision == "fp32"
    assert set(found.absent) == {"graphs", "implementations", "gpus", "counters"}


def test_only_requested_variants_are_measured():
    found = plan("resnet", variants=("graphs",))
    assert names(found) == [("", 1), ("eager", 1)]
    assert set(found.absent) == {"precision", "implementations", "gpus", "counters"}


def test_counters_are_read_under_ncu_without_graphs():
    tree = compose(["benchmark=resnet", "scale=1xH200"])
    found = plan_of("resnet", scales_of("resnet"), "1xH200", tree, (), (1,), 1, False, ("ncu", "--log-file", "x"))
    assert found.jobs[-1].prefix == ("ncu", "--log-file", "x")
    assert compose(found.jobs[-1].words())["bench"]["only"] == "counters"


@pytest.mark.parametrize("benchmark", ["gpt3", "resnet"])
def test_every_variant_has_a_valid_configuration(benchmark):
    scale = "8xH200" if "8xH200" in scales_of(benchmark) else "1xH200"
    for job in plan(benchmark, scale, gpus=(1,), places=1).jobs:
        cli.load(compose(job.words()))
