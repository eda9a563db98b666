"""Default boxes against the benchmark's numbers and plain loops, and the order of the heads' channels."""

from __future__ import annotations

import math

import pytest
import torch
from small_ssd300 import FACTS, SMALL
from torch.nn import functional as F

from benchmarks.ssd300.model import SSD300
from benchmarks.ssd300.targets import coding, reference_boxes, reference_rows
from common.errors import ConfigError
from common.mlperf.fixed import fixed_facts

SIZES = (38, 19, 10, 5, 3, 1)
KINDS = (4, 6, 6, 6, 4, 4)
STEPS = (8, 16, 32, 64, 100, 300)
SCALES = (21, 45, 99, 153, 207, 261, 315)
RATIOS = ((2,), (2, 3), (2, 3), (2, 3), (2,), (2,))


def plain_boxes() -> list[tuple[float, float, float, float]]:
    """Centre and size of each default box, level by level, kind by kind, cell by cell, cut to 0 to 1."""
    boxes = []
    for level, size in enumerate(SIZES):
        smaller, larger = SCALES[level] / 300, SCALES[level + 1] / 300
        kinds = [(smaller, smaller), (math.sqrt(smaller * larger),) * 2]
        for ratio in RATIOS[level]:
            kinds += [(smaller * ratio**0.5, smaller * ratio**-0.5), (smaller * ratio**-0.5, smaller * ratio**0.5)]
        for width, height in kinds:
            for row in range(size):
                for column in range(size):
                    x, y = (column + 0.5) * STEPS[level] / 300, (row + 0.5) * STEPS[level] / 300
                    boxes.append((min(x, 1), min(y, 1), min(width, 1), min(height, 1)))
    return boxes


def test_there_are_8732_on_six_levels():
    assert FACTS.level_sizes == SIZES
    assert FACTS.boxes_per_cell == KINDS
    assert reference_boxes(FACTS).shape == (8732, 4)


def test_they_are_those_of_the_formula():
    corners = reference_boxes(FACTS).double()
    found = torch.cat([(corners[:, :2] + corners[:, 2:]) / 2, corners[:, 2:] - corners[:, :2]], 1)
    torch.testing.assert_close(found, torch.tensor(plain_boxes(), dtype=torch.float64), rtol=0, atol=2e-7)
    assert found[0, :2].tolist() == pytest.approx([0.5 / 37.5] * 2)


def test_the_heads_order_is_cell_by_cell_and_in_a_cell_kind_by_kind():
    rows = reference_rows(FACTS)
    assert sorted(rows.tolist()) == list(range(8732))
    assert rows[:5].tolist() == [0, 1444, 2888, 4332, 1]
    second_level = 4 * 1444
    assert rows[second_level : second_level + 7].tolist() == [second_level + k * 361 for k in range(6)] + [
        second_level + 1
    ]


def test_a_head_gives_what_the_references_two_heads_with_their_own_channels_give():
    """The reference's channel is coordinate (or class) * kinds + kind, its view (N, coordinates, kinds * H * W)."""
    torch.manual_seed(0)
    network = SSD300(SMALL, torch.Generator().manual_seed(1)).double().eval()
    image = torch.randn(2, 3, 64, 64, dtype=torch.float64)
    outputs = network(image)
    logits, offsets = [], []
    for head, level in zip(network.heads, network.levels(image), strict=True):
        kinds, classes = head.channels.kinds, head.channels.classes

        def reordered(tensor: torch.Tensor, parts: int, kinds: int = kinds) -> torch.Tensor:
            return tensor.unflatten(0, (kinds, parts)).transpose(0, 1).flatten(0, 1)

        cut = head.channels.logits
        for part, of, found in ((slice(0, cut), classes, logits), (slice(cut, None), 4, offsets)):
            result = F.conv2d(level, reordered(head.weight[part], of), reordered(head.bias[part], of), padding=1)
            found.append(result.reshape(2, of, -1))
    rows = reference_rows(SMALL)
    torch.testing.assert_close(torch.cat(logits, 2)[:, :, rows].transpose(1, 2), outputs.logits)
    torch.testing.assert_close(torch.cat(offsets, 2)[:, :, rows].transpose(1, 2), outputs.offsets)


def test_coding_is_the_papers_and_decoding_its_inverse():
    anchors = reference_boxes(FACTS)[::97].double()
    random = torch.Generator().manual_seed(3)
    boxes = torch.rand((len(anchors), 2, 2), generator=random, dtype=torch.float64).sort(1).values.flatten(1)
    offsets = coding(FACTS).encode(boxes, anchors)
    centre, size = (boxes[:, :2] + boxes[:, 2:]) / 2, boxes[:, 2:] - boxes[:, :2]
    own_centre, own_size = (anchors[:, :2] + anchors[:, 2:]) / 2, anchors[:, 2:] - anchors[:, :2]
    expected = torch.cat([(centre - own_centre) / own_size / 0.1, torch.log(size / own_size) / 0.2], 1)
    torch.testing.assert_close(offsets, expected)
    torch.testing.assert_close(coding(FACTS).decode(offsets, anchors), boxes)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"image_size": 150}, "too small for the extras"),
        ({"steps": [8, 16, 32, 64, 100]}, "steps: 5 entries, where 5 extras make 6 levels: 6"),
        ({"box_sizes": [21, 45]}, "box_sizes: 2 entries"),
    ],
)
def test_levels_that_do_not_fit_are_refused(changes, message):
    with pytest.raises(ConfigError, match=message):
        fixed_facts(type(FACTS), "ssd300", **changes)
