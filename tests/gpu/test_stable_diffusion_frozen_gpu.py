"""Test Stable Diffusion's frozen networks on a GPU, and the data that they prepare, against the CPU."""

from __future__ import annotations

import contextlib
import io
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import safetensors.torch
import torch
from torch import Tensor, nn

from benchmarks.stable_diffusion.frozen.clip import TextTower, VisionTower
from benchmarks.stable_diffusion.frozen.inception import Inception
from benchmarks.stable_diffusion.frozen.sizes import TextSizes, VaeSizes, VisionSizes
from benchmarks.stable_diffusion.frozen.vae import AutoencoderKL
from benchmarks.stable_diffusion.prepare import prepare
from benchmarks.stable_diffusion.unet_operations import LAYERS, choose_layers
from common.nn.tf32 import tf32_products
from common.ops.operation import REFERENCE
from tests.benchmarks.stable_diffusion.public_names import randomized
from tests.benchmarks.stable_diffusion.small_raw import pictures, read_tar, write_raw
from tests.gpu.support import captured, relative_error

pytestmark = pytest.mark.gpu

GPU = torch.device("cuda")
TEXT = TextSizes(vocabulary=600, context=77, width=128, layers=3, heads=2, mlp=256, embedding=64)
VISION = VisionSizes(resolution=56, patch=14, width=160, layers=3, heads=2, mlp=320, embedding=64)  # heads of 80, as H
VAE = VaeSizes(channels=32, multipliers=(1, 2, 4, 4))

REFERENCES = dict.fromkeys(LAYERS, REFERENCE)
FUSED = {"group_norm": "triton", "upsampling": "transposed"}

PRECISIONS = {
    "exact": (torch.float32, False, 5e-4),
    "tf32": (torch.float32, True, 5e-3),
    "fp16": (torch.float16, False, 1e-2),
    "bf16": (torch.bfloat16, False, 6e-2),
}
"""dtype, whether convolutions and products use TF32, and the largest error in standard deviations of the result.

The bounds are three times the errors of a CPU with the same rounding in the deepest network, the autoencoder: 1.6e-3
with TF32 operands of convolutions, 2.8e-3 in fp16, 2.1e-2 in bf16. Without TF32, each of some 30 convolutions in a row
may use Winograd's algorithm, with an error of up to 5e-5.
"""

Forward = Callable[[nn.Module, Tensor], Tensor]


def uniform(*shape: int) -> Tensor:
    return torch.rand(shape, generator=torch.Generator().manual_seed(7), dtype=torch.float64)


def contrasts() -> Tensor:
    """Return three pictures of noise; the means of their features differ, because their contrasts do."""
    return uniform(3, 3, 64, 48) * torch.tensor([0.1, 1.0, 30.0]).view(3, 1, 1, 1)


def tokens() -> Tensor:
    rows = torch.randint(1, 598, (3, 77), generator=torch.Generator().manual_seed(0))
    for row, end in zip(rows, (5, 76, 30), strict=True):
        row[end] = 599
        row[end + 1 :] = 0
    return rows


CASES: dict[str, tuple[Callable[[], nn.Module], Callable[[], Tensor], Forward]] = {
    "moments": (lambda: AutoencoderKL(VAE), lambda: uniform(2, 3, 128, 64), lambda net, x: net.encode_moments(x)),
    "pictures": (lambda: AutoencoderKL(VAE), lambda: uniform(2, 4, 16, 8), lambda net, x: net.decode(x)),
    "context": (lambda: TextTower(TEXT), tokens, lambda net, x: net.encode(x)),
    "texts": (lambda: TextTower(TEXT), tokens, lambda net, x: net.project(x)),
    "vision": (lambda: VisionTower(VISION), lambda: uniform(3, 3, 56, 56), lambda net, x: net.project(x)),
    "inception": (lambda: Inception(0.25, 96), contrasts, lambda net, x: net.features(x)),
}


def made(case: str) -> tuple[nn.Module, Tensor, Tensor, Forward]:
    """Return a network and its input on the CPU in float64, the result, and the function that computes it."""
    build, given, forward = CASES[case]
    network = build().double()
    randomized(network)
    x = given()
    return network, x, forward(network, x), forward


@pytest.fixture(autouse=True)
def exact_convolutions() -> Iterator[None]:
    """Turn off TF32; tests can turn it on."""
    before = torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    yield
    torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32 = before
    torch.cuda.empty_cache()


def error(found: Tensor, expected: Tensor) -> float:
    return ((found.cpu().double() - expected).square().mean().sqrt() / expected.std()).item()


