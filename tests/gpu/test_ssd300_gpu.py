"""Test SSD300 on a GPU: network, targets, loss and detections against float64 and the CPU, and in a graph."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest
import torch
from torch import Tensor

from benchmarks.ssd300.config import Facts
from benchmarks.ssd300.detect import Detector
from benchmarks.ssd300.model import SSD300, Predictions, multibox_loss
from benchmarks.ssd300.targets import Targets, reference_rows
from common import cli
from common.data.batches import Block
from common.distributed.layout import Layout
from common.mlperf.fixed import fixed_facts
from common.nn.fused_convolution import FusedConv2d
from common.vision.dali import DALI
from tests.gpu.support import captured

pytestmark = pytest.mark.gpu

FACTS = fixed_facts(Facts, "ssd300")
SMALL = fixed_facts(
    Facts,
    "ssd300",
    classes=7,
    image_size=96,
    width=32,
    layers=[1, 2, 1],
    extras=[[32, 64, 2], [32, 64, 2], [32, 64, 1]],
    steps=[8, 16, 32, 96],
    box_sizes=[12, 24, 42, 60, 90],
    aspect_ratios=[[2], [2, 3], [2], [2]],
)
GPU = torch.device("cuda")
PICTURES, CAPACITY = 6, 20


def build(dtype: torch.dtype, implementation: str = "reference") -> SSD300:
    """Return a network with random norms, and the same weights in every dtype."""
    generator = torch.Generator().manual_seed(0)
    network = SSD300(SMALL, generator)
    with torch.no_grad():
        for name, parameter in network.named_parameters():
            if ".bn" in name or ".downsample.1" in name:
                parameter.add_(torch.randn(parameter.shape, generator=generator), alpha=0.1)
            parameter.copy_(parameter.half())
    network.cast(dtype).to(GPU)
    network.choose_implementations({"batch_norm": implementation, "convolution": implementation})
    return network


def images(dtype: torch.dtype, pictures: int = PICTURES) -> Tensor:
    image_NCHW = torch.randn((pictures, 4, 96, 96), generator=torch.Generator().manual_seed(1)).half()
    image_NCHW[:, 3] = 0
    return image_NCHW.to(GPU, dtype, memory_format=torch.channels_last)


def boxes(facts: Facts, seed: int = 2) -> tuple[Tensor, Tensor, Tensor]:
    """Return boxes of six pictures on the CPU; the second picture has none."""
    generator = torch.Generator().manual_seed(seed)
    corners = torch.rand((PICTURES, CAPACITY, 2, 2), generator=generator).sort(2).values.flatten(2)
    labels = torch.randint(1, facts.classes + 1, (PICTURES, CAPACITY), generator=generator)
    return corners, labels, torch.tensor([3, 0, CAPACITY, 1, 7, 12])


def targets(facts: Facts, seed: int = 2) -> tuple[Tensor, Tensor]:
    """Return classes and offsets of every default box, on the GPU."""
    found = Targets(facts, {"anchor_matching": "reference"}, torch.device("cpu"))(*boxes(facts, seed))
    return found[0].cuda(), found[1].cuda()


def losses_and_gradients(network: SSD300) -> dict[str, Tensor]:
    """Return the loss and the gradient of every parameter by name, in float64."""
    predicted, (classes, wanted) = network(images(network.backbone.conv1.weight.dtype)), targets(SMALL)
    total = multibox_loss(predicted.logits, predicted.offsets, classes, wanted, SMALL.negatives).total
    (128 * total).backward()
    found = {"loss": total.detach().double()}
    for name, parameter in network.named_parameters():
        assert parameter.grad is not None, name
        found[name] = parameter.grad.double() / 128
    return found


def relative_error(found: dict[str, Tensor], expected: dict[str, Tensor]) -> float:
    """Return the relative error of all values as one vector."""
    apart = torch.stack([(found[name] - exact).norm() for name, exact in expected.items()]).norm()
    return float(apart / torch.stack([exact.norm() for exact in expected.values()]).norm())


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_loss_and_gradients_follow_float64(dtype: torch.dtype) -> None:
    expected = losses_and_gradients(build(torch.float64))
    usual, found = (losses_and_gradients(build(dtype, name)) for name in ("reference", "auto"))
    error, reference = (relative_error(one, expected) for one in (found, usual))
    assert error < max(2e-2, 2 * reference), f"all gradients: {error:.1e}, reference {reference:.1e}"
    for name, exact in expected.items():
        error = float((found[name] - exact).norm() / exact.norm())
        # Rounding changes the sign of inputs of ReLU, of other inputs in every implementation. The last convolutions
        # have few outputs, so that one such sign changes their gradients by 15 %. A wrong gradient differs by more.
        assert error < 0.3, f"{name}: {error:.1e}"


def test_results_keep_channels_last() -> None:
    network, seen = build(torch.float16, "auto"), {}
    for name, layer in network.named_modules():
        if isinstance(layer, FusedConv2d):
            layer.register_forward_hook(lambda module, args, y_NCHW, name=name: seen.update({name: y_NCHW}))
    assert network(images(torch.float16)).logits.is_contiguous()
    assert len(seen) == 2 * 3 + 4
    for name, y_NCHW in seen.items():
        assert y_NCHW.is_contiguous(memory_format=torch.channels_last), name
        if name.startswith("heads"):
            assert y_NCHW.shape[1] % 8 == 0, "tensor cores want channels padded"


@pytest.mark.parametrize("facts", [SMALL, FACTS], ids=["small", "benchmark"])
def test_targets_are_those_of_the_cpu(facts: Facts) -> None:
    given = boxes(facts)
    expected = Targets(facts, {"anchor_matching": "reference"}, torch.device("cpu"))(*given)
    found = Targets(facts, {}, GPU)(*(tensor.cuda() for tensor in given))
    assert torch.equal(found[0].cpu(), expected[0])
    torch.testing.assert_close(found[1].cpu(), expected[1], rtol=1e-5, atol=1e-5)


def test_detections_in_a_graph_are_those_of_the_cpu() -> None:
    generator = torch.Generator().manual_seed(4)
    count = len(reference_rows(SMALL))
    given = [
        Predictions(
            torch.randn((PICTURES, count, 8), generator=generator) * 3,
            torch.randn((PICTURES, count, 4), generator=generator),
        )
        for _ in range(2)
    ]
    size = torch.tensor([[480.0, 640.0], [300.0, 200.0]] * 3)
    network = SSD300(SMALL, torch.Generator().manual_seed(0))
    reference = Detector(network, SMALL, {"suppression": "reference"}, torch.device("cpu"))
    fast = Detector(network, SMALL, {}, GPU)
    inputs, sizes = Predictions(*(tensor.cuda() for tensor in given[0])), size.cuda()
    graph, recorded = captured(lambda: fast.select(inputs, sizes))
    for predicted in reversed(given):
        for tensor, value in zip(inputs, predicted, strict=True):
            tensor.copy_(value)
        graph.replay()
        expected = reference.select(predicted, size)
        assert expected.valid.any()
        assert torch.equal(recorded.valid.cpu(), expected.valid)
        assert torch.equal(recorded.class_id.cpu()[expected.valid], expected.class_id[expected.valid])
        torch.testing.assert_close(recorded.score.cpu(), expected.score, rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(
            recorded.box.cpu()[expected.valid], expected.box[expected.valid], rtol=1e-4, atol=1e-2
        )


@pytest.mark.skipif(DALI.unavailable() is not None, reason="needs DALI")
def test_dali_on_the_gpu_reads_what_the_other_reader_reads(tmp_path: Path) -> None:
    from benchmarks.ssd300.data import Ssd300Data
    from benchmarks.ssd300.prepare import prepare
    from benchmarks.ssd300.synthetic import SyntheticBoxes, generate
    from common.detection.config import BoxReaderConfig

    generate(tmp_path / "raw", SyntheticBoxes(24, 6, 7, (96, 160), 3, 8, 96, layers=(1, 1, 1)))
    prepare(tmp_path / "raw", tmp_path / "data")
    plain = dataclasses.replace(SMALL, brightness=0.0, contrast=0.0, saturation=0.0, hue=0.0)
    block = Block(0, 1, 1, 0, 24)
    found = {}
    for kind, device in (("torchvision", torch.device("cpu")), ("dali", torch.device("cuda", 0))):
        reader = BoxReaderConfig(
            threads=2,
            prefetch=2,
            max_boxes=16,
            hw_decoder_load=0.5,
            input_batch_multiplier=2,
            eval_batch=4,
            reader=kind,
        )
        data, layout = Ssd300Data(plain, reader, torch.float16, 1), Layout(device=device, seed=5)
        data.warm_up(layout, 4)
        train, evaluation = data.open_train(tmp_path / "data", layout, 4), data.open_eval(tmp_path / "data", layout, 4)
        batches = [batch.tensors for batch in (*train.batches(block), *evaluation)]
        found[kind] = [{name: tensor.cpu() for name, tensor in batch.items()} for batch in batches]
        if kind == "dali":
            assert batches[0]["image"].is_cuda
            assert batches[0]["image"].is_contiguous(memory_format=torch.channels_last)
        train.close()
        evaluation.close()
    assert len(found["dali"]) == 6 + 2
    for mine, other in zip(found["dali"], found["torchvision"], strict=True):
        for name in other.keys() - {"image"}:
            assert torch.equal(mine[name], other[name]), name
        real = other["picture"] >= 0 if "picture" in other else slice(None)
        assert ((mine["image"].float() - other["image"].float())[real].abs() * 58).mean() < 2.5, "levels of 255"


def test_bench_reports_the_evaluation_by_kind_of_kernel(tmp_path: Path) -> None:
    report = tmp_path / "report.json"
    words = ["bench", "benchmark=ssd300", "scale=test", "device=cuda", "bench.only=evaluation"]
    assert cli.run([*words, f"data_dir={tmp_path / 'none'}", f"bench.report={report}"]) == 0
    found = json.loads(report.read_text())["evaluation"]
    assert found["synthetic"]
    assert found["profiled"] > 0
    assert found["breakdown"]
    assert found["reserved_bytes"] >= found["allocated_bytes"] > 0
