"""Levels to compute a focal loss of, and the loss by torchvision's function and autograd in float64."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torchvision.ops import sigmoid_focal_loss

ALPHA, GAMMA = 0.25, 2.0


class Level(NamedTuple):
    """One level, whose classes are some columns of those of all levels."""

    logits: Tensor
    bias: Tensor
    classes: Tensor
    weight: Tensor


def level(
    pictures: int,
    height: int,
    width: int,
    anchors: int,
    classes: int,
    dtype: torch.dtype = torch.float32,
    spread: float = 3.0,
    device: str = "cpu",
) -> Level:
    """Logits around those of a new classifier; every tenth anchor has a class, every tenth is ignored."""
    random = torch.Generator(device).manual_seed(pictures * height + width)
    shape = (pictures, anchors * classes, height, width)
    logits = torch.randn(shape, generator=random, device=device) * spread
    bias = torch.randn(anchors * classes, generator=random, device=device) - 3
    positions = height * width * anchors
    drawn = torch.randint(-classes * 8, classes * 2, (pictures, positions + 13), generator=random, device=device)
    ids = torch.where(drawn >= classes, -2, drawn.clamp(min=-1))
    weight = 1 / torch.randint(1, 30, (pictures,), generator=random, device=device) / pictures
    logits = logits.to(dtype).contiguous(memory_format=torch.channels_last)
    return Level(logits, bias.to(dtype), ids[:, 7 : 7 + positions], weight)


def by_torchvision(case: Level, alpha: float = ALPHA, gamma: float = GAMMA, scale: float = 1.0) -> list[Tensor]:
    """Loss, and the gradients of the scaled loss with respect to logits and bias, all in float64."""
    logits, bias = (value.double().requires_grad_() for value in (case.logits, case.bias))
    x = (logits + bias[:, None, None]).permute(0, 2, 3, 1).reshape(*case.classes.shape, -1)
    target = torch.zeros_like(x).scatter_(2, case.classes.clamp(min=0).unsqueeze(2), 1.0)
    target *= (case.classes >= 0).unsqueeze(2)
    element = sigmoid_focal_loss(x, target, alpha, gamma)
    counted = torch.where((case.classes == -2).unsqueeze(2), 0.0, element)
    loss = (counted.sum((1, 2)) * case.weight.double()).sum()
    return [loss.detach(), *torch.autograd.grad(loss * scale, [logits, bias])]
