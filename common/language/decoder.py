"""Run a :class:`common.language.network.Decoder` with hand-written backward passes."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn

from common.distributed.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from common.distributed.tensor_parallel.ranks import TokenProducts
from common.language.architecture import DecoderNorm, DecoderOperations, TokenPositions, Tokens
from common.language.blocks import AttentionHalf, AutogradHalf, MlpHalf, QkvHeads
from common.language.fp8_products import Fp8FrozenProduct, Fp8TrainedProduct, FrozenWeight
from common.language.lora import ProductAdapter
from common.language.movement import movement_of
from common.language.network import Decoder, DecoderBlock
from common.language.products import HalfProduct, Product, Scales, Scratch, Shared, WeightCasts
from common.language.residual import NormPasses, Pair, joined, last_normed
from common.language.te_products import TeFrozenProduct
from common.ops.operation import AUTO

FROZEN_PRODUCTS: dict[str, type[Fp8FrozenProduct]] = {"fp8": Fp8FrozenProduct, "te": TeFrozenProduct}
"""Product class with a frozen weight for each FP8 value of ``model.linear``."""


class Layer(nn.Module):
    """A block that runs through its halves. It is a module, so that hooks can wait for its weights before it runs."""

    def __init__(self, block: DecoderBlock, attention: AttentionHalf, mlp: MlpHalf | AutogradHalf) -> None:
        super().__init__()
        self.block, self.attention, self.mlp = block, attention, mlp

    def forward(self, pair: Pair, tokens: Tokens) -> Pair:
        """Return the pair for the next layer."""
        return self.mlp(self.attention(pair, tokens), tokens)

    @property
    def products(self) -> list[Product]:
        """The hand-written products in the order of the forward pass; only those of attention with another MLP."""
        mlp = self.mlp
        return [
            self.attention.qkv,
            self.attention.output,
            *((mlp.first, mlp.second) if isinstance(mlp, MlpHalf) else ()),
        ]


class NormAndHead(nn.Module):
    """The last norm. The module also holds the head's weight, because the head runs directly after the norm."""

    def __init__(self, decoder: Decoder, passes: NormPasses) -> None:
        super().__init__()
        self.norm, self.head_weight, self._passes = decoder.norm, decoder.head_weight, passes

    def forward(self, pair: Pair) -> Tensor:
        """Return the normalised hidden states (s, E) of this rank."""
        return last_normed(pair, self._passes)


