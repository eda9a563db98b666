"""Parts of detection on a GPU: equal to the CPU's, and captured without a wait for the device."""

from __future__ import annotations

import pytest
import torch
import torchvision

from common.detection import bench
from common.detection.coco_scoring import Detections, GroundTruth, score
from common.detection.coding import BoxCoding, clip
from common.ops import anchor_matching, suppression
from common.ops.anchor_matching.reference import MatchingRule, match_reference
from common.ops.bench import detection as size
from common.ops.suppression.reference import suppress_reference

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

CODING = BoxCoding((10.0, 10.0, 5.0, 5.0), most_growth=1000 / 16)


def boxes(seed: int, *shape: int) -> torch.Tensor:
    random = torch.Generator().manual_seed(seed)
    corner = torch.randint(600, (*shape, 2), generator=random)
    return torch.cat([corner, corner + torch.randint(8, 200, (*shape, 2), generator=random)], -1).float()


RULES = pytest.mark.parametrize(
    "rule",
    [
        MatchingRule(0.4, 0.5, rescue="every_best"),
        MatchingRule(0.3, 0.7),
        MatchingRule(0.5, 0.5, exclusive=True, rescue="own_best"),
    ],
    ids=lambda rule: rule.rescue,
)


@pytest.mark.parametrize("name", anchor_matching.ANCHOR_MATCHING.names)
@RULES
def test_matches_are_the_cpus(name: str, rule: MatchingRule) -> None:
    arguments = boxes(0, 20_000), boxes(1, 4, 60), torch.tensor([60, 0, 7, 31])
    matched = anchor_matching.ANCHOR_MATCHING.function(name)(*(tensor.cuda() for tensor in arguments), rule)
    assert torch.equal(matched.cpu(), match_reference(*arguments, rule))


@RULES
def test_matches_of_retinanets_anchors_are_the_references(rule: MatchingRule) -> None:
    """Fractions of pixels, whose overlaps differ in the last bit wherever a product is fused with a sum."""
    anchors, real = size.anchors(), size.boxes(4, 400, side=300.0)
    assert len(anchors) == 120_087
    real[:, 1::2] = anchors[torch.randint(len(anchors), (4, 200), device="cuda")] + 0.25 * torch.rand(
        (4, 200, 4), device="cuda"
    )
    count = torch.tensor([400, 1, 0, 37], device="cuda")
    real[count[:, None] <= torch.arange(400, device="cuda")] = float("nan")
    found = anchor_matching.ANCHOR_MATCHING.function("triton")(anchors, real, count, rule)
    assert torch.equal(found, match_reference(anchors, real, count, rule))
    assert (found[2] == -1).all()
    assert (found[[0, 3]] >= 0).any(1).all()


@pytest.mark.parametrize("name", suppression.SUPPRESSION.names)
@pytest.mark.parametrize("pictures", [1, 8])
def test_suppression_is_torchvisions_on_the_cpu(pictures: int, name: str) -> None:
    found = boxes(2, pictures, 3000)
    points = torch.stack([torch.randperm(3000, generator=torch.Generator().manual_seed(n)) for n in range(pictures)])
    classes = torch.randint(5, points.shape, generator=torch.Generator().manual_seed(9))
    suppress = suppression.SUPPRESSION.function(name)
    kept, there = suppress(found.cuda(), points.cuda() / 3000, classes.cuda(), 0.5, 300)
    assert there.all()
    for row in range(pictures):
        expected = torchvision.ops.batched_nms(found[row], points[row] / 3000, classes[row], 0.5)
        assert kept[row].tolist() == expected[:300].tolist()


@pytest.mark.parametrize(
    ("candidates", "keep", "classes"), [(5000, 300, 264), (5000, 5000, 20), (777, 777, 1), (3, 9, 1)]
)
def test_suppression_is_the_references(candidates: int, keep: int, classes: int) -> None:
    """Fractions of pixels, equal scores, and candidates that are not there."""
    found = size.boxes(3, candidates, side=400.0)
    score = torch.rand((3, candidates), device="cuda").mul(1000).round() / 1000
    score[1, candidates // 2 :] = -torch.inf
    score[2] = -torch.inf
    ids = torch.randint(classes, (3, candidates), device="cuda")
    kept, there = suppression.SUPPRESSION.function("triton")(found, score, ids, 0.5, keep)
    expected_kept, expected_there = suppress_reference(found, score, ids, 0.5, keep)
    assert torch.equal(there, expected_there)
    assert torch.equal(kept, expected_kept)


@pytest.mark.parametrize("name", ["reference", "triton"])
def test_everything_between_pictures_and_detections_is_captured(name: str) -> None:
    anchors, count = boxes(3, 5000).cuda(), torch.tensor([9, 0], device="cuda")
    truth, offsets = boxes(4, 2, 20).cuda(), (boxes(5, 2, 5000) / 800 - 0.5).cuda()
    points, classes = (offsets[..., 0] + 1).contiguous(), (offsets[..., 1] * 10).long()
    rule = MatchingRule(0.4, 0.5, rescue="every_best")
    match, suppress = anchor_matching.ANCHOR_MATCHING.function(name), suppression.SUPPRESSION.function(name)

    def work() -> list[torch.Tensor]:
        matched = match(anchors, truth, count, rule)
        target = CODING.encode(truth.gather(1, matched.clamp(min=0).unsqueeze(2).expand(-1, -1, 4)), anchors)
        found = clip(CODING.decode(offsets, anchors), 600.0, 800.0)
        return [matched, target, *suppress(found, points, classes, 0.5, 100)]

    work()
    torch.cuda.set_sync_debug_mode("error")
    try:
        eager = [tensor.clone() for tensor in work()]
    finally:
        torch.cuda.set_sync_debug_mode("default")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = work()
    count.fill_(3)
    graph.replay()
    assert not torch.equal(captured[0], eager[0])
    count.copy_(torch.tensor([9, 0]))
    graph.replay()
    assert all(torch.equal(one, other) for one, other in zip(captured, eager, strict=True))


def test_scores_are_the_cpus() -> None:
    truth, found = bench.made_up(300, 100, 0.5, torch.device("cpu"))
    there = GroundTruth(**{name: column.cuda() for name, column in vars(truth).items()})
    seen = Detections(**{name: column.cuda() for name, column in vars(found).items()})
    assert score(there, seen) == pytest.approx(score(truth, found), rel=0, abs=1e-12)
