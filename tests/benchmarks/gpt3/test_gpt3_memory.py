"""What a rank of GPT-3 is expected to keep, against hand-worked numbers."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from benchmarks.gpt3.config import Facts
from common.distributed.pipeline.order import layers_of
from common.distributed.tensor_parallel.ranks import TensorParallel
from common.language.memory import StageWorkspace
from common.language.network import Decoder
from common.mlperf.fixed import fixed_facts
from common.optim.memory_plan import KEPT, MemoryPlan

SHAPE = fixed_facts(Facts, "gpt3")
STATE, WEIGHTS8, LOGITS = "weights, gradients and optimizer", "weights in FP8", "gradients of logits"


def stage(stage: int, stages: int, chunks: int, ranks: int, shards: int, **given: object) -> StageWorkspace:
    """A rank of a stage, in bf16 but for ``given``."""
    parallel = TensorParallel(ranks, 0, None if ranks == 1 else object())
    model = Decoder(
        SHAPE, "meta", torch.bfloat16, parallel=parallel, parts=layers_of(SHAPE.layers, stage, stages, chunks),
        first=stage == 0, last=stage == stages - 1,
    )  # fmt: skip
    return StageWorkspace(
        architecture=SHAPE, ranks=ranks, eval_tokens=0, itemsize=2, head_chunk=2048, alone=False, shards=shards,
        own_parameters=sum(parameter.numel() for parameter in model.parameters()), stage=stage, stages=stages,
        chunks=chunks, **{**BF16, **given},
    )  # fmt: skip


BF16 = {"micro_batches": 64, "tokens": 4096, "master_bytes": 4, "fp8": False, "deferred_head": 0}
FP8 = {**BF16, "fp8": True, "deferred_head": 65}


def test_a_layer_keeps_22_bytes_of_a_feature_in_fp8_and_20_in_16_bits():
    small = 8 + 4 * 96  # moments and log-sum-exps
    assert stage(0, 8, 1, 1, 1, **FP8).layer() == 4096 * (22 * 12288 + small)
    assert stage(0, 8, 1, 1, 1).layer() == 4096 * (20 * 12288 + small)


@pytest.mark.parametrize(
    ("number", "units", "waiting"),
    [(0, 2 * 7 + 5 * 8 + 1, 0), (7, 5 * 8 + 1, 64)],
)
def test_a_stage_of_512_gpus(number, units, waiting):
    """Two layers a unit; the warm-up of the order and one more are on their way; 64 micro-batches of logits wait."""
    work = stage(number, 8, 6, 4, 16, **FP8)
    found = work.parts(0, 0)
    assert found[STATE] == work.own_parameters * (2 + 2 + (4 + 8 + 2 + 2) / 16)
    assert found[WEIGHTS8] == 12 * 12 * 12288**2 / 4
    assert found[KEPT] == pytest.approx(units * 2 * 4096 * 22 * 12288 / 4, rel=0.002)
    assert found[LOGITS] == waiting * 4096 * 2 * (50688 + 12288) / 4
    plan = MemoryPlan(found, 0, 0, "", None)
    assert 55e9 < plan.total < 75e9  # of 80
    assert f"{plan.total / 1e9:.1f} GB and some of scratch" in plan.in_words()


def test_all_layers_on_one_gpu():
    work = stage(0, 1, 1, 1, 1)
    own, found = work.own_parameters, work.parts(0, 0)
    assert own == 96 * SHAPE.parameters_per_layer + (50304 + 2048 + 2) * 12288
    assert found[STATE] == 16 * own
    assert found[WEIGHTS8] == 0
    assert found[KEPT] == pytest.approx(96 * 4096 * 20 * 12288, rel=0.002)  # a single micro-batch
    assert found[LOGITS] == 4096 * 2 * (50304 + 12288)
    in_fp32 = replace(work, gradient_bytes=4).parts(0, 0)
    assert in_fp32[STATE] == 18 * own
    assert sum(in_fp32.values()) - sum(found.values()) == 2 * own


@pytest.mark.parametrize(("number", "slots"), [(0, 8), (5, 3), (7, 1)])
def test_graphs_of_chunks_hold_the_maximum_of_every_chunk(number, slots):
    """A single chunk as many micro-batches as stages from it on; of several each its own most, at whatever time."""
    found = stage(number, 8, 1, 8, 1, micro_batches=1536, tokens=2048, chunk_graphs=True).parts(0, 0)
    assert found[KEPT] == pytest.approx(slots * 12 * 2048 * 20 * 12288 / 8, rel=0.002)
    several = [stage(number, 8, 6, 4, 16, chunk_graphs=graphs).parts(0, 0)[KEPT] for graphs in (False, True)]
    assert several[0] <= several[1]
