"""Train a :class:`common.nn.decoder.Decoder` through the halves of :mod:`.blocks`."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager

import torch
from torch import Tensor, nn

from common.distributed.tensor_parallel.products import TokenProducts
from common.nn.decoder import Decoder, DecoderBlock
from common.nn.decoder_operations import DecoderOperations
from common.nn.frozen_decoder.passing import Pair
from common.nn.lora import TokenPlaces
from common.nn.scratch import Scratch
from common.nn.trained_decoder.blocks import AttentionHalf, LastNorm, MlpHalf, Tokens
from common.nn.trained_decoder.casts import Scales, WeightCasts
from common.nn.trained_decoder.products import Shared, trained_product
from common.ops.operation import AUTO


class Layer(nn.Module):
    """A block that runs through its halves. It is a module, so that hooks can wait for its weights before it runs.

    Args:
        block: holds the weights.
    """

    def __init__(self, block: DecoderBlock, attention: AttentionHalf, mlp: MlpHalf) -> None:
        super().__init__()
        self.block, self.attention, self.mlp = block, attention, mlp

    def forward(self, pair: Pair, tokens: Tokens) -> Pair:
        """Return the pair for the next layer."""
        return self.mlp(self.attention(pair, tokens), tokens)


class NormAndHead(nn.Module):
    """The last norm. The module also holds the head's weight, because the head runs directly after the norm.

    Args:
        decoder: holds the weights.
        operations: chosen implementations.
    """

    def __init__(self, decoder: Decoder, operations: DecoderOperations) -> None:
        super().__init__()
        self.norm, self.head = decoder.norm, decoder.head
        self._last_norm = LastNorm(decoder.architecture, operations, decoder.norm.weight)

    def forward(self, pair: Pair) -> Tensor:
        """Return the normalised hidden states."""
        return self._last_norm(pair)


class TrainedDecoder:
    """The blocks of a decoder as halves.

    Args:
        decoder: has all weights, on their device and in their dtype. The scales of FP8 products are added to its
            layers.
        linear: implementation of the blocks' linear layers: ``torch`` or ``fp8``.
        most_tokens: largest number of tokens of a batch. The buffer that layers share is allocated here, so that CUDA
            graphs keep its address.
        recomputed_gate_up: number of layers, from the first, that recompute gate and up in the backward pass.
        products: moves tokens during products if ranks share the layers; None for separate collectives.
        accumulation: how FP8 weight gradients are added up, an implementation of :mod:`common.ops.weight_gradient`.
        transposed_layers: number of layers, from the first, that also keep their FP8 weights transposed for a step.
        own_eval_scales: see :class:`common.nn.trained_decoder.products.Fp8TrainedProduct`.

    Attributes:
        readers: modules by name in execution order. No module reads its weights before it runs; see
            :class:`common.optim.communication.WeightGatherer`.

    Raises:
        UnsupportedImplementation: FP8 cannot multiply these weights.
    """

    def __init__(
        self,
        decoder: Decoder,
        operations: DecoderOperations,
        linear: str,
        most_tokens: int,
        recomputed_gate_up: int = 0,
        products: TokenProducts | None = None,
        accumulation: str = AUTO,
        transposed_layers: int = 0,
        own_eval_scales: bool = False,
    ) -> None:
        self.decoder = decoder
        scratch, parallel = Scratch(decoder.head.weight.device), decoder.parallel
        features = 2 * decoder.architecture.feed_forward // parallel.size
        scratch.wide((most_tokens, features), decoder.head.weight.dtype)
        self._shared = shared = Shared(scratch, WeightCasts(), parallel, products, accumulation, own_eval_scales)
        self._layers = [
            _layer(block, operations, linear, shared, block.index < recomputed_gate_up, block.index < transposed_layers)
            for block in decoder.blocks
        ]
        self._norm_and_head = NormAndHead(decoder, operations)
        self.readers: Sequence[tuple[str, nn.Module]] = [
            ("embedding", decoder.embedding),
            *((f"layer {layer.block.index}", layer) for layer in self._layers),
            ("norm and head", self._norm_and_head),
        ]

    def hidden_states(self, tokens_BL: Tensor, places: TokenPlaces) -> Tensor:
        """Return the normalised hidden states (s, E) of this rank's tokens, the input of the head. Collective."""
        shape = self.decoder.architecture
        inference = not torch.is_grad_enabled()
        self._shared.begin(inference)
        tokens = Tokens(places.rows, *shape.rope_tables(places.positions), inference)
        pair = Pair(self.decoder.embedding(tokens_BL.flatten()), None, None)
        for layer in self._layers:
            pair = layer(pair, tokens)
        normed: Tensor = self._norm_and_head(pair)
        return normed

    def same_weights(self) -> AbstractContextManager[None]:
        """Within this context, no weight changes. FP8 products cast their weights in the first forward pass only."""
        return self._shared.casts.once()

    def prepare(self) -> None:
        """Cast all weights within :meth:`same_weights`, so that no forward pass casts them."""
        for layer in self._layers:
            for product in (layer.attention.qkv, layer.attention.output, layer.mlp.gate_up, layer.mlp.down):
                product.prepare()

    def begin_backward(self) -> None:
        """Call this before a backward pass that does not directly follow its forward pass. Collective over tp."""
        self._shared.begin_backward()

    def evaluating(self) -> AbstractContextManager[None]:
        """Context of an evaluation: no gradients, and no weight changes. Entering it casts the FP8 weights."""
        return self._shared.casts.evaluating()


def _layer(
    block: DecoderBlock,
    operations: DecoderOperations,
    linear: str,
    shared: Shared,
    recompute: bool,
    keep_turned: bool,
) -> Layer:
    shape = block.architecture
    qkv, output, gate_up, down = (
        trained_product(layer, linear, shared, keep_turned=keep_turned)
        for layer in (block.qkv, block.output, block.gate_up, block.down)
    )
    saved = None
    if linear != "torch":
        block.saved = Scales(1, block.qkv.weight.device)
        saved = block.saved.scaling(0)
    return Layer(
        block,
        AttentionHalf(shape, operations, shared.parallel.size, block.attention_norm.weight, qkv, output),
        MlpHalf(shape, operations, shared.scratch, block.mlp_norm.weight, gate_up, down, saved, recompute),
    )
