"""The parts after the heads of torchvision's RetinaNet, and random outputs of the heads."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torchvision.models.detection.retinanet import RetinaNet

from benchmarks.retinanet.model import HeadOutput, anchors, level_sizes

IMAGE_SIZE = 96
CLASSES = 5


class _NoBackbone(nn.Module):
    out_channels = 8


def torchvision_retinanet(**options: float) -> RetinaNet:
    """Return torchvision's network; only its loss and its selection of detections are used."""
    return RetinaNet(_NoBackbone(), CLASSES, min_size=IMAGE_SIZE, max_size=IMAGE_SIZE, **options).eval()


def levels_of(
    batch: int, generator: torch.Generator, dtype: torch.dtype = torch.float32, spread: float = 2.0
) -> tuple[list[HeadOutput], Tensor]:
    """Random outputs of heads whose channels lie last, and a random bias of the logits."""
    levels = []
    for side in level_sizes(IMAGE_SIZE):
        made = []
        for channels, scale in ((9 * CLASSES, spread), (9 * 4, 0.3)):
            output_NHWC = scale * torch.randn((batch, side, side, channels), generator=generator, dtype=torch.float64)
            made.append(output_NHWC.to(dtype).permute(0, 3, 1, 2))
        levels.append(HeadOutput(*made))
    return levels, torch.randn(9 * CLASSES, generator=generator, dtype=torch.float64).to(dtype)


def as_torchvision_has_it(levels: list[HeadOutput], bias_C: Tensor) -> dict[str, list[Tensor]]:
    """Return torchvision's shapes, (N, anchors, K) and (N, anchors, 4) per level, from (N, 9 x K, H, W)."""

    def reshaped(output_NCHW: Tensor, width: int) -> Tensor:
        batch, _, height, columns = output_NCHW.shape
        return output_NCHW.reshape(batch, -1, width, height, columns).permute(0, 3, 4, 1, 2).reshape(batch, -1, width)

    return {
        "cls_logits": [reshaped(level.logits_NCHW + bias_C.view(1, -1, 1, 1), CLASSES) for level in levels],
        "bbox_regression": [reshaped(level.offsets_NCHW, 4) for level in levels],
    }


def level_anchors() -> list[Tensor]:
    """The anchors of each level."""
    return list(anchors(IMAGE_SIZE).split([9 * side * side for side in level_sizes(IMAGE_SIZE)]))
