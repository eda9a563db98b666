"""Names, shapes and configuration of Llama weights at Hugging Face, for a :class:`common.language.network.Decoder`.

At Hugging Face, query, key and value are three tensors or, as in the base of the benchmark, one ``qkv_proj`` with rows
in that order; gate and up are two tensors. The rotation pairs the same dimensions as ours, so no rows are permuted.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from common.language.architecture import LlamaArchitecture

IGNORED = ".rotary_emb.inv_freq"
"""End of the names of tensors that older files also contain: a constant of the rotation, which is ignored."""


@dataclass(frozen=True)
class Part:
    """A tensor in the Hugging Face files, and the number of rows that it fills in our tensor."""

    name: str
    rows: int


@dataclass(frozen=True)
class Weight:
    """One of our tensors.

    Attributes:
        ways: alternative forms in files; each form is a list of parts to concatenate along the rows.
    """

    name: str
    shape: tuple[int, ...]
    ways: tuple[tuple[Part, ...], ...]


def weights(architecture: LlamaArchitecture) -> Iterator[Weight]:
    """Yield all weights of a decoder without adapters, from the embedding to the head."""
    shape = architecture
    table = (shape.vocabulary, shape.hidden)
    yield _one("embedding.weight", table, "model.embed_tokens.weight")
    for index in range(shape.layers):
        ours, theirs = f"layers.{index}", f"model.layers.{index}"
        queries, keys = shape.attention_features, shape.kv_heads * shape.head_size
        separate = tuple(
            Part(f"{theirs}.self_attn.{kind}_proj.weight", rows)
            for kind, rows in (("q", queries), ("k", keys), ("v", keys))
        )
        fused = (Part(f"{theirs}.self_attn.qkv_proj.weight", shape.qkv_features),)
        halves = tuple(Part(f"{theirs}.mlp.{kind}_proj.weight", shape.feed_forward) for kind in ("gate", "up"))
        yield _one(f"{ours}.attention_norm.weight", (shape.hidden,), f"{theirs}.input_layernorm.weight")
        yield Weight(f"{ours}.qkv.weight", (shape.qkv_features, shape.hidden), (fused, separate))
        yield _one(f"{ours}.output.weight", (shape.hidden, queries), f"{theirs}.self_attn.o_proj.weight")
        yield _one(f"{ours}.mlp_norm.weight", (shape.hidden,), f"{theirs}.post_attention_layernorm.weight")
        yield Weight(f"{ours}.gate_up.weight", (2 * shape.feed_forward, shape.hidden), (halves,))
        yield _one(f"{ours}.down.weight", (shape.hidden, shape.feed_forward), f"{theirs}.mlp.down_proj.weight")
    yield _one("norm.weight", (shape.hidden,), "model.norm.weight")
    yield _one("head.weight", table, "lm_head.weight")


def _one(name: str, shape: tuple[int, ...], theirs: str) -> Weight:
    return Weight(name, shape, ((Part(theirs, shape[0]),),))


def config(architecture: LlamaArchitecture, max_positions: int, dtype: str) -> dict[str, Any]:
    """Return the content of ``config.json`` for a model with these sizes; BOS is token 1 and EOS is token 2."""
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_act": "silu",
        "max_position_embeddings": max_positions,
        "tie_word_embeddings": False,
        "attention_bias": False,
        "mlp_bias": False,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "rope_scaling": None,
        "torch_dtype": dtype,
        "initializer_range": architecture.initializer_range,
        **_numbers(architecture),
    }


def disagreement(described: dict[str, Any], architecture: LlamaArchitecture) -> str | None:
    """Return the first difference between a ``config.json`` and ``architecture``, or None.

    The shapes of tensors do not determine the number of heads or the base of the rotation, so they are not sufficient.
    """
    found = dict(described)
    rope = found.get("rope_parameters")  # transformers 5 has the rotation here; older versions have it at the top level
    if isinstance(rope, dict):
        found.setdefault("rope_theta", rope.get("rope_theta"))
        if rope.get("rope_type", "default") != "default":
            return f"rope_type {rope['rope_type']!r}, and the model has 'default'"
    expected = {**_numbers(architecture), "tie_word_embeddings": False, "hidden_act": "silu", "rope_scaling": None}
    for name, value in expected.items():
        if name in found and found[name] != value:
            return f"{name} {found[name]!r}, and the model has {value!r}"
    return None


def _numbers(architecture: LlamaArchitecture) -> dict[str, Any]:
    return {
        "vocab_size": architecture.vocabulary,
        "hidden_size": architecture.hidden,
        "num_hidden_layers": architecture.layers,
        "num_attention_heads": architecture.heads,
        "num_key_value_heads": architecture.kv_heads,
        "head_dim": architecture.head_size,
        "intermediate_size": architecture.feed_forward,
        "rms_norm_eps": architecture.norm_epsilon,
        "rope_theta": architecture.rope_base,
    }
