"""The plain sampler against one in lists and dictionaries, and against what sampling means."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from scipy.stats import chi2

from benchmarks.rgat.graph import BlockShape, Graph, SampledBlock, Schema
from benchmarks.rgat.ops.sample.reference import sampler_reference
from benchmarks.rgat.sampling import largest_shape
from tests.benchmarks.rgat.sample_oracle import (
    NODES,
    SCHEMA,
    SMALL_CAPACITIES,
    filled,
    graph_of,
    neighbours,
    sampled,
    sharded,
    small_graph,
    smaller,
)

FANOUTS = (4, 3, 2)
SEEDS = 7
CITES = SCHEMA.relations.index(next(each for each in SCHEMA.relations if each.symmetric))

pytestmark = pytest.mark.usefixtures("poisoned_memory")


def some_seeds(number: int = 0, count: int = SEEDS) -> torch.Tensor:
    return torch.randperm(NODES[1], generator=torch.Generator().manual_seed(number))[:count].int()


def sample(graph: Graph, fanouts: tuple[int, ...], seeds: torch.Tensor, seed: int = 5) -> SampledBlock:
    shape = largest_shape(graph, len(seeds), fanouts)
    return sampler_reference(graph, fanouts, shape)(seeds, len(seeds), torch.tensor(seed))


def star(sources: int, centres: int) -> Graph:
    """Every target of the only relation has the same neighbours."""
    schema = Schema.augmented(("hub", "leaf"), ("leaf__in__hub",), "hub")
    return graph_of(schema, (centres, sources), {"leaf__in__hub": [list(range(sources))] * centres})


@pytest.mark.parametrize("fanouts", [FANOUTS, (16, 5), (1,), (2, 1, 1, 1)], ids=str)
@pytest.mark.parametrize("number", [0, 1])
def test_a_block_is_what_one_edge_after_the_other_gives(number, fanouts):
    graph, seeds = small_graph(number), some_seeds(number)
    for seed in (0, 1 << 40):
        assert filled(sample(graph, fanouts, seeds, seed)) == sampled(graph, fanouts, seeds.tolist(), seed)


def test_the_small_graph_has_what_real_ones_have():
    graph = small_graph()
    cited = [neighbours(graph, CITES, paper) for paper in range(NODES[1])]
    assert any(len(set(each)) < len(each) for each in cited)
    assert any(paper in each for paper, each in enumerate(cited))
    assert max(map(len, cited)) > 16
    assert 0 in graph.edges
    rev_of = [str(relation) for relation in SCHEMA.relations].index("field__rev_of__paper")
    assert not all(neighbours(graph, rev_of, paper) for paper in range(NODES[1]))


def picks_of(sources: int, fanout: int, centres: int) -> torch.Tensor:
    """[centres, fanout]: positions that the centres of stars draw."""
    graph = star(sources, centres)
    block = sample(graph, (fanout,), torch.arange(centres, dtype=torch.int32))
    rows = block.nodes[block.shape.node_offsets(1)[1] :][block.rows[block.edge_row[: centres * fanout]]]
    return rows.view(centres, fanout)


def test_every_position_is_drawn_as_often():
    degree, fanout, centres = 50, 15, 4000
    picks = picks_of(degree, fanout, centres)
    assert (picks.sort(1).values.diff(dim=1) > 0).all()
    share = fanout / degree
    deviation = picks.flatten().bincount(minlength=degree).double() - centres * share
    # Of draws without replacement, the variance of each is n p (1 - p), and the deviations sum to 0.
    statistic = float((deviation**2).sum() / (centres * share * (1 - share))) * (degree - 1) / degree
    assert chi2.ppf(0.001, degree - 1) < statistic < chi2.ppf(0.999, degree - 1)


@pytest.mark.parametrize("count", [0, 1, SEEDS - 1])
def test_a_short_batch_reads_no_more_seeds(count):
    graph, seeds = small_graph(), some_seeds()
    sampler = sampler_reference(graph, FANOUTS, largest_shape(graph, SEEDS, FANOUTS))
    expected = sampled(graph, FANOUTS, seeds[:count].tolist(), 9)
    seeds[count:] = -1
    for given in (count, torch.tensor(count, dtype=torch.int32), torch.tensor([count], dtype=torch.int32)):
        assert filled(sampler(seeds, given, torch.tensor(9))) == expected


def test_calls_know_nothing_of_each_other():
    graph = small_graph()
    shape = largest_shape(graph, SEEDS, FANOUTS)
    sampler = sampler_reference(graph, FANOUTS, shape)
    calls = [(some_seeds(number), torch.tensor(number)) for number in (0, 1, 0)]
    blocks = [sampler(seeds, SEEDS, seed) for seeds, seed in calls]
    for block, (seeds, seed) in zip(blocks, calls, strict=True):
        assert filled(block) == filled(sampler_reference(graph, FANOUTS, shape)(seeds, SEEDS, seed))
    assert filled(blocks[0]) != filled(blocks[1])


def test_shards_make_no_difference():
    graph, seeds = small_graph(), some_seeds()
    whole = filled(sample(graph, FANOUTS, seeds))
    for shards in (2, 7):
        assert filled(sample(sharded(graph, shards), FANOUTS, seeds)) == whole


def assert_within(block: SampledBlock) -> None:
    """Entries that a kernel reads by the block's counts are within the capacity of their level."""
    shape, schema, found = block.shape, block.shape.schema, filled(block)
    for hop in range(shape.hops):
        for counts, capacity in (
            ("nodes_within", shape.nodes[1:]),
            ("edges_within", shape.edges),
            ("rows_within", shape.rows),
        ):
            have = found[counts][1:] if counts == "nodes_within" else found[counts]
            assert all(count <= most for count, most in zip(have[hop], capacity[hop], strict=True))
        for relation, (source, target) in enumerate(zip(schema.sources, schema.targets, strict=True)):
            each, edges = found["relations"][relation], found["edges_within"][hop][relation]
            rows = found["rows_within"][hop][relation]
            assert each["indptr"][found["nodes_within"][hop][target]] == edges
            assert all(row < rows for row in each["edge_row"][:edges])
            assert all(node < found["nodes_within"][hop + 1][source] for node in each["rows"][:rows])
    for each in found["relations"]:
        assert each["indptr"] == sorted(each["indptr"])
        assert each["row_indptr"] == sorted(each["row_indptr"])
        assert each["row_indptr"][-1] == len(each["row_edges"])
        for row, (first, end) in enumerate(zip(each["row_indptr"], each["row_indptr"][1:], strict=False)):
            assert all(each["edge_row"][edge] == row for edge in each["row_edges"][first:end])


