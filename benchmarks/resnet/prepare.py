"""Commands that generate, prepare and verify ResNet-50's data: ImageNet (ILSVRC2012) as MXNet RecordIO.

The prepared files are ``train.rec``, ``train.idx``, ``val.rec``, ``val.idx`` and ``manifest.json``. JPEG bytes are not
changed, except for PNG pictures with a JPEG name and CMYK JPEGs: as in the benchmark's reference, these are encoded
again as RGB JPEG of quality 100. Training records are shuffled once, so that shards mix the classes.
"""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
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
from common.data.threads import ahead
from common.errors import DataError
from common.formats.jpeg import checked_size, to_rgb_jpeg
from common.formats.recordio import ImageRecord, RecordWriter, pack_image

FORMAT = "imagenet-recordio/1"
PREPARE_COMMAND = "mlperf-suite prepare benchmark=resnet --raw-dir RAW --data-dir DATA"
FILES = ("train.rec", "train.idx", "val.rec", "val.idx")
STATE = "prepare.partial"
IMAGENET_COUNTS = {"train_samples": 1_281_167, "eval_samples": 50_000, "classes": 1000}
PUBLISHED = Published(IMAGENET_COUNTS)
SHUFFLE_SEED = 20120
_WINDOW = 64  # pictures per worker thread that are read ahead of the writer


def prepare(raw_dir: Path, data_dir: Path, workers: int = 4, trust: Trust = False) -> Manifest:
    """Write the prepared data set. Skip complete data and continue interrupted preparations.

    Args:
        raw_dir: tars or folders, see :mod:`benchmarks.resnet.raw`.
        workers: threads that read and decode pictures.

    Raises:
        DataError: raw data are missing, incomplete or damaged; the disk is too small; ``data_dir`` has data of another
            source, or another process is preparing it.
    """
    source = raw.open_raw(raw_dir)
    counts = {"train_samples": len(source.train), "eval_samples": len(source.val), "classes": len(source.synsets)}
    if source.stand_in is None and counts != IMAGENET_COUNTS:
        raise DataError(
            f"{raw_dir} holds {counts} where ImageNet has {IMAGENET_COUNTS}: pictures are missing; for other data "
            f"than ImageNet put a file {MARKER} into the folder that says what they are"
        )
    wanted = {"fingerprint": source.fingerprint(), **preparation.decoding(trust)}
    synthetic = {} if source.stand_in is None else {"description": source.stand_in}
    with preparing(data_dir, FORMAT, PREPARE_COMMAND, wanted, PUBLISHED, synthetic or None) as job:
        if job.found is not None:
            return job.found
        _write_splits(source, data_dir, wanted, workers, trust)
        made = job.finish(manifest.describe_files(data_dir, FILES), counts, "ILSVRC2012", synthetic)
        (data_dir / STATE).unlink()
        return made


def verify(data_dir: Path) -> Manifest:
    """Check every checksum of ``data_dir``; the first difference raises :class:`DataError`."""
    return manifest.verify(data_dir, FORMAT, PREPARE_COMMAND)


def _write_splits(source: RawData, data_dir: Path, wanted: dict[str, str], workers: int, trust: bool) -> None:
    state = data_dir / STATE
    if not state.exists():
        for name in FILES:  # remove files of an unknown source
            (data_dir / name).unlink(missing_ok=True)
            (data_dir / f"{name}.partial").unlink(missing_ok=True)
    preparation.begin_or_continue(data_dir, state, wanted)
    present = sum(file.stat().st_size for file in data_dir.iterdir())
    records = sum(picture.size + 64 for split in (source.train, source.val) for picture in split)
    preparation.require_space(data_dir, records - present)
    order = np.random.default_rng(SHUFFLE_SEED).permutation(len(source.train)).tolist()
    _write_records(source.train, order, data_dir / "train.rec", workers, trust)
    _write_records(source.val, list(range(len(source.val))), data_dir / "val.rec", workers, trust)


def _write_records(pictures: list[RawPicture], order: list[int], rec: Path, workers: int, trust: bool) -> None:
    """Write ``pictures`` in ``order``. The id of a record is the index of its picture in ``pictures``."""
    if rec.exists() and rec.with_suffix(".idx").exists():
        return
    with RecordWriter(rec, resume=True) as writer:
        for record_id, payload in _payloads(pictures, order[writer.written :], workers, trust):
            writer.write(record_id, payload)


def _payloads(pictures: list[RawPicture], order: list[int], workers: int, trust: bool) -> Iterator[tuple[int, bytes]]:
    workers = max(1, workers)
    make = partial(_payload, trust=True) if trust else _payload
    with ThreadPoolExecutor(workers) as pool:
        begun = ((record_id, pool.submit(make, record_id, pictures[record_id])) for record_id in order)
        for record_id, payload in ahead(begun, _WINDOW * workers, lambda piece: piece[1].cancel()):
            yield record_id, payload.result()


def _payload(record_id: int, picture: RawPicture, trust: bool = False) -> bytes:
    try:
        data = to_rgb_jpeg(picture.read())
        checked_size(data, trust)
    except ValueError as error:
        place = f"{picture.path}: {picture.synset}/{picture.name} at byte {picture.offset}"
        raise DataError(f"{place}: {error}; fetch the file again") from error
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
