"""Test operations, proposals and matching of Mask R-CNN on a GPU: CUDA graphs, real sizes, and large offsets."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import pytest
import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from benchmarks.maskrcnn.config import Facts
from benchmarks.maskrcnn.ops import mask_targets, paste, resize, roi_align, selected_logits
from benchmarks.maskrcnn.polygon_table import PolygonTable
from benchmarks.maskrcnn.proposals import PIXEL, Proposer, Selection, anchors, with_truth
from benchmarks.maskrcnn.targets import RoiTargets, RpnTargets
from common.mlperf.fixed import fixed_facts
from common.ops import anchor_matching, suppression
from common.ops.anchor_matching import MatchingRule
from common.ops.cases import Draw, Pass
from common.ops.catalogue import cases_of
from common.ops.operation import Operation
from tests.gpu.support import captured

pytestmark = pytest.mark.gpu

OPERATIONS = (
    mask_targets.MASK_TARGETS,
    paste.PASTE,
    resize.RESIZE,
    roi_align.ROI_ALIGN,
    selected_logits.SELECTED_LOGITS,
)


def built(operation: Operation, skipped: int, **sizes: Any) -> tuple[list[Pass], list[tuple[Any, ...]]]:
    """Return the passes of the kernels, and a list to which they append the arguments of every call.

    ``skipped`` values are drawn first, so that another number gives other inputs.
    """
    case, arguments = cases_of(operation)[0], []
    draw = Draw(torch.device("cuda"), case.dtypes[-1])
    draw.normal(skipped)

    def recorded(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*given: Any) -> Any:
            arguments.append(given)
            return function(*given)

        return call

    function: Any = operation.function("triton")
    wrapped = function._make(map(recorded, function)) if hasattr(function, "_make") else recorded(function)
    return case.passes(wrapped, draw, **{**(case.gpu or {}), **sizes}), arguments


def tensors(tree: Any) -> list[Tensor]:
    """Return all tensors, including the tensors of polygon tables."""
    found = []
    for leaf in tree_leaves(tree):
        if isinstance(leaf, PolygonTable):
            found += [leaf.object_bounds, leaf.polygon_bounds, leaf.xy]
        elif isinstance(leaf, Tensor):
            found.append(leaf)
    return found


@pytest.mark.parametrize("operation", OPERATIONS, ids=lambda operation: operation.name)
def test_passes_wait_for_nothing_and_their_graph_follows_the_inputs(operation: Operation) -> None:
    """The graph gives the same bits as the passes after other inputs are copied into its inputs."""
    passes, arguments = built(operation, 0)
    others, other_arguments = built(operation, 1000)

    def step() -> list[Tensor]:
        return [x.detach() for x in tensors([each.run() for each in passes])]

    for each in others:
        each.run()
    torch.cuda.synchronize()
    calls = len(other_arguments)
    graph, results = captured(step)
    with torch.no_grad():
        for own, other in zip(tensors(arguments[:calls]), tensors(other_arguments), strict=True):
            own.copy_(other)
        for tensor in results:
            tensor.zero_()
    graph.replay()
    found = [tensor.clone() for tensor in results]
    assert any(tensor.any() for tensor in found)
    for one, other in zip(found, step(), strict=True):
        assert torch.equal(one, other)


def test_batches_of_more_than_two_billion_values_are_resized_whole() -> None:
    """Offsets in a large evaluation batch can exceed 32 bits."""
    few, shape = 4, (800, 1344)
    pictures = (((480, 640), (800, 1066), True),) * few
    passes, arguments = built(resize.RESIZE, 0, pictures=pictures, shape=shape)
    expected, _ = passes[0].run()
    many = [x.repeat(170, *[1] * (x.dim() - 1)) if isinstance(x, Tensor) else x for x in arguments[0]]
    assert len(many[0]) * 3 * shape[0] * shape[1] > 2**31
    assert torch.equal(resize.RESIZE.function("triton")(*many)[-few:], expected)


# Proposals and matching of 12 pictures of 800 x 1344 pixels


FACTS = fixed_facts(Facts, "maskrcnn")
HEIGHT, WIDTH, PICTURES, CAPACITY = 800, 1344, 12, 96


def boxes(pictures: int, count: int, seed: int) -> Tensor:
    """Return boxes of all sizes with integer corners, so that overlaps tie."""
    random = torch.Generator(device="cuda").manual_seed(seed)
    limits = torch.tensor([WIDTH, HEIGHT], device="cuda")
    first = torch.rand((pictures, count, 2), device="cuda", generator=random) * limits
    size = torch.rand((pictures, count, 2), device="cuda", generator=random) ** 3 * 500 + 2
    return torch.cat([first, torch.minimum(first + size, limits - 1)], 2).floor()


def truth(seed: int) -> dict[str, Tensor]:
    """Return the objects of each picture: none, one or more."""
    return {
        "boxes": boxes(PICTURES, CAPACITY, seed),
        "label": torch.randint(1, FACTS.classes + 1, (PICTURES, CAPACITY), device="cuda"),
        "count": torch.tensor([0, 1, 7, 40, 96, 3, 7, 7, 0, 12, 5, 9], device="cuda"),
        "size": torch.tensor([[HEIGHT, WIDTH - 7 * number] for number in range(PICTURES)], device="cuda").float(),
        "real": torch.arange(PICTURES, device="cuda") < PICTURES - 1,
        "seed": torch.tensor([seed], device="cuda"),
    }


def predictions(levels: list[Tensor], seed: int) -> list[tuple[Tensor, Tensor]]:
    """Return logits and offsets of each level in bf16; many are equal."""
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
    inputs, objects = predictions(levels, 5), truth(6)
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

    graph, results = captured(lambda: chain("triton"))
    for (logits, offsets), (others, other_offsets) in zip(inputs, predictions(levels, 7), strict=True):
        logits.copy_(others)
        offsets.copy_(other_offsets)
    for name, tensor in truth(8).items():
        objects[name].copy_(tensor)
    graph.replay()
    for mine, other in zip(results, chain("reference"), strict=True):
        assert torch.equal(mine, other)
