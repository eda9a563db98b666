"""Small prepared data sets of given pictures."""

from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np
import torch
from PIL import Image

from benchmarks.resnet.config import CachedReaderConfig, Facts
from benchmarks.resnet.data import ImageNet
from common.config.loading import build
from common.data import manifest
from common.data.manifest import Manifest
from common.formats.jpeg import encode
from common.formats.recordio import ImageRecord, RecordWriter, pack_image
from common.mlperf.fixed import benchmark_settings

READER = {
    "reader": "torchvision", "threads": 2, "prefetch": 2, "hw_decoder_load": 0.99, "cache_mb": 0, "eval_cache_mb": 0,
    "input_batch_multiplier": 1, "dont_use_mmap": False, "eval_batch": 4,
}  # fmt: skip


def settings(dtype: torch.dtype = torch.float16, **changes: object) -> ImageNet:
    """Settings for pictures of 16 px and two threads; ``changes`` are of the benchmark's facts or of the reader."""
    facts = {**benchmark_settings("resnet")["facts"], "image_size": 16, "eval_resize": 18, "classes": 61}
    facts |= {name: value for name, value in changes.items() if name in facts}
    reader = READER | {name: value for name, value in changes.items() if name not in facts}
    return ImageNet(build(Facts, facts, "benchmark.facts"), build(CachedReaderConfig, reader, "reader"), dtype)


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
    return encode(Image.fromarray(pixels), quality)
