"""Synthetic data in the format of COCO 2017 (see :mod:`common.detection.coco_stand_in`), with a backbone.

Some boxes are crowds; one picture per split has no box. The backbone has random weights, and its batch norms have the
statistics of the pictures.
"""

from __future__ import annotations

import io
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from benchmarks.ssd300.augment import eval_pixels
from benchmarks.ssd300.config import BACKBONES, Facts
from common.data import stand_in
from common.detection.coco_raw import SPLITS
from common.detection.coco_stand_in import Generated, Look, write_pictures
from common.detection.drawn_pictures import LOOKS, Form, PicturePlan
from common.errors import ConfigError
from common.mlperf.fixed import fixed_facts
from common.nn.batch_norm import BatchNorm2d
from common.nn.resnet import ResNetShape, ResNetTrunk, TrainedNorm, draw_weights
from common.vision.pictures import Normalizer

_BATCHES, _BATCH = 4, 16  # number and size of the batches for the backbone's statistics


@dataclass(frozen=True)
class Request:
    """Options of the synthetic data.

    Attributes:
        train: training pictures with a box; one more has none.
        eval: validation pictures. If there are several, the last has no box.
        classes: classes of objects.
        sides: smallest and largest width and height of a picture, px.
        boxes: maximum number of objects in a picture, besides crowds and tiny objects.
        width, layers: channels and blocks of the backbone.
        image_size: size in px to which the backbone's pictures are resized.
        seed: seed of all random numbers.
    """

    train: int = 2000
    eval: int = 200
    classes: int = 80
    sides: tuple[int, int] = (300, 640)
    boxes: int = 8
    width: int = 64
    layers: tuple[int, int, int] = (3, 4, 6)
    image_size: int = 300
    seed: int = 0


def generate(raw_dir: Path, request: Request, workers: int = 1) -> Generated:
    """Write synthetic data in the format of COCO 2017 to ``raw_dir``, with the marker file of synthetic data.

    Args:
        raw_dir: an empty or new folder.
        workers: processes that draw.

    Raises:
        ConfigError: a number is out of its range.
        DataError: ``raw_dir`` is not empty.
    """
    if min(request.train, request.eval) < 1:
        raise ConfigError("generate needs at least one training and one validation picture")
    if not 1 <= request.classes <= LOOKS:
        raise ConfigError(f"classes={request.classes}: 1 to {LOOKS} can be told apart")
    stand_in.require_unused(raw_dir)
    if raw_dir.exists():
        raw_dir.rmdir()
    plans = {"train": _plans(request, 0, request.train, empty_besides=True)}
    plans["val"] = _plans(request, len(plans["train"]), request.eval, empty_besides=False)
    with stand_in.generated(raw_dir) as partial:
        made = write_pictures(partial, plans, Look(request.classes), workers)
        torch.save(_backbone(partial / SPLITS["train"], request), partial / BACKBONES[-1])
        stand_in.mark(partial, asdict(request))
    return made


def _plans(request: Request, first: int, count: int, empty_besides: bool) -> list[PicturePlan]:
    """Return ``count`` plans. A picture without a box is added, or it replaces the last of several pictures."""
    forms: list[Form] = ["plain"] * count
    if empty_besides:
        forms.append("empty")
    elif count > 1:
        forms[-1] = "empty"
    classes = tuple(range(request.classes))
    return [
        PicturePlan(request.seed, first + number, classes, request.sides, request.boxes, form=form)
        for number, form in enumerate(forms)
    ]


def _backbone(folder: Path, request: Request) -> dict[str, Tensor]:
    """Return a state dict with torchvision's names, with the statistics of some pictures in ``folder``."""
    facts = fixed_facts(Facts, "ssd300")
    norm = TrainedNorm(facts.bn_epsilon, facts.bn_momentum)
    trunk = ResNetTrunk(ResNetShape(request.layers, request.width, bottleneck=False, norm=norm, strides=(1, 2, 1)))
    generator = torch.Generator().manual_seed(request.seed)
    draw_weights(trunk, generator)
    norms = [module for module in trunk.modules() if isinstance(module, BatchNorm2d)]
    with torch.no_grad():
        for number, image_NCHW in enumerate(_batches(folder, request.image_size, facts)):
            for layer in norms:
                layer.momentum = 1 / (number + 1)  # cumulative mean over the batches
            trunk.features(image_NCHW)
    classifier = torch.randn((request.classes, trunk.shape.out_channels[-1]), generator=generator)
    return {
        **trunk.state_dict(),
        "bn1.num_batches_tracked": torch.tensor(_BATCHES),
        "fc.weight": classifier,
        "fc.bias": torch.zeros(request.classes),
    }


def _batches(folder: Path, image_size: int, facts: Facts) -> Iterator[Tensor]:
    normalizer = Normalizer(facts.mean, facts.std, torch.float32)
    paths = sorted(folder.iterdir())
    for first in range(0, min(len(paths), _BATCHES * _BATCH), _BATCH):
        part = paths[first : first + _BATCH]
        image_NHWC = torch.empty((len(part), image_size, image_size, 3))
        for out_HWC, path in zip(image_NHWC, part, strict=True):
            with Image.open(io.BytesIO(path.read_bytes())) as picture:
                normalizer.write(np.asarray(eval_pixels(picture.convert("RGB"), image_size)), out_HWC)
        yield image_NHWC.permute(0, 3, 1, 2)
