"""The decoder against Hugging Face's Llama, its adapters against PEFT's, and its counts against the published ones."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from common.errors import ConfigError
from common.language.architecture import LlamaArchitecture, TokenPositions
from common.language.lora import LoraSettings, adapter_dropout
from common.language.network import Decoder
from tests.generators import generator_of

SMALL = LlamaArchitecture(
    vocabulary=97, hidden=48, layers=2, heads=8, kv_heads=2, head_size=6, feed_forward=80,
    norm_epsilon=1e-5, rope_base=10_000.0, initializer_range=0.2,
)  # fmt: skip
LLAMA_2_70B = LlamaArchitecture(
    vocabulary=32_000, hidden=8192, layers=80, heads=64, kv_heads=8, head_size=128, feed_forward=28_672,
    norm_epsilon=1e-5, rope_base=10_000.0, initializer_range=0.02,
)  # fmt: skip
ADAPTERS = LoraSettings(rank=4, alpha=8.0, dropout=0.0)


def small(lora: LoraSettings | None = None, dtype: torch.dtype = torch.float32) -> Decoder:
    decoder = Decoder(SMALL, dtype=dtype, lora=lora)
    decoder.initialise(generator_of)
    for block in decoder.blocks():  # norms and adapters that matter
        for name, parameter in block.named_parameters():
            if name.endswith(("norm.weight", "lora_b")):
                parameter.data.normal_(1.0, 0.1, generator=generator_of(name))
    return decoder


def tokens(rows: int = 2, length: int = 19) -> Tensor:
    return torch.randint(SMALL.vocabulary, (rows, length), generator=torch.Generator().manual_seed(1))


def their_llama(decoder: Decoder):
    """Hugging Face's model with the same base weights; its QKV and MLP products are separate."""
    from transformers import LlamaConfig, LlamaForCausalLM

    shape = decoder.architecture
    config = LlamaConfig(
        vocab_size=shape.vocabulary, hidden_size=shape.hidden, intermediate_size=shape.feed_forward,
        num_hidden_layers=shape.layers, num_attention_heads=shape.heads, num_key_value_heads=shape.kv_heads,
        head_dim=shape.head_size, rms_norm_eps=shape.norm_epsilon, max_position_embeddings=64,
        rope_theta=shape.rope_base, tie_word_embeddings=False, attn_implementation="eager",
    )  # fmt: skip
    model = LlamaForCausalLM(config)
    ours = dict(decoder.named_parameters())
    sizes = [shape.heads * shape.head_size, *2 * [shape.kv_heads * shape.head_size]]
    state = {
        "model.embed_tokens.weight": ours["embedding.weight"],
        "model.norm.weight": ours["norm.weight"],
        "lm_head.weight": ours["head.weight"],
    }
    for n in range(shape.layers):
        mine, theirs = f"layers.{n}.", f"model.layers.{n}."
        for name, part in zip("qkv", ours[f"{mine}qkv.weight"].split(sizes), strict=True):
            state[f"{theirs}self_attn.{name}_proj.weight"] = part
        state[f"{theirs}self_attn.o_proj.weight"] = ours[f"{mine}output.weight"]
        gate, up = ours[f"{mine}gate_up.weight"].chunk(2)
        state |= {f"{theirs}mlp.gate_proj.weight": gate, f"{theirs}mlp.up_proj.weight": up}
        state[f"{theirs}mlp.down_proj.weight"] = ours[f"{mine}down.weight"]
        state[f"{theirs}input_layernorm.weight"] = ours[f"{mine}attention_norm.weight"]
        state[f"{theirs}post_attention_layernorm.weight"] = ours[f"{mine}mlp_norm.weight"]
    model.load_state_dict(state)
    return model.float()


def test_logits_are_those_of_hugging_face():
    decoder, given = small(), tokens()
    expected = their_llama(decoder)(input_ids=given).logits
    torch.testing.assert_close(decoder.forward_logits(given), expected, rtol=1e-4, atol=1e-4)


