"""An iteration of torchvision's detection models, which the suite's are timed against."""

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
    """Forward, losses, backward, update over the same pictures, on a GPU in mixed fp16 with a gradient scaler.

    Args:
        model: of ``torchvision.models.detection``, in training.
        optimizer: of its trained parameters.
        pictures, targets: in torchvision's form.
        device: of all of them.

    Returns:
        What runs an iteration and gives the sum of its losses.
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
