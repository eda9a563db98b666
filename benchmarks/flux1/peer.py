"""Peers: the same training with diffusers, and with our own network compiled by TorchInductor.

The transformer of diffusers has the depth of the recipe, PyTorch's attention and fused AdamW. It is eager, or compiled
block by block as its documentation recommends. Its weights are in bf16 without fp32 masters, or in fp32, which autocast
casts to bf16: then an update moves as many bytes as ours. Latents and captions are noise that is already on the device.
The other peer is our own step with reference implementations; TorchInductor compiles its blocks separately.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.flux1.architecture import FluxArchitecture
from benchmarks.flux1.workload import FluxTraining
from common.config.schema import RunConfig
from common.contract.peer_steps import fill_zeros, start_compiled_step
from common.contract.workload import Peer
from common.data.batches import Batch
from common.step.plain_step import plain_step

COMPILED = ("modulated_norm", "gated_residual", "qk_norm_rope", "gelu")
"""Operations that use the reference in the step that TorchInductor compiles."""


def build(architecture: FluxArchitecture) -> Any:
    """Return the network of diffusers with its own initial weights, on PyTorch's default device."""
    from diffusers import FluxTransformer2DModel

    return FluxTransformer2DModel(
        in_channels=architecture.packed,
        num_layers=architecture.double_blocks,
        num_single_layers=architecture.single_blocks,
        attention_head_dim=architecture.head_size,
        num_attention_heads=architecture.heads,
        joint_attention_dim=architecture.text_width,
        pooled_projection_dim=architecture.caption_width,
        guidance_embeds=False,
        axes_dims_rope=tuple(architecture.rope_axes),
    )


def step_of(
    network: Any, architecture: FluxArchitecture, batch: int, device: torch.device, dtype: torch.dtype
) -> Callable[[], Tensor]:
    """Return a function that runs an iteration on a batch of noise in ``dtype``, and returns the loss.

    If ``dtype`` is not that of the weights, autocast casts the weights to it.
    """
    shape, mixed = architecture, next(network.parameters()).dtype != dtype
    optimizer = torch.optim.AdamW(network.parameters(), lr=1e-5, weight_decay=0.1, fused=device.type == "cuda")
    generator = torch.Generator(device).manual_seed(1)

    def normal(*sizes: int) -> Tensor:
        return torch.randn(sizes, generator=generator, device=device).to(dtype)

    x_NLP, target_NLP = (normal(batch, shape.image_length, shape.packed) for _ in range(2))
    text_NTK, caption_NK = normal(batch, shape.text_length, shape.text_width), normal(batch, shape.caption_width)
    t_N = torch.rand(batch, generator=generator, device=device)
    rows = torch.arange(shape.rows, device=device)
    image_ids_L3 = torch.cartesian_prod(rows[:1], rows, rows).to(dtype)
    text_ids_T3 = torch.zeros(shape.text_length, 3, device=device, dtype=dtype)

    def loss_of(*inputs: Tensor) -> Tensor:
        with torch.autocast(device.type, dtype, enabled=mixed):
            (velocity_NLP,) = network(*inputs, return_dict=False)
        return nn.functional.mse_loss(velocity_NLP.float(), target_NLP.float())

    inputs = (x_NLP, text_NTK, caption_NK, t_N, image_ids_L3, text_ids_T3)
    return plain_step(loss_of, inputs, optimizer, compiled=False)


def start(
    run: RunConfig, example: Batch, device: torch.device, compiled: bool = False, weights: torch.dtype = torch.bfloat16
) -> Callable[[], Tensor]:
    """Start the peer with weights of a dtype, in bf16; see :class:`common.contract.workload.Peer`."""
    architecture = run.workload.architecture
    with device:
        network = build(architecture).to(weights)
    fill_zeros(network)
    if compiled:
        network.compile_repeated_blocks(dynamic=False)
    return step_of(network, architecture, run.micro_batch, device, torch.bfloat16)


def start_compiled_references(run: RunConfig, example: Batch, device: torch.device) -> Callable[[], object]:
    """Start our own step with the references of the operations in ``COMPILED`` and blocks compiled by TorchInductor.

    No block recomputes activations. See :class:`common.contract.workload.Peer`.
    """
    blocks = ("double_blocks", "single_blocks")
    return start_compiled_step(
        FluxTraining, COMPILED, blocks, run, example, device, recomputed_blocks=0, recomputed_operations=0
    )


PEERS = (
    Peer("ours with compiled references", start_compiled_references),
    Peer("diffusers in bf16 without masters", start),
    Peer("diffusers in bf16 without masters, compiled", functools.partial(start, compiled=True)),
    Peer("diffusers, mixed precision in bf16", functools.partial(start, weights=torch.float32)),
    Peer(
        "diffusers, mixed precision in bf16, compiled", functools.partial(start, compiled=True, weights=torch.float32)
    ),
)
