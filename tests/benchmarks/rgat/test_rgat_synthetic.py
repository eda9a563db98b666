"""Synthetic graphs in memory, and raw files of them: degrees and skew as requested, and labels that need neighbours."""

import dataclasses
import json
import math

import numpy as np
import pytest
import torch

from benchmarks.rgat import synthetic
from benchmarks.rgat.graph import Schema
from benchmarks.rgat.raw import NODES, open_raw
from benchmarks.rgat.synthetic import (
    SyntheticCommunities,
    generate,
    signal,
    synthetic_graph,
    synthetic_igbh,
)
from common.errors import ConfigError

SCHEMA = Schema.augmented(("paper", "author"), ("paper__cites__paper", "paper__by__author"), "paper")
CPU = torch.device("cpu")


def test_targets_have_the_mean_degree():
    graph = synthetic_graph(SCHEMA, (20_000, 3_000), {"paper__cites__paper": 12.0, "paper__by__author": 0.25}, 0, CPU)
    assert graph.edges[0] == pytest.approx(12 * 20_000, rel=0.02)
    assert graph.edges[1] == pytest.approx(0.25 * 3_000, rel=0.15)
    assert graph.edges[2] == 0
    for relation, (indptr, indices) in enumerate(zip(graph.indptr, graph.indices, strict=True)):
        assert (indptr[0].dtype, indices[0].dtype) == (torch.int64, torch.int32)
        assert len(indptr[0]) == graph.nodes[SCHEMA.targets[relation]] + 1
        assert indptr[0][0] == 0
        assert indptr[0][-1] == len(indices[0])
        assert (indptr[0].diff() >= 0).all()
        assert ((indices[0] >= 0) & (indices[0] < graph.nodes[SCHEMA.sources[relation]])).all()


@pytest.mark.parametrize(("skew", "share"), [(0.0, 0.01), (0.5, 0.1), (0.75, 0.316)])
def test_the_first_hundredth_of_the_nodes_has_its_share_of_both_ends(skew, share):
    """The share of ranks below x is x ** (1 - s)."""
    graph = synthetic_graph(SCHEMA, (20_000, 1), {"paper__cites__paper": 20.0}, 1, CPU, skew)
    drawn = graph.indices[0][0].bincount(minlength=20_000)
    for ends in (graph.indptr[0][0].diff(), drawn):
        best = ends.sort(descending=True).values[:200].sum() / ends.sum()
        assert float(best) == pytest.approx(share, rel=0.1, abs=0.01)


def test_popular_nodes_have_many_edges_and_lie_apart():
    graph = synthetic_graph(SCHEMA, (10_000, 1), {"paper__cites__paper": 20.0}, 2, CPU)
    targets = graph.indptr[0][0].diff()
    drawn = graph.indices[0][0].bincount(minlength=10_000)
    assert torch.corrcoef(torch.stack([targets, drawn]).double())[0, 1] > 0.9
    halves = targets.view(2, -1).sum(1).double()
    assert halves[0] / halves[1] == pytest.approx(1, abs=0.1)


def test_pieces_and_seeds(monkeypatch):
    wanted = {"paper__cites__paper": 3.0}
    first, again, other = (synthetic_graph(SCHEMA, (999, 1), wanted, seed, CPU) for seed in (1, 1, 2))
    assert torch.equal(first.indices[0][0], again.indices[0][0])
    assert not torch.equal(first.indptr[0][0], other.indptr[0][0])
    monkeypatch.setattr(synthetic, "PIECE", 100)
    pieces = synthetic_graph(SCHEMA, (999, 1), wanted, 1, CPU)
    assert (pieces.indptr[0][0].diff() - first.indptr[0][0].diff()).abs().max() <= 1
    assert int(pieces.indptr[0][0][-1]) == len(pieces.indices[0][0])


def test_a_share_of_igbh_has_its_degrees():
    graph = synthetic_igbh(13_467, 0, CPU)
    assert len(graph.schema.relations) == 11
    of_each_paper = {name: count / NODES["full"]["paper"] for name, count in NODES["full"].items()}
    expected = {name: max(1, round(13_467 * each)) for name, each in of_each_paper.items()}
    assert dict(zip(graph.schema.types, graph.nodes, strict=True)) == expected
    assert graph.edges[0] / graph.nodes[0] == pytest.approx(29.7, rel=0.05)
    assert all(graph.edges)


# Raw files

LARGE = SyntheticCommunities(papers=20_000, classes=8, feature_size=128)
SMALL = SyntheticCommunities(papers=300, classes=3, feature_size=8)


@pytest.fixture(scope="module")
def large(tmp_path_factory):
    """As large as the demo's: 20,000 papers."""
    folder = tmp_path_factory.mktemp("large") / "raw"
    generate(folder, LARGE)
    return folder


def classes_of(options):
    return np.arange(options.papers) % options.classes


def papers_of(folder, options):
    return np.fromfile(folder / "paper/node_feat.npy", np.float32).reshape(-1, options.feature_size)


def linear_accuracy(features, classes, train):
    """Return the accuracy of least squares on all but the first ``train`` papers."""
    inputs = np.concatenate([features, np.ones((len(features), 1))], axis=1).astype(np.float64)
    wanted = np.eye(classes.max() + 1)[classes]
    weights = np.linalg.solve(inputs[:train].T @ inputs[:train], inputs[:train].T @ wanted[:train])
    return float(((inputs[train:] @ weights).argmax(1) == classes[train:]).mean())


