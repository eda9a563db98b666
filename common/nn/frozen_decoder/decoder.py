"""A :class:`common.nn.decoder.Decoder` whose base is frozen, run through its halves."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from common.distributed.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from common.distributed.tensor_parallel.products import TokenProducts
from common.errors import CheckpointError
from common.nn.decoder import Decoder, DecoderBlock
from common.nn.frozen_decoder.adapter import Adapter
from common.nn.frozen_decoder.blocks import AttentionHalf, LastNorm, MlpHalf
from common.nn.frozen_decoder.operations import Operations
from common.nn.frozen_decoder.passing import Pair, Tokens
from common.nn.frozen_decoder.products import Fp8FrozenProduct, FrozenProduct, HalfProduct
from common.nn.frozen_decoder.te_products import TeFrozenProduct
from common.nn.lora import TokenPlaces
from common.nn.scratch import Scratch
from common.ops.fp8_cast.reference import Scaling

PRODUCTS = ("qkv", "output", "gate_up", "down")
"""The products of a block that may be in FP8; embedding and head stay as they are."""

IN_FP8: dict[str, type[Fp8FrozenProduct]] = {"fp8": Fp8FrozenProduct, "te": TeFrozenProduct}
"""``model.linear`` to the products that it means."""


class SavedScale(nn.Module):
    """The scale with which SwiGLU's input is kept in FP8; buffers as of :class:`Fp8FrozenProduct`."""

    scale: Tensor
    pending: Tensor

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self.register_buffer("scale", torch.zeros((), dtype=torch.float32, device=device))
        self.register_buffer("pending", torch.zeros(2, dtype=torch.int32, device=device), persistent=False)

    def scaling(self) -> Scaling:
        """Its state."""
        return Scaling(self.scale, self.pending)


@dataclass(frozen=True)
class FrozenDecoder:
    """The blocks of ``decoder`` as halves.

    Attributes:
        decoder: holds all weights; its blocks' products are in FP8 where :func:`load_frozen` was told so.
        operations: how they run.
        products: how tokens move beside products.
        scratch: what they share.
        recomputed_qkv: the first so many layers compute query, key and value again in the backward pass.
    """

    decoder: Decoder
    operations: Operations
    products: TokenProducts
    scratch: Scratch
    recomputed_qkv: int = 0

    def hidden_states(self, tokens_BS: Tensor, places: TokenPlaces) -> Tensor:
        """Normalised hidden states (s, E) of own tokens, which the head reads."""
        shape, parallel = self.decoder.architecture, self.decoder.parallel
        self.products.begin()
        tables = shape.rope_tables(places.positions)
        own_numbers = parallel.own_tokens(places.numbers)
        tokens = Tokens(places.rows, places.numbers, own_numbers, *tables, places.seed)
        pair = Pair(self.decoder.embedding(tokens_BS.flatten()), None, None)
        for block in self.decoder.blocks:
            adapters = (block.qkv.lora_a, block.qkv.lora_b, block.output.lora_a, block.output.lora_b)
            pair = self._attention(block)(pair, tokens, adapters)
            pair = self._mlp(block)(pair, tokens)
        return LastNorm(shape, self.operations, self.decoder.norm.weight)(pair)

    def _attention(self, block: DecoderBlock) -> AttentionHalf:
        shape, parallel = block.architecture, self.decoder.parallel
        columns = shape.attention_features
        return AttentionHalf(
            shape,
            self.operations,
            parallel,
            self.products,
            self.scratch,
            block.attention_norm.weight,
            _product(block.qkv),
            self._adapter(block, "qkv", shape.hidden, 0),
            _product(block.output),
            self._adapter(block, "output", columns, parallel.index * columns // parallel.size),
            block.index >= self.recomputed_qkv,
        )

    def _adapter(self, block: DecoderBlock, product: str, columns: int, first_column: int) -> Adapter:
        assert block.lora is not None
        return Adapter(block.lora, block.site(product), columns, first_column, self.operations.lora_input)

    def _mlp(self, block: DecoderBlock) -> MlpHalf:
        saved: SavedScale | None = getattr(block, "saved", None)
        return MlpHalf(
            block.architecture,
            self.operations,
            self.decoder.parallel,
            self.products,
            self.scratch,
            block.mlp_norm.weight,
            _product(block.gate_up),
            _product(block.down),
            None if saved is None else saved.scaling(),
        )


def _product(layer: ColumnParallelLinear | RowParallelLinear) -> FrozenProduct:
    fp8: Fp8FrozenProduct | None = getattr(layer, "fp8", None)
    return HalfProduct(layer.weight) if fp8 is None else fp8


@torch.no_grad()
def load_frozen(
    decoder: Decoder,
    tensors: Iterable[tuple[str, Tensor]],
    device: torch.device,
    dtype: torch.dtype,
    linear: str,
    transposed_layers: int = 0,
) -> None:
    """Give a decoder that was built on ``meta`` its weights, one tensor at a time, each rank its part.

    Args:
        decoder: adapters are brought to the device uninitialised.
        tensors: name and value of every frozen weight, whole, on any device, in any order.
        device, dtype: where and in which dtype the network computes.
        linear: one of ``IN_FP8`` casts the products of the blocks, each as it comes, so that they are never there in a
            wider dtype together; ``torch`` leaves them.
        transposed_layers: the first so many keep their FP8 weights transposed, too.

    Raises:
        CheckpointError: a weight is missing, unknown, or of another shape.
    """
    splits = decoder.tensor_splits()
    missing = {name: parameter.shape for name, parameter in decoder.named_parameters() if not parameter.requires_grad}
    for name, tensor in tensors:
        own = splits[name].local_of(tensor) if name in splits else tensor
        shape = missing.pop(name, None)
        if shape != own.shape:
            raise CheckpointError(f"{name} is {tuple(own.shape)}, the network has {shape and tuple(shape)}")
        layer, moved = decoder.get_submodule(name.rpartition(".")[0]), own.to(device, dtype)
        path = name.split(".")
        if linear in IN_FP8 and path[0] == "layers" and path[2] in PRODUCTS:
            layer.register_parameter("weight", None)
            layer.fp8 = IN_FP8[linear](moved, dtype, int(path[1]) < transposed_layers)
        else:
            layer.weight = nn.Parameter(moved, requires_grad=False)
    if missing:
        raise CheckpointError(f"{next(iter(missing))} and {len(missing) - 1} other frozen weights are missing")
    for name, parameter in list(decoder.named_parameters()):
        if parameter.requires_grad:
            owner, _, own_name = name.rpartition(".")
            fresh = torch.empty(parameter.shape, device=device, dtype=dtype)
            setattr(decoder.get_submodule(owner), own_name, nn.Parameter(fresh))
    if linear in IN_FP8:
        for block in decoder.layers:
            block.saved = SavedScale(device)
