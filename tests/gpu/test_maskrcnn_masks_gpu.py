"""Mask targets and the virtual paste on a GPU: equal to pycocotools and to the references, and captured without a
wait for the device."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from pycocotools import mask as coco

from benchmarks.maskrcnn.ops import mask_targets, paste
from benchmarks.maskrcnn.ops.mask_targets.reference import mask_targets_reference
from benchmarks.maskrcnn.ops.paste.masks import Masks, find_runs
from benchmarks.maskrcnn.polygon_table import MADE_UP_BOX, PolygonRoom, PolygonTable
from tests.benchmarks.maskrcnn.mask_oracle import (
    Targets,
    codes,
    columns,
    expected_targets,
    pasted,
    random_masks,
    random_targets,
)

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

DRAW = mask_targets.MASK_TARGETS.function("triton")
PASTE = paste.PASTE.function("triton")


def drawn(case: Targets, size: int) -> torch.Tensor:
    table = case.table("cuda")
    return DRAW(table, case.object.cuda(), case.boxes.cuda(), case.transform.cuda(), size).cpu()


@pytest.mark.parametrize("size", [28, 14, 31])
def test_targets_are_pycocotools(size: int) -> None:
    case = random_targets(seed=size, rois=1536, most_points=80)
    assert torch.equal(drawn(case, size), expected_targets(case, size))


@pytest.mark.parametrize("step", [1.0, 0.5, 0.1])
def test_corners_on_the_grid_where_roundings_tie(step: float) -> None:
    random = np.random.default_rng(int(10 * step))
    objects = []
    for _ in range(2000):
        corners = random.uniform(-0.5, 1.5, (random.integers(3, 40), 2)) * random.choice([8, 28, 600, 6000])
        objects.append([(np.round(corners / step) * step).astype(np.float32)])
    transform = torch.tensor([1.0, 1.0, 0.0, 640.0]).expand(2000, 4)
    case = Targets(objects, torch.arange(2000), torch.tensor([[0.0, 0, 28, 28]]).expand(2000, 4), transform)
    assert torch.equal(drawn(case, 28), expected_targets(case, 28))


def test_targets_from_a_table_as_large_as_cocos() -> None:
    """Of the reference, from the first to the last of its 20.9 million points."""
    room = PolygonRoom(850_000, 970_000, 20_900_000)
    table = PolygonTable(room, torch.device("cuda"))
    objects = torch.randint(room.objects, (1536,), device="cuda")
    objects[0], objects[1], objects[2::3] = 0, room.objects - 1, -1
    boxes = torch.tensor(MADE_UP_BOX, device="cuda") + 10 * torch.randn((1536, 4), device="cuda")
    transform = torch.tensor([1.0, 1.0, 0.0, 640.0], device="cuda").repeat(1536, 1)
    found = DRAW(table, objects, boxes, transform, 28)
    assert found[:2].flatten(1).any(1).all()
    assert torch.equal(found, mask_targets_reference(table, objects, boxes, transform, 28))


def test_targets_are_captured_and_follow_the_table() -> None:
    """The graph is captured before the data are there."""
    case = random_targets(seed=5, rois=200)
    polygons = columns(case.objects)
    room = PolygonRoom(len(case.objects), len(polygons.polygon_bounds), len(polygons.xy))
    table = PolygonTable(room, torch.device("cuda"))
    given = case.object.cuda(), case.boxes.cuda(), case.transform.cuda()
    DRAW(table, *given, 28)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        DRAW(table, *given, 28)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = DRAW(table, *given, 28)
    table.load(polygons)
    graph.replay()
    assert torch.equal(captured.cpu(), expected_targets(case, 28))


# Paste


def cuda(masks: Masks) -> Masks:
    return Masks(*(column.cuda() for column in masks))


def test_codes_are_those_of_whole_pictures() -> None:
    masks = random_masks(0, 2000)
    found = find_runs(PASTE, 0.5, *cuda(masks))
    for place, code in enumerate(codes(found, masks)):
        assert code == coco.encode(np.asfortranarray(pasted(masks, place, 0.5)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_runs_in_pictures_of_cocos_size_are_the_references(dtype: torch.dtype) -> None:
    masks = random_masks(1, 1200, most=640)
    masks = masks._replace(probability_DSS=masks.probability_DSS.to(dtype), there_D=torch.arange(1200) % 7 != 3)
    expected = find_runs(paste.PASTE.reference, 0.5, *masks)
    for one, other in zip(find_runs(PASTE, 0.5, *cuda(masks)), expected, strict=True):
        assert torch.equal(one.cpu(), other)


def test_both_passes_are_captured() -> None:
    masks = cuda(random_masks(2, 300))
    counts, ends = find_runs(PASTE, 0.5, *masks)
    first = counts.long().cumsum(0) - counts

    def work() -> list[torch.Tensor]:
        written = torch.zeros_like(ends)
        PASTE.write_ends(masks, 0.5, first, written)
        return [PASTE.count_runs(masks, 0.5), written]

    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        eager = work()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert torch.equal(eager[0], counts)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = work()
    for tensor in captured:
        tensor.fill_(-1)
    graph.replay()
    assert all(torch.equal(one, other) for one, other in zip(captured, eager, strict=True))
