"""Our tensors with the names of published checkpoints, Transformers and diffusers.

Our U-Net has the published names, except where one of our weights contains several layers: queries, keys and values of
a self-attention; keys and values of all cross-attentions; and the time projections of all residual blocks.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

import torch
from torch import Tensor

from benchmarks.stable_diffusion.unet_architecture import Transformer, UNetArchitecture
from benchmarks.stable_diffusion.unet_blocks import caption_rows, time_rows


def randomized(module: torch.nn.Module, seed: int = 0) -> None:
    """Draw all parameters and statistics, also those that usually start at 0 or 1."""
    generator = torch.Generator().manual_seed(seed)
    for name, tensor in module.state_dict().items():
        if not tensor.is_floating_point():
            continue
        noise = torch.randn(tensor.shape, generator=generator, dtype=torch.float64)
        if name.endswith("running_var"):
            value = 0.5 + noise.abs()
        elif tensor.ndim > 1:
            value = noise * tensor[0].numel() ** -0.5
        else:
            value = 0.2 * noise + (1.0 if "weight" in name else 0.0)
        tensor.copy_(value)


def _blocks(state: dict[str, Tensor], ours: str, theirs: str) -> dict[str, Tensor]:
    """Return the blocks' weights with Transformers' names: separate query, key and value."""
    found = {}
    words = {"ln_1": "layer_norm1", "ln_2": "layer_norm2", "mlp.c_fc": "mlp.fc1", "mlp.c_proj": "mlp.fc2"}
    words["attn.out_proj"] = "self_attn.out_proj"
    for name, tensor in state.items():
        if not name.startswith(f"{ours}transformer.resblocks."):
            continue
        layer, rest = name.removeprefix(f"{ours}transformer.resblocks.").split(".", 1)
        if rest.startswith("attn.in_proj_"):
            kind = rest.removeprefix("attn.in_proj_")
            for part, rows in zip("qkv", tensor.chunk(3), strict=True):
                found[f"{theirs}.encoder.layers.{layer}.self_attn.{part}_proj.{kind}"] = rows
        else:
            part, kind = rest.rsplit(".", 1)
            found[f"{theirs}.encoder.layers.{layer}.{words[part]}.{kind}"] = tensor
    return found


def text_of_transformers(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return a text tower's weights with the names of ``CLIPTextModelWithProjection``."""
    return {
        "text_model.embeddings.token_embedding.weight": state["token_embedding.weight"],
        "text_model.embeddings.position_embedding.weight": state["positional_embedding"],
        "text_model.final_layer_norm.weight": state["ln_final.weight"],
        "text_model.final_layer_norm.bias": state["ln_final.bias"],
        "text_projection.weight": state["text_projection"].T,
        **_blocks(state, "", "text_model"),
    }


