"""Synthetic data in OpenImages' raw format: pictures of shapes, tables of their boxes, and a backbone fitted to them.

Each class is a shape in a colour and has the name of a benchmark class. There are also boxes of other classes, and
pictures with only such boxes, which the benchmark does not use. With 100 training pictures or more, one has more than
300 objects, and one has a single object of 2 px.
"""

from __future__ import annotations

import csv
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from benchmarks.retinanet.config import Facts
from benchmarks.retinanet.data import resized_pixels
from benchmarks.retinanet.raw import BACKBONES, CLASSES, FLAGS, SPLITS, class_names, picture_name
from common.data import synthetic
from common.data.options import Option, Options, comma_separated
from common.detection.drawn_pictures import LOOKS, DrawnBox, DrawnPicture, Form, PicturePlan, draw
from common.errors import ConfigError
from common.mlperf.fixed import fixed_facts
from common.nn.backbone_file import fitted_backbone, write_backbone
from common.nn.resnet import ResNetShape, TrainedNorm

PER_WORKER = 32
"""Number of pictures that are worth a process."""
SPECIAL = 100
"""Minimum number of training pictures for which some are special."""
OTHER_CLASSES = ("Tree", "Person", "Car")
"""Classes of OpenImages that the benchmark does not use."""
OTHER_SHARE = 0.1
"""Fraction of pictures with an additional box of such a class, and number of additional pictures per picture."""
FITTED = 16
"""Number of pictures to which the backbone's batch norms are fitted."""
_EVAL = 1 << 32
"""Number of the first evaluation picture."""
HEADER = (
    "ImageID", "Source", "LabelName", "Confidence", "XMin", "XMax", "YMin", "YMax", *FLAGS,
)  # fmt: skip


@dataclass(frozen=True)
class SyntheticOpenImages(Options):
    """Options of ``generate``. See :class:`benchmarks.retinanet.model.Architecture` for the sizes of the backbone."""

    train: Annotated[int, Option("training pictures that prepare selects", least=1)] = 512
    eval: Annotated[int, Option("pictures to evaluate", least=1)] = 64
    classes: Annotated[int, Option("number of classes, the first ones of the benchmark", least=1)] = 264
    size: Annotated[tuple[int, int], Option("smallest and largest side, px", parse=comma_separated)] = (400, 1200)
    boxes: Annotated[int, Option("largest number of objects in a picture")] = 20
    image_size: Annotated[int, Option("side of the backbone's input, px", least=1)] = 800
    layers: Annotated[tuple[int, ...], Option("blocks of the backbone's stages", parse=comma_separated)] = (3, 4, 6, 3)
    width: Annotated[int, Option("channels of the backbone's first convolution", least=1)] = 64
    groups: Annotated[int, Option("groups of its convolutions", least=1)] = 32
    width_per_group: Annotated[int, Option("channels of a group", least=1)] = 4
    seed: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.classes > len(class_names()):
            raise ConfigError(f"--classes={self.classes}: the benchmark has {len(class_names())}")
        if len(self.size) != 2:
            raise ConfigError("--size: the least and the largest side, such as 400,1200")
        if len(self.layers) != 4 or min(self.layers) < 1:
            raise ConfigError("--layers: blocks of four stages, such as 3,4,6,3")
        _ = self.plan(0), self.backbone  # raises an error if the picture or the backbone is not possible

    def plan(self, number: int, form: Form = "plain", others_only: bool = False) -> PicturePlan:
        """Return the plan of picture ``number``; if ``others_only``, without the benchmark's classes."""
        known = tuple(range(self.classes))
        others = tuple(range(LOOKS - len(OTHER_CLASSES), LOOKS))
        return PicturePlan(self.seed, number, others if others_only else known, self.size, self.boxes, form=form)

    @property
    def backbone(self) -> ResNetShape:
        """Shape of the backbone, with norms that take the statistics of a single batch."""
        return ResNetShape(self.layers, self.width, True, TrainedNorm(1e-5, 1.0), self.groups, self.width_per_group)


