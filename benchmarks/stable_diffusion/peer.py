"""Peers: the same training with diffusers, and with our own network compiled by TorchInductor.

The U-Net of diffusers has the sizes of the rules. It is channels_last, in bf16 without fp32 master weights, with
fused AdamW, eager or compiled as a whole. Latents and captions are noise that is already on the device. The other
peer is our own step with reference implementations; TorchInductor compiles its blocks separately.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.stable_diffusion.unet_architecture import UNetArchitecture
from benchmarks.stable_diffusion.workload import StableDiffusion
from common.config.schema import RunConfig
from common.contract.peer_steps import fill_zeros, start_compiled_step
from common.contract.workload import Peer
from common.data.batches import Batch
from common.step.plain_step import plain_step

COMPILED = ("group_norm", "layer_norm", "geglu", "bias_gradient")
"""Operations that use the reference in the step that TorchInductor compiles."""


def build(architecture: UNetArchitecture) -> Any:
    """Return the network of diffusers with its own initial weights, in fp32 on the CPU.

    diffusers gives all norms the number of groups of the transformers. This function corrects it in residual blocks
    and in the last norm.
    """
    from diffusers import UNet2DConditionModel
    from diffusers.models.resnet import ResnetBlock2D

    levels = range(len(architecture.channel_multipliers))
    channels = [multiplier * architecture.model_channels for multiplier in architecture.channel_multipliers]
    attends = [level in architecture.attention_levels for level in levels]
    network = UNet2DConditionModel(
        sample_size=architecture.latent_size,
        in_channels=architecture.latent_channels,
        out_channels=architecture.latent_channels,
        block_out_channels=channels,
        layers_per_block=architecture.residual_blocks,
        attention_head_dim=[each // architecture.head_channels for each in channels],  # in fact the number of heads
        cross_attention_dim=architecture.context_width,
        use_linear_projection=True,
        norm_num_groups=architecture.transformer_norm_groups,
        norm_eps=architecture.norm_epsilon,
        down_block_types=["CrossAttnDownBlock2D" if attend else "DownBlock2D" for attend in attends],
        up_block_types=["CrossAttnUpBlock2D" if attend else "UpBlock2D" for attend in reversed(attends)],
    )
    for module in network.modules():
        if isinstance(module, ResnetBlock2D):
            module.norm1.num_groups = module.norm2.num_groups = architecture.norm_groups
    network.conv_norm_out.num_groups = architecture.norm_groups
    return network


def step_of(
    network: nn.Module, forward: Callable[..., Any], architecture: UNetArchitecture, batch: int, device: torch.device
) -> Callable[[], Tensor]:
    """Return a function that runs an iteration on a batch of noise and returns the loss."""
    optimizer = torch.optim.AdamW(network.parameters(), lr=1e-5, weight_decay=0.01, fused=device.type == "cuda")
    dtype, size = next(network.parameters()).dtype, architecture.latent_size
    generator = torch.Generator(device).manual_seed(1)
    shape = (batch, architecture.latent_channels, size, size)
    x_NCHW, target_NCHW = (
        torch.randn(shape, generator=generator, device=device).to(dtype, memory_format=torch.channels_last)
        for _ in range(2)
    )
    t_N = torch.randint(1000, (batch,), generator=generator, device=device)
    context = (batch, architecture.context_length, architecture.context_width)
    context_NTK = torch.randn(context, generator=generator, device=device).to(dtype)

    def loss_of(*inputs: Tensor) -> Tensor:
        prediction = forward(*inputs, return_dict=False)[0]
        return nn.functional.mse_loss(prediction.float(), target_NCHW.float())

    return plain_step(loss_of, (x_NCHW, t_N, context_NTK), optimizer, compiled=False)


def start(run: RunConfig, example: Batch, device: torch.device, compiled: bool = False) -> Callable[[], Tensor]:
    """Start the peer; see :class:`common.contract.workload.Peer`."""
    facts = run.workload.facts
    torch.backends.cudnn.benchmark = True
    network = build(facts)
    fill_zeros(network)
    network = network.to(device, torch.bfloat16, memory_format=torch.channels_last)
    forward = torch.compile(network, dynamic=False) if compiled else network
    return step_of(network, forward, facts, run.micro_batch, device)


def start_compiled_references(run: RunConfig, example: Batch, device: torch.device) -> Callable[[], object]:
    """Start our own step with the references of the operations in ``COMPILED`` and blocks compiled by TorchInductor.

    See :class:`common.contract.workload.Peer`.
    """
    torch._dynamo.config.cache_size_limit = 128  # per code object: every block may have another shape
    blocks = ("input_blocks", "output_blocks", "middle_block")
    return start_compiled_step(StableDiffusion, COMPILED, blocks, run, example, device)


PEERS = (
    Peer("ours with compiled references", start_compiled_references),
    Peer("diffusers in bf16 without masters", start),
    Peer("diffusers in bf16 without masters, compiled", functools.partial(start, compiled=True)),
)