def neighbour_mean(features, edges):
    """Mean over citing and cited papers."""
    ends = np.concatenate([edges, edges[:, ::-1]])
    ends = ends[ends[:, 0] != ends[:, 1]]
    ends = ends[np.argsort(ends[:, 1], kind="stable")]
    counts = np.bincount(ends[:, 1], minlength=len(features))
    assert counts.min() > 0
    return np.add.reduceat(features[ends[:, 0]], np.cumsum(counts) - counts) / counts[:, None]


def test_features_alone_say_little_and_neighbours_much(large):
    classes, features = classes_of(LARGE), papers_of(large, LARGE)
    alone = linear_accuracy(features, classes, 16_000)
    assert 0.56 < alone < 0.62
    edges = np.load(large / "paper__cites__paper/edge_index.npy")
    once = neighbour_mean(features, edges)
    assert linear_accuracy(np.concatenate([features, once], axis=1), classes, 16_000) > 0.93


def test_citations_stay_within_the_class_as_often_as_asked(large):
    classes = classes_of(LARGE)
    edges = np.load(large / "paper__cites__paper/edge_index.npy")
    others = edges[edges[:, 0] != edges[:, 1]]
    assert abs((classes[others[:, 0]] == classes[others[:, 1]]).mean() - 0.7) < 0.01
    assert (edges[:, 0] == edges[:, 1]).sum() >= 20_000  # a self-loop of every paper
    cited = np.sort(np.bincount(others[:, 1], minlength=20_000))[::-1]
    assert cited[0] > 20 * cited.mean()
    # A power law: popularity falls as rank to the power -0.6 within a class.
    slope = np.polyfit(np.log(np.arange(80, 4000)), np.log(cited[80:4000]), 1)[0]
    assert -0.75 < slope < -0.45


def test_mean_degrees_are_those_of_igbh(large):
    wanted = {
        "paper__cites__paper": 14,
        "paper__written_by__author": 2.7,
        "paper__topic__fos": 3.9,
        "paper__published__journal": 0.3,
    }
    found = {name: len(np.load(large / name / "edge_index.npy", mmap_mode="r")) / 20_000 for name in wanted}
    assert found == pytest.approx(wanted, rel=0.03)


def test_both_traps_are_there(tmp_path):
    generate(tmp_path / "raw", SMALL)
    heads = {
        str(path.relative_to(tmp_path / "raw")): path.read_bytes()[:6] == b"\x93NUMPY"
        for path in (tmp_path / "raw").rglob("*.npy")
    }
    without = {name for name, header in heads.items() if not header}
    assert without == {"paper/node_feat.npy", "author/node_feat.npy", "paper/node_label_2K.npy"}
    assert len(heads) == 6 + 1 + 6
    opened = open_raw(tmp_path / "raw")
    assert opened.labelled == 240
    labels = opened.labels.read(0, 300)[:, 0]
    assert np.isnan(labels[240:]).all()  # a reader that takes all papers for labelled fails on NaN
    assert labels[:240].astype(int).tolist() == classes_of(SMALL)[:240].tolist()
    assert {array.dtype.str for array in opened.edges.values()} == {"<i4", "<i8"}
    marker = json.loads((tmp_path / "raw" / "SYNTHETIC").read_text())
    assert (marker["seed"], marker["settings"]["labelled"]) == (0, 240)


def contents(folder):
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_another_seed_changes_everything_but_labels(tmp_path):
    generate(tmp_path / "0", SMALL)
    generate(tmp_path / "1", dataclasses.replace(SMALL, seed=1))
    first, second = contents(tmp_path / "0"), contents(tmp_path / "1")
    assert all(first[name] != second[name] for name in first if name != "paper/node_label_2K.npy")


@pytest.mark.usefixtures("forked_pools")
def test_workers_change_nothing(tmp_path, monkeypatch):
    monkeypatch.setattr(synthetic, "_NUMBERS_PER_WORKER", 1)
    generate(tmp_path / "one", SMALL, workers=1)
    generate(tmp_path / "two", SMALL, workers=2)
    assert contents(tmp_path / "one") == contents(tmp_path / "two")


@pytest.mark.parametrize("classes", [2, 8])
def test_the_signal_gives_the_accuracy(classes):
    """Against drawn numbers: the largest of the noisy scores is the own class's so often."""
    random = np.random.default_rng(0)
    scores = random.standard_normal((200_000, classes))
    scores[:, 0] += signal(0.6, classes)
    assert abs((scores.argmax(axis=1) == 0).mean() - 0.6) < 4 * math.sqrt(0.24 / 200_000)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"classes": 1}, "--classes=1: at least 2"),
        ({"classes": 129}, "--classes=129: at most --size=128"),
        ({"seed": -1}, "--seed=-1"),
        ({"eval_share": 0.45}, "are no shares of one set"),
        ({"eval_share": 1e-5}, "of 16000 labelled papers has none"),
    ],
)
def test_bad_options_are_named(changes, message):
    with pytest.raises(ConfigError, match=message):
        SyntheticCommunities(**changes)
