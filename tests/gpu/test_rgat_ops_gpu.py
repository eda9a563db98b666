"""Test R-GAT's operations on a GPU: captured, repeatable, and with long rows and large offsets."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from benchmarks.rgat.graph import BlockShape, Graph, SampledBlock
from benchmarks.rgat.ops import projection
from benchmarks.rgat.ops.block_of_cases import FANOUTS as REAL_FANOUTS
from benchmarks.rgat.ops.block_of_cases import capacities_of_cases, graph_of_cases
from benchmarks.rgat.ops.edge_attention import EDGE_ATTENTION
from benchmarks.rgat.ops.edge_attention.cases import CASES
from benchmarks.rgat.ops.projection import triton as projection_triton
from benchmarks.rgat.ops.projection.reference import Projection
from benchmarks.rgat.ops.sample.reference import sampler_reference
from benchmarks.rgat.ops.sample.triton import triton_sampler
from benchmarks.rgat.sampling import BlockSampler, SeedBatch, at_most
from benchmarks.rgat.synthetic import IGBH_EIGHTH
from common.ops.cases import Draw
from common.ops.dropout.reference import DropoutMask
from tests.benchmarks.rgat import sample_oracle
from tests.benchmarks.rgat.projection_oracle import Case, assert_close, case, expected, only_filled, results
from tests.benchmarks.rgat.random_blocks import SCHEMA, filled, random_block
from tests.benchmarks.rgat.sample_oracle import on
from tests.gpu.support import GPU, captured, waiting_is_an_error
from tests.operation_checks import check

pytestmark = pytest.mark.gpu

# Attention over edges


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_long_rows_with_the_tiles_of_training(case: Any) -> None:
    """A source has thousands of edges in many chunks. Lower levels use the first entries."""
    sizes = {"seeds": 300, "papers": 600, "skew": 0.9, "compared": True}
    check(EDGE_ATTENTION, "triton", case, sizes, torch.float32, GPU)


def test_the_same_bits_twice() -> None:
    sizes = {"seeds": 128, "papers": IGBH_EIGHTH // 16}
    forward, backward = CASES[0].passes(EDGE_ATTENTION.function("triton"), Draw(GPU, torch.bfloat16), **sizes)

    def run() -> list[Tensor]:
        dz, others = backward.run()
        return [forward.run()[0], *dz, *others]

    first = run()
    for _ in range(3):
        assert all(torch.equal(*pair) for pair in zip(run(), first, strict=True))


def on_gpu(block: SampledBlock) -> SampledBlock:
    return SampledBlock.of(block.shape, {name: tensor.to(GPU) for name, tensor in block.tensors().items()})


@pytest.mark.parametrize("name", ["reference", "triton"])
def test_a_captured_step_takes_the_next_block_and_seed(name: str) -> None:
    functions, draw, level, heads, width = EDGE_ATTENTION.function(name), Draw(GPU, torch.float32), 2, 4, 8
    large = random_block(4, seeds=6, slack=100)
    small = random_block(5, seeds=6, fanouts=(2, 1, 1), shape=large.shape)
    block, shape, relations = on_gpu(small), large.shape, len(large.shape.schema.relations)
    z_MD = draw.normal(shape.row_offsets(level)[-1], heads * width)
    terms = draw.normal(len(z_MD), heads), draw.normal(shape.target_offsets(level)[-1], heads)
    bias_RD, att_source_RAd = draw.normal(relations, heads * width), draw.normal(relations, heads, width)
    dout_PD = draw.normal(shape.node_offsets(level - 1)[-1], heads * width)
    beyond, seed = ~filled(block, level).rows, torch.tensor(11, device=GPU)
    options: dict[str, Any] = {"slope": 0.2, "activation_slope": 0.01, "dropout": DropoutMask(0.2, seed, 2)}
    dropped = torch.zeros(0, dtype=torch.bool, device=GPU)

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


# Products


BLOCK_SHAPE = random_block(0, seeds=300, graph=3000, slack=400).shape


def block_on_gpu(seed: int) -> SampledBlock:
    """Return a block of several thousand rows, always in the same shape."""
    block = random_block(seed, seeds=300, graph=3000, shape=BLOCK_SHAPE)
    return SampledBlock.of(BLOCK_SHAPE, {name: tensor.cuda() for name, tensor in block.tensors().items()})


def poison() -> None:
    """Leave NaN in the memory that the allocator hands out next."""
    held = [torch.full((1 << 20 << power,), float("nan"), device="cuda") for power in range(7)]
    del held


def poisoned_results(function: Projection, given: Case) -> dict[str, Tensor]:
    poison()
    return results(function, given)


@pytest.mark.parametrize("level", [1, 2, 3])
@pytest.mark.parametrize("size", [(512, 4, 128), (200, 3, 48)], ids=str)
def test_products_of_fp16_equal_float64(size: tuple[int, int, int], level: int) -> None:
    given = case(block_on_gpu(level), level, *size, torch.float16, torch.float16)
    formula = expected(given)._asdict()
    for key, value in only_filled(poisoned_results(projection.PROJECTION.function("triton"), given), given).items():
        assert_close(value, formula[key], 1e-3 if key.startswith("term") else 2e-3, key)


@pytest.mark.parametrize("name", projection.PROJECTION.names)
def test_captured_products_follow_the_blocks_counts_and_give_the_same_bits(name: str) -> None:
    function = projection.PROJECTION.function(name)
    given = case(block_on_gpu(0), 2, 512, 4, 128, torch.bfloat16, torch.bfloat16)
    graph, found = captured(lambda: poisoned_results(function, given))
    for seed in (1, 2):
        other = case(block_on_gpu(seed), 2, 512, 4, 128, torch.bfloat16, torch.bfloat16)
        for key, tensor in given.block.tensors().items():
            tensor.copy_(other.block.tensors()[key])
        for key in ("x_NK", "weight_RKD", "att_source_RAd", "v_RKA", "dz_MD", "dterm_TA"):
            getattr(given, key).copy_(getattr(other, key))
        for tensor in found.values():
            tensor.fill_(float("nan"))
        graph.replay()
        eager = only_filled(poisoned_results(function, other), other)
        for key, value in only_filled(found, other).items():
            assert value.isfinite().all(), key
            if name == "triton":
                assert torch.equal(value, eager[key]), key
            else:
                assert_close(value, eager[key].double(), 1e-2, key)


def test_inputs_and_rows_of_more_than_2_31_elements() -> None:
    """The first and the last rows of a relation with 2.2 million rows equal the formula."""
    inputs, nodes = 1024, 2_200_000
    capacity = BlockShape(
        SCHEMA,
        nodes=((300, 0, 0), (nodes, 400, 20)),
        edges=((0,) * 5,),
        rows=((nodes, 0, 0, 300, 10),),
    )
    block = SampledBlock.empty(capacity, torch.device("cuda"))
    for tensor in block.tensors().values():
        tensor.zero_()
    block.node_counts.copy_(torch.tensor(capacity.nodes))
    block.row_counts.copy_(torch.tensor(capacity.rows))
    block.rows[:nodes] = torch.randperm(nodes, device="cuda")
    assert nodes * inputs > 1 << 31
    x_NK = torch.randint(0, 120, (capacity.node_offsets(1)[-1], inputs), dtype=torch.uint8, device="cuda")
    x_NK = x_NK.view(torch.float8_e4m3fn)
    weight = torch.randn((5, inputs, 512), device="cuda", dtype=torch.bfloat16)
    att = torch.randn((5, 4, 128), device="cuda")
    z, term = projection_triton.project(x_NK, block, 1, weight, att)
    first = capacity.row_offsets(1)[0]
    for own in (slice(0, 100), slice(nodes - 100, nodes)):
        node = block.rows[own].long()
        formula = x_NK.view(torch.uint8)[node].view(x_NK.dtype).double() @ weight[0].double()
        assert_close(z[first:][own], formula, 1e-2, "z")
        assert_close(term[first:][own], (formula.view(-1, 4, 128) * att[0]).sum(2), 1e-3, "term")
    dz = torch.randn_like(z)
    dweight = projection_triton.weight_gradient(x_NK, dz, block, 1, torch.float32)
    node = block.rows[:nodes].long()
    formula = torch.zeros((inputs, 512), dtype=torch.float64, device="cuda")
    for own in torch.arange(nodes, device="cuda").split(200_000):
        x_MK = x_NK.view(torch.uint8)[node[own]].view(x_NK.dtype)
        formula += x_MK.double().T @ dz[own].double()
    assert_close(dweight[0], formula, 1e-4, "weight gradient")


# Sampling


PAPERS = 67_000
"""Papers of a small graph with 2.9 million edges; IGBH has 269 million papers."""


def some_seeds(papers: int, count: int, number: int) -> Tensor:
    return torch.randperm(papers, generator=torch.Generator().manual_seed(number))[:count].int()


@pytest.fixture(scope="module")
def share() -> Graph:
    return graph_of_cases(torch.device("cpu"), PAPERS)


@pytest.fixture(scope="module")
def shape(share: Graph) -> BlockShape:
    return capacities_of_cases(share, 64)


def test_sampling_is_captured(share: Graph, shape: BlockShape) -> None:
    sampler = triton_sampler(on("cuda", share), REAL_FANOUTS, shape)
    seeds, count, seed = (
        some_seeds(share.nodes[0], 64, 7).cuda(),
        torch.tensor(64, device="cuda", dtype=torch.int32),
        torch.tensor(7, device="cuda"),
    )

    def work() -> SampledBlock:
        return sampler(seeds, count, seed)

    first = sample_oracle.filled(work())
    graph, block = captured(work)
    others = some_seeds(share.nodes[0], 64, 8).cuda()
    for given, many, number in ((others, 50, 8), (seeds.clone(), 64, 7)):
        seeds.copy_(given)
        count.fill_(many)
        seed.fill_(number)
        graph.replay()
        assert sample_oracle.filled(block) == sample_oracle.filled(work())
    assert sample_oracle.filled(block) == first


def test_samplers_are_made_and_blocks_sampled_again_without_a_copy_that_waits(share: Graph, shape: BlockShape) -> None:
    numbers = (7, 8, 9)
    plain = sampler_reference(share, REAL_FANOUTS, shape)
    expected = [
        sample_oracle.filled(plain(some_seeds(share.nodes[0], 64, each), 64, torch.tensor(each))) for each in numbers
    ]
    batches = [
        SeedBatch(some_seeds(share.nodes[0], 64, each).cuda(), 64, torch.tensor(each, device="cuda"))
        for each in numbers
    ]
    graph, small = on("cuda", share), at_most(shape, 5_000)
    torch.cuda.synchronize()
    with waiting_is_an_error():
        sampler = BlockSampler(graph, REAL_FANOUTS, triton_sampler, small)
        blocks = list(sampler.blocks(batches))
    assert sampler.larger == len(numbers)
    assert [sample_oracle.filled(block) for block in blocks] == expected


def test_a_graph_is_made_in_bounded_memory() -> None:
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    graph = graph_of_cases(torch.device("cuda"), IGBH_EIGHTH // 8)
    held = torch.cuda.memory_allocated() - before
    assert held == pytest.approx(4 * sum(graph.edges) + 8 * sum(len(each) for (each,) in graph.indptr), rel=0.02)
    assert torch.cuda.max_memory_allocated() - before - held < 1.5e9
    for source, ((starts,), (sources,)) in zip(
        graph.schema.sources, zip(graph.indptr, graph.indices, strict=True), strict=True
    ):
        assert int(starts.diff().min()) >= 0
        assert 0 <= int(sources.min()) <= int(sources.max()) < graph.nodes[source]
