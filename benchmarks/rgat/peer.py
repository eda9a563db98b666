"""Peers of R-GAT: the same training with PyTorch Geometric.

The network is a HeteroConv of GATConv in bf16 with fused Adam, eager or compiled. Each convolution has only the nodes
and edges that reach a seed. The block is the one on which our step is timed. Features are gathered and converted to
bf16 before timing starts.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.rgat.graph import BlockShape, SampledBlock, Schema
from benchmarks.rgat.model import Architecture
from common.config.schema import RunConfig
from common.contract.workload import Peer
from common.data.batches import Batch
from common.step.plain_step import plain_step


class GeometricNetwork(nn.Module):
    """R-GAT, built from layers of PyTorch Geometric."""

    def __init__(self, architecture: Architecture, schema: Schema, hops: int) -> None:
        super().__init__()
        from torch_geometric.nn import GATConv, HeteroConv

        self.convs = nn.ModuleList()
        for layer in range(hops):
            inputs = architecture.width if layer else architecture.feature_size
            each = {
                (relation.source, relation.name, relation.target): GATConv(
                    inputs, architecture.head_size, heads=architecture.heads, add_self_loops=False
                )
                for relation in schema.relations
            }
            self.convs.append(HeteroConv(each, aggr="sum"))
        self.lin = nn.Linear(architecture.width, architecture.classes)
        self._slope, self._dropout, self._seeds = architecture.activation_slope, architecture.dropout, schema.seeds

    def forward(self, x: dict[str, Tensor], levels: list[tuple[dict[str, int], dict[Any, Tensor]]]) -> Tensor:
        """Return the class logits (seeds, classes) of the seed nodes.

        Args:
            x: features by node type.
            levels: numbers of nodes kept after each convolution, by type, and its edges by relation.
        """
        for number, (convolution, (kept, edges)) in enumerate(zip(self.convs, levels, strict=True)):
            x = {name: each[: kept[name]] for name, each in convolution(x, edges).items()}
            if number < len(levels) - 1:
                x = {name: nn.functional.leaky_relu(each, self._slope) for name, each in x.items()}
                x = {name: nn.functional.dropout(each, self._dropout, self.training) for name, each in x.items()}
        logits: Tensor = self.lin(x[self._seeds])
        return logits


def inputs_of(
    block: SampledBlock, features_NF: Tensor, dtype: torch.dtype
) -> tuple[dict[str, Tensor], list[tuple[dict[str, int], dict[Any, Tensor]]]]:
    """Return the arguments of :meth:`GeometricNetwork.forward` for a block: features by type, and ``levels``."""
    shape, schema, hops = block.shape, block.shape.schema, block.shape.hops
    nodes, edge_counts = block.node_counts.tolist(), block.edge_counts.tolist()
    x = {}
    for number, name in enumerate(schema.types):
        at = shape.node_offsets(hops)[number]
        x[name] = features_NF[at : at + nodes[hops][number]].to(dtype)
    levels = []
    for level in range(hops, 0, -1):
        edges = {}
        for number, relation in enumerate(schema.relations):
            at, rows = shape.edge_offsets[number], shape.row_offsets(hops)[number]
            count = edge_counts[level - 1][number]
            source = block.rows[rows:][block.edge_row[at : at + count].long()]
            pair = torch.stack([source, block.edge_target[at : at + count]]).long()
            edges[relation.source, relation.name, relation.target] = pair
        kept = {name: nodes[level - 1][number] for number, name in enumerate(schema.types)}
        levels.append((kept, edges))
    return x, levels


def step_of(model: nn.Module, forward: Callable[..., Tensor], inputs: Any, label: Tensor) -> Callable[[], Tensor]:
    """Return a function that runs one training step and returns the loss."""
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3, fused=label.is_cuda)

    def loss_of(*inputs: Any) -> Tensor:
        return nn.functional.cross_entropy(forward(*inputs).float(), label)

    return plain_step(loss_of, inputs, optimizer, compiled=False)


def start(run: RunConfig, example: Batch, device: torch.device, compiled: bool = False) -> Callable[[], Tensor]:
    """Start the peer; see :class:`common.contract.workload.Peer`."""
    shape, facts = example.key, run.workload.facts
    assert isinstance(shape, BlockShape)
    network = GeometricNetwork(facts, facts.schema, len(facts.fanouts)).to(device, torch.bfloat16).train()
    inputs = inputs_of(SampledBlock.of(shape, example.tensors), example.tensors["features"], torch.bfloat16)
    with torch.no_grad():
        network(*inputs)  # builds the lazy layers
    forward = torch.compile(network, dynamic=True) if compiled else network
    return step_of(network, forward, inputs, example.tensors["label"])


PEERS = (
    Peer("PyTorch Geometric in bf16", start),
    Peer("PyTorch Geometric in bf16, compiled", functools.partial(start, compiled=True)),
)
