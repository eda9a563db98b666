"""A made-up graph in the proportions of IGBH-Full, for warm-up and for measuring."""

from __future__ import annotations

import torch

from benchmarks.rgat.config import RgatConfig
from benchmarks.rgat.data import Sources
from benchmarks.rgat.made_up_graph import IGBH_EDGES, IGBH_NODES, made_up_graph
from benchmarks.rgat.sampling import BuildSampler
from benchmarks.rgat.schema import Relation, Schema
from benchmarks.rgat.stores.features import made_up_features

PER_SEED = 1.0
"""Nodes, and edges of a relation, to a seed, where IGBH has none of the kind."""

_SEED = 1


def proportions(schema: Schema, papers: int) -> tuple[list[int], dict[str, float]]:
    """Nodes of each type, and mean edges of a target by relation, of IGBH-Full with so many papers."""
    share = papers / IGBH_NODES["paper"]
    nodes = [max(1, round(IGBH_NODES.get(name, PER_SEED * IGBH_NODES["paper"]) * share)) for name in schema.types]

    def edges(relation: Relation) -> float:
        return IGBH_EDGES.get(str(relation), IGBH_EDGES.get(str(relation.reverse), PER_SEED * IGBH_NODES["paper"]))

    pairs = zip(schema.relations, schema.targets, strict=True)
    return nodes, {str(relation): edges(relation) * share / nodes[target] for relation, target in pairs}


def example_sources(own: RgatConfig, schema: Schema, seeds: int, build: BuildSampler, device: torch.device) -> Sources:
    """A graph with random edges, and features in FP8.

    Args:
        own: its ``model.example_papers`` says how large.
        schema: types and relations.
        seeds: of a batch; there are at least so many papers.
        build: makes a sampler.
        device: where everything lies.
    """
    nodes, degrees = proportions(schema, max(own.model.example_papers, seeds))
    graph = made_up_graph(schema, nodes, degrees, _SEED, device)
    features = made_up_features(schema, nodes, own.facts.feature_size, torch.float8_e4m3fn, _SEED, device)
    return Sources(graph, features, own.facts.fanouts, build)
