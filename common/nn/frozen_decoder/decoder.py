"""Run a :class:`common.nn.decoder.Decoder` with a frozen base through the halves of :mod:`.blocks`."""

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
"""Products of a block that may be in FP8. Embedding and head keep their dtype."""

IN_FP8: dict[str, type[Fp8FrozenProduct]] = {"fp8": Fp8FrozenProduct, "te": TeFrozenProduct}
"""FP8 product class for each FP8 value of ``model.linear``."""


class SavedScale(nn.Module):
    """Scale for keeping SwiGLU's input in FP8. Buffers as in :class:`Fp8FrozenProduct`."""

    scale: Tensor
    pending: Tensor

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self.register_buffer("scale", torch.zeros((), dtype=torch.float32, device=device))
        self.register_buffer("pending", torch.zeros(2, dtype=torch.int32, device=device), persistent=False)

    def scaling(self) -> Scaling:
        """Return the state of the scale."""
        return Scaling(self.scale, self.pending)


@dataclass(frozen=True)
class FrozenDecoder:
    """The blocks of ``decoder`` as halves.

    Attributes:
        decoder: holds all weights, as loaded by :func:`load_frozen`.
        operations: chosen implementations.
        products: moves tokens between ranks during products.
        scratch: buffers that all layers share.
        recomputed_qkv: number of layers, from the first, that recompute query, key and value in the backward pass.
    """

    decoder: Decoder
    operations: Operations
    products: TokenProducts
    scratch: Scratch
    recomputed_qkv: int = 0

    def hidden_states(self, tokens_BS: Tensor, places: TokenPlaces) -> Tensor:
        """Return the normalised hidden states (s, E) of this rank's tokens, the input of the head."""
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
    """Load the frozen weights into a decoder on ``meta``, one tensor at a time. Each rank keeps its part.

    The adapters are allocated uninitialised.

    Args:
        tensors: name and whole value of every frozen weight, on any device, in any order.
        device, dtype: device and dtype of the computation.
        linear: ``torch``, or a key of ``IN_FP8``, which casts each product of the blocks as soon as it is loaded, so
            that the blocks never exist as a whole in a wider dtype.
        transposed_layers: number of layers, from the first, that also keep their FP8 weights transposed.

    Raises:
        CheckpointError: a weight is missing, unknown or of another shape.
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
