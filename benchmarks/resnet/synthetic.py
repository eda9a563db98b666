"""Synthetic data in ImageNet's raw layout, so that preparation and readers run their real code.

- ``digits``: scikit-learn's 1,797 handwritten digits, a real data set; 1,437 to train and 360 to validate.
- ``imagenet-sized``: stripes with the picture sizes, file sizes and chroma subsampling of ImageNet. The class sets the
  hue and the direction of the stripes, so that a network can learn it.
"""

from __future__ import annotations

import colorsys
import functools
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from benchmarks.resnet import raw
from common.data import synthetic
from common.data.options import Option, Options
from common.errors import ConfigError
from common.formats.jpeg import encode

DIGITS_TRAIN, DIGITS_VAL = 1437, 360
PER_WORKER = 32
"""Number of pictures that are worth a process."""
HUGE_SIDE = 5200
"""Long side in px of the one huge picture. The largest sides in ImageNet are 5980 and 6430."""


@dataclass(frozen=True)
class PicturePlan:
    """One picture to draw.

    Attributes:
        number: index of the digit, or random seed of the striped picture.
        form: plain, huge or grey.
    """

    synset: str
    name: str
    label: int
    classes: int
    seed: int
    number: int
    form: str = "plain"


@dataclass(frozen=True)
class SyntheticImages(Options):
    """Options of ``generate``. ``seed`` determines sizes and contents; the split of the digits is fixed."""

    kind: Literal["digits", "imagenet-sized"] = "digits"
    train: Annotated[
        int | None, Option("number of training pictures (default: all digits; 10000 for imagenet-sized)")
    ] = None
    val: Annotated[
        int | None, Option("number of validation pictures (default: all digits; 500 for imagenet-sized)")
    ] = None
    classes: Annotated[int | None, Option("number of classes, only for imagenet-sized (default: 1000)")] = None
    seed: int = 0
    tars: Annotated[bool, Option("write tars, as ImageNet does, instead of folders")] = False


def generate(raw_dir: Path, options: SyntheticImages = SyntheticImages(), workers: int = 1) -> str:
    """Write synthetic data to ``raw_dir``, an empty or new folder, and mark it as synthetic; return a summary.

    Args:
        workers: largest number of processes.

    Raises:
        ConfigError: a number of pictures or classes is not possible.
        DataError: ``raw_dir`` is not empty.
    """
    if options.kind == "digits":
        plans, draw = digit_plans(options), draw_digit
        workers = 1  # drawing all digits takes less time than starting a process
    else:
        plans, draw = _striped_plans(options), draw_stripes
    synsets = sorted({plan.synset for plan in plans["train"]})
    total = 0
    with synthetic.generated(raw_dir) as folder:
        counts = {split: len(wanted) for split, wanted in plans.items()}
        synthetic.mark(folder, {"kind": options.kind, "seed": options.seed, **counts})
        for split, wanted in plans.items():
            drawn = synthetic.drawn(draw, wanted, workers, PER_WORKER)
            pictures = ((plan.synset, plan.name, data) for plan, data in zip(wanted, drawn, strict=True))
            if not options.tars:
                total += raw.write_folders(folder, split, pictures)
            elif split == "train":
                total += raw.write_train_tar(folder, pictures)
            else:
                total += raw.write_val_tar(folder, pictures, synsets)
    return (
        f"{counts['train']} training and {counts['val']} validation pictures of {len(synsets)} classes, "
        f"{total / sum(counts.values()) / 1000:.1f} KB on average"
    )


def draw_digit(plan: PicturePlan) -> bytes:
    """Return one handwritten digit as JPEG, enlarged bicubically to sides of 48 to 128 px."""
    random = np.random.default_rng([plan.seed, plan.number])
    height = int(random.integers(48, 129))
    width = int(np.clip(round(height * math.exp(random.uniform(math.log(3 / 4), math.log(4 / 3)))), 48, 128))
    pixels = (_digits()[0][plan.number] * (255 / 16)).astype(np.uint8)
    picture = Image.fromarray(pixels).convert("RGB").resize((width, height), Image.Resampling.BICUBIC)
    return encode(picture, 90)


