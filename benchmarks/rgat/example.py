"""A made-up graph in the proportions of IGBH-Full, for warm-up and for measuring."""

from __future__ import annotations

import torch
from torch import Tensor

from benchmarks.rgat.config import RgatConfig
from benchmarks.rgat.data import Sources
from benchmarks.rgat.made_up_graph import made_up_igbh
from benchmarks.rgat.sampling import BuildSampler
from benchmarks.rgat.schema import Schema
from benchmarks.rgat.stores.features import build_features
from benchmarks.rgat.stores.partition import Partition
from common.distributed.layout import Layout

_SEED = 1
_SKEW = 0.5
_SIXTEENTH = 0x18  # the bits of 1/16 in e4m3


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
    graph = made_up_igbh(max(own.model.example_papers, seeds), _SEED, layout.device, _SKEW, schema)
    ranks = layout.world_size
    features = build_features(
        graph.nodes, own.facts.feature_size, torch.float8_e4m3fn, placement, layout, ranks, layout.device, _noise
    )
    return Sources(graph, features, own.facts.fanouts, build)


def _noise(partition: Partition, shard: int, own_RF: Tensor) -> None:
    """Numbers from 0 to less than 1/16: rows of 1,024 then have about the norm of a sentence's embedding, 1."""
    generator = torch.Generator(own_RF.device).manual_seed(_SEED + shard)
    own_RF.view(torch.uint8).random_(0, _SIXTEENTH, generator=generator)
