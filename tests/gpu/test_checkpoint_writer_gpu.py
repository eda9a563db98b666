"""Checkpoints of weights on a GPU: copied while the training stream goes on, which waits for nothing on the host."""

from __future__ import annotations

from pathlib import Path

import pytest
import safetensors.torch
import torch

from common.distributed.weights import Template
from common.evaluation.checkpoint_writer import CheckpointWriter

pytestmark = pytest.mark.gpu
DEVICE = torch.device("cuda")


def test_training_overwrites_the_weights_behind_the_copy_and_never_synchronises(tmp_path: Path) -> None:
    weight = torch.zeros(64 << 20, dtype=torch.float16, device=DEVICE)
    image = torch.zeros(8, 64, 3, 3, device=DEVICE).contiguous(memory_format=torch.channels_last)
    weights = {"weight": weight, "image": image}
    writer = CheckpointWriter(tmp_path, Template.of(weights, 1), DEVICE, 2)
    ramp = torch.arange(image.numel(), device=DEVICE).reshape(image.shape).float()
    before = torch.cuda.get_sync_debug_mode()
    with torch.cuda.stream(torch.cuda.Stream()):
        torch.cuda.set_sync_debug_mode("error")
        try:
            for step in range(1, 3):
                weight.fill_(step)
                image.copy_(ramp).mul_(step)
                writer.write(weights)
                weight.fill_(-1)
                image.fill_(-1)
        finally:
            torch.cuda.set_sync_debug_mode(before)
    found = [safetensors.torch.load_file(path) for path in writer.collect(wait=True)]
    for step, tensors in enumerate(found, start=1):
        assert torch.equal(tensors["weight"], torch.full_like(tensors["weight"], step))
        assert torch.equal(tensors["image"], ramp.cpu() * step)
    writer.close()
    assert len(found) == 2
