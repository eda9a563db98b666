"""A made-up graph in the proportions of IGBH-Full, for warm-up and for measuring.

Proportions: nodes and edges of the published files (https://github.com/IllinoisGraphBenchmark/IGB-Datasets). Those of
papers in journals and conferences are not published; a third of the papers is taken for each.
"""

from __future__ import annotations

import torch

from benchmarks.rgat.config import RgatConfig
from benchmarks.rgat.data import Sources
from benchmarks.rgat.made_up_graph import made_up_graph
from benchmarks.rgat.sampling import BuildSampler
from benchmarks.rgat.schema import REVERSED, Schema
from benchmarks.rgat.stores.features import made_up_features

PAPERS = 269_346_174
NODES = {"author": 277_220_883, "institute": 26_918, "fos": 712_960, "journal": 49_052, "conference": 4_547}
EDGES = {
    "cites": 2 * 3_996_442_004,
    "written_by": 716_761_549,
    "affiliated_to": 48_521_486,
    "topic": 1_050_280_600,
    "published": PAPERS // 3,
    "venue": PAPERS // 3,
}
"""Of each relation and of its reverse."""

_SEED = 1


def example_sources(
    own: RgatConfig, schema: Schema, seeds: int, build: BuildSampler, device: torch.device, dtype: torch.dtype
) -> Sources:
    """A graph with random edges and features.

    Args:
        own: its ``model.example_papers`` says how large.
        schema: types and relations; those that IGBH has not are as frequent as authors.
        seeds: of a batch; there are at least so many papers.
        build: makes a sampler.
        device: where everything lies.
        dtype: of the features.
    """
    papers = max(own.model.example_papers, seeds)
    nodes = [
        papers if name == schema.seeds else max(1, round(papers * NODES.get(name, PAPERS) / PAPERS))
        for name in schema.types
    ]
    per_target = [
        EDGES.get(relation.name.removeprefix(REVERSED), PAPERS) / PAPERS * papers / nodes[target]
        for relation, target in zip(schema.relations, schema.targets, strict=True)
    ]
    graph = made_up_graph(schema, nodes, per_target, _SEED, device)
    features = made_up_features(schema, nodes, own.facts.feature_size, dtype, _SEED, device)
    return Sources(graph, features, own.facts.fanouts, build)
