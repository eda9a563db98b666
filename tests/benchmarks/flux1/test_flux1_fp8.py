"""FLUX.1 with FP8 products over tokens, on a CPU through the references of the operations."""

from __future__ import annotations

import functools
from collections import Counter

import pytest
import torch
from flux_ranks import batch_of, loaded
from torch import Tensor

from benchmarks.flux1.workload import FluxTraining
from common.distributed.layout import Layout
from common.ops.linear.fp8 import GRADIENT, INPUT, Fp8LinearProduct

SAMPLES = 4
SIZES = (
    "scale=test", f"micro_batch={SAMPLES}", f"hparams.global_batch_size={2 * SAMPLES}", "model.zero_std=0.1",
    "benchmark.facts.text_length=4", "benchmark.facts.hidden=32", "benchmark.facts.heads=2",
    "benchmark.facts.feed_forward=96", "benchmark.facts.rope_axes=[4,8,4]",
)  # fmt: skip
"""Every stream has a multiple of 16 rows."""


def built(precision: str, linear: str = "auto", *overrides: str) -> FluxTraining:
    """Return the workload; the initial weights do not depend on the arguments."""
    run, _ = loaded(*SIZES, f"precision={precision}", f"model.implementations.linear={linear}", *overrides)
    return FluxTraining(run, Layout(run.layout, seed=7))


def losses(workload: FluxTraining, first: int = 0) -> Tensor:
    return workload.sample_losses(batch_of(workload, range(first, first + SAMPLES)).tensors, torch.tensor(3))


def gradients(workload: FluxTraining) -> dict[str, Tensor]:
    """Return the gradients of the second of two passes; the first finds the scales of the weights."""
    for _ in range(2):
        workload.model.zero_grad()
        losses(workload).mean().backward()
    return {name: each.grad.double() for name, each in workload.model.named_parameters() if each.grad is not None}


def products(workload: FluxTraining) -> dict[str, Fp8LinearProduct]:
    named = workload.model.named_modules()
    return {name: module for name, module in named if isinstance(module, Fp8LinearProduct)}


def apart(found: dict[str, Tensor], expected: dict[str, Tensor]) -> dict[str, float]:
    """Return the relative error of each gradient."""
    assert found.keys() == expected.keys()
    return {name: ((found[name] - each).norm() / each.norm()).item() for name, each in expected.items()}


@pytest.fixture(scope="module", name="expected")
def gradients_in_fp64() -> dict[str, Tensor]:
    """Gradients of the same weights, which bf16 rounds, in fp64."""
    workload = built("fp64")
    with torch.no_grad():
        for parameter in workload.model.parameters():
            parameter.copy_(parameter.bfloat16())
    return gradients(workload)


@pytest.mark.parametrize("recomputed", [0, 2])
def test_gradients_are_close_to_those_in_fp64(expected, recomputed):
    in_bf16, in_fp8 = (
        apart(gradients(built("bf16", linear, f"model.recomputed_blocks={recomputed}")), expected)
        for linear in ("reference", "fp8")
    )
    assert max(in_bf16.values()) < 0.03
    # e5m2 gradients have 2 bits of mantissa, a relative error of up to 1/8 for each element
    assert max(in_fp8.values()) < 0.15
    assert sum(in_fp8.values()) > 1.5 * sum(in_bf16.values())


def test_every_product_over_tokens_is_in_fp8_and_finds_its_scales():
    workload = built("bf16", "fp8")
    gradients(workload)
    found = products(workload)
    kinds = Counter(name.split(".")[-2] for name in found)
    assert kinds == dict.fromkeys(("qkv", "proj", "up", "down"), 3)  # text, image and the single block
    # qkv and up of a single block read one tensor, and proj and down have one gradient
    shared = {"single_blocks.0.up.product": INPUT, "single_blocks.0.down.product": GRADIENT}
    for name, product in found.items():
        unused = [index for index, scale in enumerate(product.scales.tolist()) if scale == 0]
        assert unused == ([shared[name]] if name in shared else []), name


def test_a_step_casts_each_weight_once():
    workload = built("bf16", "fp8")
    step, casts = workload.build_step(), Counter[str]()
    weights = {
        name: workload.model.get_parameter(name.removesuffix("product") + "weight") for name in products(workload)
    }

    def counted(name, cast, tensor, *arguments):
        casts[name] += tensor.data_ptr() == weights[name].data_ptr()
        return cast(tensor, *arguments)

    for name, product in products(workload).items():
        product._cast = functools.partial(counted, name, product._cast)
    for iteration in range(2):
        step([batch_of(workload, range(first, first + SAMPLES), SAMPLES) for first in (0, SAMPLES)])
        assert casts == dict.fromkeys(products(workload), iteration + 1)


def test_evaluations_are_in_bf16_and_change_no_scale():
    workload, in_bf16 = built("bf16", "fp8"), built("bf16")
    gradients(workload)
    before = {name: product.scales.clone() for name, product in products(workload).items()}
    with torch.no_grad():
        torch.testing.assert_close(losses(workload), losses(in_bf16), rtol=0, atol=0)
    for name, product in products(workload).items():
        assert torch.equal(product.scales, before[name]), name


def test_the_log_states_the_precision_of_the_products():
    assert built("bf16", "fp8").cfg.declaration.lowest_precision == {"linear": "fp8"}
    assert built("bf16").cfg.declaration.lowest_precision == {}
