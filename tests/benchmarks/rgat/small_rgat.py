"""A small network, and features as it takes them."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from benchmarks.rgat.graph import SampledBlock, Schema
from benchmarks.rgat.model import RGAT, Architecture

CPU = torch.device("cpu")
SMALL = Architecture(
    feature_size=6, heads=2, head_size=3, classes=5, attention_slope=0.2, activation_slope=0.01, dropout=0.2
)


def network(architecture: Architecture, schema: Schema, hops: int, dtype: torch.dtype = torch.float32) -> RGAT:
    """With biases that are not 0."""
    made = RGAT(architecture, schema, hops, {}, CPU, dtype, False, torch.Generator().manual_seed(3))
    for convolution in made.convs:
        nn.init.normal_(convolution.bias, generator=torch.Generator().manual_seed(4))
    return made


def features_of(block: SampledBlock, features: Sequence[Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
    """The rows of a block's nodes, NaN beyond them; and those that are there by type."""
    shape = block.shape
    x_NF = torch.full((shape.node_offsets(shape.hops)[-1], features[0].shape[1]), torch.nan, dtype=features[0].dtype)
    by_type = {}
    for number, name in enumerate(shape.schema.types):
        at, count = shape.node_offsets(shape.hops)[number], int(block.node_counts[-1, number])
        by_type[name] = features[number][block.nodes[at : at + count].long()]
        x_NF[at : at + count] = by_type[name]
    return x_NF, by_type
