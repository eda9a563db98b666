"""Synthetic data in ImageNet's raw layout, so that preparation and readers run their real code.

- ``digits``: scikit-learn's 1,797 handwritten digits, a real data set; 1,437 to train and 360 to validate.
- ``imagenet-sized``: stripes with the picture sizes, file sizes and chroma subsampling of ImageNet. The class sets the
  hue and the direction of the stripes, so that a network can learn it.
"""

from __future__ import annotations

import colorsys
import functools
import io
import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from benchmarks.resnet import raw
from common.data import stand_in
from common.errors import ConfigError

KINDS = ("digits", "imagenet-sized")
DIGITS_TRAIN, DIGITS_VAL = 1437, 360
WORTH_PROCESSES = 64
"""Minimum number of pictures of a split for which other processes draw them."""
HUGE_SIDE = 5200
"""Long side in px of the one huge picture. The largest sides in ImageNet are 5980 and 6430."""


@dataclass(frozen=True)
class Request:
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
class Generated:
    """Summary of the generated files; ``mean_bytes`` is the mean file size."""

    train: int
    val: int
    classes: int
    mean_bytes: float

    def __str__(self) -> str:
        return (
            f"{self.train} training and {self.val} validation pictures of {self.classes} classes, "
            f"{self.mean_bytes / 1000:.1f} KB on average"
        )


def generate(
    raw_dir: Path,
    kind: str,
    *,
    train: int | None = None,
    val: int | None = None,
    classes: int | None = None,
    seed: int = 0,
    workers: int = 1,
    tars: bool = False,
) -> Generated:
    """Write synthetic data to ``raw_dir``, with the marker file of synthetic data.

    Args:
        raw_dir: an empty or new folder.
        kind: one of ``KINDS``.
        train: training pictures; default: all 1,437 digits, or 10,000 pictures.
        val: validation pictures; default: all 360 digits, or 500 pictures.
        classes: classes of ``imagenet-sized``; default: 1000, or the number of training pictures if that is smaller.
        seed: seed of sizes and contents. The split of the digits is fixed.
        workers: processes that draw ``imagenet-sized`` pictures.
        tars: write ImageNet's tars and development kit instead of folders.

    Raises:
        ConfigError: the kind is unknown, or a number of pictures or classes is not possible.
        DataError: ``raw_dir`` is not empty.
    """
    if kind not in KINDS:
        raise ConfigError(f"kind={kind!r}: generate knows {' and '.join(KINDS)}")
    stand_in.require_unused(raw_dir)
    draw: Callable[[Request], bytes]
    if kind == "digits":
        requests, draw = _digit_requests(train, val, seed), draw_digit
        workers = 1  # drawing all digits takes less time than starting a process
    else:
        requests, draw = _striped_requests(train, val, classes, seed), draw_stripes
    raw_dir.mkdir(parents=True, exist_ok=True)
    stand_in.mark(raw_dir, {"kind": kind, "seed": seed, **{split: len(requests[split]) for split in requests}})
    total = 0
    for split, wanted in requests.items():
        made = stand_in.drawn(draw, wanted, workers if len(wanted) >= WORTH_PROCESSES else 1, chunk=16)
        pictures = ((request.synset, request.name, data) for request, data in zip(wanted, made, strict=True))
        if not tars:
            total += raw.write_folders(raw_dir, split, pictures)
        elif split == "train":
            total += raw.write_train_tar(raw_dir, pictures)
        else:
            synsets = sorted({request.synset for request in requests["train"]})
            total += raw.write_val_tar(raw_dir, pictures, synsets)
    pictures_written = sum(len(wanted) for wanted in requests.values())
    return Generated(
        train=len(requests["train"]),
        val=len(requests["val"]),
        classes=len({request.label for request in requests["train"]}),
        mean_bytes=total / pictures_written,
    )


