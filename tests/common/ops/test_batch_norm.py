"""Batch norm: the reference against the formula, the Triton one in a process of its own, groups, and the layer."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from batch_norm_oracle import KINDS, Formula, disagreement, inputs, run
from batch_norm_ranks import RANKS, SHAPE, run_rank
from torch import multiprocessing as mp
from torch import nn

from common.errors import UnsupportedImplementation
from common.nn.batch_norm import BatchNorm2d
from common.ops import batch_norm as ops
from common.ops.batch_norm.reference import (
    batch_norm_add_relu_reference,
    batch_norm_reference,
    batch_norm_relu_max_pool_reference,
)
from common.ops.operation import OperationRequest

NEEDS_TRITON = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed")
PLAIN = SimpleNamespace(
    batch_norm=batch_norm_reference,
    batch_norm_add_relu=batch_norm_add_relu_reference,
    batch_norm_relu_max_pool=batch_norm_relu_max_pool_reference,
)


@pytest.mark.parametrize("kind", KINDS)
def test_reference_equals_the_formula(kind: str) -> None:
    x, residual = inputs((3, 6, 5, 7), torch.float64)
    errors = disagreement(run(PLAIN, kind, x, residual), run(Formula, kind, x, residual))
    assert max(errors.values()) < 1e-12, errors


@pytest.mark.parametrize("implementation", ["reference", pytest.param("triton", marks=NEEDS_TRITON)])
def test_group_of_two_equals_the_concatenated_batch(implementation: str, tmp_path: Path) -> None:
    mp.start_processes(run_rank, args=(str(tmp_path), implementation), nprocs=RANKS, start_method="forkserver")
    parts = [torch.load(tmp_path / f"{rank}.pt") for rank in range(RANKS)]
    x, residual = inputs(SHAPE, torch.float64)
    for kind in KINDS:
        expected = run(Formula, kind, x, residual)
        found = {}
        for name in expected:
            values = [part[kind][name] for part in parts]
            if "running" in name:
                assert torch.equal(values[0], values[1]), (kind, name)
                found[name] = values[0]
            elif name.startswith("d_") and name != "d_residual":
                found[name] = values[0] + values[1]
            else:
                found[name] = torch.cat(values)
        errors = disagreement(found, expected)
        assert max(errors.values()) < 1e-5, (kind, errors)


def test_auto_takes_the_first_that_is_supported() -> None:
    request = OperationRequest(torch.device("cpu"), torch.float32, {"channels": 64})
    assert ops.BATCH_NORM.select("auto", request).name == "reference"


def test_naming_an_unsupported_implementation_gives_its_reason() -> None:
    request = OperationRequest(torch.device("cpu"), torch.float32, {"channels": 64})
    with pytest.raises(UnsupportedImplementation, match="needs a GPU"):
        ops.BATCH_NORM.select("triton", request)


def test_unknown_implementation_lists_the_known() -> None:
    request = OperationRequest(torch.device("cpu"), torch.float32, {"channels": 64})
    with pytest.raises(UnsupportedImplementation, match="auto, triton, reference"):
        ops.BATCH_NORM.select("cuda", request)


@pytest.mark.parametrize("training", [True, False])
def test_layer_equals_torch_with_its_loaded_state(training: bool) -> None:
    torch.manual_seed(0)
    theirs = nn.BatchNorm2d(6)
    nn.init.normal_(theirs.weight)
    nn.init.normal_(theirs.bias)
    theirs(torch.randn(4, 6, 5, 5))
    ours = BatchNorm2d(6, relu=True)
    ours.load_state_dict(theirs.state_dict())
    theirs.train(training)
    ours.train(training)
    x = torch.randn(4, 6, 5, 5)
    assert torch.allclose(ours(x), theirs(x).relu(), atol=1e-6)
    assert torch.allclose(ours.running_var, theirs.running_var)
    theirs.load_state_dict(ours.state_dict())


def test_layer_evaluates_residual_and_pool_with_running_statistics() -> None:
    torch.manual_seed(0)
    first, second, x, residual = BatchNorm2d(8), BatchNorm2d(8), torch.randn(2, 8, 6, 6), torch.randn(2, 8, 6, 6)
    for layer in (first, second):
        layer.running_mean.normal_()
        layer.running_var.uniform_(0.5, 2.0)
        layer.eval()

    def by_hand(layer: BatchNorm2d, value: torch.Tensor) -> torch.Tensor:
        mean, deviation = layer.running_mean.view(1, -1, 1, 1), (layer.running_var + 1e-5).sqrt().view(1, -1, 1, 1)
        return (value - mean) / deviation

    expected = (by_hand(first, x) + by_hand(second, residual)).relu()
    assert torch.allclose(first.add_relu(x, residual, second)[0], expected, atol=1e-5)
    pooled = nn.functional.max_pool2d(by_hand(first, x).relu(), 3, 2, 1)
    assert torch.allclose(first.relu_max_pool(x), pooled, atol=1e-5)