def vision_of_transformers(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return a vision tower's weights with the names of ``CLIPVisionModelWithProjection``."""
    norms = {
        f"vision_model.{theirs}.{kind}": state[f"{ours}.{kind}"]
        for ours, theirs in (("ln_pre", "pre_layrnorm"), ("ln_post", "post_layernorm"))
        for kind in ("weight", "bias")
    }
    return {
        "vision_model.embeddings.class_embedding": state["class_embedding"],
        "vision_model.embeddings.patch_embedding.weight": state["conv1.weight"],
        "vision_model.embeddings.position_embedding.weight": state["positional_embedding"],
        "visual_projection.weight": state["proj"].T,
        **norms,
        **_blocks(state, "", "vision_model"),
    }


def vae_of_diffusers(state: dict[str, Tensor], levels: int) -> dict[str, Tensor]:
    """Return an autoencoder's weights with the names of diffusers' ``AutoencoderKL``."""
    found = {}
    for name, tensor in state.items():
        theirs = name
        for level in range(levels):
            theirs = theirs.replace(f"encoder.down.{level}.block.", f"encoder.down_blocks.{level}.resnets.")
            theirs = theirs.replace(f"encoder.down.{level}.downsample.", f"encoder.down_blocks.{level}.downsamplers.0.")
            up = levels - 1 - level
            theirs = theirs.replace(f"decoder.up.{level}.block.", f"decoder.up_blocks.{up}.resnets.")
            theirs = theirs.replace(f"decoder.up.{level}.upsample.", f"decoder.up_blocks.{up}.upsamplers.0.")
        for ours, other in (
            ("mid.block_1.", "mid_block.resnets.0."),
            ("mid.block_2.", "mid_block.resnets.1."),
            ("mid.attn_1.norm.", "mid_block.attentions.0.group_norm."),
            ("mid.attn_1.q.", "mid_block.attentions.0.to_q."),
            ("mid.attn_1.k.", "mid_block.attentions.0.to_k."),
            ("mid.attn_1.v.", "mid_block.attentions.0.to_v."),
            ("mid.attn_1.proj_out.", "mid_block.attentions.0.to_out.0."),
            ("nin_shortcut", "conv_shortcut"),
            ("norm_out", "conv_norm_out"),
        ):
            theirs = theirs.replace(ours, other)
        found[theirs] = tensor[:, :, 0, 0] if ".attentions.0." in theirs and tensor.ndim == 4 else tensor
    return found


_RESIDUAL = {
    "in_layers.0": "norm1",
    "in_layers.2": "conv1",
    "emb_layers.1": "time_emb_proj",
    "out_layers.0": "norm2",
    "out_layers.3": "conv2",
    "skip_connection": "conv_shortcut",
}
_ENDS = {
    "time_embed.0": "time_embedding.linear_1",
    "time_embed.2": "time_embedding.linear_2",
    "input_blocks.0.0": "conv_in",
    "out.0": "conv_norm_out",
    "out.2": "conv_out",
}


def diffusers_name(published: str, shape: UNetArchitecture) -> str:
    """Return the name of a published tensor in diffusers' ``UNet2DConditionModel``."""
    for ours, theirs in _ENDS.items():
        if published.startswith(f"{ours}."):
            return theirs + published[len(ours) :]
    if found := re.match(r"middle_block\.([012])\.(.*)", published):
        module = ("mid_block.resnets.0", "mid_block.attentions.0", "mid_block.resnets.1")[int(found[1])]
        return f"{module}.{_inner(found[2])}"
    found = re.match(r"(input|output)_blocks\.(\d+)\.(\d)\.(.*)", published)
    assert found is not None, published
    number, layer, rest = int(found[2]), int(found[3]), found[4]
    if found[1] == "input":
        level, at = divmod(number - 1, shape.residual_blocks + 1)
        if rest.startswith("op."):
            return f"down_blocks.{level}.downsamplers.0.conv.{rest[3:]}"
        block = f"down_blocks.{level}"
    else:
        level, at = divmod(number, shape.residual_blocks + 1)
        if rest.startswith("conv."):
            return f"up_blocks.{level}.upsamplers.0.{rest}"
        block = f"up_blocks.{level}"
    return f"{block}.{'attentions' if layer else 'resnets'}.{at}.{_inner(rest)}"


def _inner(name: str) -> str:
    for ours, theirs in _RESIDUAL.items():
        if name.startswith(f"{ours}."):
            return theirs + name[len(ours) :]
    return name


def _fused(architecture: UNetArchitecture) -> dict[str, list[tuple[str, int]]]:
    """Return, by our name, the published names of the parts and their numbers of rows."""
    times, captions = time_rows(architecture), caption_rows(architecture)
    fused = {
        f"time_projections.{ours}": [
            (f"{name}.{theirs}", count) for name, count in zip(times.names, times.counts, strict=True)
        ]
        for ours, theirs in (
            ("weight", "emb_layers.1.weight"),
            ("bias", "emb_layers.1.bias"),
            ("convolution_bias", "in_layers.2.bias"),
        )
    }
    fused["caption_projections.weight"] = [
        (f"{name}.weight", count) for name, count in zip(captions.names, captions.counts, strict=True)
    ]
    for name, layer in architecture.named(Transformer):
        attention = f"{name}.transformer_blocks.0.attn1"
        fused[f"{attention}.to_qkv.weight"] = [
            (f"{attention}.{each}.weight", layer.channels) for each in ("to_q", "to_k", "to_v")
        ]
    return fused


def to_published(tensors: Mapping[str, Tensor], architecture: UNetArchitecture) -> dict[str, Tensor]:
    """Return our tensors, such as parameters or their gradients, by published names, as views."""
    fused, published = _fused(architecture), {}
    for name, tensor in tensors.items():
        rows = fused.get(name, [(name, len(tensor))])
        parts = tensor.split([count for _, count in rows])
        published.update({each: part for (each, _), part in zip(rows, parts, strict=True)})
    return published