class HandwrittenDecoder:
    """The blocks of a decoder as halves, on a stage that has some or all parts of it.

    Args:
        decoder: has all weights, on their device and in their dtype. The scales of FP8 products are added to its
            layers.
        linear: implementation of the blocks' linear layers: ``torch`` or ``fp8``, or ``te`` for frozen weights.
        most_tokens: largest number of tokens of a batch. The buffer that layers share is allocated here, so that CUDA
            graphs keep its address; 0 to allocate it when it is needed.
        recomputed_qkv, recomputed_mlp: number of layers, from the first, that recompute query, key and value, or the
            MLP's first product, in the backward pass.
        products: moves tokens during products if ranks share the layers; None for separate collectives.
        accumulation: how FP8 weight gradients are added up, an implementation of :mod:`common.ops.weight_gradient`.
        transposed_layers: number of layers, from the first, that also keep their FP8 weights transposed.

    Attributes:
        readers: modules by name in execution order, if this stage has the whole network. No module reads its weights
            before it runs; see :class:`common.optim.communication.WeightGatherer`.

    Raises:
        UnsupportedImplementation: FP8 cannot multiply these weights.
    """

    def __init__(
        self,
        decoder: Decoder,
        operations: DecoderOperations,
        linear: str,
        most_tokens: int,
        *,
        recomputed_qkv: int = 0,
        recomputed_mlp: int = 0,
        products: TokenProducts | None = None,
        accumulation: str = AUTO,
        transposed_layers: int = 0,
        own_eval_scales: bool = False,
    ) -> None:
        self.decoder, self._operations, self._linear = decoder, operations, linear
        shape, parallel, example = decoder.architecture, decoder.parallel, decoder.blocks()[0].attention_norm.weight
        scratch = Scratch(example.device)
        if most_tokens:
            scratch.mlp((most_tokens, shape.activation.parts * shape.feed_forward // parallel.size), example.dtype)
        self._shared = Shared(scratch, WeightCasts(), parallel, products, accumulation, own_eval_scales)
        self._recomputed, self._transposed = (recomputed_qkv, recomputed_mlp), transposed_layers
        self.layers = [[self._layer(block) for block in decoder.blocks(part)] for part in range(len(decoder.parts))]
        self.readers: Sequence[tuple[str, nn.Module]] = ()
        if decoder.last:
            self._norm_and_head = NormAndHead(decoder, self._norm(decoder.norm))
        if decoder.first and decoder.last:
            self.readers = [
                ("embedding", decoder.embedding),
                *((f"layer {layer.block.index}", layer) for part in self.layers for layer in part),
                ("norm and head", self._norm_and_head),
            ]

    def embed(self, tokens_BS: Tensor, positions: TokenPositions) -> Tensor:
        """Return the hidden states (s, E) before the first layer; see :meth:`common.language.network.Decoder.embed`."""
        return self.decoder.embed(tokens_BS, positions)

    def through(self, part: int, x_sE: Tensor, positions: TokenPositions) -> Tensor:
        """Return the hidden states (s, E) after one part of the network.

        See :meth:`common.language.network.Decoder.through`. Weight gradients are added to the main gradients.
        """
        return joined(self._through(part, x_sE, positions), self._operations.bias_gradient)

    def normed(self, x_sE: Tensor) -> Tensor:
        """Return the input (s, E) of the head; see :meth:`common.language.network.Decoder.normed`."""
        result: Tensor = self._norm_and_head(Pair(x_sE))
        return result

    def hidden_states(self, tokens_BS: Tensor, positions: TokenPositions) -> Tensor:
        """Return the input (s, E) of the head for all layers of the network.

        See :meth:`common.language.network.Decoder.hidden_states`. Collective.
        """
        result: Tensor = self._norm_and_head(self._through(0, self.embed(tokens_BS, positions), positions))
        return result

    def _through(self, part: int, x_sE: Tensor, positions: TokenPositions) -> Pair:
        inference = not torch.is_grad_enabled()
        self._shared.begin(inference)
        own_in_batch = self.decoder.parallel.own_tokens(positions.in_batch)
        cos, sin = self.decoder.architecture.rope_tables(positions.in_row)
        tokens = Tokens(positions.rows, inference, positions.in_batch, own_in_batch, cos, sin, positions.seed)
        pair = Pair(x_sE)
        for layer in self.layers[part]:
            pair = layer(pair, tokens)
        return pair

    def same_weights(self) -> AbstractContextManager[None]:
        """Within this context, no weight changes. FP8 products cast their weights in the first forward pass only."""
        return self._shared.casts.once()

    def prepare(self, part: int = 0) -> None:
        """Cast the weights of a part within :meth:`same_weights`, so that no forward pass casts them."""
        for layer in self.layers[part]:
            for product in layer.products:
                product.prepare()

    def begin_backward(self) -> None:
        """Call this before a backward pass that does not directly follow its forward pass. Collective over tp."""
        self._shared.begin_backward()

    def evaluating(self) -> AbstractContextManager[None]:
        """Context of an evaluation: no gradients, and no weight changes. Entering it casts the FP8 weights."""
        return self._shared.casts.evaluating()

    def _layer(self, block: DecoderBlock) -> Layer:
        shape, ranks, operations = block.architecture, self._shared.parallel.size, self._operations
        heads = QkvHeads(
            shape.heads // ranks, shape.kv_heads // ranks, shape.head_size, shape.rotary, operations.positions
        )
        recompute_qkv, recompute_mlp = (block.index < count for count in self._recomputed)
        qkv, output = (self._product(block, name) for name in ("qkv", "output"))
        bias = block.output.bias
        attention = AttentionHalf(operations, self._norm(block.attention_norm), heads, qkv, output, bias, recompute_qkv)
        if shape.mlp is not None:
            return Layer(block, attention, AutogradHalf(block, operations.bias_gradient))
        saved = None
        if self._linear != "torch":
            block.saved = Scales(1, block.attention_norm.weight.device)
            saved = block.saved.scaling(0)
        mlp = MlpHalf(
            operations.activation, self._shared.scratch, self._norm(block.mlp_norm),
            self._product(block, shape.activation.first), self._product(block, "down"), block.down.bias, saved,
            recompute_mlp,
        )  # fmt: skip
        return Layer(block, attention, mlp)

    def _norm(self, norm: DecoderNorm) -> NormPasses:
        return NormPasses(self._operations.norm, norm)

    def _product(self, block: DecoderBlock, name: str) -> Product:
        layer: Any = block.get_submodule(name)
        shared, shape = self._shared, block.architecture
        product = product_of(layer, self._linear, shared, block.index < self._transposed)
        if block.lora is not None and getattr(layer, "adapter", None) is not None:
            column_parallel = isinstance(layer, ColumnParallelLinear)
            product.adapter = ProductAdapter(
                block.lora, block.site(name), shape.hidden if column_parallel else shape.attention_features,
                column_parallel, shared.parallel, layer.lora_a, layer.lora_b, self._operations.lora_input,
            )  # fmt: skip
        return product


def product_of(layer: Any, linear: str, shared: Shared, keep_transposed: bool = False) -> Product:
    """Return the product for a layer's weight, without an adapter. A trained one in FP8 registers its scales there.

    It adds the layer's bias, but not that of a row-parallel layer, which every rank would add.

    Args:
        layer: module with ``weight``; column- or row-parallel if ranks share it.
        keep_transposed: whether to keep the FP8 weight transposed; ignored for ``torch``.

    Raises:
        UnsupportedImplementation: FP8 cannot multiply this weight.
    """
    movement = movement_of(layer, shared.parallel, shared.tokens)
    bias: nn.Parameter | None = None if isinstance(layer, RowParallelLinear) else getattr(layer, "bias", None)
    state = getattr(layer, "fp8", None)
    if isinstance(state, FrozenWeight):
        return FROZEN_PRODUCTS[linear](state, movement, shared, keep_transposed)
    if linear == "torch":
        return HalfProduct(layer.weight, movement, bias)
    layer.fp8 = Scales(3, layer.weight.device)
    return Fp8TrainedProduct(layer.weight, movement, bias, layer.fp8, shared, keep_transposed)
