"""Made-up graphs: degrees as asked for, skewed at both ends, the same in pieces."""

from __future__ import annotations

import pytest
import torch

from benchmarks.rgat import made_up_graph as made_up
from benchmarks.rgat.graph import Schema
from benchmarks.rgat.made_up_graph import made_up_graph, made_up_igbh
from benchmarks.rgat.raw import NODES

SCHEMA = Schema.augmented(("paper", "author"), ("paper__cites__paper", "paper__by__author"), "paper")
CPU = torch.device("cpu")


def degrees(indptr: torch.Tensor) -> torch.Tensor:
    return indptr.diff()


def test_targets_have_the_mean_degree() -> None:
    graph = made_up_graph(SCHEMA, (20_000, 3_000), {"paper__cites__paper": 12.0, "paper__by__author": 0.25}, 0, CPU)
    assert graph.edges[0] == pytest.approx(12 * 20_000, rel=0.02)
    assert graph.edges[1] == pytest.approx(0.25 * 3_000, rel=0.15)
    assert graph.edges[2] == 0
    for relation, (indptr, indices) in enumerate(zip(graph.indptr, graph.indices, strict=True)):
        assert indptr[0].dtype == torch.int64
        assert indices[0].dtype == torch.int32
        assert len(indptr[0]) == graph.nodes[SCHEMA.targets[relation]] + 1
        assert indptr[0][0] == 0
        assert indptr[0][-1] == len(indices[0])
        assert (degrees(indptr[0]) >= 0).all()
        assert ((indices[0] >= 0) & (indices[0] < graph.nodes[SCHEMA.sources[relation]])).all()


@pytest.mark.parametrize(("skew", "share"), [(0.0, 0.01), (0.5, 0.1), (0.75, 0.316)])
def test_the_first_hundredth_of_the_nodes_has_its_share_of_both_ends(skew: float, share: float) -> None:
    """Of ranks below x, the share is x ** (1 - s)."""
    graph = made_up_graph(SCHEMA, (20_000, 1), {"paper__cites__paper": 20.0}, 1, CPU, skew)
    drawn = graph.indices[0][0].bincount(minlength=20_000)
    for ends in (degrees(graph.indptr[0][0]), drawn):
        best = ends.sort(descending=True).values[:200].sum() / ends.sum()
        assert float(best) == pytest.approx(share, rel=0.1, abs=0.01)


def test_popular_nodes_have_many_edges_and_lie_apart() -> None:
    graph = made_up_graph(SCHEMA, (10_000, 1), {"paper__cites__paper": 20.0}, 2, CPU)
    targets = degrees(graph.indptr[0][0])
    drawn = graph.indices[0][0].bincount(minlength=10_000)
    assert torch.corrcoef(torch.stack([targets, drawn]).double())[0, 1] > 0.9
    halves = targets.view(2, -1).sum(1).double()
    assert halves[0] / halves[1] == pytest.approx(1, abs=0.1)


def test_pieces_and_seeds(monkeypatch: pytest.MonkeyPatch) -> None:
    wanted = {"paper__cites__paper": 3.0}
    first, again, other = (made_up_graph(SCHEMA, (999, 1), wanted, seed, CPU) for seed in (1, 1, 2))
    assert torch.equal(first.indices[0][0], again.indices[0][0])
    assert not torch.equal(first.indptr[0][0], other.indptr[0][0])
    monkeypatch.setattr(made_up, "PIECE", 100)
    pieces = made_up_graph(SCHEMA, (999, 1), wanted, 1, CPU)
    assert (degrees(pieces.indptr[0][0]) - degrees(first.indptr[0][0])).abs().max() <= 1
    assert int(pieces.indptr[0][0][-1]) == len(pieces.indices[0][0])


def test_a_share_of_igbh_has_its_degrees() -> None:
    graph = made_up_igbh(13_467, 0, CPU)
    assert len(graph.schema.relations) == 11
    of_each_paper = {name: count / NODES["full"]["paper"] for name, count in NODES["full"].items()}
    expected = {name: max(1, round(13_467 * each)) for name, each in of_each_paper.items()}
    assert dict(zip(graph.schema.types, graph.nodes, strict=True)) == expected
    assert graph.edges[0] / graph.nodes[0] == pytest.approx(29.7, rel=0.05)
    assert all(graph.edges)


def test_what_cannot_be_made_is_refused() -> None:
    with pytest.raises(ValueError, match="no such relation: paper__likes__paper"):
        made_up_graph(SCHEMA, (9, 9), {"paper__likes__paper": 1.0}, 0, CPU)
    with pytest.raises(ValueError, match="skew=1"):
        made_up_graph(SCHEMA, (9, 9), {}, 0, CPU, 1.0)