def draw_stripes(plan: PicturePlan) -> bytes:
    """Return a noisy striped picture as 4:2:0 JPEG: around 500 x 375 px and 110 KB, or of huge size."""
    random = np.random.default_rng([plan.seed, plan.number])
    width, height = _imagenet_size(random) if plan.form != "huge" else (HUGE_SIDE, HUGE_SIDE * 3 // 4)
    hues = max(1, round(math.sqrt(1.6 * plan.classes)))
    directions = math.ceil(plan.classes / hues)
    angle = math.pi * (plan.label // hues) / directions
    hue = (plan.label % hues) / hues
    frequency = 2 * math.pi * random.uniform(6, 10) / max(width, height)
    x = np.arange(width, dtype=np.float32) * np.float32(frequency * math.cos(angle))
    y = np.arange(height, dtype=np.float32) * np.float32(frequency * math.sin(angle))
    stripes_HW = np.sin(y[:, None] + x[None, :] + np.float32(random.uniform(0, 2 * math.pi)))
    level_HW = 0.55 + 0.25 * stripes_HW + random.uniform(-0.08, 0.08) + _noise(height, width, random)
    colour = colorsys.hsv_to_rgb(hue, random.uniform(0.5, 0.8), 1.0)
    pixels_HWC = level_HW[:, :, None] * (255 * np.asarray(colour, np.float32))
    picture = Image.fromarray(np.clip(pixels_HWC, 0, 255).astype(np.uint8))
    if plan.form == "grey":
        picture = picture.convert("L").convert("RGB")
    return encode(picture, 94)


def _imagenet_size(random: np.random.Generator) -> tuple[int, int]:
    area = 500 * 375 * math.exp(random.normal(0, 0.35))
    aspect = (4 / 3 if random.random() < 0.75 else 3 / 4) * math.exp(random.normal(0, 0.12))
    width, height = math.sqrt(area * aspect), math.sqrt(area / aspect)
    return int(np.clip(round(width), 200, 700)), int(np.clip(round(height), 200, 700))


@functools.cache
def _grain() -> NDArray[np.float32]:
    return np.random.default_rng(0).normal(0, 1, (1024, 1024)).astype(np.float32)


def _noise(height: int, width: int, random: np.random.Generator) -> NDArray[np.float32]:
    """Noise with a random strength per picture, cut from one table that repeats in both directions."""
    top, left = random.integers(0, 1024, 2)
    rows = np.arange(top, top + height) % 1024
    columns = np.arange(left, left + width) % 1024
    return _grain()[rows][:, columns] * np.float32(0.07 * math.exp(random.normal(0, 0.5)))


@functools.cache
def _digits() -> tuple[NDArray[np.float64], NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
    """Pictures (1797, 8, 8) with values 0 to 16, labels, and the indices of training and validation pictures."""
    from sklearn.datasets import load_digits
    from sklearn.model_selection import train_test_split

    data = load_digits()
    train, val = train_test_split(
        np.arange(len(data.target)), test_size=DIGITS_VAL, random_state=0, stratify=data.target
    )
    return data.images, data.target, _class_by_class(train, data.target), _class_by_class(val, data.target)


def _class_by_class(numbers: NDArray[np.int64], labels: NDArray[np.int64]) -> NDArray[np.int64]:
    """Reorder ``numbers`` so that the classes alternate and the first few have all of them."""
    seen: dict[int, int] = {}
    turns = []
    for number in numbers:
        label = int(labels[number])
        turns.append((seen.get(label, 0), label))
        seen[label] = seen.get(label, 0) + 1
    return numbers[sorted(range(len(numbers)), key=turns.__getitem__)]


def digit_plans(options: SyntheticImages) -> dict[str, list[PicturePlan]]:
    """Return the plans of the digits of each split."""
    _, labels, train_numbers, val_numbers = _digits()
    plans = {}
    for split, numbers, wanted in (("train", train_numbers, options.train), ("val", val_numbers, options.val)):
        if wanted is not None and not (10 if split == "train" else 1) <= wanted <= len(numbers):
            raise ConfigError(f"--{split}={wanted}: this split has 10 to {len(numbers)} handwritten digits")
        plans[split] = [
            PicturePlan(f"n{label:07d}d", _name(split, f"n{label:07d}d", index), label, 10, options.seed, int(number))
            for index, number in enumerate(numbers[:wanted])
            for label in [int(labels[number])]
        ]
    return plans


def _striped_plans(options: SyntheticImages) -> dict[str, list[PicturePlan]]:
    defaults = {"train": (options.train, 10_000), "val": (options.val, 500)}
    counts = {split: usual if given is None else given for split, (given, usual) in defaults.items()}
    if min(counts.values()) < 1:
        raise ConfigError("generate needs at least one training and one validation picture")
    total_classes = min(1000, counts["train"]) if options.classes is None else options.classes
    if not 1 <= total_classes <= counts["train"]:
        raise ConfigError(
            f"--classes={total_classes}: every class needs a training picture, there are {counts['train']}"
        )
    forms = {0: "huge", 1: "grey"} if counts["train"] >= 100 else {}
    plans = {}
    for split, count in counts.items():
        first = 0 if split == "train" else counts["train"]
        stride = 1 if split == "train" else max(1, total_classes // count)
        plans[split] = [
            PicturePlan(
                f"n{label:08d}",
                _name(split, f"n{label:08d}", index),
                label,
                total_classes,
                options.seed,
                first + index,
                forms.get(first + index, "plain"),
            )
            for index in range(count)
            for label in [index * stride % total_classes]
        ]
    return plans


def _name(split: str, synset: str, index: int) -> str:
    return f"{synset}_{index}.JPEG" if split == "train" else f"ILSVRC2012_val_{index + 1:08d}.JPEG"
