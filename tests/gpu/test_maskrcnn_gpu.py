"""Test Mask R-CNN on a GPU: network, training step and evaluation, eager and captured."""

from __future__ import annotations

import os
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from benchmarks.maskrcnn.config import Facts
from benchmarks.maskrcnn.model import MaskRCNN
from common.mlperf.fixed import fixed_facts
from common.nn.batch_norm import FrozenBatchNorm2d

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # cuBLAS reads it once


from pathlib import Path

import numpy as np

from benchmarks.maskrcnn import iteration
from benchmarks.maskrcnn.workload import MaskRCNNSegmentation
from common import cli
from common.config import loading
from common.config.composition import compose
from common.contract.evaluation import Predictions
from common.data.batches import Batch
from common.detection.evaluation import DetectionEvaluation
from common.distributed.layout import Layout
from common.distributed.startup import set_determinism
from common.step.branches import Branch
from common.step.graphs import StepRunner
from tests.gpu.support import waiting_is_an_error

pytestmark = pytest.mark.gpu

# The network


FACTS = replace(
    fixed_facts(Facts, "maskrcnn"), classes=10, layers=(1, 2, 1, 1), pyramid_channels=64, box_channels=128,
    mask_convolutions=2,
)  # fmt: skip
DTYPES = (torch.float16, torch.bfloat16)


def build(dtype: torch.dtype, implementation: str = "reference") -> MaskRCNN:
    """Return a network with random norms and heads, and the same weights in every dtype."""
    generator = torch.Generator().manual_seed(0)
    network = MaskRCNN(FACTS, generator)
    with torch.no_grad():
        for module in network.modules():
            if isinstance(module, FrozenBatchNorm2d):
                for buffer, low, high in zip(
                    module.buffers(), (0.5, -0.3, -0.3, 0.8), (1.0, 0.3, 0.3, 1.5), strict=True
                ):
                    buffer.uniform_(low, high, generator=generator)
        for name, parameter in network.named_parameters():
            if not name.startswith("backbone."):
                parameter.normal_(0.0, 0.05, generator=generator)
            parameter.copy_(parameter.half())
    network.cast(dtype).to("cuda")
    network.choose_implementations({"convolution": implementation, "selected_logits": "reference"})
    return network


def inputs(dtype: torch.dtype, regions: int = 24) -> list[Tensor]:
    """Return pictures, and features of regions for both heads."""
    generator = torch.Generator().manual_seed(1)
    shapes = [(2, 3, 128, 192), (regions, 64, 7, 7), (regions, 64, 14, 14)]
    values = [torch.randn(shape, generator=generator).half() for shape in shapes]
    return [value.to("cuda", dtype, memory_format=torch.channels_last) for value in values]


def classes_of(masks: Tensor) -> Tensor:
    """Return the class of each region; -1 for no object."""
    number = torch.arange(len(masks), device=masks.device)
    return torch.where(number % 4 == 3, -1, number % 3)


def results(network: MaskRCNN, image: Tensor, boxes: Tensor, masks: Tensor) -> dict[str, Tensor]:
    """Return the results by name, in the dtype of the weights."""
    found = {}
    for number, output in enumerate(network.propose(network.pyramid(image)), 2):
        found |= {f"logits {number}": output.logits_NAHW, f"deltas {number}": output.deltas_NAHW}
    classes, deltas = network.box_head(boxes)
    return found | {"classes": classes, "boxes": deltas, "masks": network.mask_head(masks, classes_of(masks))}


def weighted_sum(found: dict[str, Tensor], weights: dict[str, Tensor]) -> Tensor:
    total = torch.zeros((), device="cuda")
    for name, value in found.items():
        total = total + (value.to(torch.promote_types(value.dtype, torch.float32)) * weights[name]).sum()
    return total


def weights_like(found: dict[str, Tensor]) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(2)
    return {name: torch.randn(value.shape, generator=generator).cuda() / 64 for name, value in found.items()}


def results_and_gradients(network: MaskRCNN, dtype: torch.dtype) -> dict[str, Tensor]:
    """Return results and gradients by name, in float64."""
    found = results(network, *inputs(dtype))
    weighted_sum(found, weights_like(found)).backward()
    gradients = {f"gradient of {n}": p.grad for n, p in network.named_parameters() if p.grad is not None}
    return {name: value.detach().double() for name, value in {**found, **gradients}.items()}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_results_and_gradients_follow_float64(dtype: torch.dtype) -> None:
    expected = results_and_gradients(build(torch.float64), torch.float64)
    usual = results_and_gradients(build(dtype), dtype)
    found = results_and_gradients(build(dtype, "cudnn"), dtype)
    assert found.keys() == expected.keys()
    for name, value in found.items():
        exact = expected[name]
        error, reference = ((v - exact).norm() / exact.norm() for v in (value, usual[name]))
        # rounding turns ReLUs over, in every implementation others
        assert error < max(1e-2, 2.5 * reference), f"{name}: {error:.1e}, not {reference:.1e}"


@pytest.mark.parametrize("implementation", ["reference", "auto"])
def test_what_goes_between_parts_keeps_channels_last(implementation: str) -> None:
    network = build(torch.bfloat16, implementation)
    image = inputs(torch.bfloat16)[0]
    levels = network.pyramid(image)
    outputs = [value for output in network.propose(levels) for value in output]
    for value in (*levels, *outputs):
        assert value.is_contiguous(memory_format=torch.channels_last)


# The training step


PRECISIONS = ["fp32", "bf16", "fp16"]


@pytest.fixture
def deterministic():
    """Let PyTorch compute every sum in a fixed order."""
    set_determinism(True)
    yield
    set_determinism(False)


