"""Test detection on a GPU: references against the CPU, capture without waiting for the device, and large tensors."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from benchmarks.retinanet.ops.focal_loss import FOCAL_LOSS
from common.detection.coco_scoring import Detections, GroundTruth, score
from common.detection.coding import BoxCoding, clip
from common.ops.anchor_matching import ANCHOR_MATCHING, MatchingRule, match_reference
from common.ops.anchor_matching.cases import RETINANET, SSD
from common.ops.suppression import SUPPRESSION, suppress_reference
from tests.common.detection.test_coco_scoring import synthetic
from tests.gpu.support import captured, replay_over_nan

pytestmark = pytest.mark.gpu

CODING = BoxCoding((10.0, 10.0, 5.0, 5.0), most_growth=1000 / 16)


def boxes(seed: int, *shape: int) -> Tensor:
    random = torch.Generator().manual_seed(seed)
    corner = torch.randint(600, (*shape, 2), generator=random)
    return torch.cat([corner, corner + torch.randint(8, 200, (*shape, 2), generator=random)], -1).float()


@pytest.mark.parametrize("rule", [RETINANET, SSD], ids=lambda rule: rule.rescue)
def test_references_give_what_they_give_on_the_cpu(rule: MatchingRule) -> None:
    given = boxes(0, 20_000), boxes(1, 4, 60), torch.tensor([60, 0, 7, 31])
    matched = match_reference(*(tensor.cuda() for tensor in given), rule)
    assert torch.equal(matched.cpu(), match_reference(*given, rule))
    points = torch.stack([torch.randperm(3000, generator=torch.Generator().manual_seed(n)) for n in range(8)]) / 3000
    found = boxes(2, 8, 3000), points, (points * 5000).long() % 5
    for mine, expected in zip(
        suppress_reference(*(tensor.cuda() for tensor in found), 0.5, 300),
        suppress_reference(*found, 0.5, 300),
        strict=True,
    ):
        assert torch.equal(mine.cpu(), expected)


@pytest.mark.parametrize("name", ["reference", "triton"])
def test_everything_between_pictures_and_detections_is_captured(name: str) -> None:
    anchors, count = boxes(3, 5000).cuda(), torch.tensor([9, 0], device="cuda")
    truth, offsets = boxes(4, 2, 20).cuda(), (boxes(5, 2, 5000) / 800 - 0.5).cuda()
    points, classes = (offsets[..., 0] + 1).contiguous(), (offsets[..., 1] * 10).long()
    match, suppress = ANCHOR_MATCHING.function(name), SUPPRESSION.function(name)

    def work() -> list[Tensor]:
        matched = match(anchors, truth, count, RETINANET)
        target = CODING.encode(truth.gather(1, matched.clamp(min=0).unsqueeze(2).expand(-1, -1, 4)), anchors)
        found = clip(CODING.decode(offsets, anchors), 600.0, 800.0)
        return [matched, target, *suppress(found, points, classes, 0.5, 100)]

    graph, results = captured(work)
    eager = [tensor.clone() for tensor in work()]
    count.fill_(3)
    graph.replay()
    assert not torch.equal(results[0], eager[0])
    count.copy_(torch.tensor([9, 0]))
    graph.replay()
    assert all(torch.equal(one, other) for one, other in zip(results, eager, strict=True))


def test_scores_are_the_cpus() -> None:
    truth, found = synthetic(0, pictures=300, classes=80, boxes=2_000, found=30_000)
    there = GroundTruth(**{name: column.cuda() for name, column in vars(truth).items()})
    seen = Detections(**{name: column.cuda() for name, column in vars(found).items()})
    assert score(there, seen) == pytest.approx(score(truth, found), rel=0, abs=1e-12)


def focal_loss(pictures: int, cells: int) -> tuple[list[Tensor], list[Tensor]]:
    """Return logits and bias, and classes and weights of pictures, for a level with the anchors of RetinaNet."""
    shape = (pictures, 9 * 264, cells, cells)
    logits = torch.empty(shape, device="cuda", dtype=torch.float16, memory_format=torch.channels_last).normal_()
    bias = torch.full((9 * 264,), -3.0, device="cuda", dtype=torch.float16)
    classes = torch.randint(-2, 264, (pictures, 9 * cells**2 + 7), device="cuda")[:, : 9 * cells**2]
    weight = torch.rand(pictures, device="cuda") / pictures
    return [logits.requires_grad_(), bias.requires_grad_()], [classes, weight]


def loss_and_gradients(leaves: list[Tensor], given: list[Tensor], scale: Tensor) -> list[Tensor]:
    """Return the loss and the gradients of the scaled loss."""
    loss = FOCAL_LOSS.function("triton")(*leaves, *given, 0.25, 2.0, scale)
    return [loss.detach(), *torch.autograd.grad(loss * scale, leaves)]


def test_more_logits_than_int32_counts() -> None:
    leaves, given = focal_loss(100, 100)
    assert leaves[0].numel() > 1 << 31
    scale = torch.tensor(4.0, device="cuda")
    _, d_logits, _ = loss_and_gradients(leaves, given, scale)
    for own in (slice(0, 1), slice(99, 100)):
        alone = [leaves[0].detach()[own].requires_grad_(), leaves[1]]
        assert torch.equal(d_logits[own], loss_and_gradients(alone, [part[own] for part in given], scale)[1])


def test_loss_is_captured_and_gives_the_same_bits_in_every_run() -> None:
    leaves, given = focal_loss(3, 25)
    scale = torch.tensor(256.0, device="cuda")
    graph, results = captured(lambda: loss_and_gradients(leaves, given, scale))
    for factor in (64.0, 128.0):
        leaves[0].detach().normal_()
        scale.fill_(factor)
        replay_over_nan(graph, results)
        for tensor, eager in zip(results, loss_and_gradients(leaves, given, scale), strict=True):
            assert eager.isfinite().all()
            assert torch.equal(tensor, eager)
