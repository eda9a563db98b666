"""Synthetic data in the format of COCO 2017 (see :mod:`common.detection.coco_synthetic`), with a backbone.

Besides ordinary pictures there are extremely wide and high ones, and objects without area. Two more training pictures
are unusable by the rules: one has no object, the other only an object without area. One usable training picture and
one validation picture have only a crowd. The last validation picture has no object.
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

from benchmarks.maskrcnn.caffe2_backbone import BACKBONE, write_backbone
from benchmarks.maskrcnn.config import Facts
from common.data.options import Option
from common.detection import coco_synthetic
from common.detection.coco_synthetic import SyntheticCoco
from common.detection.drawn_pictures import LEAST_SIDE, Form, PicturePlan
from common.errors import ConfigError
from common.mlperf.fixed import fixed_facts
from common.nn.backbone_file import fitted_backbone
from common.nn.resnet import ResNetShape, TrainedNorm

EXTREME = 25
"""One of this number of pictures is extreme, and one has an object without area."""
NARROW = 0.15
"""Ratio of the shorter to the longer side of an extreme picture."""
FITTED = 8
"""Number of pictures to which the backbone's batch norms are fitted."""
_EPSILON = 1e-5


@dataclass(frozen=True)
class SyntheticOutlines(SyntheticCoco):
    """Options of ``generate``, which adds two training pictures: one has only a box of one pixel's width, one none."""

    layers: Annotated[tuple[int, int, int, int], Option("blocks per stage of the backbone")] = (3, 4, 6, 3)
    image_size: Annotated[int, Option("side of pictures to fit the backbone to, px", least=LEAST_SIDE)] = 800

    def __post_init__(self) -> None:
        super().__post_init__()
        longest = fixed_facts(Facts, "maskrcnn").longest_side
        if self.sides[1] > longest:
            raise ConfigError(f"--sides {self.sides[0]} {self.sides[1]}: COCO's pictures have {longest} px at most")
        _ = self.plan(0), self.backbone  # raises an error if the picture or the backbone is not possible

    def plan(self, number: int, form: Form = "plain") -> PicturePlan:
        """Return the plan of picture ``number``."""
        size = None
        if number % EXTREME == EXTREME // 2:
            size = (self.sides[1], max(LEAST_SIDE, round(NARROW * self.sides[1])))
            size = size if number // EXTREME % 2 == 0 else size[::-1]
        return PicturePlan(self.seed, number, tuple(range(self.classes)), self.sides, self.boxes, form=form, size=size)

    @property
    def backbone(self) -> ResNetShape:
        """Shape of the backbone, with stride in the 1x1 convolution and norms that take the statistics of one batch."""
        return ResNetShape(self.layers, self.width, True, TrainedNorm(_EPSILON, 1.0), stride_in_1x1=True)


def generate(raw_dir: Path, options: SyntheticOutlines = SyntheticOutlines(), workers: int = 1) -> str:
    """Write synthetic data to ``raw_dir``, an empty or new folder; return a summary.

    Args:
        workers: largest number of processes.

    Raises:
        DataError: ``raw_dir`` is not empty.
    """

    def add_backbone(folder: Path, pictures: list[Path]) -> None:
        write_backbone(folder / BACKBONE, _backbone(pictures[:FITTED], options), _EPSILON)

    plans, slivers = _plans(options)
    return coco_synthetic.generate(raw_dir, options, plans, workers, add_backbone, slivers)


def _plans(options: SyntheticOutlines) -> tuple[dict[str, list[PicturePlan]], set[int]]:
    """Return the plans of the pictures of each split, and the numbers of pictures with a box one pixel wide."""
    forms: dict[str, list[Form]] = {"train": ["plain"] * options.train, "val": ["plain"] * options.eval}
    if options.train > 2:
        forms["train"][2] = "crowd"
    if options.eval > 2:
        forms["val"][1] = "crowd"
    if options.eval > 1:
        forms["val"][-1] = "empty"
    without_area = len(forms["train"])
    forms["train"] += ["empty", "empty"]
    plans: dict[str, list[PicturePlan]] = {}
    first = 0
    for split, wanted in forms.items():
        plans[split] = [options.plan(first + number, form) for number, form in enumerate(wanted)]
        first += len(wanted)
    drawn = [plan.number for split in plans.values() for plan in split if plan.form == "plain"]
    return plans, {without_area, *(number for number in drawn if number % EXTREME == 1)}


def _backbone(pictures: list[Path], options: SyntheticOutlines) -> dict[str, Tensor]:
    """Return a trunk fitted to the given pictures, as the network sees them: BGR minus the mean."""
    mean_C = torch.tensor(fixed_facts(Facts, "maskrcnn").mean)
    images = list(_squares(pictures, options.image_size))
    image_NCHW = (torch.stack(images).flip(-1) - mean_C).permute(0, 3, 1, 2)
    return fitted_backbone(options.backbone, image_NCHW, options.seed)


def _squares(paths: list[Path], side: int) -> Iterator[Tensor]:
    """Yield pictures (side, side, 3) fp32, red, green, blue."""
    for path in paths:
        with Image.open(io.BytesIO(path.read_bytes())) as picture:
            square = picture.convert("RGB").resize((side, side), Image.Resampling.BILINEAR)
        yield torch.from_numpy(np.array(square)).float()
