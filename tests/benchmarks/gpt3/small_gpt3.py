"""A small GPT-3, and Hugging Face's GPT-2 with the same weights."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from benchmarks.gpt3.architecture import Architecture
from benchmarks.gpt3.network import Gpt
from benchmarks.gpt3.operations import BLOCK_OPERATIONS, choose_operations
from benchmarks.gpt3.written import WrittenGpt
from common.ops.operation import REFERENCE
from tests.generators import generator_of

SMALL: dict[str, Any] = {
    "vocabulary": 150, "hidden": 32, "layers": 2, "heads": 4, "feed_forward": 96, "positions": 40,
    "norm_epsilon": 1e-5, "initializer_range": 0.2,
}  # fmt: skip
"""On two ranks the second has words and padding, on four two have padding alone."""
B, S, CHUNK = 2, 32, 20
REFERENCES = dict.fromkeys(BLOCK_OPERATIONS, REFERENCE)


def architecture(**changes: object) -> Architecture:
    """Of a few thousand weights."""
    return Architecture(**{**SMALL, **changes})


def randomise(model: Gpt) -> None:
    """Norms and biases that matter, too; equal for any number of ranks."""
    model.initialise(generator_of)
    splits = model.tensor_splits()
    for name, parameter in model.named_parameters():
        if parameter.ndim == 1:
            whole = torch.empty(splits[name].full_shape if name in splits else parameter.shape, dtype=torch.float64)
            whole.normal_(0.0, 0.1, generator=generator_of(name))
            parameter.data.copy_(splits[name].local_of(whole) if name in splits else whole)


def network(dtype: torch.dtype = torch.float64, **changes: object) -> Gpt:
    """The whole of it on one rank."""
    shape = architecture(**changes)
    model = Gpt(shape, [range(shape.layers)], dtype=dtype)
    randomise(model)
    return model


def written(
    model: Gpt,
    linear: str = "torch",
    put_off_head: int = 0,
    **changes: str,
) -> WrittenGpt:
    """``model`` through its halves, by the references but for ``changes``."""
    parameter = next(model.parameters())
    operations, _ = choose_operations(
        {**REFERENCES, **changes}, model.architecture, parameter.device, parameter.dtype, model.parallel.size
    )
    return WrittenGpt(model, operations, linear, B * S, put_off_head=put_off_head)


def rows(shape: Architecture | None = None, seed: int = 1) -> tuple[Tensor, Tensor]:
    """Tokens and labels (B, S); the last label of every row is not scored."""
    vocabulary = (shape or architecture()).vocabulary
    tokens_BR = torch.randint(vocabulary, (B, S + 1), generator=torch.Generator().manual_seed(seed), dtype=torch.int32)
    tokens_BR[:, -1] = -1
    return tokens_BR[:, :-1].contiguous(), tokens_BR[:, 1:].contiguous()


def losses(model: Any, chunk: int = CHUNK) -> Tensor:
    """Losses (T,) of :func:`rows`."""
    tokens_BS, labels_BS = rows(model.architecture)
    x_sE = model.embed(tokens_BS)
    for number in range(len(model.parts)):
        x_sE = model.through(number, x_sE, B)
    found: Tensor = model.losses(x_sE, labels_BS.flatten(), chunk)
    return found


def hugging_face(ours: Gpt) -> Any:
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
