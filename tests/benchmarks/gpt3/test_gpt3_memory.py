"""What a rank of GPT-3 is expected to keep, against hand-worked numbers."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from benchmarks.gpt3.config import Facts
from benchmarks.gpt3.memory import Place, Step, expected, kept_of_a_token
from benchmarks.gpt3.network import Gpt
from common.distributed.pipeline.order import layers_of
from common.distributed.tensor_parallel.ranks import TensorParallel
from common.mlperf.fixed import fixed_facts

SHAPE = fixed_facts(Facts, "gpt3")
FP8 = Step(64, 4096, 2, 4, fp8=True, put_off_head=65, gradient_bytes=2)
BF16 = Step(64, 4096, 2, 4, fp8=False, put_off_head=0, gradient_bytes=2)


def parameters(stage: int, stages: int, chunks: int, ranks: int) -> int:
    parts = layers_of(SHAPE.layers, stage, stages, chunks)
    parallel = TensorParallel(ranks, 0, None if ranks == 1 else object())
    ends = stage == 0, stage == stages - 1
    model = Gpt(SHAPE, parts, *ends, torch.device("meta"), torch.bfloat16, parallel)
    return sum(parameter.numel() for parameter in model.parameters())


def test_a_layer_keeps_22_bytes_of_a_feature_in_fp8_and_20_in_16_bits():
    assert kept_of_a_token(SHAPE, FP8) == 22 * 12288
    assert kept_of_a_token(SHAPE, BF16) == 20 * 12288


@pytest.mark.parametrize(
    ("stage", "units", "waiting"),
    [(0, 2 * 7 + 5 * 8 + 1, 0), (7, 5 * 8 + 1, 64)],
)
def test_a_stage_of_512_gpus(stage, units, waiting):
    """Two layers a unit; the warm-up of the order and one more are on their way; 64 micro-batches of logits wait."""
    own = parameters(stage, 8, 6, 4)
    found = expected(SHAPE, own, Place(stage, 8, 6, 4, 16), FP8)
    assert found.state == own * (2 + 2 + (4 + 8 + 2 + 2) / 16)
    assert found.weights_in_fp8 == 12 * 12 * 12288**2 / 4
    assert found.kept == units * 2 * 4096 * 22 * 12288 / 4
    assert found.head == waiting * 4096 * 2 * (50688 + 12288) / 4
    assert 55e9 < found.total < 75e9  # of 80
    assert f"{found.total / 1e9:.1f} GB and some of scratch" in found.in_words()


def test_all_layers_on_one_gpu():
    own = parameters(0, 1, 1, 1)
    assert own == 96 * SHAPE.parameters_per_layer + (50304 + 2048 + 2) * 12288
    found = expected(SHAPE, own, Place(0, 1, 1, 1, 1), BF16)
    assert found.state == 16 * own
    assert found.weights_in_fp8 == 0
    assert found.kept == 96 * 4096 * 20 * 12288  # a single micro-batch
    assert found.head == 4096 * 2 * (50304 + 12288)
    in_fp32 = expected(SHAPE, own, Place(0, 1, 1, 1, 1), replace(BF16, gradient_bytes=4))
    assert in_fp32.state == 18 * own
    assert in_fp32.total - found.total == 2 * own


@pytest.mark.parametrize(("stage", "slots"), [(0, 8), (5, 3), (7, 1)])
def test_graphs_of_chunks_hold_what_every_chunk_has_at_most(stage, slots):
    """A single chunk as many micro-batches as stages from it on; of several each its own most, at whatever time."""
    own = parameters(stage, 8, 1, 8)
    step = replace(BF16, micro_batches=1536, tokens=2048, chunk_graphs=True)
    found = expected(SHAPE, own, Place(stage, 8, 1, 8, 1), step)
    assert found.kept == slots * 12 * 2048 * 20 * 12288 / 8
    several = [
        expected(SHAPE, own, Place(stage, 8, 6, 4, 16), replace(BF16, chunk_graphs=graphs)).kept
        for graphs in (False, True)
    ]
    assert several[0] <= several[1]
