"""Test attention over edges on a GPU: long lists of edges, capture, and repeatability."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from benchmarks.rgat.graph import SampledBlock
from benchmarks.rgat.ops.edge_attention import EDGE_ATTENTION
from benchmarks.rgat.ops.edge_attention.cases import CASES
from benchmarks.rgat.synthetic import IGBH_EIGHTH
from common.ops.cases import Draw
from common.ops.dropout.reference import DropoutMask
from tests.benchmarks.rgat.random_blocks import filled, random_block
from tests.gpu.captures import captured
from tests.operation_checks import check

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

CUDA = torch.device("cuda")


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_long_rows_with_the_tiles_of_training(case: Any) -> None:
    """A source has thousands of edges in many chunks. Lower levels use the first entries."""
    sizes = {"seeds": 300, "papers": 600, "skew": 0.9, "compared": True}
    check(EDGE_ATTENTION, "triton", case, sizes, torch.float32, CUDA)


def test_the_same_bits_twice() -> None:
    sizes = {"seeds": 128, "papers": IGBH_EIGHTH // 16}
    forward, backward = CASES[0].passes(EDGE_ATTENTION.function("triton"), Draw(CUDA, torch.bfloat16), **sizes)

    def run() -> list[Tensor]:
        dz, others = backward.run()
        return [forward.run()[0], *dz, *others]

    first = run()
    for _ in range(3):
        assert all(torch.equal(*pair) for pair in zip(run(), first, strict=True))


def on_gpu(block: SampledBlock) -> SampledBlock:
    return SampledBlock.of(block.shape, {name: tensor.to(CUDA) for name, tensor in block.tensors().items()})


@pytest.mark.parametrize("name", ["reference", "triton"])
def test_a_captured_step_takes_the_next_block_and_seed(name: str) -> None:
    functions, draw, level, heads, width = EDGE_ATTENTION.function(name), Draw(CUDA, torch.float32), 2, 4, 8
    large = random_block(4, seeds=6, slack=100)
    small = random_block(5, seeds=6, fanouts=(2, 1, 1), shape=large.shape)
    block, shape, relations = on_gpu(small), large.shape, len(large.shape.schema.relations)
    z_MD = draw.normal(shape.row_offsets(level)[-1], heads * width)
    terms = draw.normal(len(z_MD), heads), draw.normal(shape.target_offsets(level)[-1], heads)
    bias_RD, att_source_RAd = draw.normal(relations, heads * width), draw.normal(relations, heads, width)
    dout_PD = draw.normal(shape.node_offsets(level - 1)[-1], heads * width)
    beyond, seed = ~filled(block, level).rows, torch.tensor(11, device=CUDA)
    options: dict[str, Any] = {"slope": 0.2, "activation_slope": 0.01, "dropout": DropoutMask(0.2, seed, 2)}
    dropped = torch.zeros(0, dtype=torch.bool, device=CUDA)

    def step() -> list[Tensor]:
        out_PD, log_sum_TA = functions.forward(z_MD, *terms, bias_RD, block, level, **options)
        dz_MD, *others = functions.backward(
            dout_PD, out_PD, z_MD, *terms, log_sum_TA, att_source_RAd, block, level, **options, deterministic=True
        )
        return [out_PD, dz_MD.masked_fill(beyond[:, None], 0), *others]

    graph, results = captured(step)
    for given, number in ((small, 11), (large, 11), (large, 12)):
        for own, tensor in zip(block.tensors().values(), given.tensors().values(), strict=True):
            own.copy_(tensor)
        beyond.copy_(~filled(block, level).rows)
        seed.fill_(number)
        graph.replay()
        expected = step()
        for found, other in zip(results, expected, strict=True):
            torch.testing.assert_close(found, other, rtol=0, atol=0)
        before, dropped = dropped, results[0] == 0
        assert not torch.equal(before, dropped)
