"""Test embeddings sharded over GPUs: every placement trains as PyTorch's tables on one rank, eagerly and in graphs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from common.distributed.layout import Layout
from tests.common.recommendation import embedding_ranks as small

pytestmark = pytest.mark.multigpu

ITERATIONS = small.ITERATIONS
MODES: dict[str, dict[str, Any]] = {
    "fp16": {"dtype": torch.float16, "scale": 64.0},
    "bf16": {"dtype": torch.bfloat16},
}


def run_rank(rank: int, world: int, folder: Path) -> dict[str, Any]:
    device = torch.device("cuda", rank)
    layout = Layout({"dp": world}, rank, device=device, seed=small.SEED)
    results: dict[str, Any] = {}
    for name, plan in small.plans(world).items():
        for mode in MODES:
            for early, captured in ((False, False), (True, True)):
                key = f"{name}.{mode}.{captured}"
                options = {**MODES[mode], "rule": small.RULES["sgd"], "early": early, "captured": captured}
                sgd = small.train(plan, layout, overlap=early, ranks_per_node=2 if early else None, **options)
                results[key] = {part: value.cpu() for part, value in sgd.items()}
    for captured in (False, True):
        trainee = small.Trainee(small.plans(world)["mixed"], layout, **MODES["fp16"], captured=captured, early=captured)
        before = trainee.everything()
        overflow = trainee.iterate(0, small.MICRO_BATCHES - 1)
        after = trainee.everything()
        trainee.runner.close()
        changed = [n for n, tensor in before.items() if "scale" not in n and not torch.equal(tensor, after[n])]
        results[f"overflow.{captured}"] = {"overflow": overflow, "changed": changed}
    return results


@pytest.mark.parametrize("mode", MODES)
def test_every_placement_trains_nearly_as_tables_of_pytorch(ranks, mode):
    start, end = small.reference(iterations=0).rows, small.reference("sgd").rows
    for name in small.plans(len(ranks)):
        errors = moved = 0.0
        for number, (first, last) in enumerate(zip(start, end, strict=True)):
            found = torch.full_like(last, torch.nan)
            for parts in (rank[f"{name}.{mode}.False"] for rank in ranks):
                for part, value in parts.items():
                    if part.startswith(f"{number}/"):
                        _, shard, shards = (int(text) for text in part.split("/"))
                        found[shard::shards] = value.double()
            errors, moved = errors + float((found - last).norm()), moved + float((first - last).norm())
        assert 0 < errors < 0.1 * moved, name


def test_captured_training_equals_eager_training(ranks):
    for rank in ranks:
        for name in small.plans(len(ranks)):
            for mode in MODES:
                plain = rank[f"{name}.{mode}.False"]
                captured = rank[f"{name}.{mode}.True"]
                for part, value in plain.items():
                    # Replicated rows and dense weights are sums over ranks, whose order NCCL may choose anew.
                    torch.testing.assert_close(captured[part].float(), value.float(), rtol=2e-2, atol=2e-3)


@pytest.mark.parametrize("captured", [False, True])
def test_a_gradient_that_is_not_finite_keeps_all_ranks_from_writing(ranks, captured):
    assert all(rank[f"overflow.{captured}"] == {"overflow": True, "changed": []} for rank in ranks)
