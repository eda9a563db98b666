"""RetinaNet's anchors against torchvision's generator and against a naive loop."""

from __future__ import annotations

import math

import pytest
import torch
from torchvision.models.detection.anchor_utils import AnchorGenerator
from torchvision.models.detection.image_list import ImageList

from benchmarks.retinanet.anchors import ANCHORS_PER_CELL, anchors, level_sizes


@pytest.mark.parametrize("image_size", [32, 128, 300, 320, 800, 801])
def test_anchors_are_those_of_torchvision(image_size: int) -> None:
    sizes = tuple((s, int(s * 2 ** (1 / 3)), int(s * 2 ** (2 / 3))) for s in (32, 64, 128, 256, 512))
    generator = AnchorGenerator(sizes, ((0.5, 1.0, 2.0),) * 5)
    images = ImageList(torch.zeros(1, 3, image_size, image_size), [(image_size, image_size)])
    expected = generator(images, [torch.zeros(1, 1, size, size) for size in level_sizes(image_size)])[0]
    found = anchors(image_size)
    assert found.dtype == torch.float32
    assert torch.equal(found, expected)


def test_the_benchmarks_anchors_by_a_naive_loop() -> None:
    found = anchors(800)
    assert found.shape == (120_087, 4)
    row = 0
    for stride, cells, base in ((8, 100, 32), (16, 50, 64), (32, 25, 128), (61, 13, 256), (114, 7, 512)):
        for i, j in ((0, 0), (0, 1), (cells - 1, cells // 2), (cells - 1, cells - 1)):
            at = row + (i * cells + j) * ANCHORS_PER_CELL
            for ratio in (0.5, 1.0, 2.0):
                for size in (base, int(base * 2 ** (1 / 3)), int(base * 2 ** (2 / 3))):
                    half_width, half_height = size / math.sqrt(ratio) / 2, size * math.sqrt(ratio) / 2
                    x, y = j * stride, i * stride
                    expected = [x + round(-half_width), y + round(-half_height)]
                    expected += [x + round(half_width), y + round(half_height)]
                    assert found[at].tolist() == expected
                    at += 1
        row += cells * cells * ANCHORS_PER_CELL
    assert row == len(found)


def test_level_sizes_of_the_benchmark() -> None:
    assert level_sizes(800) == (100, 50, 25, 13, 7)
    assert sum(size**2 for size in level_sizes(800)) == 13_343