@pytest.mark.parametrize(("table", "hop", "name"), SMALL_CAPACITIES)
def test_entries_beyond_the_capacity_are_left_out_without_a_trace(table, hop, name):
    graph, seeds = small_graph(), some_seeds()
    largest = largest_shape(graph, SEEDS, FANOUTS)
    full = sampler_reference(graph, FANOUTS, largest)(seeds, SEEDS, torch.tensor(1))
    shape = smaller(full, largest, table, hop, name)
    sampler = sampler_reference(graph, FANOUTS, shape)
    cut = sampler(seeds, SEEDS, torch.tensor(1))
    assert cut.overflow.item() != 0
    assert_within(cut)
    for number in (2, 1):
        again, fresh = (
            each(some_seeds(number), SEEDS, torch.tensor(number))
            for each in (sampler, sampler_reference(graph, FANOUTS, shape))
        )
        assert filled(again) == filled(fresh)


def test_a_block_that_just_fits_is_whole():
    graph, seeds = small_graph(), some_seeds()
    largest = largest_shape(graph, SEEDS, FANOUTS)
    block = sampler_reference(graph, FANOUTS, largest)(seeds, SEEDS, torch.tensor(1))
    used = (block.node_counts, block.edge_counts, block.row_counts)
    nodes, edges, rows = (tuple(map(tuple, counts.tolist())) for counts in used)
    exact = sampler_reference(graph, FANOUTS, BlockShape(SCHEMA, nodes, edges, rows))(seeds, SEEDS, torch.tensor(1))
    assert filled(exact) == filled(block)


def test_what_cannot_be_sampled_is_refused():
    graph = small_graph()
    shape = largest_shape(graph, SEEDS, FANOUTS)
    for fanouts in ((4, 3), (4, 3, 0), (17, 3, 2)):
        with pytest.raises(ValueError, match="one for each of 3 hops, 1 to 16"):
            sampler_reference(graph, fanouts, shape)
    other = replace(shape, schema=replace(SCHEMA, seeds="author"))
    with pytest.raises(ValueError, match="another schema"):
        sampler_reference(graph, FANOUTS, other)
    rows = ((0,) * len(SCHEMA.relations), *shape.rows[1:])
    with pytest.raises(ValueError, match="hop 1: paper__cites__paper has capacity for edges but none for rows"):
        sampler_reference(graph, FANOUTS, replace(shape, rows=rows))
    huge = tuple((1 << 30,) * len(SCHEMA.types) for _ in shape.nodes)
    with pytest.raises(ValueError, match="more than int32 numbers"):
        sampler_reference(graph, FANOUTS, replace(shape, nodes=huge))
