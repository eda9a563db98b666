"""Test that the peer trains the same parameters as we do."""

import torch

from benchmarks.retinanet.config import Facts
from benchmarks.retinanet.peer import build, step_of
from common.mlperf.fixed import fixed_facts


def test_an_iteration_trains_as_many_parameters_as_the_rules_network_has():
    torch.manual_seed(0)
    facts, cpu = fixed_facts(Facts, "retinanet", image_size=64), torch.device("cpu")
    model = build(facts, cpu)
    assert sum(p.numel() for p in model.parameters() if p.requires_grad) == 36_849_004
    frozen = [p.clone() for p in model.parameters() if not p.requires_grad]
    step = step_of(model, facts, 1, cpu)
    assert step().isfinite()
    assert all(
        torch.equal(p, was)
        for p, was in zip((p for p in model.parameters() if not p.requires_grad), frozen, strict=True)
    )
