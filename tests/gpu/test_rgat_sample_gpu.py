"""Test R-GAT's samplers on a GPU: capture, and the blocks of a CPU. Synthetic graphs are made in bounded memory."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from benchmarks.rgat.graph import BlockShape, Graph, SampledBlock
from benchmarks.rgat.ops.block_of_cases import FANOUTS as REAL_FANOUTS
from benchmarks.rgat.ops.block_of_cases import capacities_of_cases, graph_of_cases
from benchmarks.rgat.ops.sample.reference import sampler_reference
from benchmarks.rgat.ops.sample.triton import triton_sampler
from benchmarks.rgat.sampling import BlockSampler, SeedBatch, at_most
from benchmarks.rgat.synthetic import IGBH_EIGHTH
from tests.benchmarks.rgat.sample_oracle import filled, on
from tests.gpu.captures import captured

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

PAPERS = 67_000
"""Of IGBH's 269 million; 2.9 million edges."""


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

    first = filled(work())
    graph, block = captured(work)
    others = some_seeds(share.nodes[0], 64, 8).cuda()
    for given, many, number in ((others, 50, 8), (seeds.clone(), 64, 7)):
        seeds.copy_(given)
        count.fill_(many)
        seed.fill_(number)
        graph.replay()
        assert filled(block) == filled(work())
    assert filled(block) == first


def test_samplers_are_made_and_blocks_sampled_again_without_a_copy_that_waits(share: Graph, shape: BlockShape) -> None:
    numbers = (7, 8, 9)
    plain = sampler_reference(share, REAL_FANOUTS, shape)
    expected = [filled(plain(some_seeds(share.nodes[0], 64, each), 64, torch.tensor(each))) for each in numbers]
    batches = [
        SeedBatch(some_seeds(share.nodes[0], 64, each).cuda(), 64, torch.tensor(each, device="cuda"))
        for each in numbers
    ]
    graph, small = on("cuda", share), at_most(shape, 5_000)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        sampler = BlockSampler(graph, REAL_FANOUTS, triton_sampler, small)
        blocks = list(sampler.blocks(batches))
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert sampler.larger == len(numbers)
    assert [filled(block) for block in blocks] == expected


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
