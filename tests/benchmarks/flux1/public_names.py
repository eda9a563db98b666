"""FLUX.1's parameters under the names of diffusers' ``FluxTransformer2DModel``."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from benchmarks.flux1.architecture import FluxArchitecture

OUTER = {
    "image_in": "x_embedder",
    "text_in": "context_embedder",
    "time_in.first": "time_text_embed.timestep_embedder.linear_1",
    "time_in.second": "time_text_embed.timestep_embedder.linear_2",
    "caption_in.first": "time_text_embed.text_embedder.linear_1",
    "caption_in.second": "time_text_embed.text_embedder.linear_2",
    "output.linear": "proj_out",
}
STREAMS = {
    "text": {
        "modulation": "norm1_context.linear", "qkv": "attn.add_{}_proj", "proj": "attn.to_add_out",
        "up": "ff_context.net.0.proj", "down": "ff_context.net.2", "query_norm": "attn.norm_added_q.weight",
        "key_norm": "attn.norm_added_k.weight",
    },
    "image": {
        "modulation": "norm1.linear", "qkv": "attn.to_{}", "proj": "attn.to_out.0", "up": "ff.net.0.proj",
        "down": "ff.net.2", "query_norm": "attn.norm_q.weight", "key_norm": "attn.norm_k.weight",
    },
}  # fmt: skip


def to_diffusers(named: Mapping[str, Tensor], shape: FluxArchitecture) -> dict[str, Tensor]:
    """Return parameters, or their gradients, under the names of diffusers."""
    found = {}

    def add(ours: str, theirs: str) -> None:
        for kind in ("weight", "bias"):
            found[f"{theirs}.{kind}"] = named[f"{ours}.{kind}"]

    def add_qkv(ours: str, theirs: str) -> None:
        for kind in ("weight", "bias"):
            for part, tensor in zip("qkv", named[f"{ours}.{kind}"].chunk(3), strict=True):
                found[f"{theirs.format(part)}.{kind}"] = tensor

    for ours, theirs in OUTER.items():
        add(ours, theirs)
    for kind in ("weight", "bias"):  # diffusers has the scale first
        shift, scale = named[f"output.modulation.{kind}"].chunk(2)
        found[f"norm_out.linear.{kind}"] = torch.cat([scale, shift])
    for number in range(shape.double_blocks):
        for stream, names in STREAMS.items():
            own, public = f"double_blocks.{number}.{stream}", f"transformer_blocks.{number}"
            for name in ("modulation", "proj", "up", "down"):
                add(f"{own}.{name}", f"{public}.{names[name]}")
            add_qkv(f"{own}.qkv", f"{public}.{names['qkv']}")
            for name in ("query_norm", "key_norm"):
                found[f"{public}.{names[name]}"] = named[f"{own}.{name}"]
    for number in range(shape.single_blocks):
        own, public = f"single_blocks.{number}", f"single_transformer_blocks.{number}"
        add(f"{own}.modulation", f"{public}.norm.linear")
        add(f"{own}.up", f"{public}.proj_mlp")
        add_qkv(f"{own}.qkv", f"{public}.attn.to_{{}}")
        for name, theirs in (("query_norm", "norm_q"), ("key_norm", "norm_k")):
            found[f"{public}.attn.{theirs}.weight"] = named[f"{own}.{name}"]
        weights = [named[f"{own}.{name}.weight"] for name in ("proj", "down")]
        found[f"{public}.proj_out.weight"] = torch.cat(weights, 1)
        found[f"{public}.proj_out.bias"] = named[f"{own}.proj.bias"]
    return found


def diffusers_network(shape: FluxArchitecture) -> nn.Module:
    """Return diffusers' network of the same sizes. Its MLPs are four times as wide as the network."""
    from diffusers import FluxTransformer2DModel

    network: nn.Module = FluxTransformer2DModel(
        patch_size=1, in_channels=shape.packed, num_layers=shape.double_blocks, num_single_layers=shape.single_blocks,
        attention_head_dim=shape.head_size, num_attention_heads=shape.heads, joint_attention_dim=shape.text_width,
        pooled_projection_dim=shape.caption_width, guidance_embeds=False, axes_dims_rope=tuple(shape.rope_axes),
    )  # fmt: skip
    return network


def positions(shape: FluxArchitecture) -> tuple[Tensor, Tensor]:
    """Return the ids of text and image tokens that diffusers' pipeline gives the network, (T, 3) and (L, 3)."""
    image_ids = torch.zeros(shape.rows, shape.rows, 3)
    image_ids[..., 1] += torch.arange(shape.rows)[:, None]
    image_ids[..., 2] += torch.arange(shape.rows)[None, :]
    return torch.zeros(shape.text_length, 3), image_ids.view(-1, 3)
