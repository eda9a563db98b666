"""Test Stable Diffusion's evaluation on a GPU: bytes of pictures, graph, sums, and waiting."""

from __future__ import annotations

import warnings
from pathlib import Path

import numpy as np
import pytest
import torch

from benchmarks.stable_diffusion.clip_score import ClipTransform, resize_bicubic
from benchmarks.stable_diffusion.evaluate import PicturesOfCaptions
from benchmarks.stable_diffusion.fid import FeatureStatistics, FeatureSums, FrechetDistance
from benchmarks.stable_diffusion.generation import initial_noise
from benchmarks.stable_diffusion.model import UNet
from benchmarks.stable_diffusion.scoring_networks import published_networks
from common.contract.evaluation import Weights
from common.distributed.layout import Layout
from tests.benchmarks.stable_diffusion.small_evaluation import (
    SEED,
    small_config,
    small_evaluation,
    small_model,
    weights_of,
    write_assets,
    write_data,
)

pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write assets and data."""
    path = tmp_path_factory.mktemp("evaluation")
    write_assets(path)
    write_data(path, published_networks(small_config(), path, torch.device("cpu"), torch.float32).inception.out)
    return path


def on_a_stream() -> torch.cuda.StreamContext:
    """Return a context with a side stream, on which the trainer evaluates."""
    return torch.cuda.stream(torch.cuda.Stream())


def model_of(seed: int, device: str, dtype: torch.dtype) -> UNet:
    """Return the network of ``small_model`` on a device, with the weights that are drawn on a CPU."""
    model = small_model(seed, device, dtype)
    model.load_state_dict(small_model(seed, "cpu", dtype).state_dict())
    return model


def opened(
    folder: Path, dtype: torch.dtype, capture: bool = True, device: str = "cuda", seed: int = 0
) -> PicturesOfCaptions:
    evaluation = small_evaluation(folder, model_of(seed, device, dtype), Layout(device=device, seed=SEED), capture)
    evaluation.warm_up()
    evaluation.open_data(folder)
    return evaluation


def weights(dtype: torch.dtype, seed: int = 1, device: str = "cuda") -> Weights:
    return weights_of(model_of(seed, device, dtype))


@pytest.mark.parametrize(("before", "after"), [((512, 512), (224, 224)), ((96, 64), (48, 32)), ((16, 16), (75, 75))])
def test_pictures_are_resized_to_the_same_bytes_as_on_a_cpu(before: tuple[int, int], after: tuple[int, int]) -> None:
    generator = torch.Generator().manual_seed(0)
    pictures = torch.randint(0, 256, (5, 3, *before), generator=generator, dtype=torch.uint8)
    pictures[0] = 255 * (pictures[0] > 127)
    assert torch.equal(resize_bicubic(pictures.cuda(), *after).cpu(), resize_bicubic(pictures, *after))
    found = ClipTransform(16, torch.float32, "cuda")(pictures.cuda())
    torch.testing.assert_close(found.cpu(), ClipTransform(16, torch.float32)(pictures), rtol=0, atol=1e-6)


def test_noise_is_that_of_a_cpu() -> None:
    prompts, shape = torch.arange(100, 108), (4, 64, 64)
    on_cpu = initial_noise(torch.tensor(3), prompts, shape, torch.float32)
    on_gpu = initial_noise(torch.tensor(3).cuda(), prompts.cuda(), shape, torch.float32)
    # logarithm, root and cosine of both differ in their last bits; 4.4e-5 was seen
    torch.testing.assert_close(on_gpu.cpu(), on_cpu, rtol=1e-4, atol=1e-4)


def test_statistics_of_the_benchmarks_width_are_those_of_a_cpu() -> None:
    features = torch.randn(3000, 2048, generator=torch.Generator().manual_seed(0)) @ torch.randn(2048, 2048) / 45
    on_cpu, on_gpu = FeatureSums(2048), FeatureSums(2048, "cuda")
    on_cpu.add(features)
    on_gpu.add(features.cuda())
    torch.testing.assert_close(on_gpu.flat.cpu(), on_cpu.flat, rtol=1e-11, atol=1e-9)
    reference = FeatureStatistics(np.zeros(2048), np.eye(2048))
    other = FeatureStatistics(np.full(2048, 0.1), np.diag(np.linspace(0.5, 3, 2048)))
    expected = 20.48 + np.square(1 - np.sqrt(np.linspace(0.5, 3, 2048))).sum()
    for device in ("cpu", "cuda"):
        assert FrechetDistance(reference, device)(other) == pytest.approx(expected, rel=1e-9)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_captured_step_makes_the_latents_of_an_eager_one(dtype: torch.dtype, folder: Path) -> None:
    with on_a_stream():
        eager, captured = (opened(folder, dtype, capture) for capture in (False, True))
        expected = eager.predict(weights(dtype))
        first, second = (captured.predict(weights(dtype)) for _ in range(2))
    assert expected is not None
    assert first is not None
    assert second is not None
    tolerance = 1e-3 if dtype == torch.float32 else 3e-2
    for name in ("cosine", "feature_sums", "product_sums"):
        np.testing.assert_allclose(first.values[name], expected.values[name], rtol=tolerance, atol=tolerance)
        np.testing.assert_allclose(second.values[name], first.values[name], rtol=tolerance, atol=tolerance)


def test_sums_are_those_of_a_cpu(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Products in TF32 differ, and some pixels are truncated to another byte."""
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)
    with on_a_stream():
        found = opened(folder, torch.float32).predict(weights(torch.float32))
    expected = opened(folder, torch.float32, device="cpu").predict(weights(torch.float32, device="cpu"))
    assert found is not None
    assert expected is not None
    for name in ("cosine", "feature_sums"):
        np.testing.assert_allclose(found.values[name], expected.values[name], rtol=1e-2, atol=1e-2)


def test_other_weights_reach_the_graph(folder: Path) -> None:
    with on_a_stream():
        evaluation = opened(folder, torch.float32)
        one, other = (evaluation.predict(weights(torch.float32, seed)) for seed in (1, 2))
    assert one is not None
    assert other is not None
    assert not np.allclose(one.values["feature_sums"], other.values["feature_sums"])


def test_only_the_sums_are_waited_for(folder: Path) -> None:
    with on_a_stream():
        evaluation, own = opened(folder, torch.bfloat16), weights(torch.bfloat16)
        evaluation.predict(own)
        torch.cuda.synchronize()
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            torch.cuda.set_sync_debug_mode("warn")
            try:
                evaluation.predict(own)
            finally:
                torch.cuda.set_sync_debug_mode("default")
    waits = [str(warning.message) for warning in caught if "synchroniz" in str(warning.message)]
    assert len(waits) == 4, waits  # pictures and cosine, seconds, sums of features, sums of products
    assert set(evaluation.stage_seconds) == {"latents", "decoding", "FID", "CLIP"}
    assert all(seconds > 0 for seconds in evaluation.stage_seconds.values())
