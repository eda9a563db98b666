"""Test proposals and matching of Mask R-CNN on a GPU, bit by bit against the references, and captured together.

The sizes are those of 12 pictures of 800 x 1344 pixels.
"""

from __future__ import annotations

from typing import Literal

import pytest
import torch
from torch import Tensor

from benchmarks.maskrcnn.config import Facts
from benchmarks.maskrcnn.proposals import PIXEL, Proposer, Selection, anchors, with_truth
from benchmarks.maskrcnn.targets import RoiTargets, RpnTargets
from common.mlperf.fixed import fixed_facts
from common.ops import anchor_matching, suppression
from common.ops.anchor_matching import MatchingRule

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

FACTS = fixed_facts(Facts, "maskrcnn")
HEIGHT, WIDTH, PICTURES, ROOM = 800, 1344, 12, 96


def boxes(pictures: int, count: int, seed: int) -> Tensor:
    """Corners of whole pixels, of all sizes, so that overlaps tie."""
    random = torch.Generator(device="cuda").manual_seed(seed)
    limits = torch.tensor([WIDTH, HEIGHT], device="cuda")
    first = torch.rand((pictures, count, 2), device="cuda", generator=random) * limits
    size = torch.rand((pictures, count, 2), device="cuda", generator=random) ** 3 * 500 + 2
    return torch.cat([first, torch.minimum(first + size, limits - 1)], 2).floor()


def truth(seed: int) -> dict[str, Tensor]:
    """Objects of each picture: none, one and more."""
    return {
        "boxes": boxes(PICTURES, ROOM, seed),
        "label": torch.randint(1, FACTS.classes + 1, (PICTURES, ROOM), device="cuda"),
        "count": torch.tensor([0, 1, 7, 40, 96, 3, 7, 7, 0, 12, 5, 9], device="cuda"),
        "size": torch.tensor([[HEIGHT, WIDTH - 7 * number] for number in range(PICTURES)], device="cuda").float(),
        "real": torch.arange(PICTURES, device="cuda") < PICTURES - 1,
        "seed": torch.tensor([seed], device="cuda"),
    }


def head_outputs(levels: list[Tensor], seed: int) -> list[tuple[Tensor, Tensor]]:
    """Logits and offsets of each level, in bf16, many of which are equal."""
    random = torch.Generator(device="cuda").manual_seed(seed)
    return [
        (
            torch.randn((PICTURES, len(level)), device="cuda", generator=random).bfloat16(),
            0.3 * torch.randn((PICTURES, len(level), 4), device="cuda", generator=random).bfloat16(),
        )
        for level in levels
    ]


@pytest.mark.parametrize(("candidates", "keep"), [(2000, 2000), (1000, 1000), (819, 819), (2000, 100)])
def test_suppression_of_all_levels_is_that_of_the_reference(candidates: int, keep: int) -> None:
    of_levels = boxes(5 * PICTURES, candidates, 2)
    score = torch.linspace(9, -9, candidates, device="cuda").repeat(5 * PICTURES, 1)
    score[3, candidates // 2 :] = -torch.inf
    score[4] = -torch.inf
    found, expected = (
        suppression.SUPPRESSION.function(name)(
            of_levels, score, None, FACTS.rpn_nms_threshold, keep, pixel=PIXEL, presorted=True
        )
        for name in ("triton", "reference")
    )
    for mine, other in zip(found, expected, strict=True):
        assert torch.equal(mine, other)


def test_matches_of_a_pictures_own_proposals_are_those_of_the_reference() -> None:
    objects, own = truth(3), boxes(PICTURES, 8_915, 4)
    rule = MatchingRule(FACTS.roi_low, FACTS.roi_low, pixel=PIXEL)
    found, expected = (
        anchor_matching.ANCHOR_MATCHING.function(name)(own, objects["boxes"], objects["count"], rule)
        for name in ("triton", "reference")
    )
    assert torch.equal(found, expected)


@pytest.mark.parametrize("over", ["micro_batch", "picture"])
def test_the_chain_is_captured_and_gives_what_the_references_give(over: Literal["micro_batch", "picture"]) -> None:
    device = torch.device("cuda", torch.cuda.current_device())
    levels = [level.to(device) for level in anchors(FACTS, (HEIGHT, WIDTH))]
    inputs, objects = head_outputs(levels, 5), truth(6)
    wanted = 12_000 if over == "micro_batch" else 1_000
    selection = Selection(FACTS.train_candidates, wanted, over)

    def chain(implementation: str) -> list[Tensor]:
        implementations = dict.fromkeys(("suppression", "anchor_matching"), implementation)
        propose = Proposer(FACTS, selection, implementations, device)
        rpn_targets = RpnTargets(FACTS, implementations, device)
        roi_targets = RoiTargets(FACTS, implementations, device)
        found = propose(inputs, levels, objects["size"], objects["real"])
        rpn = rpn_targets(
            torch.cat(levels), objects["boxes"], objects["count"], objects["size"], objects["real"], objects["seed"]
        )
        rois = roi_targets(
            with_truth(found, objects["boxes"], objects["count"]),
            objects["boxes"], objects["label"], objects["count"], objects["seed"],
        )  # fmt: skip
        return [*found, *rpn, *rois]

    with torch.cuda.stream(torch.cuda.Stream()):
        chain("triton")
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error")
        try:
            chain("triton")
        finally:
            torch.cuda.set_sync_debug_mode("default")
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=torch.cuda.current_stream()):
            captured = chain("triton")
        for (logits, offsets), (others, other_offsets) in zip(inputs, head_outputs(levels, 7), strict=True):
            logits.copy_(others)
            offsets.copy_(other_offsets)
        for name, tensor in truth(8).items():
            objects[name].copy_(tensor)
        graph.replay()
        expected = chain("reference")
        torch.cuda.synchronize()
    for mine, other in zip(captured, expected, strict=True):
        assert torch.equal(mine, other)
