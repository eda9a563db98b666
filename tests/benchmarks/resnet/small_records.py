"""Small prepared data sets of pictures that a test makes up."""

import io
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np
from PIL import Image

from benchmarks.resnet.data_settings import DataSettings
from common.data import manifest
from common.data.manifest import Manifest
from common.data.recordio import ImageRecord, RecordWriter, pack_image


def settings(**changes: object) -> DataSettings:
    """Settings for pictures of 16 px, two threads."""
    small = {"reader": "torchvision", "image_size": 16, "eval_resize": 18, "classes": 61, "threads": 2, "prefetch": 2}
    return DataSettings(**{**small, **changes})


def write_data(root: Path, pictures: Sequence[bytes], labels: Iterable[int], classes: int = 61) -> Path:
    """Records of ``pictures`` for both splits, with a manifest."""
    root.mkdir()
    for split in ("train", "val"):
        with RecordWriter(root / f"{split}.rec") as writer:
            for number, (picture, label) in enumerate(zip(pictures, labels, strict=True)):
                writer.write(number, pack_image(ImageRecord(number, (float(label),), picture)))
    files = manifest.describe_files(root, ["train.rec", "train.idx", "val.rec", "val.idx"])
    counts = {"train_samples": len(pictures), "eval_samples": len(pictures), "classes": classes}
    manifest.write(root, Manifest("imagenet-recordio/1", files, counts, True, {}))
    return root


def encoded(pixels: np.ndarray, quality: int = 95) -> bytes:
    """``pixels`` (H, W, 3) or (H, W) as JPEG."""
    buffer = io.BytesIO()
    Image.fromarray(pixels).save(buffer, "JPEG", quality=quality)
    return buffer.getvalue()
