"""What the benchmark of the layers runs and how it counts; its timing needs a GPU."""

from __future__ import annotations

import pytest
import torch
from small_gpt3 import architecture

from benchmarks.gpt3.layers_bench import Iteration, Way, facts, flops_of, in_words, parsed, ways
from common.distributed.layout import Layout
from common.errors import ConfigError


def iteration(ends: bool, linear: str = "torch", micro_batches: int = 2) -> Iteration:
    return Iteration(architecture(positions=16), Layout({"tp": 1}), torch.bfloat16, Way(linear), 2, micro_batches, ends)


@pytest.mark.parametrize("linear", ["torch", "fp8"])
def test_every_weight_of_the_layers_gets_the_gradient_of_all_micro_batches(linear: str) -> None:
    one, two = iteration(False, linear, 1), iteration(False, linear, 2)
    one()
    two()
    for (name, parameter), twice in zip(one.model.named_parameters(), two.model.parameters(), strict=True):
        assert name.startswith("layers.")
        assert parameter.grad is not None
        assert twice.grad is not None
        assert float(twice.grad.norm()) == pytest.approx(2 * float(parameter.grad.norm()), rel=0.1), name
    assert one.outcome is not None
    assert one.outcome.shape == (32, 32)
    assert bool(one.outcome.any())


def test_with_its_ends_the_network_has_a_loss() -> None:
    run = iteration(True)
    run()
    assert all(parameter.grad is not None and bool(parameter.grad.any()) for parameter in run.model.parameters())
    assert run.outcome is not None
    assert 4.0 < float(run.outcome) < 7.0


def test_operations_are_those_of_the_specification() -> None:
    """22.88 and 22.57 TFLOP a layer and row, and the line of a layer in the time of 1,000 TFLOP/s."""
    shape = facts(1)
    full, causal = (flops_of(shape, 2, 4, False, half) for half in (False, True))
    assert full == pytest.approx(2 * 22.88e12 / 4, rel=1e-3)
    assert causal == pytest.approx(2 * 22.57e12 / 4, rel=1e-3)
    head = flops_of(shape, 2, 4, True, True) - causal
    assert head == pytest.approx(2 * 3 * 2 * 2048 * 12_288 * 50_257 / 4)
    line = in_words(Way("fp8"), full / 1e12, shape, 2, 4, False)
    assert "1000.0 TFLOP/s with attention in full" in line
    assert "986.5 causal" in line


def test_ways_are_the_products_and_the_movements_that_are_asked_for() -> None:
    assert [way.linear for way in ways(parsed([]))] == ["fp8", "torch"]
    shared = list(ways(parsed(["--tp", "4", "--linear", "fp8", "--implementations", "attention=cudnn"])))
    assert [way.products for way in shared] == ["symmetric_memory", "collective"]
    assert [way.implementations for way in shared] == [{"attention": "cudnn"}] * 2


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        (["--layers", "0"], "--layers 0"),
        (["--micro-batches", "0"], "--micro-batches 0"),
        (["--linear", "fp4"], "--linear fp4"),
        (["--implementations", "softmax=reference"], "--implementations softmax=reference"),
    ],
)
def test_what_cannot_be_measured_is_said(words: list[str], complaint: str) -> None:
    with pytest.raises(ConfigError, match=complaint):
        parsed(words)
