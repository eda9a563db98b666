"""Mask targets of the reference against pycocotools bit for bit, and the table that they are drawn from."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from mask_oracle import Targets, columns, expected_targets, random_targets

from benchmarks.maskrcnn.ops import mask_targets
from benchmarks.maskrcnn.ops.mask_targets import mask_targets_reference
from benchmarks.maskrcnn.polygon_table import EXAMPLE_BOX, PolygonCapacity, PolygonTable
from common.errors import DataError, UnsupportedImplementation
from common.ops.operation import OperationRequest

SQUARE = np.array([(2, 2), (12, 2), (12, 12), (2, 12)], np.float32)


def found(case: Targets, size: int = 28) -> torch.Tensor:
    return mask_targets_reference(case.table(), case.object, case.boxes, case.transform, size)


def still(objects: list[list[np.ndarray]], box: tuple[float, ...] = (0, 0, 28, 28)) -> Targets:
    """Each object in the same RoI of a picture that was not resized."""
    rois = len(objects)
    transform = torch.tensor([1.0, 1.0, 0.0, 640.0]).expand(rois, 4)
    return Targets(objects, torch.arange(rois), torch.tensor([box]).expand(rois, 4), transform)


@pytest.mark.parametrize("size", [28, 7])
def test_outlines_of_several_parts_are_drawn_as_pycocotools_does(size):
    case = random_targets(seed=size, rois=150)
    expected = expected_targets(case, size)
    assert 0.02 < expected.float().mean() < 0.5
    assert torch.equal(found(case, size), expected)


@pytest.mark.parametrize("step", [1.0, 0.5, 0.1])
def test_corners_on_the_grid_where_roundings_tie(step):
    random = np.random.default_rng(int(10 * step))
    objects = []
    for _ in range(300):
        corners = random.uniform(-0.5, 1.5, (random.integers(3, 8), 2)) * random.choice([8, 28, 600])
        objects.append([(np.round(corners / step) * step).astype(np.float32)])
    case = still(objects)
    assert torch.equal(found(case), expected_targets(case, 28))


def test_lines_points_and_what_lies_outside_are_drawn_as_pycocotools_does():
    point, line = np.full((3, 2), 5.0), np.array([(3.0, 4), (20, 4), (11, 4)])
    slanted = np.array([(3.0, 4), (20, 9), (3, 4)])
    lower = SQUARE + np.array([0, 14])
    objects = [[point], [line], [line[:, ::-1]], [slanted], [SQUARE - 40], [SQUARE + 60], [SQUARE * 9]]
    objects += [[SQUARE, SQUARE], [SQUARE, SQUARE + 4, lower, point]]
    case = still([[part.astype(np.float32) for part in outline] for outline in objects])
    assert torch.equal(found(case), expected_targets(case, 28))


def test_a_square_by_hand():
    """A RoI of twice the mask's size: the square's corners are at 1 and 6 there."""
    mask = found(still([[SQUARE]], (0, 0, 56, 56)))[0]
    expected = torch.zeros((28, 28), dtype=torch.uint8)
    expected[1:6, 1:6] = 1
    assert torch.equal(mask, expected)


def test_mirroring_counts_from_the_last_pixel_of_the_resized_picture():
    """640 px become 1,280; x of 2 to 12 becomes 4 to 24, then 1275 to 1255."""
    case = still([[SQUARE]], (1251, 4, 1279, 32))
    case = case._replace(transform=torch.tensor([[2.0, 2.0, 1.0, 640.0]]))
    rows, columns_ = found(case)[0].nonzero().unbind(1)
    assert (columns_.min(), columns_.max() + 1, rows.min(), rows.max() + 1) == (4, 24, 0, 20)


def test_a_roi_narrower_than_a_pixel_is_drawn_as_one_of_a_pixel():
    case = still([[SQUARE], [SQUARE]], (2.25, 3.0, 2.5, 9.0))
    case = case._replace(boxes=torch.tensor([[2.25, 3.0, 2.5, 9.0], [2.25, 3.0, 3.25, 9.0]]))
    both = found(case)
    assert torch.equal(both[0], both[1])
    assert torch.equal(both, expected_targets(case, 28))


def test_no_object_no_polygon_and_no_roi():
    case = still([[SQUARE], []])
    assert not found(case._replace(object=torch.tensor([-1, 1]))).any()
    nothing = case._replace(object=case.object[:0], boxes=case.boxes[:0], transform=case.transform[:0])
    assert found(nothing).shape == (0, 28, 28)


# The table


def test_until_there_are_data_every_object_is_a_disc():
    table = PolygonTable(PolygonCapacity(5, 7, 210), torch.device("cpu"))
    case = still([[SQUARE]] * 5, EXAMPLE_BOX)
    masks = mask_targets_reference(table, case.object, case.boxes, case.transform, 28)
    corner = torch.arange(28) + 0.5 - 14
    disc = (corner.square() + corner[:, None].square() < 14 * 14).byte()
    assert ((masks != disc).float().mean((1, 2)) < 0.1).all()


def test_data_replace_all_that_was_there_and_no_address_changes():
    table = PolygonTable(PolygonCapacity(4, 6, 40), torch.device("cpu"))
    before = [column.data_ptr() for column in (table.object_bounds, table.polygon_bounds, table.xy)]
    for objects in ([[SQUARE], [SQUARE + 1, SQUARE + 2], [SQUARE]], [[SQUARE + 3]]):
        table.load(columns(objects))
        assert [column.data_ptr() for column in (table.object_bounds, table.polygon_bounds, table.xy)] == before
        parts = [len(outline) for outline in objects] + [0] * (4 - len(objects))
        assert table.object_bounds.diff().tolist() == parts
        assert table.polygon_bounds.diff()[: sum(parts)].tolist() == [4] * sum(parts)
        points = np.concatenate([part for outline in objects for part in outline])
        assert table.xy[: len(points)].tolist() == points.tolist()


@pytest.mark.parametrize("capacity", [(1, 9, 99), (9, 2, 99), (9, 9, 11)], ids=["objects", "polygons", "points"])
def test_data_above_the_capacity_are_refused_with_the_remedy(capacity):
    polygons = columns([[SQUARE], [SQUARE, SQUARE]])
    with pytest.raises(DataError, match=r"reader\.polygon_capacity=\{objects: 2, polygons: 3, points: 12\}"):
        PolygonTable(PolygonCapacity(*capacity), torch.device("cpu")).load(polygons)


def test_bounds_that_point_elsewhere_are_refused():
    polygons = columns([[SQUARE], [SQUARE, SQUARE]])
    polygons.polygon_bounds[1] = 9
    with pytest.raises(DataError, match="polygon_bounds don't rise from 0 to 12"):
        PolygonTable(PolygonCapacity(9, 9, 99), torch.device("cpu")).load(polygons)


def test_the_kernel_refuses_masks_of_more_rows_than_its_integers_have_bits():
    request = OperationRequest(torch.device("cuda"), torch.float16, {"size": 56})
    with pytest.raises(UnsupportedImplementation, match="size is at most 31, not 56"):
        mask_targets.MASK_TARGETS.select("triton", request)