def draw_digit(request: Request) -> bytes:
    """Return one handwritten digit as JPEG, enlarged bicubically to sides of 48 to 128 px."""
    random = np.random.default_rng([request.seed, request.number])
    height = int(random.integers(48, 129))
    width = int(np.clip(round(height * math.exp(random.uniform(math.log(3 / 4), math.log(4 / 3)))), 48, 128))
    pixels = (_digits()[0][request.number] * (255 / 16)).astype(np.uint8)
    picture = Image.fromarray(pixels).convert("RGB").resize((width, height), Image.Resampling.BICUBIC)
    return _jpeg(picture, 90)


def draw_stripes(request: Request) -> bytes:
    """Return a noisy striped picture as 4:2:0 JPEG: around 500 x 375 px and 110 KB, or of huge size."""
    random = np.random.default_rng([request.seed, request.number])
    width, height = _imagenet_size(random) if request.form != "huge" else (HUGE_SIDE, HUGE_SIDE * 3 // 4)
    hues = max(1, round(math.sqrt(1.6 * request.classes)))
    directions = math.ceil(request.classes / hues)
    angle = math.pi * (request.label // hues) / directions
    hue = (request.label % hues) / hues
    frequency = 2 * math.pi * random.uniform(6, 10) / max(width, height)
    x = np.arange(width, dtype=np.float32) * np.float32(frequency * math.cos(angle))
    y = np.arange(height, dtype=np.float32) * np.float32(frequency * math.sin(angle))
    stripes_HW = np.sin(y[:, None] + x[None, :] + np.float32(random.uniform(0, 2 * math.pi)))
    level_HW = 0.55 + 0.25 * stripes_HW + random.uniform(-0.08, 0.08) + _noise(height, width, random)
    colour = colorsys.hsv_to_rgb(hue, random.uniform(0.5, 0.8), 1.0)
    pixels_HWC = level_HW[:, :, None] * (255 * np.asarray(colour, np.float32))
    picture = Image.fromarray(np.clip(pixels_HWC, 0, 255).astype(np.uint8))
    if request.form == "grey":
        picture = picture.convert("L").convert("RGB")
    return _jpeg(picture, 94)


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


def _jpeg(picture: Image.Image, quality: int) -> bytes:
    buffer = io.BytesIO()
    picture.save(buffer, "JPEG", quality=quality, subsampling="4:2:0")
    return buffer.getvalue()


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


def _digit_requests(train: int | None, val: int | None, seed: int) -> dict[str, list[Request]]:
    _, labels, train_numbers, val_numbers = _digits()
    requests = {}
    for split, numbers, wanted in (("train", train_numbers, train), ("val", val_numbers, val)):
        if wanted is not None and not (10 if split == "train" else 1) <= wanted <= len(numbers):
            raise ConfigError(f"{split}={wanted}: this split has 10 to {len(numbers)} handwritten digits")
        requests[split] = [
            Request(f"n{label:07d}d", _name(split, f"n{label:07d}d", place), label, 10, seed, int(number))
            for place, number in enumerate(numbers[:wanted])
            for label in [int(labels[number])]
        ]
    return requests


def _striped_requests(train: int | None, val: int | None, classes: int | None, seed: int) -> dict[str, list[Request]]:
    counts = {"train": 10_000 if train is None else train, "val": 500 if val is None else val}
    if min(counts.values()) < 1:
        raise ConfigError("generate needs at least one training and one validation picture")
    total_classes = min(1000, counts["train"]) if classes is None else classes
    if not 1 <= total_classes <= counts["train"]:
        raise ConfigError(f"classes={total_classes}: every class needs a training picture, there are {counts['train']}")
    forms = {0: "huge", 1: "grey"} if counts["train"] >= 100 else {}
    requests = {}
    for split, count in counts.items():
        first = 0 if split == "train" else counts["train"]
        stride = 1 if split == "train" else max(1, total_classes // count)
        requests[split] = [
            Request(
                f"n{label:08d}",
                _name(split, f"n{label:08d}", place),
                label,
                total_classes,
                seed,
                first + place,
                forms.get(first + place, "plain"),
            )
            for place in range(count)
            for label in [place * stride % total_classes]
        ]
    return requests


def _name(split: str, synset: str, place: int) -> str:
    return f"{synset}_{place}.JPEG" if split == "train" else f"ILSVRC2012_val_{place + 1:08d}.JPEG"
