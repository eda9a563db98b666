"""Training iteration of torchvision's detection models on noise, the baseline for the suite's timings."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

BOXES = 7
"""Boxes in a picture: the average of COCO and of OpenImages."""


def noise(
    shape: tuple[int, int], batch: int, classes: range, least: int, device: torch.device
) -> tuple[list[Tensor], list[dict[str, Tensor]]]:
    """Return pictures of noise, (3, height, width) each, and their boxes and labels in torchvision's format.

    Args:
        shape: height and width, px.
        least: smallest width and height of a box, px.
    """
    generator = torch.Generator(device).manual_seed(1)
    extent_2 = torch.tensor([shape[1], shape[0]], device=device)
    pictures = list(torch.rand((batch, 3, *shape), generator=generator, device=device))
    corners_BO22 = torch.rand((batch, BOXES, 2, 2), generator=generator, device=device).sort(2).values
    corners_BO22 = corners_BO22 * (extent_2 - least) + torch.tensor([[0.0], [least]], device=device)
    labels_BO = torch.randint(classes.start, classes.stop, (batch, BOXES), generator=generator, device=device)
    found = zip(corners_BO22.flatten(2), labels_BO, strict=True)
    return pictures, [{"boxes": boxes_O4, "labels": labels_O} for boxes_O4, labels_O in found]


def peer_step(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    pictures: Sequence[Tensor],
    targets: Sequence[dict[str, Tensor]],
    device: torch.device,
) -> Callable[[], Tensor]:
    """Return a function that runs forward, losses, backward and update over the same pictures.

    On a GPU it uses mixed fp16 with a gradient scaler.

    Args:
        model: a model of ``torchvision.models.detection``, in training mode.
        optimizer: optimizer of its trained parameters.
        pictures, targets: inputs in torchvision's format.

    Returns:
        A function that runs one iteration and returns the sum of its losses.
    """
    gpu = device.type == "cuda"
    scaler = torch.amp.GradScaler(device.type, enabled=gpu)

    def step() -> Tensor:
        with torch.autocast(device.type, torch.float16 if gpu else torch.bfloat16, enabled=gpu):
            loss = sum(model(list(pictures), list(targets)).values())
        assert isinstance(loss, Tensor)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad(set_to_none=True)
        return loss.detach()

    return step
