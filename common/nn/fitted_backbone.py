"""Backbone file for synthetic data: random weights, with batch norm statistics that fit the synthetic images."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from common.data.atomic import written
from common.nn.resnet import ResNetShape, ResNetTrunk, draw_weights


def fitted_backbone(shape: ResNetShape, image_NCHW: Tensor, seed: int) -> dict[str, Tensor]:
    """Return a trunk's state dict with torchvision's names, without a classifier.

    The running statistics are those of ``image_NCHW``, so evaluation mode normalises these images as training does:
    every batch norm produces mean 0 and variance 1.

    Args:
        shape: shape with a trained norm of momentum 1, so that the running statistics are those of ``image_NCHW``
            alone.
        image_NCHW: normalised images.
        seed: seed of the weights.
    """
    trunk = ResNetTrunk(shape)
    draw_weights(trunk, torch.Generator().manual_seed(seed))
    with torch.no_grad():
        trunk.train().features(image_NCHW)
    return {name: tensor.detach().contiguous() for name, tensor in trunk.state_dict().items()}


def write_backbone(path: Path, state: dict[str, Tensor]) -> None:
    """Write ``state`` in the format of torchvision's weight files."""
    with written(path) as beside:
        torch.save(state, beside)
