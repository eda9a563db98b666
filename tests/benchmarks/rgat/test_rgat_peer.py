"""Test that the peer computes the same results as our network, so that their times can be compared."""

from __future__ import annotations

import torch
from torch import nn

from benchmarks.rgat.ops.sample.reference import sampler_reference
from benchmarks.rgat.peer import Network, inputs_of, step_of
from benchmarks.rgat.sampling import largest_shape
from tests.benchmarks.rgat.small_rgat import NODES, SCHEMA, SMALL, features_of, network, random_graph


def test_the_trimmed_peer_gives_our_logits_and_learns() -> None:
    torch.manual_seed(0)
    fanouts = (3, 2, 2)
    graph = random_graph(1)
    block = sampler_reference(graph, fanouts, largest_shape(graph, 12, fanouts))(
        torch.arange(12, dtype=torch.int32), 12, torch.tensor(5)
    )
    x_NF, _ = features_of(block, [torch.randn(count, SMALL.feature_size) for count in NODES])
    model, peer = network(SMALL, SCHEMA, 3).eval(), Network(SMALL, SCHEMA, 3).eval()
    inputs = inputs_of(block, x_NF, torch.float32)
    for ours, theirs in zip(model.convs, peer.convs, strict=True):
        for number, relation in enumerate(SCHEMA.relations):
            layer = theirs.convs[relation.source, relation.name, relation.target]
            layer.lin.weight = nn.Parameter(ours.weight[number].detach().T.clone())
            layer.att_src = nn.Parameter(ours.att_src[number].detach()[None].clone())
            layer.att_dst = nn.Parameter(ours.att_dst[number].detach()[None].clone())
            layer.bias = nn.Parameter(ours.bias[number].detach().clone())
    peer.lin.load_state_dict(model.lin.state_dict())
    torch.testing.assert_close(peer(*inputs), model(x_NF, block, torch.tensor(0)), atol=1e-5, rtol=1e-5)
    step = step_of(peer, peer, inputs, torch.arange(12) % SMALL.classes)
    losses = [float(step()) for _ in range(30)]
    assert losses[-1] < losses[0]
