"""Names of diffusers' tensors for those of published U-Nets."""

from __future__ import annotations

import re

from benchmarks.stable_diffusion.unet_architecture import UNetArchitecture

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
    """The name of the same tensor in a UNet2DConditionModel."""
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
