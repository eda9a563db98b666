"""A trunk's file for stand-in data: random weights, and batch norms whose statistics fit the stand-in's pictures."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from common.data.atomic import written
from common.nn.resnet import ResNetShape, ResNetTrunk, draw_weights


def fitted_backbone(shape: ResNetShape, image_NCHW: Tensor, seed: int) -> dict[str, Tensor]:
    """A state under torchvision's names, without a classifier.

    In inference the trunk then does to ``image_NCHW`` what it does in training: what every batch norm puts out has mean
    0 and variance 1 over them.

    Args:
        shape: with trained norms, whose momentum is 1: the statistics are those of ``image_NCHW`` alone.
        image_NCHW: normalised pictures.
        seed: of the weights.
    """
    trunk = ResNetTrunk(shape)
    draw_weights(trunk, torch.Generator().manual_seed(seed))
    with torch.no_grad():
        trunk.train().features(image_NCHW)
    return {name: tensor.detach().contiguous() for name, tensor in trunk.state_dict().items()}


def write_backbone(path: Path, state: dict[str, Tensor]) -> None:
    """Write ``state`` as torchvision publishes its weights."""
    with written(path) as beside:
        torch.save(state, beside)
