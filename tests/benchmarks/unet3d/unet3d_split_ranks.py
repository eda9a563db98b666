"""A small 3D U-Net in float64 on one rank of a split volume; test_unet3d_split_model.py compares it with the whole."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from benchmarks.unet3d.model import UNet3D, UNet3DArchitecture
from benchmarks.unet3d.ops.dice_cross_entropy import dice_cross_entropy_reference
from common.data.batches import Batch
from common.distributed.layout import Layout
from common.distributed.spatial.split import VolumeSplit
from common.optim.learning_rate import constant
from common.optim.momentum import SGD
from common.optim.optimizer import Optimizer, ParameterGroup
from common.step.train_step import Losses, TrainStep, accumulate

ARCHITECTURE = UNet3DArchitecture(classes=3, filters=(2, 3, 4, 5, 6), norm_epsilon=1e-5)
SIZE = (64, 32, 32)  # the smallest for eight ranks
SAMPLES = 2
STEPS = 3
LEARNING_RATE = 0.1


def batch(step: int) -> tuple[Tensor, Tensor]:
    """Return whole images and labels."""
    generator = torch.Generator().manual_seed(step)
    image = torch.randn(SAMPLES, 1, *SIZE, dtype=torch.float64, generator=generator)
    return image, torch.randint(0, 3, (SAMPLES, *SIZE), dtype=torch.uint8, generator=generator)


class Trainee:
    """The network, whole or split over ``cp``, and its losses."""

    def __init__(self, layout: Layout) -> None:
        self.layout = layout
        self.split = VolumeSplit.from_layout(layout)
        generator = torch.Generator().manual_seed(11)
        self.model = UNet3D(ARCHITECTURE, generator, dtype=torch.float64, split=self.split)

    def local(self, whole: Tensor, dim: int) -> Tensor:
        return whole if self.split is None else self.split.slab(whole, dim).contiguous()

    def loss(self, image_NCDHW: Tensor, label_NDHW: Tensor) -> tuple[Tensor, Tensor]:
        """Return loss and logits."""
        logits_NKDHW = self.model(image_NCDHW)
        return dice_cross_entropy_reference(logits_NKDHW, label_NDHW, 1e-6, self.split), logits_NKDHW

    def gradients(self, of_image: bool) -> dict[str, Tensor]:
        """Return logits, loss and gradients of this rank."""
        self.model.zero_grad()
        image, label = batch(0)
        image = self.local(image, 2).clone().requires_grad_(of_image)
        value, logits = self.loss(image, self.local(label, 1))
        value.backward()
        found = {"loss": value.detach(), "logits": logits.detach()}
        if of_image:
            assert image.grad is not None
            found["image"] = image.grad
        for name, parameter in self.model.named_parameters():
            assert parameter.grad is not None
            found[name] = parameter.grad.clone()
        return found

    def train(self) -> dict[str, Tensor]:
        """Return the weights after a few steps of the optimizer."""
        redundant = self.model.redundant_parameters()
        named = dict(self.model.named_parameters())
        groups = [
            ParameterGroup({name: p for name, p in named.items() if name not in redundant}),
            ParameterGroup({name: p for name, p in named.items() if name in redundant}, replicated_over=("cp",)),
        ]
        optimizer = Optimizer(
            [group for group in groups if group.parameters], SGD(0.9, nesterov=True), constant(LEARNING_RATE),
            self.layout, grad_divisor=1.0,
        )  # fmt: skip

        def loss(micro_batch: Batch) -> Losses:
            value, _ = self.loss(micro_batch.tensors["image"], micro_batch.tensors["label"])
            return Losses(value, {"loss": value})

        step = TrainStep(accumulate(loss), [optimizer], self.layout)
        for index in range(STEPS):
            image, label = batch(index)
            step([Batch({"image": self.local(image, 2), "label": self.local(label, 1)}, SAMPLES)])
        step.materialize()
        return {name: parameter.detach().clone() for name, parameter in named.items()}


def run_rank(rank: int, world: int, folder: str) -> dict[str, Any]:
    layout = Layout({"cp": world}, rank)
    trainee = Trainee(layout)
    results: dict[str, Any] = {
        "gradients": trainee.gradients(of_image=False),
        "with image": trainee.gradients(of_image=True),
        "chosen": trainee.model.chosen(),
        "redundant": sorted(trainee.model.redundant_parameters()),
        "weights": trainee.train(),
    }
    return results
