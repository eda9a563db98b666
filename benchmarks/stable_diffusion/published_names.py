"""Conversion between our names of the U-Net's tensors and the published ones.

The names are the same, except where one of our weights contains several layers: queries, keys and values of a
self-attention; keys and values of all cross-attentions; and the time projections of all residual blocks.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from benchmarks.stable_diffusion.unet_architecture import Transformer, UNetArchitecture
from benchmarks.stable_diffusion.unet_blocks import caption_rows, time_rows
from common.errors import CheckpointError


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


def from_published(tensors: Mapping[str, Tensor], architecture: UNetArchitecture) -> dict[str, Tensor]:
    """Return published tensors by our names.

    Raises:
        CheckpointError: a part of one of our tensors is missing.
    """
    left, ours = dict(tensors), {}
    for name, rows in _fused(architecture).items():
        missing = [each for each, _ in rows if each not in left]
        if missing:
            raise CheckpointError(f"the U-Net has no tensor {missing[0]!r}, a part of {name!r}")
        ours[name] = torch.cat([left.pop(each) for each, _ in rows])
    return {**left, **ours}
