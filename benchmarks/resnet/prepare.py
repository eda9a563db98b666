"""Commands that generate, prepare and verify ResNet-50's data: ImageNet (ILSVRC2012) as MXNet RecordIO.

The prepared files are ``train.rec``, ``train.idx``, ``val.rec``, ``val.idx`` and ``manifest.json``. JPEG bytes are not
changed, except for PNG pictures with a JPEG name and CMYK JPEGs: as in the benchmark's reference, these are encoded
again as RGB JPEG of quality 100. Training records are shuffled once, so that shards mix the classes.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path

import numpy as np

from benchmarks.resnet import raw
from benchmarks.resnet.raw import RawData, RawPicture
from benchmarks.resnet.synthetic import generate
from common.data import manifest, preparation
from common.data.commands import DataCommands, Trust
from common.data.manifest import Manifest
from common.data.preparation import preparing
from common.data.published import Published
from common.data.synthetic import MARKER
from common.errors import DataError
from common.formats.jpeg import checked_size, to_rgb_jpeg
from common.formats.recordio import ImageRecord, pack_image
from common.vision import record_files

FORMAT = "imagenet-recordio/1"
PREPARE_COMMAND = "mlperf-suite prepare benchmark=resnet --raw-dir RAW --data-dir DATA"
FILES = ("train.rec", "train.idx", "val.rec", "val.idx")
IMAGENET_COUNTS = {"train_samples": 1_281_167, "eval_samples": 50_000, "classes": 1000}
PUBLISHED = Published(IMAGENET_COUNTS)
SHUFFLE_SEED = 20120


def prepare(raw_dir: Path, data_dir: Path, workers: int = 4, trust: Trust = False) -> Manifest:
    """Write the prepared data set. Skip complete data and continue interrupted preparations.

    Args:
        raw_dir: tars or folders, see :mod:`benchmarks.resnet.raw`.

    Raises:
        DataError: raw data are missing, incomplete or damaged; the disk is too small; ``data_dir`` has data of another
            source, or another process is preparing it.
    """
    source = raw.open_raw(raw_dir)
    counts = {"train_samples": len(source.train), "eval_samples": len(source.val), "classes": len(source.synsets)}
    if source.synthetic is None and counts != IMAGENET_COUNTS:
        raise DataError(
            f"{raw_dir} holds {counts} where ImageNet has {IMAGENET_COUNTS}: pictures are missing; for other data "
            f"than ImageNet put a file {MARKER} into the folder that says what they are"
        )
    wanted = {"fingerprint": source.fingerprint(), **preparation.decoding(trust)}
    synthetic = {} if source.synthetic is None else {"description": source.synthetic}
    with preparing(data_dir, FORMAT, PREPARE_COMMAND, wanted, PUBLISHED, synthetic or None) as job:
        if job.found is not None:
            return job.found
        _write_splits(source, data_dir, wanted, workers, trust)
        made = job.finish(manifest.describe_files(data_dir, FILES), counts, "ILSVRC2012", synthetic)
        (data_dir / record_files.STATE).unlink()
        return made


def verify(data_dir: Path) -> Manifest:
    """Check every checksum of ``data_dir``; the first difference raises :class:`DataError`."""
    return manifest.verify(data_dir, FORMAT, PREPARE_COMMAND)


def _write_splits(source: RawData, data_dir: Path, wanted: dict[str, str], workers: int, trust: bool) -> None:
    """Write the records of both splits. The id of a record is the index of its picture."""
    record_files.begin(data_dir, FILES, wanted, (picture.size for picture in (*source.train, *source.val)))
    order = np.random.default_rng(SHUFFLE_SEED).permutation(len(source.train)).tolist()
    record_files.write(data_dir / "train.rec", order, partial(_payload, source.train, trust), workers)
    record_files.write(data_dir / "val.rec", range(len(source.val)), partial(_payload, source.val, trust), workers)


def _payload(pictures: list[RawPicture], trust: bool, record_id: int) -> bytes:
    picture = pictures[record_id]
    try:
        data = to_rgb_jpeg(picture.read())
        checked_size(data, trust)
    except ValueError as error:
        location = f"{picture.path}: {picture.synset}/{picture.name} at byte {picture.offset}"
        raise DataError(f"{location}: {error}; fetch the file again") from error
    return pack_image(ImageRecord(record_id, (float(picture.label),), data))


COMMANDS = DataCommands(
    "resnet",
    raw="tars or folders of pictures",
    prepared="prepared records",
    real="ImageNet",
    generate=generate,
    prepare=prepare,
    verify=verify,
    published=PUBLISHED,
)
