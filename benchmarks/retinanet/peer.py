"""The same training with RetinaNet from torchvision.

Training uses the network of the rules with the same three trained stages and frozen batch norms, channels_last, fused
Adam, and automatic mixed precision of PyTorch in fp16 with its gradient scaler. Pictures are noise with a few boxes.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torchvision.models.detection import RetinaNet
from torchvision.models.detection.backbone_utils import resnet_fpn_backbone
from torchvision.ops.feature_pyramid_network import LastLevelP6P7

from benchmarks.retinanet.config import Facts
from common.config.schema import RunConfig
from common.contract.workload import Peer
from common.data.batches import Batch
from common.detection.peer_step import noise, peer_step

TRAINED_STAGES = 3


def build(facts: Facts, device: torch.device) -> RetinaNet:
    """Return the network with random weights, in fp32."""
    backbone = resnet_fpn_backbone(
        backbone_name="resnext50_32x4d",
        weights=None,
        trainable_layers=TRAINED_STAGES,
        returned_layers=[2, 3, 4],
        extra_blocks=LastLevelP6P7(256, 256),
    )
    model = RetinaNet(backbone, facts.classes, min_size=facts.image_size, max_size=facts.image_size)
    return model.to(device, memory_format=torch.channels_last).train()


def step_of(model: nn.Module, facts: Facts, batch: int, device: torch.device) -> Callable[[], Tensor]:
    """Return a function that runs an iteration on a batch of noise and returns the loss."""
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    gpu = device.type == "cuda"
    optimizer = torch.optim.Adam(trained, lr=1e-4, fused=gpu)
    pictures, targets = noise((facts.image_size, facts.image_size), batch, range(facts.classes), 1, device)
    return peer_step(model, optimizer, pictures, targets, device)


def start(run: RunConfig, example: Batch, device: torch.device) -> Callable[[], Tensor]:
    """Start the peer; see :class:`common.contract.workload.Peer`."""
    facts = run.workload.facts
    torch.backends.cudnn.benchmark = True
    return step_of(build(facts, device), facts, run.micro_batch, device)


PEERS = (Peer("torchvision's RetinaNet, mixed precision in fp16", start),)
