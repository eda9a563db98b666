"""The same training with Mask R-CNN from torchvision.

Training uses the same three trained stages and frozen batch norms, channels_last, SGD with momentum, and automatic
mixed precision of PyTorch in fp16 with its gradient scaler. Pictures are noise of the larger shape of the recipes, with
a few objects whose masks are discs. cuDNN does not search for algorithms, because the shapes in torchvision's RoI heads
differ in every iteration and each would start a new search.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn
from torchvision.models.detection import MaskRCNN
from torchvision.models.detection.backbone_utils import resnet_fpn_backbone

from benchmarks.maskrcnn.config import Facts
from common.config.schema import RunConfig
from common.contract.workload import Peer
from common.data.batches import Batch
from common.detection import peer_step

TRAINED_STAGES = 3


def build(facts: Facts, shape: tuple[int, int], device: torch.device) -> MaskRCNN:
    """Return the network with random weights, in fp32, for pictures of ``shape``: height and width."""
    backbone = resnet_fpn_backbone(backbone_name="resnet50", weights=None, trainable_layers=TRAINED_STAGES)
    model = MaskRCNN(backbone, facts.classes + 1, min_size=min(shape), max_size=max(shape))
    return model.to(device, memory_format=torch.channels_last).train()


def noise(facts: Facts, shape: tuple[int, int], batch: int, device: torch.device) -> tuple[list[Tensor], list[dict]]:
    """Return pictures of noise, (3, height, width) each, and their objects: boxes, labels, and ellipses as masks."""
    pictures, targets = peer_step.noise(shape, batch, range(1, facts.classes + 1), 32, device)
    return pictures, [{**target, "masks": _discs(target["boxes"].unflatten(1, (2, 2)), shape)} for target in targets]


def _discs(corners_O22: Tensor, shape: tuple[int, int]) -> Tensor:
    """Return the ellipse in each box as uint8, (objects, height, width)."""
    middle_O2, radius_O2 = corners_O22.mean(1), (corners_O22[:, 1] - corners_O22[:, 0]) / 2
    height, width = (torch.arange(size, device=corners_O22.device) for size in shape)
    x_OW = (width - middle_O2[:, :1]) / radius_O2[:, :1]
    y_OH = (height - middle_O2[:, 1:]) / radius_O2[:, 1:]
    return (x_OW[:, None].square() + y_OH[:, :, None].square() <= 1).to(torch.uint8)


def step_of(
    model: nn.Module, pictures: Sequence[Tensor], targets: Sequence[dict], device: torch.device
) -> Callable[[], Tensor]:
    """Return a function that runs an iteration on these pictures and returns the sum of the losses."""
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    gpu = device.type == "cuda"
    optimizer = torch.optim.SGD(trained, lr=1e-4, momentum=0.9, weight_decay=1e-4, fused=gpu)

    return peer_step.peer_step(model, optimizer, pictures, targets, device)


def start(run: RunConfig, example: Batch, device: torch.device) -> Callable[[], Tensor]:
    """Start the peer; see :class:`common.contract.workload.Peer`."""
    facts, shape = run.workload.facts, example.key
    assert isinstance(shape, tuple)
    torch.backends.cudnn.benchmark = False
    pictures, targets = noise(facts, shape, run.micro_batch, device)
    return step_of(build(facts, shape, device), pictures, targets, device)


PEERS = (Peer("torchvision's Mask R-CNN, mixed precision in fp16", start),)
