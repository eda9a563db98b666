"""Test 3D U-Net on a GPU: the network against float64, and a captured evaluation."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch import Tensor

from benchmarks.unet3d.evaluate import EvaluationSettings, MeanDice
from benchmarks.unet3d.model import UNet3D, UNet3DArchitecture, UpBlock
from benchmarks.unet3d.sliding_window import SlidingWindow, add_window, count_classes
from benchmarks.unet3d.volumes import VolumeEntry
from common.contract.evaluation import Weights
from common.distributed.layout import Layout
from common.distributed.spatial.convolution import SpatialConv3d
from tests.benchmarks.unet3d import evaluation_oracle as oracle
from tests.gpu.support import relative_error

pytestmark = pytest.mark.gpu

# The network


ARCHITECTURE = UNet3DArchitecture(classes=3, filters=(16, 24, 32, 40, 48), norm_epsilon=1e-5)
SHAPE = (2, 1, 64, 64, 64)


def build(device: str, dtype: torch.dtype) -> UNet3D:
    return UNet3D(ARCHITECTURE, generator=torch.Generator().manual_seed(1), device=device, dtype=dtype)


def image() -> Tensor:
    return torch.randn(SHAPE, generator=torch.Generator().manual_seed(2))


def test_activations_and_their_gradients_keep_channels_last():
    model = build("cuda", torch.bfloat16)
    found: dict[str, Tensor] = {}

    def note(name: str, y: Tensor) -> None:
        found[name] = y
        y.register_hook(lambda dy: found.update({f"d {name}": dy}))

    for name, module in model.named_modules():
        if isinstance(module, SpatialConv3d):
            module.register_forward_hook(lambda _module, _inputs, y, name=name: note(name, y))
        if isinstance(module, UpBlock):
            module.conv1.register_forward_pre_hook(lambda _module, inputs, name=name: note(f"{name} joined", *inputs))
    model(image().to("cuda", torch.bfloat16)).float().square().sum().backward()
    assert len(found) == 2 * (22 + 5)
    for name, tensor in found.items():
        assert tensor.is_contiguous(memory_format=torch.channels_last_3d), name


def test_the_kernels_are_chosen_where_they_serve():
    kernels = {"instance_norm": "triton", "upsample": "triton", "output_convolution": "triton", "halo": "none"}
    assert build("cuda", torch.bfloat16).chosen() == kernels | {"convolution": "folded+triton"}
    assert build("cuda", torch.float32).chosen() == kernels | {"convolution": "reference+triton"}


def test_weights_keep_channels_last():
    for name, parameter in build("cuda", torch.bfloat16).named_parameters():
        if parameter.ndim == 5 and not name.startswith("output"):
            assert parameter.stride(1) == 1, name


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 5e-3), (torch.bfloat16, 3e-2)], ids=str)
def test_logits_follow_float64(dtype, tolerance):
    expected = build("cpu", torch.float64)(image().double()).detach()
    found = build("cuda", dtype)(image().to("cuda", dtype)).detach().double().cpu()
    assert relative_error(found, expected) < tolerance


def test_gradients_follow_float64():
    found = {}
    for device, dtype in (("cpu", torch.float64), ("cuda", torch.float32)):
        model = build(device, dtype)
        with torch.backends.cudnn.flags(enabled=True, allow_tf32=False):
            logits = model(image().to(device, dtype))
            gradient = torch.randn(logits.shape, generator=torch.Generator().manual_seed(3))
            logits.backward(gradient.to(device, dtype))
        found[device] = {name: parameter.grad.double().cpu() for name, parameter in model.named_parameters()}
    # float32 on a CPU is off by up to 2e-3: next to a ReLU's corner rounding decides whether a gradient passes
    for name, expected in found["cpu"].items():
        assert relative_error(found["cuda"][name], expected) < 1e-2, name


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_the_largest_convolution_follows_float32_at_its_real_size(dtype):
    # cuDNN 9.8 to 9.14 had wrong results for narrow 3-D convolutions of large tensors.
    generator = torch.Generator("cuda").manual_seed(3)
    x = torch.randn(7, 64, 128, 128, 128, device="cuda", dtype=dtype, generator=generator)
    x = x.contiguous(memory_format=torch.channels_last_3d)
    layer = SpatialConv3d(64, 32, 1, device="cuda", dtype=dtype)
    torch.nn.init.normal_(layer.weight, std=0.02, generator=generator)
    y = layer(x.requires_grad_())
    dy = torch.randn(y.shape, device="cuda", dtype=dtype, generator=generator).contiguous(
        memory_format=torch.channels_last_3d
    )
    y.backward(dy)
    wide, expected_dw = layer.weight.detach().float(), torch.zeros_like(layer.weight, dtype=torch.float32)
    for sample in range(len(x)):  # a sample at a time: float32 needs twice the memory
        x_1 = x[sample : sample + 1].detach().float().requires_grad_()
        w = wide.clone().requires_grad_()
        with torch.backends.cudnn.flags(enabled=True, allow_tf32=False):
            expected = torch.nn.functional.conv3d(x_1, w, padding=1)
            expected.backward(dy[sample : sample + 1].float())
        for name, found, wanted in (("y", y, expected), ("dx", x.grad, x_1.grad)):
            error = (found[sample : sample + 1].float() - wanted).norm() / wanted.norm()
            assert float(error) < 1e-2, f"{name} of sample {sample}"
        expected_dw += w.grad
    assert float((layer.weight.grad.float() - expected_dw).norm() / expected_dw.norm()) < 1e-2


# The evaluation


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
    settings = EvaluationSettings(SMALL, batch, 1e-6)
    evaluation = MeanDice(model, settings, Layout(device="cuda"), dtype, capture)
    evaluation.warm_up()
    evaluation.cache(CASES, lambda case: oracle.volume(case.shape, seed=int(case.name[-5:])))
    return evaluation


def counts_of(evaluation: MeanDice, model: UNet3D) -> dict[str, list[list[int]]]:
    values = evaluation.predict(Weights(dict(model.named_parameters()))).values
    return {name: case["counts"] for name, case in values["cases"].items()}


def on_a_stream() -> torch.cuda.StreamContext:
    """Return a context with a side stream, on which the trainer evaluates."""
    return torch.cuda.stream(torch.cuda.Stream())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_captured_windows_count_what_eager_ones_count(dtype: torch.dtype) -> None:
    model = network(dtype)
    with on_a_stream():
        eager, captured = (evaluation_of(model, dtype, capture) for capture in (False, True))
        expected = counts_of(eager, model)
        assert counts_of(captured, model) == expected
        assert counts_of(captured, model) == expected


def sums_of_logits(image_DHW: Tensor, model: UNet3D) -> Tensor:
    """Return the weighted sums of the logits of all windows, (D, H, W, K), in the scored part of a volume."""
    depth, height, width = image_DHW.shape
    geometry = SMALL.geometry((depth, height, width))
    padded = SMALL.padded(image_DHW[geometry.kept], geometry)
    sums = torch.zeros(*padded.shape, 3, device=padded.device)
    for origin in geometry.origins:
        part = tuple(slice(start, start + size) for start, size in zip(origin, SMALL.shape, strict=True))
        add_window(sums[part], model(padded[part][None, None])[0], SMALL.importance(padded.device))
    return sums[geometry.inside]


@pytest.mark.parametrize("batch", [1, 2, 7])
def test_counts_are_those_of_windows_one_by_one(batch: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another batch size may select another algorithm; its rounding can change the classes of voxels close to a tie."""
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)
    model = network(torch.float32)
    with on_a_stream():
        found = counts_of(evaluation_of(model, torch.float32, True, batch), model)
    for case in CASES:
        image, label = oracle.volume(case.shape, seed=int(case.name[-5:]))
        with torch.no_grad():
            sums = sums_of_logits(torch.from_numpy(image).cuda(), model)
        kept = torch.from_numpy(label)[SMALL.geometry(case.shape).kept].cuda()
        expected = torch.zeros(3, 3, dtype=torch.int64, device="cuda")
        count_classes(sums, kept, expected)
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
