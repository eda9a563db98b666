"""Peer for comparison: the same fine-tuning with transformers and PEFT from Hugging Face.

The base model has the layers of the recipe; query, key, value and output have adapters of the rank in the rules.
Training is in bf16 on random tokens, with scaled dot-product attention, and AdamW for the adapters. It is timed with
and without gradient checkpointing; on one GPU, the whole model needs it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from benchmarks.llama2_70b_lora.config import Facts
from common.config.schema import RunConfig
from common.contract.workload import Peer
from common.data.batches import Batch

ADAPTED = ("q_proj", "k_proj", "v_proj", "o_proj")


def build(facts: Facts, layers: int, device: torch.device) -> Any:
    """Return the network with adapters, in bf16 and with random weights."""
    from peft import LoraConfig, get_peft_model
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=facts.vocabulary,
        hidden_size=facts.hidden,
        intermediate_size=facts.feed_forward,
        num_hidden_layers=layers,
        num_attention_heads=facts.heads,
        num_key_value_heads=facts.kv_heads,
        head_dim=facts.head_size,
        rms_norm_eps=facts.norm_epsilon,
        initializer_range=facts.initializer_range,
        max_position_embeddings=facts.row_length,
        use_cache=False,
    )
    config._attn_implementation = "sdpa"
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        with device:
            base = LlamaForCausalLM(config)
    finally:
        torch.set_default_dtype(before)
    adapters = LoraConfig(
        r=facts.lora_rank,
        lora_alpha=int(facts.lora_alpha),
        lora_dropout=facts.lora_dropout,
        target_modules=list(ADAPTED),
        task_type="CAUSAL_LM",
    )
    return get_peft_model(base, adapters).train()


def step_of(model: Any, facts: Facts, rows: int, device: torch.device, checkpointing: bool) -> Callable[[], Tensor]:
    """Return a function that runs an iteration on rows of random tokens, with clipping, and returns the loss."""
    if checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        model.enable_input_require_grads()
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=4e-4, weight_decay=1e-4, fused=device.type == "cuda")
    generator = torch.Generator(device).manual_seed(1)
    tokens = torch.randint(facts.vocabulary, (rows, facts.row_length), generator=generator, device=device)

    def step() -> Tensor:
        loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(trained, facts.max_grad_norm)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss.detach()

    return step


def start(run: RunConfig, example: Batch, device: torch.device, checkpointing: bool = False) -> Callable[[], Tensor]:
    """Start the peer; see :class:`common.contract.workload.Peer`."""
    facts, layers = run.workload.facts, run.workload.model.layers
    return step_of(build(facts, layers or facts.layers, device), facts, run.micro_batch, device, checkpointing)


PEERS = (
    Peer("transformers and PEFT in bf16", start),
    Peer("transformers and PEFT in bf16, gradient checkpointing", functools.partial(start, checkpointing=True)),
)