def generate(raw_dir: Path, options: SyntheticOpenImages = SyntheticOpenImages(), workers: int = 1) -> str:
    """Write pictures, tables, backbone and the marker of synthetic data to ``raw_dir``, an empty or new folder.

    Returns:
        a summary: numbers of pictures and boxes, and mean file size.

    Raises:
        DataError: ``raw_dir`` is not empty.
    """
    pictures: dict[str, int] = {}
    boxes = size = 0
    with synthetic.generated(raw_dir) as folder:
        _write_table(folder / CLASSES, _labels(), ("LabelName", "DisplayName"))
        for split, table in SPLITS.items():
            plans = _plans(options, split)
            pictures[split] = len(plans)
            rows: list[tuple[str, ...]] = []
            (folder / split).mkdir()
            made = synthetic.drawn(draw, list(plans.values()), workers, PER_WORKER)
            for (picture, plan), drawn in zip(plans.items(), made, strict=True):
                (folder / split / picture_name(picture)).write_bytes(drawn.jpeg)
                rows += _rows(picture, drawn, options, plan.number)
                size += len(drawn.jpeg)
            boxes += len(rows)
            _write_table(folder / table, rows, HEADER)
            if split == "train":
                fitted = list(plans)[: min(FITTED, options.train)]
                write_backbone(folder / BACKBONES[-1], _backbone(options, folder / split, fitted))
        synthetic.mark(folder, asdict(options))
    counts = ", ".join(f"{count} pictures to {split}" for split, count in pictures.items())
    return f"{counts}; {boxes} boxes; {size / sum(pictures.values()) / 1000:.1f} KB a picture"


def _plans(options: SyntheticOpenImages, split: str) -> dict[str, PicturePlan]:
    """Return plans by picture id, for the selected pictures and for additional ones with other classes only."""
    count = options.train if split == "train" else options.eval
    first = 0 if split == "train" else _EVAL
    forms: dict[int, Form] = {1: "many", 2: "one tiny"} if split == "train" and count >= SPECIAL else {}
    numbers = range(first, first + count + max(1, int(OTHER_SHARE * count)))
    plans = [
        options.plan(number, forms.get(number - first, "plain"), others_only=number - first >= count)
        for number in numbers
    ]
    return {_picture_id(options.seed, plan.number): plan for plan in plans}


def _picture_id(seed: int, number: int) -> str:
    """Return 16 hexadecimal digits in random order, like ids of OpenImages. The last digits make them unique."""
    random = int(np.random.default_rng([seed, number, 1]).integers(1 << 31))
    return f"{random:08x}{number % _EVAL:07x}{number // _EVAL:x}"


def _rows(picture: str, drawn: DrawnPicture, options: SyntheticOpenImages, number: int) -> Iterator[tuple[str, ...]]:
    """Yield the table rows of a picture's boxes, and sometimes one of a class outside the benchmark."""
    random = np.random.default_rng([options.seed, number, 2])
    boxes = list(drawn.boxes)
    if random.random() < OTHER_SHARE:
        boxes.append(DrawnBox(LOOKS - 1, 0, 0, drawn.width, drawn.height))
    for box in boxes:
        edges = (
            box.x / drawn.width,
            (box.x + box.width) / drawn.width,
            box.y / drawn.height,
            (box.y + box.height) / drawn.height,
        )
        occluded, truncated, depiction, inside = random.integers(0, 2, 4)
        flags = (occluded, truncated, int(box.crowd), depiction, inside)
        label = _label(box.class_index, options)
        yield (picture, "drawn", label, "1", *(f"{edge:.6f}" for edge in edges), *map(str, flags))


def _label(class_index: int, options: SyntheticOpenImages) -> str:
    """Return the label of a drawn class in the tables."""
    known = class_index < options.classes
    return f"/m/0{class_index:03d}" if known else f"/m/0{len(class_names()) + LOOKS - 1 - class_index:03d}"


def _labels() -> Iterator[tuple[str, ...]]:
    """Yield label and name of all benchmark classes and of the classes outside the benchmark."""
    for index, name in enumerate((*class_names(), *OTHER_CLASSES)):
        yield f"/m/0{index:03d}", name


def _backbone(options: SyntheticOpenImages, folder: Path, pictures: Iterable[str]) -> dict[str, Tensor]:
    """Return random weights with norms fitted to pictures, which are preprocessed as in training."""
    facts = fixed_facts(Facts, "retinanet")
    images = []
    for picture in pictures:
        with Image.open(folder / picture_name(picture)) as opened:
            pixels_SSC = resized_pixels(opened.convert("RGB"), options.image_size, mirror=False)
        images.append((pixels_SSC - torch.tensor(facts.mean)) / torch.tensor(facts.std))
    return fitted_backbone(options.backbone, torch.stack(images).permute(0, 3, 1, 2), options.seed)


def _write_table(path: Path, rows: Iterable[tuple[str, ...]], header: tuple[str, ...]) -> None:
    with open(path, "w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(header)
        writer.writerows(rows)
