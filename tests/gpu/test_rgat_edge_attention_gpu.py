"""Attention over edges on a GPU: the kernels against float64 at real sizes, captured, and bit by bit."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor

from benchmarks.rgat.block import Block
from benchmarks.rgat.made_up_graph import IGBH_EIGHTH
from benchmarks.rgat.ops.bench_block import bench_block
from benchmarks.rgat.ops.edge_attention import EDGE_ATTENTION
from benchmarks.rgat.ops.edge_attention.reference import EdgeAttention
from common.ops.dropout.reference import DropoutMask
from tests.benchmarks.rgat.edge_attention_bounds import TOLERANCE, assert_within, backward_terms, forward_terms
from tests.benchmarks.rgat.random_edges import filled, random_block, random_inputs

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

CUDA = torch.device("cuda")
SLOPE = 0.2


class Convolution:
    """Inputs of one convolution; ``garbage`` is NaN where the block fills nothing."""

    def __init__(
        self,
        block: Block,
        level: int,
        heads: int,
        width: int,
        dtype: torch.dtype,
        activation_slope: float | None = 0.01,
        p: float | None = 0.2,
        garbage: bool = True,
    ) -> None:
        self.block, self.level = block, level
        random = torch.Generator(CUDA).manual_seed(level)
        shape, relations = block.shape, len(block.shape.schema.relations)

        def normal(*size: int) -> Tensor:
            return torch.randn(size, device=CUDA, generator=random)

        self.z_MD = normal(shape.row_offsets(level)[-1], heads * width).to(dtype)
        self.dout_PD = normal(shape.node_offsets(level - 1)[-1], heads * width).to(dtype)
        self.source_term_MA = normal(len(self.z_MD), heads)
        self.target_term_TA = normal(shape.target_offsets(level)[-1], heads)
        self.bias_RD, self.att_source_RAd = normal(relations, heads * width), normal(relations, heads, width)
        self.beyond = ~filled(block, level, "rows")
        for tensor, what in (
            (self.z_MD, "rows"), (self.source_term_MA, "rows"), (self.target_term_TA, "targets"),
            (self.dout_PD, "nodes"),
        ):  # fmt: skip
            if garbage:
                tensor[~filled(block, level, what)] = torch.nan
        self.seed = torch.tensor(11, device=CUDA)
        dropout = None if p is None else DropoutMask(p, self.seed, 2)
        self.options: dict[str, Any] = {"slope": SLOPE, "activation_slope": activation_slope, "dropout": dropout}

    def doubled(self) -> Convolution:
        """The same numbers in float64."""
        other = copy.copy(self)
        for name, value in vars(self).items():
            if isinstance(value, Tensor) and value.is_floating_point():
                setattr(other, name, value.double())
        return other

    def forward(self, functions: EdgeAttention) -> tuple[Tensor, Tensor]:
        terms = self.source_term_MA, self.target_term_TA
        return functions.forward(self.z_MD, *terms, self.bias_RD, self.block, self.level, **self.options)

    def forward_terms(self) -> Tensor:
        terms = self.source_term_MA, self.target_term_TA
        return forward_terms(self.z_MD, *terms, self.bias_RD, self.block, self.level, **self.options)

    def backward_terms(self, out_PD: Tensor, log_sum_TA: Tensor) -> tuple[Tensor, ...]:
        return backward_terms(
            self.dout_PD, out_PD, self.z_MD, self.source_term_MA, self.target_term_TA, log_sum_TA,
            self.att_source_RAd, self.block, self.level, **self.options,
        )  # fmt: skip

    def backward(self, functions: EdgeAttention, out_PD: Tensor, log_sum_TA: Tensor) -> tuple[Tensor, ...]:
        """Gradients; dz is 0 beyond the rows that exist."""
        dz_MD, *rest = functions.backward(
            self.dout_PD, out_PD, self.z_MD, self.source_term_MA, self.target_term_TA, log_sum_TA,
            self.att_source_RAd, self.block, self.level, **self.options, deterministic=True,
        )  # fmt: skip
        return dz_MD.masked_fill(self.beyond[:, None], 0), *rest


def on_gpu(block: Block) -> Block:
    return Block.of(block.shape, {name: tensor.to(CUDA) for name, tensor in block.tensors().items()})


def assert_exact(work: Convolution, tolerance: float) -> None:
    """Results and gradients against the reference's in float64, which get the same results of forward."""
    plain, triton, exact = EDGE_ATTENTION.function("reference"), EDGE_ATTENTION.function("triton"), work.doubled()
    expected_PD, log_sum_TA = exact.forward(plain)
    found_PD, found_log_sum_TA = work.forward(triton)
    assert_within(found_PD, expected_PD, work.forward_terms(), tolerance)
    there = log_sum_TA.isfinite()
    torch.testing.assert_close(found_log_sum_TA[there].double(), log_sum_TA[there], rtol=1e-5, atol=1e-5)
    out_PD, log_sum_TA = expected_PD.to(found_PD.dtype), log_sum_TA.float()
    terms = work.backward_terms(out_PD, log_sum_TA)
    found = work.backward(triton, out_PD, log_sum_TA)
    expected = exact.backward(plain, out_PD.double(), log_sum_TA.double())
    for one, other, of_one in zip(found, expected, terms, strict=True):
        assert_within(one, other, of_one, tolerance)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("level", [1, 2, 3])
