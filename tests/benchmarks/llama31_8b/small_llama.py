"""A small Llama 3.1, and Hugging Face's model with the same weights."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from benchmarks.llama31_8b.config import Facts
from common.language.network import Decoder
from common.mlperf.fixed import fixed_facts
from tests.generators import generator_of

SMALL: dict[str, Any] = {
    "vocabulary": 96, "hidden": 48, "layers": 2, "heads": 6, "kv_heads": 2, "head_size": 16, "feed_forward": 80,
    "rope_base": 1000.0, "rope_original_context": 32, "row_length": 40, "initializer_range": 0.2,
}  # fmt: skip
"""The original context lies between the wavelengths, so that all three parts of the scaling occur."""


def facts(**changes: object) -> Facts:
    """Those of the rules but for the sizes."""
    return fixed_facts(Facts, "llama31_8b", **{**SMALL, **changes})


def decoder(dtype: torch.dtype = torch.float64, **changes: object) -> Decoder:
    """With norms that matter."""
    made = Decoder(facts(**changes), dtype=dtype)
    made.initialise(generator_of)
    for name, parameter in made.named_parameters():
        if name.endswith("norm.weight"):
            parameter.data.normal_(1.0, 0.1, generator=generator_of(name))
    return made


def rows(count: int = 2, shape: Facts | None = None, seed: int = 1) -> Tensor:
    """Rows of tokens with the last one's label."""
    shape = shape or facts()
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(shape.vocabulary, (count, shape.row_length + 1), generator=generator, dtype=torch.int32)


def hugging_face(ours: Decoder) -> Any:
    """``LlamaForCausalLM`` with the weights of ``ours``; query, key and value, and gate and up, are products apart."""
    from transformers import LlamaConfig, LlamaForCausalLM

    shape = ours.architecture
    assert isinstance(shape, Facts)
    config = LlamaConfig(
        vocab_size=shape.vocabulary, hidden_size=shape.hidden, intermediate_size=shape.feed_forward,
        num_hidden_layers=shape.layers, num_attention_heads=shape.heads, num_key_value_heads=shape.kv_heads,
        head_dim=shape.head_size, rms_norm_eps=shape.norm_epsilon, max_position_embeddings=4096,
        tie_word_embeddings=False, attn_implementation="eager", rope_theta=shape.rope_base,
        rope_scaling={
            "rope_type": "llama3", "factor": shape.rope_factor, "low_freq_factor": shape.rope_slow_turns,
            "high_freq_factor": shape.rope_fast_turns,
            "original_max_position_embeddings": shape.rope_original_context,
        },
    )  # fmt: skip
    model = LlamaForCausalLM(config).to(next(ours.parameters()).dtype)
    model.load_state_dict(dict(theirs_of(ours, dict(ours.named_parameters()))))
    return model


def theirs_of(ours: Decoder, tensors: dict[str, Tensor]) -> list[tuple[str, Tensor]]:
    """Their names, and the parts of our tensors (weights or gradients) that belong there."""
    shape = ours.architecture
    sizes = [shape.attention_features, *2 * [shape.kv_heads * shape.head_size]]
    found = [
        ("model.embed_tokens.weight", tensors["embedding.weight"]),
        ("model.norm.weight", tensors["norm.weight"]),
        ("lm_head.weight", tensors["head.weight"]),
    ]
    for n in range(shape.layers):
        mine, theirs = f"layers.{n}.", f"model.layers.{n}."
        for name, part in zip("qkv", tensors[f"{mine}qkv.weight"].split(sizes), strict=True):
            found.append((f"{theirs}self_attn.{name}_proj.weight", part))
        gate, up = tensors[f"{mine}gate_up.weight"].chunk(2)
        found += [
            (f"{theirs}self_attn.o_proj.weight", tensors[f"{mine}output.weight"]),
            (f"{theirs}mlp.gate_proj.weight", gate),
            (f"{theirs}mlp.up_proj.weight", up),
            (f"{theirs}mlp.down_proj.weight", tensors[f"{mine}down.weight"]),
            (f"{theirs}input_layernorm.weight", tensors[f"{mine}attention_norm.weight"]),
            (f"{theirs}post_attention_layernorm.weight", tensors[f"{mine}mlp_norm.weight"]),
        ]
    return found
