"""A small GPT-3, and Hugging Face's GPT-2 with the same weights."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from benchmarks.gpt3.config import GptArchitecture
from common.distributed.context_parallel import ContextSplit
from common.language.architecture import Architecture, TokenPositions, block_operations, choose_operations
from common.language.decoder import HandwrittenDecoder
from common.language.head import LossHead, NextTokenHead, PendingGradients, TiedHead
from common.language.network import Decoder
from common.ops.cross_entropy import OF_A_PART
from common.ops.operation import REFERENCE, OperationRequest
from tests.generators import generator_of

SMALL: dict[str, Any] = {
    "vocabulary": 150, "hidden": 32, "layers": 2, "heads": 4, "feed_forward": 96, "positions": 40,
    "norm_epsilon": 1e-5, "initializer_range": 0.2,
}  # fmt: skip
"""On two ranks the second has words and padding, on four two have padding alone."""
B, S, CHUNK = 2, 32, 20
REFERENCES = dict.fromkeys(block_operations(GptArchitecture), REFERENCE)


def architecture(**changes: object) -> GptArchitecture:
    """Of a few thousand weights."""
    return GptArchitecture(**{**SMALL, **changes})


def randomise(model: Decoder) -> None:
    """Norms and biases that matter, too; equal for any number of ranks."""
    model.initialise(generator_of)
    splits = model.tensor_splits()
    for name, parameter in model.named_parameters():
        if parameter.ndim == 1:
            whole = torch.empty(splits[name].full_shape if name in splits else parameter.shape, dtype=torch.float64)
            whole.normal_(0.0, 0.1, generator=generator_of(name))
            parameter.data.copy_(splits[name].local_of(whole) if name in splits else whole)


def part(
    shape: GptArchitecture, parts: Sequence[range] | None = None, first: bool = True, last: bool = True, **given: Any
) -> Decoder:
    """Parts of the network on one stage; ``given``: others of :class:`Decoder`."""
    return Decoder(shape, parts=parts, first=first, last=last, **given)


def network(dtype: torch.dtype = torch.float64, **changes: object) -> Decoder:
    """The whole of it on one rank."""
    model = part(architecture(**changes), dtype=dtype)
    randomise(model)
    return model


class Passes:
    """Passes of a network with its head: under autograd, or through the halves."""

    def __init__(
        self,
        model: Decoder,
        handwritten: HandwrittenDecoder | None = None,
        pending: int = 0,
        cross_entropy: str = REFERENCE,
    ) -> None:
        self.model, self.handwritten, self.network = model, handwritten, handwritten or model
        self.architecture, self.parts, self.parallel = model.architecture, model.parts, model.parallel
        self._cross_entropy = cross_entropy
        self._pending = PendingGradients(0 if model.first else pending)

    def embed(self, tokens_BS: Tensor) -> Tensor:
        return self.network.embed(
            tokens_BS, TokenPositions.whole(len(tokens_BS), tokens_BS.shape[1], device=tokens_BS.device)
        )

    def through(self, chunk: int, x_sE: Tensor, rows: int) -> Tensor:
        length = len(x_sE) * self.parallel.size // rows
        return self.network.through(chunk, x_sE, TokenPositions.whole(rows, length, device=x_sE.device))

    def head(self, chunk: int = CHUNK) -> LossHead:
        weight, vocabulary = self.model.head_weight, self.architecture.vocabulary
        if self.handwritten is None:
            return NextTokenHead(weight, self.parallel, chunk, vocabulary)
        function = OF_A_PART.select(
            self._cross_entropy, OperationRequest(weight.device, weight.dtype, {"columns": len(weight)})
        )
        return TiedHead(
            weight, vocabulary, self.parallel, function.function, not self.model.first, chunk, self._pending
        )

    def losses(self, x_sE: Tensor, labels_T: Tensor, chunk: int = CHUNK) -> Tensor:
        return self.head(chunk).losses(self.network.normed(x_sE), labels_T)

    def summed_loss(self, x_sE: Tensor, labels_T: Tensor, chunk: int = CHUNK, factor: float = 1.0) -> Tensor:
        return self.head(chunk).summed_loss(self.network.normed(x_sE), labels_T, factor)

    @contextlib.contextmanager
    def same_weights(self) -> Iterator[None]:
        """What a step does around its passes."""
        assert self.handwritten is not None
        with contextlib.ExitStack() as stack:
            stack.enter_context(self.handwritten.same_weights())
            if self.model.last:
                stack.enter_context(self.head().step())
            yield


def handwritten(model: Decoder, linear: str = "torch", pending: int = 0, **changes: str) -> Passes:
    """``model`` through its halves, by the references but for ``changes``."""
    parameter = next(model.parameters())
    operations, _ = choose_operations(
        {**REFERENCES, **changes}, model.architecture, ContextSplit(S), parameter.device, parameter.dtype
    )
    return Passes(model, HandwrittenDecoder(model, operations, linear, B * S), pending)


def rows(shape: Architecture | None = None, seed: int = 1) -> tuple[Tensor, Tensor]:
    """Tokens and labels (B, S); the last label of every row is not scored."""
    vocabulary = (shape or architecture()).vocabulary
    tokens_BR = torch.randint(vocabulary, (B, S + 1), generator=torch.Generator().manual_seed(seed), dtype=torch.int32)
    tokens_BR[:, -1] = -1
    return tokens_BR[:, :-1].contiguous(), tokens_BR[:, 1:].contiguous()


def losses(model: Decoder | Passes, chunk: int = CHUNK) -> Tensor:
    """Losses (T,) of :func:`rows`."""
    passes = Passes(model) if isinstance(model, Decoder) else model
    tokens_BS, labels_BS = rows(passes.architecture)
    x_sE = passes.embed(tokens_BS)
    for number in range(len(passes.parts)):
        x_sE = passes.through(number, x_sE, B)
    return passes.losses(x_sE, labels_BS.flatten(), chunk)


def hugging_face(ours: Decoder) -> Any:
    """``GPT2LMHeadModel`` with the weights of ``ours``."""
    from transformers import GPT2Config, GPT2LMHeadModel

    shape = ours.architecture
    config = GPT2Config(
        vocab_size=shape.vocabulary, n_positions=shape.positions, n_embd=shape.hidden, n_layer=shape.layers,
        n_head=shape.heads, n_inner=shape.feed_forward, activation_function="gelu_new", resid_pdrop=0.0,
        embd_pdrop=0.0, attn_pdrop=0.0, layer_norm_epsilon=shape.norm_epsilon, tie_word_embeddings=True,
        attn_implementation="eager",
    )  # fmt: skip
    model = GPT2LMHeadModel(config).to(next(ours.parameters()).dtype).eval()
    with torch.no_grad():
        own = dict(model.named_parameters())
        for name, tensor in theirs_of(ours.architecture, dict(ours.named_parameters()), norm=1.0):
            own.pop(name).copy_(tensor)
    assert not own
    return model


def theirs_of(shape: Architecture, tensors: dict[str, Tensor], norm: float = 0.0) -> list[tuple[str, Tensor]]:
    """Their names, and our tensors (weights or gradients) in their order; ``norm`` is added to the norms' weights.

    Their linear layers have the transposed weight, and all queries come before all keys.
    """

    def by_kind(qkv: Tensor) -> Tensor:
        return qkv.unflatten(0, (shape.heads, 3, shape.head_size)).transpose(0, 1).flatten(0, 2)

    found = [
        ("transformer.wte.weight", tensors["embedding.weight"][: shape.vocabulary]),
        ("transformer.wpe.weight", tensors["positions.weight"]),
        ("transformer.ln_f.weight", tensors["norm.weight"] + norm),
        ("transformer.ln_f.bias", tensors["norm.bias"]),
    ]
    for n in range(shape.layers):
        mine, theirs = f"layers.{n}.", f"transformer.h.{n}."
        found += [
            (f"{theirs}attn.c_attn.weight", by_kind(tensors[f"{mine}qkv.weight"]).t()),
            (f"{theirs}attn.c_attn.bias", by_kind(tensors[f"{mine}qkv.bias"])),
        ]
        for our_name, their_name in (("attention_norm", "ln_1"), ("mlp_norm", "ln_2")):
            found += [
                (f"{theirs}{their_name}.weight", tensors[f"{mine}{our_name}.weight"] + norm),
                (f"{theirs}{their_name}.bias", tensors[f"{mine}{our_name}.bias"]),
            ]
        for our_name, their_name in (("output", "attn.c_proj"), ("up", "mlp.c_fc"), ("down", "mlp.c_proj")):
            found += [
                (f"{theirs}{their_name}.weight", tensors[f"{mine}{our_name}.weight"].t()),
                (f"{theirs}{their_name}.bias", tensors[f"{mine}{our_name}.bias"]),
            ]
    return found