def test_a_block_like_the_data_sets(level: int, dtype: torch.dtype) -> None:
    last = {"activation_slope": None, "p": None} if level == 1 else {}
    assert_exact(Convolution(bench_block(128, CUDA, IGBH_EIGHTH // 16), level, 4, 128, dtype, **last), TOLERANCE[dtype])


@pytest.mark.parametrize(("heads", "width"), [(4, 8), (1, 3), (8, 1), (2, 256)])
def test_other_heads_and_widths(heads: int, width: int) -> None:
    block = on_gpu(random_block(1, hub=0.3))
    assert_exact(Convolution(block, 3, heads, width, torch.float32), TOLERANCE[torch.float32])


def test_long_rows_with_the_tiles_of_training() -> None:
    """A source of thousands of edges: through many chunks, of which lower levels count the first entries."""
    block = on_gpu(random_block(2, graph=600, seeds=200, fanouts=(15, 10, 5), hub=0.4))
    assert block.row_indptr.diff().max() > 1000
    for level in (1, 2, 3):
        assert_exact(Convolution(block, level, 4, 128, torch.float32), TOLERANCE[torch.float32])


def test_a_small_block_is_the_cpus() -> None:
    block = random_block(3)
    inputs = random_inputs(block, 2, 4, 8)
    options = {"slope": SLOPE, "activation_slope": 0.01, "dropout": DropoutMask(0.2, torch.tensor(5), 1)}
    arguments = inputs.z_MD, inputs.source_term_MA, inputs.target_term_TA, inputs.bias_RD
    expected, _ = EDGE_ATTENTION.function("reference").forward(*arguments, block, 2, **options)
    options["dropout"] = DropoutMask(0.2, torch.tensor(5, device=CUDA), 1)
    half = [tensor.float().to(CUDA) for tensor in arguments]
    found, _ = EDGE_ATTENTION.function("triton").forward(*half, on_gpu(block), 2, **options)
    torch.testing.assert_close(found.cpu().double(), expected, rtol=1e-5, atol=1e-5)


def test_the_same_bits_twice() -> None:
    work = Convolution(bench_block(128, CUDA, IGBH_EIGHTH // 16), 3, 4, 128, torch.bfloat16)
    functions = EDGE_ATTENTION.function("triton")
    out_PD, log_sum_TA = work.forward(functions)
    gradients = work.backward(functions, out_PD, log_sum_TA)
    for _ in range(3):
        assert torch.equal(work.forward(functions)[0], out_PD)
        again = work.backward(functions, out_PD, log_sum_TA)
        assert all(torch.equal(one, other) for one, other in zip(again, gradients, strict=True))


@pytest.mark.parametrize("name", ["reference", "triton"])
def test_a_captured_step_takes_the_next_block_and_seed(name: str) -> None:
    functions = EDGE_ATTENTION.function(name)
    large = random_block(4, seeds=6, slack=100)
    small = random_block(5, seeds=6, fanouts=(2, 1, 1), shape=large.shape)
    block = on_gpu(small)
    work = Convolution(block, 2, 4, 8, torch.float32, garbage=False)
    dropped = torch.zeros(0, dtype=torch.bool, device=CUDA)

    def step() -> list[Tensor]:
        out_PD, log_sum_TA = work.forward(functions)
        return [out_PD, *work.backward(functions, out_PD, log_sum_TA)]

    step()
    torch.cuda.set_sync_debug_mode("error")
    try:
        step()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    for given, seed in ((small, 11), (large, 11), (large, 12)):
        for own, tensor in zip(block.tensors().values(), given.tensors().values(), strict=True):
            own.copy_(tensor)
        work.beyond.copy_(~filled(block, 2, "rows"))
        work.seed.fill_(seed)
        graph.replay()
        expected = step()
        for found, other in zip(captured, expected, strict=True):
            torch.testing.assert_close(found, other, rtol=0, atol=0)
        before, dropped = dropped, captured[0] == 0
        assert not torch.equal(before, dropped)