def built_for_training(precision: str, *overrides: str) -> MaskRCNNSegmentation:
    run, _ = cli.load(compose(["benchmark=maskrcnn", "scale=test", f"precision={precision}", *overrides]))
    return MaskRCNNSegmentation(run, Layout(run.layout, device=torch.device("cuda", 0), seed=7))


def weights(workload: MaskRCNNSegmentation) -> dict[str, Tensor]:
    torch.cuda.synchronize()
    return {name: tensor.detach().clone() for name, tensor in workload.named_state()}


def batches(workload: MaskRCNNSegmentation, shapes: str, seed: int) -> list[Batch]:
    """Return micro-batches with random pictures; each digit of ``shapes`` is the number of an example."""
    examples = list(workload.example_batches())
    generator = torch.Generator(device="cuda").manual_seed(seed)
    found = []
    for shape in shapes:
        example = examples[int(shape)]
        image = torch.randn(example.tensors["image"].shape, device="cuda", generator=generator)
        image = image.to(workload.dtype, memory_format=torch.channels_last)
        own = {"image": image, "seed": torch.full_like(example.tensors["seed"], seed)}
        found.append(Batch({**example.tensors, **own}, example.samples, example.key))
    return found


@pytest.mark.usefixtures("deterministic")
@pytest.mark.parametrize("precision", PRECISIONS)
def test_streams_of_branches_change_no_gradient(precision, monkeypatch):
    found = []
    for branch in (Branch, lambda device: Branch(torch.device("cpu"))):  # the latter has no stream of its own
        monkeypatch.setattr(iteration, "Branch", branch)
        workload = built_for_training(precision)
        (batch,) = batches(workload, "1", seed=3)
        losses = workload.loss(batch)
        losses.total.backward()
        torch.cuda.synchronize()
        gradients = {n: p.grad.double() for n, p in workload.model.named_parameters() if p.grad is not None}
        found.append((losses.metrics, gradients))
    (metrics, gradients), (expected_metrics, expected) = found
    for name, value in expected_metrics.items():
        torch.testing.assert_close(metrics[name], value, rtol=1e-5, atol=1e-6)
    tolerance = 1e-5 if precision == "fp32" else 2e-2  # levels add up in another order
    for name, gradient in expected.items():
        assert (gradients[name] - gradient).norm() <= tolerance * gradient.norm() + 1e-12, name


@pytest.mark.parametrize("precision", PRECISIONS)
def test_an_eager_iteration_waits_for_nothing(precision):
    workload = built_for_training(precision)
    step = workload.build_step()
    given = batches(workload, "0101", seed=1)
    step(given)  # compiles kernels
    torch.cuda.synchronize()
    with waiting_is_an_error():
        step(given)


@pytest.mark.usefixtures("deterministic")
@pytest.mark.parametrize("precision", PRECISIONS)
def test_a_graph_of_every_combination_of_shapes_changes_the_weights_as_the_eager_iteration(precision):
    runners = []
    for capture in (False, True):
        workload = built_for_training(precision)
        runner = StepRunner(workload.build_step(), workload.model, workload.cfg.grad_accumulation_steps, capture)
        runner.warm_up(workload.example_batches())
        runners.append((workload, runner))
    for seed, shapes in enumerate(("0101", "1000", "1111", "0011")):
        changed = []
        for workload, runner in runners:
            with runner.on_stream():
                runner(batches(workload, shapes, seed))
            changed.append(weights(workload))
        for name, expected in changed[0].items():
            assert (changed[1][name] - expected).double().norm() <= 1e-4 * expected.double().norm() + 1e-6, name
    (_, eager), (_, captured) = runners
    assert captured.uncaptured == eager.uncaptured == {}
    assert len(captured._captured) == 5


# The evaluation


PICTURES = 7


def built(*overrides: str) -> tuple[MaskRCNNSegmentation, DetectionEvaluation]:
    """Return a network with random heads, and its evaluation of random pictures of every shape."""
    # Random heads give every class about the same score, 1 / 81, which is less than the threshold of the rules.
    size = [f"benchmark.eval_samples={PICTURES}", "benchmark.facts.score_threshold=0.005"]
    run, _ = loading.load(
        compose(["benchmark=maskrcnn", "scale=1xH200", "reader.eval_batch=2", "assets_dir=null", *size, *overrides]),
        lambda _: MaskRCNNSegmentation,
    )
    workload = MaskRCNNSegmentation(run, Layout(run.layout, device=torch.device("cuda"), seed=1))
    return workload, workload.synthetic_evaluation(workload.layout)


def found(*overrides: str) -> Predictions:
    """Return predictions at full size. Computing them must not wait for the device."""
    workload, evaluation = built(*overrides)
    with torch.cuda.stream(torch.cuda.Stream()):
        evaluation.warm_up()
        evaluation.open_data(Path())
        evaluation.find(workload.weights())
        with waiting_is_an_error():
            evaluation.find(workload.weights())
        predictions = evaluation.gathered()
    evaluation.close()
    assert predictions is not None
    return predictions


def test_captured_passes_wait_for_nothing_and_find_what_eager_ones_find() -> None:
    captured, eager = found().values, found("cuda_graphs=false").values
    assert len(captured["score"]) > 0
    for name in ("pictures", "picture_id", "class_id", "box", "score", "run_count", "runs"):
        np.testing.assert_array_equal(captured[name], eager[name], err_msg=name)


def test_runs_cover_the_pictures() -> None:
    values = found().values
    ends = np.cumsum(values["run_count"])
    covered = np.diff(np.concatenate([[0], np.cumsum(values["runs"], dtype=np.int64)[ends - 1]]))
    assert set(covered.tolist()) <= {380 * 640, 640 * 380}
