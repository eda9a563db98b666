"""An iteration at fixed shapes gives the losses and gradients of one on lists, for the same random keys."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest
import torch
from torch import Tensor

from benchmarks.maskrcnn.config import MaskRCNNConfig
from benchmarks.maskrcnn.iteration import TrainingPass
from benchmarks.maskrcnn.loss import rpn_losses
from benchmarks.maskrcnn.model import MaskRCNN, RpnOutput
from benchmarks.maskrcnn.polygon_table import PolygonCapacity, PolygonTable
from benchmarks.maskrcnn.targets import RpnSample
from common import cli
from common.config.composition import compose
from common.step.train_step import Losses
from tests.benchmarks.maskrcnn import list_iteration
from tests.benchmarks.maskrcnn.list_iteration import NAMES, Picture
from tests.benchmarks.maskrcnn.mask_oracle import columns

SHAPE = (64, 96)
SEED = 0x1234_5678_9ABC
SCALE = torch.tensor(4.0, dtype=torch.float64)


@dataclass
class Case:
    """A network, a batch, and the same batch as pictures."""

    own: MaskRCNNConfig
    model: MaskRCNN
    pictures: list[Picture]
    tensors: dict[str, Tensor]
    table: PolygonTable

    def fixed(self) -> Losses:
        return TrainingPass(self.model, self.own, self.table, torch.float64)(self.tensors, SHAPE, SCALE)

    def gradients(self, total: Tensor) -> dict[str, Tensor]:
        """Return the gradients by parameter, divided by the scale."""
        self.model.zero_grad()
        if total.requires_grad:  # without a sample, the losses of the lists are constants
            (total * SCALE).backward()
        return {
            name: (torch.zeros_like(parameter) if parameter.grad is None else parameter.grad.clone()) / SCALE
            for name, parameter in self.model.named_parameters()
            if parameter.requires_grad
        }


def picture(random: np.random.Generator, objects: int, size: tuple[int, int], mirrored: bool, real: bool) -> Picture:
    """Objects with outlines of one or two parts, somewhere in the picture."""
    (height, width), scale = size, (2.0, 1.6)
    boxes, outlines = [], []
    for _ in range(objects):
        first = random.uniform(0, 0.6, 2) * (width, height)
        last = np.minimum(first + random.uniform(0.1, 0.5, 2) * (width, height), (width - 1, height - 1))
        boxes.append(np.concatenate([first, last]).astype(np.float32).tolist())
        parts = [random.uniform(first, last, (random.integers(3, 7), 2)) for _ in range(random.integers(1, 3))]
        if mirrored:
            parts = [np.stack([width - 1 - part[:, 0], part[:, 1]], 1) for part in parts]
        outlines.append([(part / scale).astype(np.float32) for part in parts])
    transform = [*scale, float(mirrored), width / scale[0]]
    labels = random.integers(1, 4, objects).tolist()
    return Picture((float(height), float(width)), boxes, labels, outlines, transform, real)


def case(pictures: list[Picture], *overrides: str) -> Case:
    run, _ = cli.load(compose(["benchmark=maskrcnn", "scale=test", "device=cpu", "precision=fp64", *overrides]))
    own: MaskRCNNConfig = run.workload
    model = MaskRCNN(own.facts, torch.Generator().manual_seed(5)).cast(torch.float64)
    with torch.no_grad():  # weights that say more than almost nothing, so that all anchors differ
        for parameter in (*model.rpn.parameters(), *model.box_head.parameters()):
            parameter.add_(0.02 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(6)))
    count, capacity = len(pictures), own.reader.max_boxes
    boxes, label = torch.full((count, capacity, 4), torch.nan), torch.ones((count, capacity), dtype=torch.int64)
    first, outlines = [], []
    for number, of in enumerate(pictures):
        objects = len(of.boxes)
        boxes[number, :objects] = torch.tensor(of.boxes).reshape(-1, 4)
        label[number, :objects] = torch.tensor(of.labels, dtype=torch.int64)
        first.append(len(outlines))
        outlines += of.outlines
    polygons = columns(outlines)
    table = PolygonTable(PolygonCapacity(40, 80, 600), torch.device("cpu"))
    table.load(polygons)
    image = 50 * torch.randn((count, 3, *SHAPE), generator=torch.Generator().manual_seed(7), dtype=torch.float64)
    tensors = {
        "image": image,
        "size": torch.tensor([of.size for of in pictures]),
        "boxes": boxes,
        "label": label,
        "count": torch.tensor([len(of.boxes) for of in pictures]),
        "object": torch.tensor(first),
        "transform": torch.tensor([of.transform for of in pictures]),
        "real": torch.tensor([of.real for of in pictures]),
        "seed": torch.tensor([SEED]),
    }
    return Case(own, model, pictures, tensors, table)


def drawn(*objects: int, twins: bool = False, surplus: bool = False) -> list[Picture]:
    """Pictures of two sizes with so many objects; with ``twins`` the second object of each has the box of the first."""
    random = np.random.default_rng(11)
    sizes = [(64, 90), (56, 96)]
    made = [picture(random, of, sizes[index % 2], bool(index % 2), True) for index, of in enumerate(objects)]
    if twins:
        made = [of._replace(boxes=[of.boxes[0], *of.boxes[:1], *of.boxes[2:]]) for of in made]
    return [*made, made[0]._replace(boxes=[], labels=[], outlines=[], real=False)] if surplus else made


CASES = {
    "as usual": (drawn(3, 1), ()),
    "one picture's own candidates": (drawn(3, 1), ("hparams.candidates_from=picture", "hparams.image_candidates=30")),
    "few of all candidates": (drawn(2, 2), ("hparams.image_candidates=25",)),
    "no positives": (drawn(0, 0), ()),
    "over the cap": (drawn(8, 7), ("benchmark.facts.roi_sampled=8", "benchmark.facts.rpn_samples=6")),
    "too few negatives": (drawn(2, 1), ("benchmark.facts.rpn_samples=4000", "benchmark.facts.roi_sampled=400")),
    "equal overlaps": (drawn(3, 2, twins=True), ()),
    "a surplus slot": (drawn(2, surplus=True), ()),
    "only surplus slots": ([empty._replace(real=False) for empty in drawn(0, 0)], ()),
}


@pytest.mark.parametrize("name", CASES)
def test_losses_and_gradients_are_those_of_the_lists(name):
    of = case(CASES[name][0], *CASES[name][1])
    wanted = list_iteration.losses(of.model, of.own, of.tensors["image"], of.pictures, SEED)
    expected = of.gradients(sum(wanted[loss] for loss in NAMES))
    found = of.fixed()
    gradients = of.gradients(found.total)
    for loss in NAMES:
        assert found.metrics[loss].item() == pytest.approx(wanted[loss].item(), rel=1e-6, abs=1e-9), loss
    slots = found.metrics["mask_slots"]
    assert slots == wanted["mask_slots"]
    assert found.total.item() == pytest.approx(sum(wanted[loss].item() for loss in NAMES))
    assert gradients.keys() == expected.keys()
    for parameter, gradient in expected.items():
        error = (gradients[parameter] - gradient).norm()
        assert error <= 1e-5 * gradient.norm() + 1e-9, parameter
    if name == "no positives":
        assert slots == found.metrics["loss_mask"] == found.metrics["loss_box_reg"] == 0
    if name == "over the cap":
        assert slots == 2 * 2


def test_half_precision_is_widened_before_it_is_summed():
    outputs = [RpnOutput(*(torch.zeros((2, 4, 4, size), dtype=torch.bfloat16).permute(0, 3, 1, 2) for size in (3, 12)))]
    sample = RpnSample(torch.arange(6).repeat(2, 1), torch.tensor([2, 2]), torch.tensor([6, 6]), torch.zeros((2, 6, 4)))
    assert {loss.dtype for loss in rpn_losses(outputs, sample, 1 / 9)} == {torch.float32}
