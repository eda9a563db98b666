"""The network against PyTorch Geometric's HeteroConv of GATConv with the same weights."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch_geometric.nn import GATConv, HeteroConv

from benchmarks.rgat.graph import Graph, SampledBlock, Schema
from benchmarks.rgat.model import RGAT, Architecture
from benchmarks.rgat.ops.sample.reference import sampler_reference
from benchmarks.rgat.sampling import largest_shape
from common.mlperf.fixed import benchmark_settings
from tests.benchmarks.rgat.small_rgat import CPU, NODES, SCHEMA, SMALL, features_of, network, random_graph


class Peer(nn.Module):
    """The same network out of PyTorch Geometric's layers."""

    def __init__(self, model: RGAT, architecture: Architecture, schema: Schema) -> None:
        super().__init__()
        self.keys = [(each.source, each.name, each.target) for each in schema.relations]
        self.convs = nn.ModuleList()
        for convolution in model.convs:
            inputs = convolution.weight.shape[1]
            layers = {
                key: GATConv(inputs, architecture.head_size, heads=architecture.heads, add_self_loops=False)
                for key in self.keys
            }
            for number, layer in enumerate(layers.values()):
                layer.lin.weight = nn.Parameter(convolution.weight[number].detach().T.clone())
                layer.att_src = nn.Parameter(convolution.att_src[number].detach()[None].clone())
                layer.att_dst = nn.Parameter(convolution.att_dst[number].detach()[None].clone())
                layer.bias = nn.Parameter(convolution.bias[number].detach().clone())
            self.convs.append(HeteroConv(layers, aggr="sum"))
        self.lin = nn.Linear(architecture.width, architecture.classes)
        self.lin.load_state_dict(model.lin.state_dict())
        self.slope = architecture.activation_slope

    def forward(self, x: dict[str, Tensor], edges: dict[tuple[str, str, str], Tensor], seeds: Tensor) -> Tensor:
        """Logits of the seeds, all convolutions on all nodes and edges that are given."""
        for number, convolution in enumerate(self.convs):
            x = convolution(x, edges)
            if number < len(self.convs) - 1:
                x = {name: nn.functional.leaky_relu(each, self.slope) for name, each in x.items()}
        return self.lin(x["paper"][seeds])

    def gradients(self, layer: int, name: str) -> Tensor:
        """Of a parameter of all relations of a layer, stacked; zeros where none came."""
        found = []
        for key in self.keys:
            module = self.convs[layer].convs[key]
            parameter = module.lin.weight if name == "weight" else getattr(module, name)
            gradient = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
            found.append(gradient.T if name == "weight" else gradient[0] if name.startswith("att") else gradient)
        return torch.stack(found)


def whole(graph: Graph) -> dict[tuple[str, str, str], Tensor]:
    """All edges as PyTorch Geometric takes them."""
    edges = {}
    for number, relation in enumerate(SCHEMA.relations):
        starts = graph.indptr[number][0]
        target = torch.repeat_interleave(torch.arange(len(starts) - 1), starts.diff())
        edges[relation.source, relation.name, relation.target] = torch.stack([graph.indices[number][0].long(), target])
    return edges


def sampled(block: SampledBlock) -> dict[tuple[str, str, str], Tensor]:
    """All edges of a block, between its own nodes."""
    shape, edges = block.shape, {}
    for number, relation in enumerate(shape.schema.relations):
        count = int(block.edge_counts[-1, number])
        at, rows = shape.edge_offsets[number], shape.row_offsets(shape.hops)[number]
        source = block.rows[rows:][block.edge_row[at : at + count].long()]
        pair = torch.stack([source, block.edge_target[at : at + count]])
        edges[relation.source, relation.name, relation.target] = pair.long()
    return edges


@pytest.mark.parametrize("fanouts", [(16, 16, 16), (3, 2, 2)])
def test_logits_and_gradients_are_those_of_pytorch_geometric(fanouts: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    graph = random_graph(1)
    shape = largest_shape(graph, 12, fanouts)
    block = sampler_reference(graph, fanouts, shape)(torch.arange(12, dtype=torch.int32), 9, torch.tensor(5))
    features = [torch.randn(count, SMALL.feature_size) for count in NODES]
    model = network(SMALL, SCHEMA, 3).eval()
    x_NF, by_type = features_of(block, features)
    peer = Peer(model, SMALL, SCHEMA)
    if fanouts[0] == 16:  # above all degrees: what is sampled is the graph
        expected = peer(dict(zip(SCHEMA.types, features, strict=True)), whole(graph), torch.arange(9))
    else:  # nested blocks equal all convolutions on the whole block
        expected = peer(by_type, sampled(block), torch.arange(9))
    found = model(x_NF, block, torch.tensor(0))[:9]
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)
    towards = torch.randn_like(expected)
    (found * towards).sum().backward()
    (expected * towards).sum().backward()
    for layer, convolution in enumerate(model.convs):
        for name in ("weight", "att_src", "att_dst", "bias"):
            gradient = getattr(convolution, name).grad
            torch.testing.assert_close(
                gradient, peer.gradients(layer, name), atol=1e-5, rtol=1e-5, msg=f"{layer} {name}"
            )
    assert torch.equal(model.convs[0].weight.grad[2], torch.zeros_like(model.convs[0].weight[2]))
    assert model.convs[0].weight.grad[0].abs().sum() > 0


def test_the_benchmarks_network_has_the_rules_parameters() -> None:
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
