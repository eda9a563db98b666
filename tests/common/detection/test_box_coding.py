"""Coding, clipping and overlaps of boxes against torchvision's and the formulas."""

import math

import pytest
import torch
import torchvision
from torchvision.models.detection._utils import BoxCoder

from common.detection.coding import BoxCoding, clip
from common.ops.boxes import area, intersection_over_union

RETINANET = BoxCoding((1.0, 1.0, 1.0, 1.0), most_growth=1000 / 16)
SSD = BoxCoding((10.0, 10.0, 5.0, 5.0))
MASK_RCNN = BoxCoding((10.0, 10.0, 5.0, 5.0), most_growth=1000 / 16, pixel=1.0)


def boxes(seed, *shape, side=800.0, dtype=torch.float32):
    random = torch.Generator().manual_seed(seed)
    corner = torch.rand((*shape, 2), generator=random, dtype=torch.float64) * side
    size = torch.rand((*shape, 2), generator=random, dtype=torch.float64) * side / 3 + 1
    return torch.cat([corner, corner + size], -1).to(dtype)


@pytest.mark.parametrize("coding", [RETINANET, SSD])
def test_coding_is_torchvisions(coding):
    theirs = BoxCoder(coding.weights, math.log(coding.most_growth) if coding.most_growth else math.inf)
    found, anchors = boxes(0, 200), boxes(1, 200)
    offsets = coding.encode(found, anchors)
    torch.testing.assert_close(offsets, theirs.encode_single(found, anchors), rtol=1e-6, atol=1e-6)
    offsets[:20, 2:] = 7.0
    torch.testing.assert_close(
        coding.decode(offsets, anchors), theirs.decode_single(offsets, anchors), rtol=1e-6, atol=1e-3
    )


def test_ssd_codes_centres_and_sizes_by_its_variances():
    found, anchors = boxes(2, 50, side=1.0, dtype=torch.float64), boxes(3, 50, side=1.0, dtype=torch.float64)
    for offset, box, anchor in zip(SSD.encode(found, anchors).tolist(), found.tolist(), anchors.tolist(), strict=True):
        for start, end, at, stretch in ((0, 2, offset[0], offset[2]), (1, 3, offset[1], offset[3])):
            size = anchor[end] - anchor[start]
            centre = (box[start] + box[end] - anchor[start] - anchor[end]) / 2
            assert at == pytest.approx(centre / size / 0.1, rel=1e-12, abs=1e-12)
            assert stretch == pytest.approx(math.log((box[end] - box[start]) / size) / 0.2, rel=1e-12, abs=1e-12)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_halves_are_decoded_in_fp32(dtype):
    offsets, anchors = (torch.randn(3, 40, 4, generator=torch.Generator().manual_seed(3)) / 4).to(dtype), boxes(4, 40)
    decoded = RETINANET.decode(offsets, anchors)
    assert decoded.dtype == torch.float32
    exact = RETINANET.decode(offsets.double(), anchors.double())
    torch.testing.assert_close(decoded.double(), exact, rtol=1e-5, atol=1e-3)


def test_what_is_coded_comes_back():
    found, anchors = boxes(5, 4, 30, dtype=torch.float64), boxes(6, 30, dtype=torch.float64)
    torch.testing.assert_close(SSD.decode(SSD.encode(found, anchors), anchors), found, rtol=1e-12, atol=1e-9)


def test_growth_is_limited_where_a_limit_is_set():
    anchor, offsets = torch.tensor([[0.0, 0.0, 16.0, 8.0]]), torch.tensor([[0.0, 0.0, 9.0, 9.0]])
    x1, y1, x2, y2 = RETINANET.decode(offsets, anchor)[0].tolist()
    assert (x2 - x1, y2 - y1) == pytest.approx((1000, 500))
    x1, _, x2, _ = BoxCoding((1.0, 1.0, 1.0, 1.0)).decode(offsets, anchor)[0].tolist()
    assert x2 - x1 == pytest.approx(16 * math.exp(9))


def test_boxes_are_clipped_to_their_own_picture():
    found = boxes(7, 3, 20) - 200
    sizes = [(300, 500), (640, 100), (250, 250)]
    expected = torch.stack(
        [torchvision.ops.clip_boxes_to_image(one, size) for one, size in zip(found, sizes, strict=True)]
    )
    height, width = (torch.tensor(column, dtype=torch.float32).unsqueeze(1) for column in zip(*sizes, strict=True))
    assert torch.equal(clip(found, height, width), expected)
    assert torch.equal(clip(found[1], 640, 100), expected[1])


def test_overlaps_and_areas_are_torchvisions():
    found, others = boxes(8, 30), boxes(9, 40)
    assert torch.equal(intersection_over_union(found, others), torchvision.ops.box_iou(found, others))
    assert torch.equal(area(found), torchvision.ops.box_area(found))


def test_boxes_without_area_overlap_nothing():
    flat = torch.tensor([[3.0, 3.0, 3.0, 9.0], [0.0, 0.0, 9.0, 9.0]])
    assert intersection_over_union(flat, flat).tolist() == [[0.0, 0.0], [0.0, 1.0]]


def test_sides_with_a_pixel_more_are_coded_as_by_hand():
    """An anchor of 10 x 20 pixels and a box of 5 x 40: centres at (5, 10) and (7.5, 30)."""
    anchor, box = torch.tensor([[0.0, 0.0, 9.0, 19.0]]), torch.tensor([[5.0, 10.0, 9.0, 49.0]])
    offsets = MASK_RCNN.encode(box, anchor)[0].tolist()
    assert offsets == pytest.approx([10 * 2.5 / 10, 10 * 20 / 20, -5 * math.log(2), 5 * math.log(2)])
    assert MASK_RCNN.decode(torch.tensor([offsets]), anchor)[0].tolist() == pytest.approx(box[0].tolist())


def test_growth_with_a_pixel_more_is_limited():
    x1, y1, x2, y2 = MASK_RCNN.decode(torch.full((1, 4), 99.0), torch.tensor([[0.0, 0.0, 15.0, 7.0]]))[0].tolist()
    assert (x2 - x1 + 1, y2 - y1 + 1) == pytest.approx((1000, 500))


def test_the_last_pixel_is_the_largest_corner():
    found = torch.tensor([[-3.0, -3.0, 99.0, 99.0]])
    assert clip(found, 50, 70, 1.0).tolist() == [[0.0, 0.0, 69.0, 49.0]]
    assert clip(found, torch.tensor([50.0]), torch.tensor([70.0]), 1.0).tolist() == [[0.0, 0.0, 69.0, 49.0]]


def test_overlaps_and_areas_with_a_pixel_more_are_torchvisions_of_boxes_that_end_there():
    """In whole pixels, of which fp32's areas are exact."""
    found, others = boxes(12, 30).round(), boxes(13, 40).round()
    ends = torch.tensor([0.0, 0.0, 1.0, 1.0])
    expected = torchvision.ops.box_iou(found + ends, others + ends)
    assert torch.equal(intersection_over_union(found, others, 1.0), expected)
    assert torch.equal(area(found, 1.0), torchvision.ops.box_area(found + ends))
