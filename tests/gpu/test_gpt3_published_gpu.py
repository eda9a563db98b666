"""The published checkpoint on a GPU: through pinned memory, read by threads, as on a CPU."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from benchmarks.gpt3.published import load_published
from common.distributed.layout import Layout
from common.distributed.tensor_parallel.ranks import TensorParallel
from common.optim.buffers import split_masters
from tests.benchmarks.gpt3.small_published import SHAPE, STEPS, Trainee, whole_tensors, write_published

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


@pytest.mark.parametrize("masters", ["fp32", "remainder"])
def test_weights_masters_and_moments_are_those_of_the_checkpoint(tmp_path: Path, masters: str) -> None:
    tensors = whole_tensors()
    write_published(tmp_path / "checkpoint", {**tensors, "weights": tensors["masters"]}, SHAPE.layers, STEPS)
    layout = Layout(device="cuda:0")
    one = Trainee(layout, TensorParallel(), masters=masters)
    splits = one.model.tensor_splits()
    load_published(tmp_path / "checkpoint", one.model, one.optimizer, layout, SHAPE, STEPS, splits)
    state, parameters = one.optimizer.state_dict(), dict(one.model.named_parameters())
    assert state["step"] == STEPS
    for name, kind, values in one.expected(tensors):
        assert torch.equal(state[kind][name], values), (name, kind)
        if kind == "masters":
            rounded = split_masters(values)[0] if masters == "remainder" else values.bfloat16()
            assert torch.equal(parameters[name].cpu(), rounded), name
