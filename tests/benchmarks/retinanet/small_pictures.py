"""Small raw and prepared data sets of given pictures."""

import json
from pathlib import Path

import numpy as np
import torch
from PIL import Image

from benchmarks.retinanet.config import Facts
from benchmarks.retinanet.data import RetinaNetData
from benchmarks.retinanet.raw import class_names
from common.config.loading import build
from common.detection.config import BoxReaderConfig
from common.formats.jpeg import encode
from common.mlperf.fixed import benchmark_settings

COLUMNS = (
    "ImageID,Source,LabelName,Confidence,XMin,XMax,YMin,YMax,IsOccluded,IsTruncated,IsGroupOf,IsDepiction,IsInside"
)
TABLES = {"train": "oidv6-train-annotations-bbox.csv", "validation": "validation-annotations-bbox.csv"}
READER = {
    "reader": "torchvision", "threads": 2, "prefetch": 2, "max_boxes": 6, "hw_decoder_load": 0.65,
    "input_batch_multiplier": 1, "eval_batch": 4,
}  # fmt: skip


def settings(dtype: torch.dtype = torch.float32, **changes: object) -> RetinaNetData:
    """Settings for pictures of 32 px and 3 classes; ``changes`` are of the benchmark's facts or of the reader."""
    facts = {**benchmark_settings("retinanet")["facts"], "image_size": 32, "classes": 3}
    facts |= {name: value for name, value in changes.items() if name in facts}
    reader = READER | {name: value for name, value in changes.items() if name not in facts}
    return RetinaNetData(build(Facts, facts, "benchmark.facts"), build(BoxReaderConfig, reader, "reader"), dtype)


def encoded(pixels: np.ndarray, quality: int = 95) -> bytes:
    """``pixels`` (H, W, 3) or (H, W) as JPEG."""
    return encode(Image.fromarray(pixels), quality)


def smooth(height: int, width: int, number: int) -> bytes:
    """A smooth picture, unlike those of other numbers."""
    random = np.random.default_rng(number)
    y, x = np.mgrid[:height, :width]
    wave = 127 + 100 * np.sin(x / 9 + y / 7 + number)[..., None] * random.uniform(0.3, 1, 3)
    return encoded(wave.astype(np.uint8))


def row(picture: str, label: str, edges: str, flags: str = "0,0,0,0,0") -> str:
    """A row of a table of boxes: ``edges`` are XMin, XMax, YMin, YMax."""
    return f"{picture},xclick,{label},1,{edges},{flags}"


def label(class_index: int) -> str:
    """Return the label of a class in the raw tables."""
    return f"/m/{class_index:04x}"


def write_raw(
    folder: Path, rows: dict[str, list[str]], pictures: dict[str, dict[str, bytes]], classes: int | None = 3
) -> Path:
    """A raw folder; marked as synthetic data of so many classes, unless ``classes`` is None."""
    folder.mkdir()
    names = [*class_names(), "Tree"]
    described = "".join(f"{label(index)},{name}\n" for index, name in enumerate(names))
    (folder / "class-descriptions-boxable.csv").write_text(described)
    for split, table in TABLES.items():
        (folder / table).write_text("\n".join([COLUMNS, *rows[split]]) + "\n")
        (folder / split).mkdir()
        for name, data in pictures[split].items():
            (folder / split / f"{name}.jpg").write_bytes(data)
    if classes is not None:
        (folder / "SYNTHETIC").write_text(json.dumps({"classes": classes}))
    return folder
