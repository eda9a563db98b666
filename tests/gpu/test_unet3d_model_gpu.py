"""The network on one GPU: channels stay last, narrow dtypes follow float64, a captured pass equals an eager one."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from benchmarks.unet3d.model import UNet3D, UNet3DArchitecture, UpBlock
from common.distributed.spatial.convolution import SpatialConv3d

pytestmark = pytest.mark.gpu

if not torch.cuda.is_available():
    pytest.skip("needs a CUDA device", allow_module_level=True)

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
    assert float((found - expected).norm() / expected.norm()) < tolerance


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
        error = float((found["cuda"][name] - expected).norm() / expected.norm())
        assert error < 1e-2, f"{name}: relative error {error:.2e}"


def test_a_captured_pass_equals_an_eager_one():
    model, static = build("cuda", torch.bfloat16), torch.zeros(SHAPE, device="cuda", dtype=torch.bfloat16)
    stream = torch.cuda.Stream()
    with torch.no_grad(), torch.cuda.stream(stream):
        for _ in range(2):
            model(static)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            logits = model(static)
        static.copy_(image())
        graph.replay()
        expected = model(static)
    torch.cuda.synchronize()
    torch.testing.assert_close(logits.float(), expected.float(), rtol=0, atol=1e-2 * float(expected.abs().max()))


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
