"""Test 3D U-Net's reader on a GPU: random bits, caches, side streams, and CUDA graphs."""

from __future__ import annotations

from itertools import product
from pathlib import Path

import pytest
import torch
from torch import Tensor

from benchmarks.unet3d.crop import CropDraws, Slab, VolumeCrop
from benchmarks.unet3d.data import VolumeDataSettings, open_train, warm_up
from benchmarks.unet3d.ops.augment import AUGMENT, parameters
from common.data.batches import Batch, Block, HostBatch
from common.data.prefetch import Prefetcher, side_stream
from common.distributed.layout import Layout
from common.ops.random_bits.reference import words
from tests.benchmarks.unet3d.small_volumes import settings, with_objects, write_volumes
from tests.gpu.support import captured

pytestmark = pytest.mark.gpu

SHAPE, SIZE = (150, 161, 143), (128, 128, 128)
VOXELS = 150 * 161 * 143
CROP = (64, 64, 64)
NOISE = 1e-4
"""Largest difference of noise: more than that of two approximations of the logarithm, times the largest deviation."""


def crops() -> list[VolumeCrop]:
    drawn = zip(product((False, True), repeat=3), [0.0, 0.1] * 4, [0, 1, 2**63 - 1, 5, 1 << 40, 3, 8, 9], strict=True)
    return [
        VolumeCrop(VOXELS * (n % 2), SHAPE, (3 * n, 32 - n, 2 * n), CropDraws(flips, 1 + 0.1 * n, deviation, seed))
        for n, (flips, deviation, seed) in enumerate(drawn)
    ]


def test_bits_are_those_of_a_cpu() -> None:
    index, seed = torch.arange(1 << 20), torch.tensor([[-5], [1 << 40]])
    assert torch.equal(words(index.cuda(), seed.cuda(), 3).cpu(), words(index, seed, 3))


def test_a_captured_graph_takes_new_parameters() -> None:
    slab = Slab(SIZE, 0, 128)
    generator = torch.Generator("cuda").manual_seed(0)
    images = torch.randn(2 * VOXELS, generator=generator, device="cuda")
    labels = torch.randint(3, (2 * VOXELS,), generator=generator, device="cuda", dtype=torch.uint8)
    given = [tensor.cuda() for tensor in parameters(crops(), slab).values()]
    augment = AUGMENT.function("triton")
    graph, (image, label) = captured(lambda: augment(images, labels, *given, slab, torch.bfloat16))
    others = [tensor.cuda() for tensor in parameters(crops()[::-1], slab).values()]
    for static, other in zip(given, others, strict=True):
        static.copy_(other)
    graph.replay()
    expected, expected_label = augment(images, labels, *others, slab, torch.bfloat16)
    assert torch.equal(image, expected)
    assert torch.equal(label, expected_label)


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pairs = [with_objects((100 + 7 * number, 90, 80 + number), number) for number in range(6)]
    return write_volumes(tmp_path_factory.mktemp("unet3d") / "data", pairs, CROP)


def chosen(cache: str, augment: str) -> VolumeDataSettings:
    return settings(
        torch.bfloat16, CROP, cache=cache, augment=augment, noise_probability=0.5, brightness_probability=0.5
    )


def crops_through_the_prefetcher(root: Path, given: VolumeDataSettings, device: str) -> list[dict[str, Tensor]]:
    """Return the batches of twelve epochs, prepared on a side stream and copied on the current one, as in training."""
    source = open_train(root, given, Layout(device=device, seed=3), 3)
    taken: list[dict[str, Tensor]] = []

    def prepare(batch: HostBatch) -> Batch:
        return Batch(source.prepare(batch), batch.samples)

    prefetcher = Prefetcher(prepare, 1, side_stream(torch.device(device)))
    prefetcher.begin(source.batches(Block(0, 1, 12, 0, 72)))
    while (batches := prefetcher.take()) is not None:
        taken.append({name: tensor.clone() for name, tensor in batches[0].tensors.items()})
        del batches
        prefetcher.consumed()
    if device == "cuda":
        torch.cuda.synchronize()
    source.close()
    return [{name: tensor.cpu() for name, tensor in batch.items()} for batch in taken]


@pytest.mark.parametrize("cache", ["device", "host"])
def test_crops_of_a_gpu_are_those_of_a_cpu(root: Path, cache: str) -> None:
    warm_up(chosen(cache, "triton"), Layout(device="cuda"), 3)
    found = crops_through_the_prefetcher(root, chosen(cache, "triton"), "cuda")
    expected = crops_through_the_prefetcher(root, chosen(cache, "reference"), "cpu")
    assert len(found) == len(expected) == 24
    for some, others in zip(found, expected, strict=True):
        assert torch.equal(some["label"], others["label"])
        torch.testing.assert_close(some["image"].float(), others["image"].float(), rtol=8e-3, atol=NOISE)
