"""A decoder that ranks share, under autograd and as halves; test_split_frozen_decoder.py compares it with one rank's.

Shapes: B rows, S tokens of a row, L those of one rank of cp, T = B L, s tokens of one rank of tp, E hidden.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from common.distributed.context_parallel import ContextSplit
from common.distributed.layout import Layout
from common.distributed.tensor_parallel.layers import partial_parameters
from common.distributed.tensor_parallel.ranks import CollectiveProducts, TensorParallel
from common.distributed.tensor_parallel.vocabulary import next_token_loss
from common.language.architecture import LlamaArchitecture, TokenPositions, block_operations, choose_operations
from common.language.decoder import HandwrittenDecoder
from common.language.fp8_products import FrozenWeight, load_frozen
from common.language.lora import LoraSettings
from common.language.network import Decoder
from common.ops.operation import REFERENCE
from tests.generators import generator_of

ARCHITECTURE = LlamaArchitecture(
    vocabulary=96, hidden=64, layers=3, heads=8, kv_heads=4, head_size=16, feed_forward=128,
    norm_epsilon=1e-5, rope_base=10_000.0, initializer_range=0.15,
)  # fmt: skip
LORA = LoraSettings(rank=16, alpha=32.0, dropout=0.25)
B, S = 2, 32
CPU = torch.device("cpu")
REFERENCES = dict.fromkeys(block_operations(LlamaArchitecture, adapters=True), REFERENCE)
CHUNK = 24
"""Tokens of a chunk of the head; it does not divide them all."""

LAYOUTS: dict[int, dict[str, dict[str, int]]] = {
    2: {"tp2": {"tp": 2}, "cp2": {"cp": 2}},
    4: {"tp4": {"tp": 4}, "tp2xcp2": {"cp": 2, "tp": 2}},
}
BLOCKS = ("autograd", "frozen")
RECOMPUTED = 1
"""Layers of the halves that compute query, key and value again; the others keep them."""

FP8_STEPS = 2
"""The first of which finds its scales in a sample."""


def micro_batch() -> tuple[Tensor, Tensor, Tensor]:
    """Tokens and labels (B, S), and the dropout's seed; the rows have different numbers of scored tokens."""
    generator = torch.Generator().manual_seed(2)
    tokens_BS, labels_BS = torch.randint(ARCHITECTURE.vocabulary, (2, B, S), generator=generator)
    labels_BS[0, :20], labels_BS[1, 5:9] = -1, -1
    return tokens_BS, labels_BS, torch.tensor(5)


def base(decoder: Decoder) -> Iterator[tuple[str, Tensor]]:
    """Whole frozen weights, norms among them that matter; in one dtype, since another would draw other numbers."""
    for name, value in decoder.drawn_base(generator_of, CPU, torch.float64):
        yield name, value.normal_(1.0, 0.1, generator=generator_of(name)) if value.ndim == 1 else value


def build(
    parallel: TensorParallel, dtype: torch.dtype, fp8: bool = False, split: ContextSplit | None = None
) -> Decoder:
    """This rank's part of the same decoder at every layout."""
    decoder = Decoder(ARCHITECTURE, "meta", dtype, LORA, parallel, split=split)
    load_frozen(decoder, base(decoder), CPU, dtype, FrozenWeight if fp8 else None)
    decoder.initialise_adapters(generator_of)
    splits = decoder.tensor_splits()
    for name, parameter in decoder.named_parameters():
        if name.endswith("lora_b"):  # zeros would hide mistakes
            split = splits.get(name)
            whole = torch.empty(parameter.shape if split is None else split.full_shape, dtype=torch.float64)
            whole.normal_(0.0, 0.1, generator=generator_of(name))
            parameter.data.copy_(whole if split is None else split.local_of(whole))
    return decoder


