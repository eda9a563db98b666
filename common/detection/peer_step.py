"""Training iteration of torchvision's detection models, the baseline for the suite's timings."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn


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
        device: device of model and inputs.

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
