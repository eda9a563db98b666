"""Synthetic graph in the proportions of IGBH-Full, for warm-up and benchmarks."""

from __future__ import annotations

import torch
from torch import Tensor

from benchmarks.rgat.config import RgatConfig
from benchmarks.rgat.data import Sources
from benchmarks.rgat.feature_store import build_features
from benchmarks.rgat.graph import Schema
from benchmarks.rgat.made_up_graph import made_up_igbh
from benchmarks.rgat.sampling import BuildSampler
from benchmarks.rgat.sharded import NodePartition
from common.distributed.layout import Layout

_SEED = 1
_SKEW = 0.5
_SIXTEENTH = 0x18  # the bits of 1/16 in e4m3


def example_sources(
    own: RgatConfig, schema: Schema, seeds: int, build: BuildSampler, layout: Layout, placement: str = "local"
) -> Sources:
    """Return a graph with random edges, and random features in FP8.

    Args:
        own: configuration; ``model.example_papers`` is the size.
        seeds: seeds of a batch, a lower bound for the number of papers.
        layout: the ranks; each builds the whole graph.
        placement: placement of the features; all except ``local`` are collective.
    """
    graph = made_up_igbh(max(own.model.example_papers, seeds), _SEED, layout.device, _SKEW, schema)
    features = build_features(graph.nodes, own.facts.feature_size, placement, layout, layout.world_size, _noise)
    return Sources(graph, features, own.facts.fanouts, build)


def _noise(partition: NodePartition, shard: int, own_RF: Tensor) -> None:
    """Fill rows with numbers in [0, 1/16). Rows of 1,024 then have a norm of about 1, like sentence embeddings."""
    generator = torch.Generator(own_RF.device).manual_seed(_SEED + shard)
    own_RF.view(torch.uint8).random_(0, _SIXTEENTH, generator=generator)
