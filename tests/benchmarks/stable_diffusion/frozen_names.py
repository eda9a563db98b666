"""Our frozen networks' weights under the names that public libraries have for them."""

from __future__ import annotations

import torch
from torch import Tensor


def randomized(module: torch.nn.Module, seed: int = 0) -> None:
    """Give every parameter and statistic, those that start as 0 or 1 too, a value of its own."""
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
    """The transformer's weights as Transformers' CLIP has them: query, key and value apart."""
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
    """A text tower's weights as ``CLIPTextModelWithProjection`` has them."""
    return {
        "text_model.embeddings.token_embedding.weight": state["token_embedding.weight"],
        "text_model.embeddings.position_embedding.weight": state["positional_embedding"],
        "text_model.final_layer_norm.weight": state["ln_final.weight"],
        "text_model.final_layer_norm.bias": state["ln_final.bias"],
        "text_projection.weight": state["text_projection"].T,
        **_blocks(state, "", "text_model"),
    }


def vision_of_transformers(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """A vision tower's weights as ``CLIPVisionModelWithProjection`` has them."""
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
    """An autoencoder's weights as diffusers' ``AutoencoderKL`` has them."""
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
