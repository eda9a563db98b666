"""Time the same training with PyTorch Geometric: ``python -m benchmarks.rgat.peer_bench``.

Its HeteroConv of GATConv, with each convolution trimmed to the nodes and edges that reach a seed, in bf16 with fused
Adam, eagerly and compiled, on blocks that our sampler drew from the graph of
:mod:`benchmarks.rgat.stage_bench`; features are gathered and turned into bf16 before the clock runs. Ours is timed on
the same block beside it, captured, from features in FP8.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.rgat.block import Block
from benchmarks.rgat.model import Architecture
from benchmarks.rgat.schema import Schema
from benchmarks.rgat.stage_bench import Stages
from benchmarks.rgat.workload import RgatClassification
from common.config import loading
from common.config.composition import compose
from common.config.schema import BenchConfig
from common.data.batches import Batch
from common.ops.bench.stopwatch import median_ms, require_gpu

PAPERS = 16_834_136
"""Of the graph: a sixteenth of IGBH-Full, which leaves the peer room for what it keeps."""


class Peer(nn.Module):
    """The network out of PyTorch Geometric's layers."""

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
        """Logits of the seeds; ``levels`` has each convolution's nodes that go on, and its edges."""
        for number, (convolution, (kept, edges)) in enumerate(zip(self.convs, levels, strict=True)):
            x = {name: each[: kept[name]] for name, each in convolution(x, edges).items()}
            if number < len(levels) - 1:
                x = {name: nn.functional.leaky_relu(each, self._slope) for name, each in x.items()}
                x = {name: nn.functional.dropout(each, self._dropout, self.training) for name, each in x.items()}
        logits: Tensor = self.lin(x[self._seeds])
        return logits


def inputs_of(
    block: Block, features_NF: Tensor, dtype: torch.dtype
) -> tuple[dict[str, Tensor], list[tuple[dict[str, int], dict[Any, Tensor]]]]:
    """A block as the peer takes it: features by type, and by convolution the nodes that go on and the edges."""
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
    """An iteration: forward, loss, backward, update; returns the loss."""
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3, fused=label.is_cuda)

    def step() -> Tensor:
        loss = nn.functional.cross_entropy(forward(*inputs).float(), label)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss.detach()

    return step


def main() -> None:
    """Print milliseconds of an iteration and seeds a second, of ours and of the peer's."""
    parser = argparse.ArgumentParser(description="time PyTorch Geometric's R-GAT on a GPU")
    parser.add_argument("--seeds", type=int, default=2048, help="of an iteration (default: 2048)")
    parser.add_argument("--papers", type=int, default=PAPERS, help=f"of the graph (default: {PAPERS})")
    parser.add_argument("--steps", type=int, default=20, help="timed, after 5 (default: 20)")
    args = parser.parse_args()
    require_gpu("benchmarks.rgat.peer_bench")
    given = ["benchmark=rgat", "scale=1xH200", f"model.example_papers={args.papers}", f"micro_batch={args.seeds}"]
    given.append(f"hparams.global_batch_size={args.seeds}")
    run, _ = loading.load(compose(given), lambda _: RgatClassification)
    device = torch.device("cuda")
    stages = Stages(run, BenchConfig(), device)
    tensors = stages.sources.example(stages.shape, stages.stream.batch(0))
    block = Block.of(stages.shape, tensors)
    counts = block.counts.tolist()
    print(
        f"PyTorch {torch.__version__}, {torch.cuda.get_device_name(device)}, {args.seeds} seeds, {sum(counts)} counts"
    )

    def say(name: str, step: Callable[[], object]) -> None:
        for _ in range(5):
            step()
        milliseconds = median_ms(step, args.steps)
        print(f"{name:<30}{milliseconds:.2f} ms, {args.seeds / milliseconds * 1e3:,.0f} seeds/s", flush=True)

    stages.runner.warm_up([Batch(tensors, args.seeds, stages.shape)])
    with stages.runner.on_stream():
        say("ours", lambda: stages.runner([Batch(tensors, args.seeds, stages.shape)]))
    stages.runner.close()
    facts = run.workload.facts
    peer = Peer(facts, facts.schema, len(facts.fanouts)).to(device, torch.bfloat16).train()
    inputs = inputs_of(block, tensors["features"], torch.bfloat16)
    with torch.no_grad():
        peer(*inputs)  # lazily built layers
    say("PyTorch Geometric", step_of(peer, peer, inputs, tensors["label"]))
    say("PyTorch Geometric, compiled", step_of(peer, torch.compile(peer, dynamic=True), inputs, tensors["label"]))


if __name__ == "__main__":
    main()
