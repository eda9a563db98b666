"""Test 3D U-Net's evaluation on a GPU: its CUDA graph, and no waiting for the device."""

from __future__ import annotations

import warnings

import pytest
import torch

from benchmarks.unet3d.evaluate import EvaluationSettings, MeanDice
from benchmarks.unet3d.model import UNet3D, UNet3DArchitecture
from benchmarks.unet3d.sliding_window import SlidingWindow, average_logits, count_classes
from benchmarks.unet3d.volumes import VolumeEntry
from common.contract.evaluation import Weights
from common.distributed.layout import Layout
from tests.benchmarks.unet3d import evaluation_oracle as oracle

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

SMALL = SlidingWindow((64, 64, 64), 0.5, -2.2)
CASES = [
    VolumeEntry(f"case_{number:05d}", shape, "eval")
    for number, shape in enumerate([(64, 70, 75), (90, 100, 81), (129, 64, 96), (64, 64, 64)])
]


def network(dtype: torch.dtype, factor: float = 1.0) -> UNet3D:
    drawn = torch.Generator().manual_seed(0)
    architecture = UNet3DArchitecture(classes=3, filters=(8, 16, 16, 16, 16), norm_epsilon=1e-5)
    model = UNet3D(architecture, generator=drawn, device="cuda", dtype=dtype)
    with torch.no_grad():
        model.output.weight.mul_(factor)
    return model


def evaluation_of(model: UNet3D, dtype: torch.dtype, capture: bool, batch: int = 3) -> MeanDice:
    settings = EvaluationSettings(SMALL, batch, None, 1e-6)
    evaluation = MeanDice(model, settings, Layout(device="cuda"), dtype, capture)
    evaluation.warm_up()
    evaluation.cache(CASES, lambda case: oracle.volume(case.shape, seed=int(case.name[-5:])))
    return evaluation


def counts_of(evaluation: MeanDice, model: UNet3D) -> dict[str, list[list[int]]]:
    values = evaluation.predict(Weights(dict(model.named_parameters()))).values
    return {name: case["counts"] for name, case in values["cases"].items()}


def on_a_stream() -> torch.cuda.StreamContext:
    """The trainer's evaluations, their warm-up too, run on another stream than the default one."""
    return torch.cuda.stream(torch.cuda.Stream())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_captured_windows_count_what_eager_ones_count(dtype: torch.dtype) -> None:
    model = network(dtype)
    with on_a_stream():
        eager, captured = (evaluation_of(model, dtype, capture) for capture in (False, True))
        expected = counts_of(eager, model)
        assert counts_of(captured, model) == expected
        assert counts_of(captured, model) == expected


@pytest.mark.parametrize("batch", [1, 2, 7])
def test_counts_are_those_of_the_plain_average(batch: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another batch may take another algorithm, which rounds otherwise: classes of voxels close to a tie may differ."""
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)
    model = network(torch.float32)
    with on_a_stream():
        found = counts_of(evaluation_of(model, torch.float32, True, batch), model)
    for case in CASES:
        image, label = oracle.volume(case.shape, seed=int(case.name[-5:]))
        with torch.no_grad():
            logits = average_logits(torch.from_numpy(image).cuda(), model, SMALL)
        kept = torch.from_numpy(label)[SMALL.geometry(case.shape).kept].cuda()
        expected = torch.zeros(3, 3, dtype=torch.int64, device="cuda")
        count_classes(logits, kept, expected)
        difference = (torch.tensor(found[case.name]) - expected.cpu()).abs().max().item()
        assert difference <= 1e-3 * kept.numel(), case.name


def test_updates_in_place_reach_the_graph() -> None:
    model = network(torch.float32)
    with on_a_stream():
        evaluation = evaluation_of(model, torch.float32, True)
        before = counts_of(evaluation, model)
        with torch.no_grad():
            model.output.bias.copy_(torch.tensor([0.0, 100.0, 0.0]))
        after = counts_of(evaluation, model)
    assert before != after
    for counts in after.values():
        assert [row[1] for row in counts] == [0, sum(row[2] for row in counts), 0]


def test_other_weights_reach_the_graph_and_leave_those_in_training_as_they_were() -> None:
    in_training, other = network(torch.bfloat16), network(torch.bfloat16, factor=-1.0)
    with on_a_stream():
        expected = counts_of(evaluation_of(other, torch.bfloat16, True), other)
        evaluation = evaluation_of(in_training, torch.bfloat16, True)
        before = {name: tensor.clone() for name, tensor in in_training.state_dict().items()}
        own = counts_of(evaluation, in_training)
        assert counts_of(evaluation, other) == expected != own
        assert all(torch.equal(tensor, before[name]) for name, tensor in in_training.state_dict().items())
        assert counts_of(evaluation, in_training) == own


def test_only_the_counts_are_waited_for() -> None:
    model = network(torch.bfloat16)
    with on_a_stream():
        evaluation = evaluation_of(model, torch.bfloat16, True)
        counts_of(evaluation, model)
        torch.cuda.synchronize()
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            torch.cuda.set_sync_debug_mode("warn")
            try:
                counts_of(evaluation, model)
            finally:
                torch.cuda.set_sync_debug_mode("default")
    waits = [warning for warning in caught if "synchronizing CUDA operation" in str(warning.message)]
    assert len(waits) == 1