class Network:
    """A rank's part of the decoder with one way to run its blocks."""

    def __init__(self, parallel: TensorParallel, split: ContextSplit, blocks: str, fp8: bool = False) -> None:
        dtype = torch.bfloat16 if fp8 else torch.float64
        self.parallel, self.split, self.decoder = parallel, split, build(parallel, dtype, fp8, split)
        self._frozen: HandwrittenDecoder | None = None
        if blocks == "frozen":
            operations, _ = choose_operations(REFERENCES, ARCHITECTURE, split, CPU, dtype, adapters=True)
            products = CollectiveProducts(parallel)
            self._frozen = HandwrittenDecoder(
                self.decoder, operations, "fp8" if fp8 else "torch", 0, products=products, recomputed_qkv=RECOMPUTED
            )

    def hidden(self, seed: Tensor | None) -> Tensor:
        """What the head reads of own tokens, (s, E)."""
        tokens_BL = self.split.own_tokens(micro_batch()[0])
        positions = TokenPositions.of(B, S, self.split.positions(), seed)
        return (self._frozen or self.decoder).hidden_states(tokens_BL, positions)

    def losses(self, hidden_sE: Tensor) -> Tensor:
        """Losses (B, L) of this rank's columns."""
        labels_T = self.split.own_tokens(micro_batch()[1]).flatten()
        return next_token_loss(hidden_sE, self.decoder.head.weight, labels_T, self.parallel, CHUNK).view(B, -1)

    def backward(self, seed: Tensor) -> tuple[Tensor, Tensor]:
        """Leave this rank's gradients of the mean of rows' means; hidden vectors (s, E) and losses (B, L)."""
        self.decoder.zero_grad()
        hidden_sE = self.hidden(seed)
        losses_BL = self.losses(hidden_sE)
        scored_B = (micro_batch()[1] != -1).sum(1)
        (losses_BL.sum(1) / scored_B).mean().backward()
        return hidden_sE.detach(), losses_BL.detach()

    def own_gradients(self) -> dict[str, Tensor]:
        """As the backward pass has left them."""
        return {name: p.grad for name, p in self.decoder.named_parameters() if p.grad is not None}


def whole_gradients(network: Network, layout: Layout) -> dict[str, Tensor]:
    """Gradients of whole adapters, summed over all ranks that have parts of sums."""
    partial, splits = partial_parameters(network.decoder), network.decoder.tensor_splits()
    found = {}
    for name, gradient in network.own_gradients().items():
        for axis in ("cp", *partial.get(name, ())):
            if layout.size(axis) > 1:
                dist.all_reduce(gradient, group=layout.group(axis))
        found[name] = splits[name].gather(gradient, layout.group("tp"), CPU) if name in splits else gradient
    return found


def one_micro_batch(layout: Layout, blocks: str) -> dict[str, Any]:
    """Whole gradients, and losses and hidden vectors of this rank's columns with these columns."""
    split, seed = ContextSplit.from_layout(layout, S), micro_batch()[2]
    network = Network(TensorParallel.from_layout(layout), split, blocks)
    hidden_sE, losses_BL = network.backward(seed)
    with torch.no_grad():
        resting_BL = network.losses(network.hidden(None))
    return {
        "columns": split.positions(),
        "hidden": network.parallel.all_gather(hidden_sE).view(B, -1, ARCHITECTURE.hidden),
        "losses": losses_BL,
        "evaluation": resting_BL,
        "gradients": whole_gradients(network, layout),
    }


def fp8_steps(network: Network) -> dict[str, Any]:
    """Losses (B, L) of every step, and the scales after the last."""
    losses = [network.backward(micro_batch()[2])[1] for _ in range(FP8_STEPS)]
    scales = {name: value.clone() for name, value in network.decoder.named_buffers() if name.endswith("fp8.scales")}
    return {"losses": losses, "scales": scales}


def run_rank(rank: int, world: int, folder: str) -> dict[str, Any]:
    results: dict[str, Any] = {}
    for name, axes in LAYOUTS[world].items():
        layout = Layout(axes, rank)
        for blocks in BLOCKS:
            results[f"{name}/{blocks}"] = one_micro_batch(layout, blocks)
        if name == "tp2":
            network = Network(TensorParallel.from_layout(layout), ContextSplit(S), "frozen", fp8=True)
            results["fp8"] = fp8_steps(network) | {"gradients": whole_gradients(network, layout)}
    return results
