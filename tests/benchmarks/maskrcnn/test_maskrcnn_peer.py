"""Test that the peer trains the same parameters as we do."""

import torch

from benchmarks.maskrcnn.config import Facts
from benchmarks.maskrcnn.peer import OBJECTS, build, noise, step_of
from common.mlperf.fixed import fixed_facts


def test_an_iteration_trains_as_many_parameters_as_the_rules_network_has():
    torch.manual_seed(0)
    facts, cpu, shape = fixed_facts(Facts, "maskrcnn"), torch.device("cpu"), (64, 96)
    model = build(facts, shape, cpu)
    assert sum(p.numel() for p in model.parameters() if p.requires_grad) == 44_125_173
    frozen = [p for p in model.parameters() if not p.requires_grad]
    before = [p.clone() for p in frozen]
    pictures, targets = noise(facts, shape, 1, cpu)
    assert step_of(model, pictures, targets, cpu)().isfinite()
    assert all(torch.equal(p, was) for p, was in zip(frozen, before, strict=True))


def test_masks_lie_in_their_boxes():
    facts, shape = fixed_facts(Facts, "maskrcnn"), (96, 128)
    (target,) = noise(facts, shape, 1, torch.device("cpu"))[1]
    assert target["masks"].shape == (OBJECTS, *shape)
    for (left, top, right, bottom), mask in zip(target["boxes"].tolist(), target["masks"], strict=True):
        rows, columns = mask.nonzero(as_tuple=True)
        assert left <= columns.min()
        assert columns.max() <= right
        assert top <= rows.min()
        assert rows.max() <= bottom
