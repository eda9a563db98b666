"""A made-up graph in the proportions of IGBH-Full, for warm-up and for measuring."""

from __future__ import annotations

import torch
from torch import Tensor

from benchmarks.rgat.config import RgatConfig
from benchmarks.rgat.data import Sources
from benchmarks.rgat.made_up_graph import IGBH_EDGES, IGBH_NODES, made_up_graph
from benchmarks.rgat.sampling import BuildSampler
from benchmarks.rgat.schema import Relation, Schema
from benchmarks.rgat.stores.features import build_features
from benchmarks.rgat.stores.partition import Partition
from common.distributed.layout import Layout

PER_SEED = 1.0
"""Nodes, and edges of a relation, to a seed, where IGBH has none of the kind."""

_SEED = 1
_SIXTEENTH = 0x18  # the bits of 1/16 in e4m3


def proportions(schema: Schema, papers: int) -> tuple[list[int], dict[str, float]]:
    """Nodes of each type, and mean edges of a target by relation, of IGBH-Full with so many papers."""
    share = papers / IGBH_NODES["paper"]
    nodes = [max(1, round(IGBH_NODES.get(name, PER_SEED * IGBH_NODES["paper"]) * share)) for name in schema.types]

    def edges(relation: Relation) -> float:
        return IGBH_EDGES.get(str(relation), IGBH_EDGES.get(str(relation.reverse), PER_SEED * IGBH_NODES["paper"]))

    pairs = zip(schema.relations, schema.targets, strict=True)
    return nodes, {str(relation): edges(relation) * share / nodes[target] for relation, target in pairs}


def example_sources(
    own: RgatConfig, schema: Schema, seeds: int, build: BuildSampler, layout: Layout, placement: str = "local"
) -> Sources:
    """A graph with random edges, and features in FP8.

    Args:
        own: its ``model.example_papers`` says how large.
        schema: types and relations.
        seeds: of a batch; there are at least so many papers.
        build: makes a sampler.
        layout: of the ranks; each has the graph.
        placement: of the features; collective for all but ``local``.
    """
    nodes, degrees = proportions(schema, max(own.model.example_papers, seeds))
    graph = made_up_graph(schema, nodes, degrees, _SEED, layout.device)
    ranks = layout.world_size
    features = build_features(
        tuple(nodes), own.facts.feature_size, torch.float8_e4m3fn, placement, layout, ranks, layout.device, _noise
    )
    return Sources(graph, features, own.facts.fanouts, build)


def _noise(partition: Partition, shard: int, own_RF: Tensor) -> None:
    """Numbers from 0 to less than 1/16: rows of 1,024 then have about the norm of a sentence's embedding, 1."""
    generator = torch.Generator(own_RF.device).manual_seed(_SEED + shard)
    own_RF.view(torch.uint8).random_(0, _SIXTEENTH, generator=generator)
