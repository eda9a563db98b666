"""The mask head's loss, and its last layer for one class, region by region in float64 with PyTorch's own functions."""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor


class Masks(NamedTuple):
    """Logits (R, H, W), targets (R, H, W) and classes (R,), -1 without an object."""

    logits: Tensor
    target: Tensor
    classes: Tensor


def masks(classes: list[int], height: int, width: int, dtype: torch.dtype) -> Masks:
    """Made up; some logits are large."""
    random = torch.Generator().manual_seed(len(classes))
    logits = 3 * torch.randn((len(classes), height, width), generator=random)
    logits[:, :1, :2] *= 30
    target = torch.randint(2, (len(classes), height, width), generator=random, dtype=torch.uint8)
    return Masks(logits.to(dtype), target, torch.tensor(classes, dtype=torch.int64))


def loss_of_regions(logits: Tensor, target: Tensor, classes: Tensor) -> Tensor:
    """The mean over all pixels of all regions with an object, differentiable."""
    entropies = [
        F.binary_cross_entropy_with_logits(logits[region].double(), target[region].double(), reduction="none")
        for region, own in enumerate(classes.tolist())
        if own >= 0
    ]
    return torch.stack(entropies).mean() if entropies else 0 * logits.double().sum()


class Features(NamedTuple):
    """Features (R, P, C), weight (K, C), bias (K,), gradient of the logits (R, P), and classes (R,)."""

    x: Tensor
    weight: Tensor
    bias: Tensor
    gradient: Tensor
    classes: Tensor


def features(classes: list[int], pixels: int, channels: int, kinds: int, dtype: torch.dtype) -> Features:
    """Made up."""
    random = torch.Generator().manual_seed(channels)
    shapes = (len(classes), pixels, channels), (kinds, channels), (kinds,)
    drawn = [torch.randn(shape, generator=random).to(dtype) for shape in shapes]
    gradient = torch.randn((len(classes), pixels), generator=random)
    return Features(*drawn, gradient, torch.tensor(classes, dtype=torch.int64))


def logits_of_regions(x: Tensor, weight: Tensor, bias: Tensor, classes: Tensor) -> Tensor:
    """A linear layer to all classes, of which one is taken; (R, P)."""
    rows = [
        F.linear(x[region], weight, bias)[:, own] if own >= 0 else x.new_zeros(x.shape[1])
        for region, own in enumerate(classes.tolist())
    ]
    return torch.stack(rows)