@pytest.mark.parametrize("last", [False, True], ids=["contiguous", "channels_last"])
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("precision", PRECISIONS)
def test_it_computes_what_the_cpu_does_in_float64(precision: str, case: str, last: bool) -> None:
    dtype, torch.backends.cudnn.allow_tf32, bound = PRECISIONS[precision]
    network, x, expected, forward = made(case)
    network.to(GPU, dtype)
    x = x.to(dtype) if x.is_floating_point() else x
    if last:
        if x.ndim != 4:
            pytest.skip("has no channels")
        network.to(memory_format=torch.channels_last)
        x = x.contiguous(memory_format=torch.channels_last)
    if isinstance(network, AutoencoderKL):
        assert choose_layers(network, {}, dtype) == FUSED

    with tf32_products() if precision == "tf32" else contextlib.nullcontext():
        found = forward(network, x.to(GPU))

    assert found.dtype == dtype
    assert error(found, expected) < bound


@pytest.mark.parametrize("case", ["moments", "pictures"])
@pytest.mark.parametrize("precision", PRECISIONS)
def test_the_autoencoders_references_run_on_a_gpu_too(precision: str, case: str) -> None:
    dtype, torch.backends.cudnn.allow_tf32, bound = PRECISIONS[precision]
    network, x, expected, forward = made(case)
    network.to(GPU, dtype).to(memory_format=torch.channels_last)
    choose_layers(network, REFERENCES, dtype)
    assert error(forward(network, x.to(GPU, dtype)), expected) < bound


@pytest.mark.parametrize("case", CASES)
def test_a_graph_replays_it_for_other_inputs(case: str) -> None:
    network, x, _, forward = made(case)
    network.to(GPU, torch.float32).to(memory_format=torch.channels_last)
    choose_layers(network, {}, torch.float32)
    static = x.float().to(GPU) if x.is_floating_point() else x.to(GPU)
    graph, recorded = captured(lambda: forward(network, static))
    replayed = []
    for _ in range(2):
        static.copy_(static.flip(0))
        graph.replay()
        replayed.append(recorded.clone())
        # without TF32 another algorithm of cuDNN's differs by the rounding of fp32 alone
        torch.testing.assert_close(recorded, forward(network, static), rtol=1e-4, atol=1e-4)
    assert (replayed[1] - replayed[0]).abs().max() > 1e-2
    torch.testing.assert_close(replayed[1], replayed[0].flip(0), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("precision", ["fp16", "bf16"])
def test_the_published_autoencoder_decodes_a_batch_of_512_px(precision: str) -> None:
    dtype, _, bound = PRECISIONS[precision]
    torch.manual_seed(0)
    with GPU:
        network = AutoencoderKL(VaeSizes())
    latents = torch.randn(16, 4, 64, 64, device=GPU)
    expected = network.decode(latents[:2]).double().cpu()
    network.to(dtype).to(memory_format=torch.channels_last)
    assert choose_layers(network, {}, dtype) == FUSED
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()

    found = network.decode(latents.to(dtype).contiguous(memory_format=torch.channels_last))

    # the input of a residual block of 256 channels, its norm, and the result of half as many of the convolution take
    # 5.4 GB; as much again for what cuDNN works in, and half as much to spare
    assert torch.cuda.max_memory_allocated() - before < 2.5 * 5.4e9
    assert found.shape == (16, 3, 512, 512)
    assert found.isfinite().all()
    assert error(found[:2], expected) < bound


# Prepared tars


TARS = ("00000.tar", "00001.tar")


@pytest.fixture(scope="module")
def raw_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_raw(tmp_path_factory.mktemp("raw"), "images", [pictures(0, 18), pictures(1, 3)])


def test_moments_are_those_of_the_cpu(raw_dir: Path, tmp_path: Path) -> None:
    for device in ("cpu", "cuda"):
        prepare(raw_dir, tmp_path / device, members="moments", device=device, workers=2)
    for name in TARS:
        ours, expected = (read_tar(tmp_path / device / "train" / name) for device in ("cuda", "cpu"))
        assert list(ours) == list(expected)
        for member in ours:
            if member.endswith(".npy"):
                found, wanted = (torch.from_numpy(np.load(io.BytesIO(tar[member]))) for tar in (ours, expected))
                assert (found.dtype, found.shape) == (torch.float32, (1, 8, 4, 4))
                assert relative_error(found, wanted) < 5e-3
            else:
                assert ours[member] == expected[member]


def test_encoded_samples_are_those_of_the_cpu(raw_dir: Path, tmp_path: Path) -> None:
    for device in ("cpu", "cuda"):
        prepare(raw_dir, tmp_path / device, device=device, workers=2)
    for name in TARS:
        ours, expected = (read_tar(tmp_path / device / "train" / name) for device in ("cuda", "cpu"))
        assert list(ours) == list(expected)
        for member in ours:
            if member.endswith(".safetensors"):
                found, wanted = (safetensors.torch.load(tar[member]) for tar in (ours, expected))
                for key in ("moments", "captions"):
                    assert found[key].dtype == torch.bfloat16
                    assert relative_error(found[key], wanted[key]) < 1e-2