def test_loss_and_adapter_gradients_are_those_of_peft():
    """Separate adapters of q, k and v that start from one A have gradients of A that add up to the fused one's."""
    from peft import LoraConfig, get_peft_model

    decoder, given = small(ADAPTERS), tokens()
    names = ["q_proj", "k_proj", "v_proj", "o_proj"]
    settings = LoraConfig(r=ADAPTERS.rank, lora_alpha=ADAPTERS.alpha, target_modules=names, lora_dropout=0.0)
    theirs = get_peft_model(their_llama(decoder), settings)
    shape, found = SMALL, dict(theirs.named_parameters())
    sizes = [shape.heads * shape.head_size, *2 * [shape.kv_heads * shape.head_size]]

    def of(layer: int, which: str, matrix: str) -> Tensor:
        return found[f"base_model.model.model.layers.{layer}.self_attn.{which}_proj.lora_{matrix}.default.weight"]

    with torch.no_grad():
        for n, block in enumerate(decoder.blocks()):
            for name, part in zip("qkv", block.qkv.lora_b.split(sizes), strict=True):
                of(n, name, "A").copy_(block.qkv.lora_a)
                of(n, name, "B").copy_(part)
            of(n, "o", "A").copy_(block.output.lora_a)
            of(n, "o", "B").copy_(block.output.lora_b)
    expected = theirs(input_ids=given, labels=given).loss
    logits = decoder.forward_logits(given)
    loss = torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), given[:, 1:].flatten())
    torch.testing.assert_close(loss, expected, rtol=1e-5, atol=1e-6)
    expected.backward()
    loss.backward()
    for n, block in enumerate(decoder.blocks()):
        sums = sum(of(n, name, "A").grad for name in "qkv")
        torch.testing.assert_close(block.qkv.lora_a.grad, sums, rtol=1e-3, atol=1e-5)
        joined = torch.cat([of(n, name, "B").grad for name in "qkv"])
        torch.testing.assert_close(block.qkv.lora_b.grad, joined, rtol=1e-3, atol=1e-5)
        torch.testing.assert_close(block.output.lora_a.grad, of(n, "o", "A").grad, rtol=1e-3, atol=1e-5)
        torch.testing.assert_close(block.output.lora_b.grad, of(n, "o", "B").grad, rtol=1e-3, atol=1e-5)
        assert block.qkv.weight.grad is None


def test_counts_of_llama_2_70b():
    decoder = Decoder(LLAMA_2_70B, "meta", torch.bfloat16, LoraSettings(16, 32.0, 0.1))
    trained = sum(p.numel() for p in decoder.parameters() if p.requires_grad)
    frozen = sum(p.numel() for p in decoder.parameters() if not p.requires_grad)
    assert (frozen, trained) == (68_976_648_192, 44_564_480)
    assert LLAMA_2_70B.parameters == frozen
    assert LLAMA_2_70B.forward_flops(8192) == pytest.approx(1213.8e12, rel=1e-4)


def test_fresh_adapters_change_nothing():
    plain, adapted = Decoder(SMALL), Decoder(SMALL, lora=LoraSettings(4, 8.0, 0.5))
    plain.initialise(generator_of)
    adapted.initialise(generator_of)
    positions = TokenPositions.whole(2, 19, torch.tensor(5))
    assert torch.equal(plain.forward_logits(tokens()), adapted.forward_logits(tokens(), positions))
    adapted.forward_logits(tokens(), positions).square().sum().backward()
    for block in adapted.blocks():
        assert block.qkv.lora_a.grad.count_nonzero() == 0
        assert block.qkv.lora_b.grad.count_nonzero() > 0


def test_dropout_is_on_the_adapters_input_alone():
    """Its mean over seeds is no dropout; two seeds differ; the same seed gives the same."""
    lora = LoraSettings(4, 8.0, 0.25)
    block = small(lora, torch.float64).blocks()[0]
    x = torch.randn(5, SMALL.hidden, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
    seeds = [TokenPositions.whole(1, 5, torch.tensor(seed)) for seed in range(400)]
    outputs = torch.stack([block.qkv(x, adapter_dropout(lora, 0, positions)) for positions in seeds])
    assert torch.equal(outputs[7], block.qkv(x, adapter_dropout(lora, 0, seeds[7])))
    assert not torch.equal(outputs[7], outputs[8])
    deviation = outputs.std(0) / math.sqrt(len(seeds))
    assert ((outputs.mean(0) - block.qkv(x)).abs() < 5 * deviation).all()


def test_shapes_that_cannot_be():
    with pytest.raises(ConfigError, match="kv_heads=3: a divisor of heads=8"):
        LlamaArchitecture(97, 48, 2, 8, 3, 6, 80, 1e-5, 10_000.0, 0.02)
    with pytest.raises(ConfigError, match="head_size=5: an even number"):
        LlamaArchitecture(97, 48, 2, 8, 2, 5, 80, 1e-5, 10_000.0, 0.02)
