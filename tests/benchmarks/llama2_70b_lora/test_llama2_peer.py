"""Test that the peer trains the same adapters as we do, and nothing else."""

import torch

from benchmarks.llama2_70b_lora.config import Facts
from benchmarks.llama2_70b_lora.peer import build, step_of
from common.mlperf.fixed import fixed_facts

SMALL = {
    "vocabulary": 64,
    "hidden": 32,
    "heads": 4,
    "kv_heads": 2,
    "head_size": 8,
    "feed_forward": 48,
    "row_length": 16,
}


def test_an_iteration_trains_the_rules_adapters_on_the_same_row_with_checkpointing_or_without():
    facts, cpu = fixed_facts(Facts, "llama2_70b_lora", **SMALL), torch.device("cpu")
    losses = []
    for checkpointing in (False, True):
        torch.manual_seed(0)
        model = build(facts, 2, cpu)
        trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
        rank, width = facts.lora_rank, facts.heads * facts.head_size
        sizes = [facts.hidden + width, 2 * (facts.hidden + facts.kv_heads * facts.head_size), width + facts.hidden]
        assert sum(p.numel() for p in trained.values()) == 2 * rank * sum(sizes)
        step = step_of(model, facts, 2, cpu, checkpointing)
        losses.append([float(step()) for _ in range(4)])
        assert losses[-1][-1] < losses[-1][0]
    assert losses[0][0] == losses[1][0]
