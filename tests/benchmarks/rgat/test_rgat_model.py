"""The network and its peer: logits and gradients of PyTorch Geometric's HeteroConv of GATConv with the same weights."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from benchmarks.rgat.graph import Graph, Schema
from benchmarks.rgat.model import RGAT, Architecture
from benchmarks.rgat.ops.sample.reference import sampler_reference
from benchmarks.rgat.peer import GeometricNetwork, inputs_of, step_of
from benchmarks.rgat.sampling import largest_shape
from common.mlperf.fixed import benchmark_settings
from tests.benchmarks.rgat.sample_oracle import NODES, SCHEMA, small_graph
from tests.benchmarks.rgat.small_rgat import CPU, SMALL, features_of, network

KEYS = [(relation.source, relation.name, relation.target) for relation in SCHEMA.relations]
Levels = list[tuple[dict[str, int], dict[Any, Tensor]]]


def peer_of(model: RGAT) -> GeometricNetwork:
    """The same network out of PyTorch Geometric's layers."""
    peer = GeometricNetwork(SMALL, SCHEMA, 3).eval()
    for ours, theirs in zip(model.convs, peer.convs, strict=True):
        for number, key in enumerate(KEYS):
            layer = theirs.convs[key]
            layer.lin.weight = nn.Parameter(ours.weight[number].detach().T.clone())
            layer.att_src = nn.Parameter(ours.att_src[number].detach()[None].clone())
            layer.att_dst = nn.Parameter(ours.att_dst[number].detach()[None].clone())
            layer.bias = nn.Parameter(ours.bias[number].detach().clone())
    peer.lin.load_state_dict(model.lin.state_dict())
    return peer


def gradients(peer: GeometricNetwork, layer: int, name: str) -> Tensor:
    """Return the gradients of a parameter of all relations of a layer, stacked; zeros where there is none."""
    found = []
    for key in KEYS:
        module = peer.convs[layer].convs[key]
        parameter = module.lin.weight if name == "weight" else getattr(module, name)
        gradient = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        found.append(gradient.T if name == "weight" else gradient[0] if name.startswith("att") else gradient)
    return torch.stack(found)


def whole(graph: Graph) -> Levels:
    """All convolutions on all nodes and edges."""
    edges = {}
    for key, (starts,), (sources,) in zip(KEYS, graph.indptr, graph.indices, strict=True):
        target = torch.repeat_interleave(torch.arange(len(starts) - 1), starts.diff())
        edges[key] = torch.stack([sources.long(), target])
    return [(dict(zip(SCHEMA.types, NODES, strict=True)), edges)] * 3


@pytest.mark.parametrize("kind", ["graph", "block", "trimmed"])
def test_logits_and_gradients_are_those_of_pytorch_geometric(kind):
    torch.manual_seed(0)
    graph = small_graph(1, 0.0)
    fanouts = (16, 16, 16) if kind == "graph" else (3, 2, 2)
    assert max(int(starts.diff().max()) for (starts,) in graph.indptr) <= 16  # what is sampled then is the graph
    shape = largest_shape(graph, 12, fanouts)
    block = sampler_reference(graph, fanouts, shape)(torch.arange(12, dtype=torch.int32), 9, torch.tensor(5))
    features = [torch.randn(count, SMALL.feature_size) for count in NODES]
    model = network(SMALL, SCHEMA, 3).eval()
    x_NF, by_type = features_of(block, features)
    peer = peer_of(model)
    inputs, levels = inputs_of(block, x_NF, torch.float32)
    if kind == "graph":
        inputs, levels = dict(zip(SCHEMA.types, features, strict=True)), whole(graph)
    elif kind == "block":  # nested blocks equal all convolutions on the whole block
        levels = [({name: len(rows) for name, rows in by_type.items()}, levels[0][1])] * 3
    expected = peer(inputs, levels)[:9]
    found = model(x_NF, block, torch.tensor(0))[:9]
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)
    towards = torch.randn_like(expected)
    (found * towards).sum().backward()
    (expected * towards).sum().backward()
    for layer, convolution in enumerate(model.convs):
        for name in ("weight", "att_src", "att_dst", "bias"):
            torch.testing.assert_close(
                getattr(convolution, name).grad,
                gradients(peer, layer, name),
                atol=1e-5,
                rtol=1e-5,
                msg=f"{layer} {name}",
            )
    assert not graph.edges[2]
    assert not model.convs[0].weight.grad[2].any()
    assert model.convs[0].weight.grad[0].abs().sum() > 0
    step = step_of(peer, peer, (inputs, levels), torch.arange(len(peer(inputs, levels))) % SMALL.classes)
    losses = [float(step()) for _ in range(30)]
    assert losses[-1] < losses[0]


def test_the_benchmarks_network_has_the_rules_parameters():
    facts = benchmark_settings("rgat")["facts"]
    schema = Schema.augmented(facts["node_types"], facts["relations"], facts["seeds"])
    architecture = Architecture(**{name: facts[name] for name in Architecture.__dataclass_fields__})
    model = RGAT(architecture, schema, 3, {}, CPU, torch.float32, False, torch.Generator())
    counts = [sum(p.numel() for p in convolution.parameters()) for convolution in model.convs]
    assert counts == [5_784_064, 2_900_480, 2_900_480]
    assert sum(p.numel() for p in model.parameters()) == 13_115_303
    assert len(schema.relations) == 11
    small = Schema.augmented(facts["node_types"][:4], facts["relations"][:4], "paper")
    assert len(small.relations) == 7
