"""Synthetic data in the format of COCO 2017 (see :mod:`common.detection.coco_synthetic`), with a backbone.

Some boxes are crowds; one picture per split has no box. The backbone has random weights, and its batch norms have the
statistics of the pictures.
"""

from __future__ import annotations

import io
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from benchmarks.ssd300.augment import eval_pixels
from benchmarks.ssd300.config import BACKBONES, Facts
from common.data.options import Option
from common.detection import coco_synthetic
from common.detection.coco_synthetic import SyntheticCoco
from common.detection.drawn_pictures import Form, PicturePlan
from common.mlperf.fixed import fixed_facts
from common.nn.batch_norm import BatchNorm2d
from common.nn.resnet import ResNetShape, ResNetTrunk, TrainedNorm, draw_weights
from common.vision.pictures import Normalizer

_BATCHES, _BATCH = 4, 16  # number and size of the batches for the backbone's statistics


@dataclass(frozen=True)
class SyntheticBoxes(SyntheticCoco):
    """Options. ``generate`` adds a training picture without boxes; the last of several evaluation pictures has none."""

    layers: Annotated[tuple[int, int, int], Option("blocks per stage of the backbone")] = (3, 4, 6)
    image_size: Annotated[int, Option("side of pictures to fit the backbone to, px")] = 300


def generate(raw_dir: Path, options: SyntheticBoxes = SyntheticBoxes(), workers: int = 1) -> str:
    """Write synthetic data to ``raw_dir``, an empty or new folder; return a summary.

    Args:
        workers: largest number of processes.

    Raises:
        ConfigError: the pictures are impossible.
        DataError: ``raw_dir`` is not empty.
    """
    plans = {"train": _plans(options, 0, options.train, add_empty=True)}
    plans["val"] = _plans(options, len(plans["train"]), options.eval, add_empty=False)

    def write_backbone(folder: Path, pictures: list[Path]) -> None:
        torch.save(_backbone(pictures, options), folder / BACKBONES[-1])

    return coco_synthetic.generate(raw_dir, options, plans, workers, write_backbone)


def _plans(options: SyntheticBoxes, first: int, count: int, add_empty: bool) -> list[PicturePlan]:
    """Return ``count`` plans. A picture without a box is added, or it replaces the last of several pictures."""
    forms: list[Form] = ["plain"] * count
    if add_empty:
        forms.append("empty")
    elif count > 1:
        forms[-1] = "empty"
    classes = tuple(range(options.classes))
    return [
        PicturePlan(options.seed, first + number, classes, options.sides, options.boxes, form=form)
        for number, form in enumerate(forms)
    ]


def _backbone(pictures: list[Path], options: SyntheticBoxes) -> dict[str, Tensor]:
    """Return a state dict with torchvision's names, with the statistics of some pictures."""
    facts = fixed_facts(Facts, "ssd300")
    norm = TrainedNorm(facts.bn_epsilon, facts.bn_momentum)
    trunk = ResNetTrunk(ResNetShape(options.layers, options.width, bottleneck=False, norm=norm, strides=(1, 2, 1)))
    generator = torch.Generator().manual_seed(options.seed)
    draw_weights(trunk, generator)
    norms = [module for module in trunk.modules() if isinstance(module, BatchNorm2d)]
    with torch.no_grad():
        for number, image_NCHW in enumerate(_batches(pictures, options.image_size, facts)):
            for layer in norms:
                layer.momentum = 1 / (number + 1)  # cumulative mean over the batches
            trunk.features(image_NCHW)
    classifier = torch.randn((options.classes, trunk.shape.out_channels[-1]), generator=generator)
    return {
        **trunk.state_dict(),
        "bn1.num_batches_tracked": torch.tensor(_BATCHES),
        "fc.weight": classifier,
        "fc.bias": torch.zeros(options.classes),
    }


def _batches(paths: list[Path], image_size: int, facts: Facts) -> Iterator[Tensor]:
    normalizer = Normalizer(facts.mean, facts.std, torch.float32)
    for first in range(0, min(len(paths), _BATCHES * _BATCH), _BATCH):
        part = paths[first : first + _BATCH]
        image_NHWC = torch.empty((len(part), image_size, image_size, 3))
        for out_HWC, path in zip(image_NHWC, part, strict=True):
            with Image.open(io.BytesIO(path.read_bytes())) as picture:
                normalizer.write(np.asarray(eval_pixels(picture.convert("RGB"), image_size)), out_HWC)
        yield image_NHWC.permute(0, 3, 1, 2)
