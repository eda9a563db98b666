"""Commands for RetinaNet's data: OpenImages' pictures that have a box of one of 264 classes.

:mod:`benchmarks.retinanet.raw` is the input format, :mod:`benchmarks.retinanet.prepared` the output format. The
backbone's initial weights go to a separate assets folder, because they may be read before ``run_start``.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import IO, Any

import numpy as np
from numpy.typing import NDArray
from tqdm import tqdm

from benchmarks.retinanet import raw
from benchmarks.retinanet.prepared import (
    BOXES,
    BYTES,
    FORMAT,
    LABELS,
    PREPARE_COMMAND,
    SHA256,
    SPLITS,
    Prepared,
    Split,
)
from benchmarks.retinanet.raw import FLAGS, RawBoxes, RawData, picture_name
from benchmarks.retinanet.synthetic import generate
from common.data import atomic, manifest, preparation
from common.data.commands import AssetsDir, DataCommands, Trust
from common.data.download import Client
from common.data.manifest import Manifest
from common.data.preparation import assets_of, link_or_copy, preparing, require_space_to_link
from common.data.published import Published
from common.data.sources import RemoteFile, Sources
from common.data.stages import Stages
from common.data.threads import ahead
from common.detection.annotations import Annotations
from common.detection.columns import read_column
from common.errors import DataError
from common.formats.jpeg import checked_size, jpeg_size
from common.formats.raw_files import listed
from common.untrusted.regular_file import read_bytes

RECORDS = "records"
TASK = 2000  # pictures per task
PUBLISHED = Published({"train_samples": 1_170_301, "eval_samples": 24_781, "classes": 264})
_ROWS = 50_000  # rows of the JSON that are converted at a time
FETCHED_AT_ONCE = 32
"""Number of concurrent picture downloads. The client allows fewer connections per host."""
PICTURE_BYTES = 2**28
"""Size limit of a picture in bytes. Those of OpenImages have less than 30 MB."""


def prepare(
    raw_dir: Path, data_dir: Path, assets_dir: AssetsDir = None, workers: int = 1, trust: Trust = False
) -> Manifest:
    """Write the prepared data set and place the backbone. Skip complete data and continue interrupted preparations.

    Args:
        assets_dir: receives the backbone.

    Raises:
        DataError: raw data are missing, incomplete or damaged; the disk is too small; ``data_dir`` or ``assets_dir``
            has data of another source, or another process is preparing them.
    """
    source = raw.open_raw(raw_dir)
    wanted = {"fingerprint": source.fingerprint(), **preparation.decoding(trust)}
    with preparing(data_dir, FORMAT, PREPARE_COMMAND, wanted, PUBLISHED, source.synthetic) as job:
        _place_backbone(source, assets_dir or assets_of(data_dir))
        if job.found is not None:
            return job.found
        job.begin(RECORDS)
        files: list[Path] = []
        counts = {"classes": len(source.classes)}
        with Stages(data_dir / RECORDS, workers) as stages:
            for split in SPLITS:
                boxes = source.boxes(SPLITS[split])
                counts |= {f"{split}_samples": len(boxes.picture), f"{split}_boxes": len(boxes.box_class)}
                files += _prepare_split(source, boxes, data_dir, SPLITS[split], stages, trust)
        names = sorted(path.relative_to(data_dir).as_posix() for path in files)
        return job.finish(manifest.describe_files(data_dir, names), counts, "OpenImages v6")


def verify(data_dir: Path, workers: int = 1) -> Manifest:
    """Compare every file of ``data_dir`` with its checksum. Reads all data, in ``workers`` threads.

    Raises:
        DataError: a file is missing, unexpected or different; the message names the first one.
    """
    found = manifest.verify(data_dir, FORMAT, PREPARE_COMMAND)
    prepared = Prepared(data_dir, found)
    for split in SPLITS:
        part = prepared.split(split)
        sha256 = read_column(data_dir / SPLITS[split] / BOXES / SHA256, np.dtype(np.uint8), (len(part), 32))
        unexpected = {path.name for path in listed(part.path)} - {name.decode() for name in part.names}
        if unexpected:
            raise DataError(f"{part.path / min(unexpected)} was not prepared; delete it")
        tasks = [range(first, min(first + TASK, len(part))) for first in range(0, len(part), TASK)]
        with ThreadPoolExecutor(workers) as pool:
            compared = pool.map(partial(_compare, part, sha256), tasks)
            try:
                for _ in tqdm(compared, f"verify {split}", len(tasks), unit="task", disable=None):
                    pass
            finally:
                pool.shutdown(wait=True, cancel_futures=True)
    return found


def _place_backbone(source: RawData, assets_dir: Path) -> None:
    if path := source.backbone:
        link_or_copy(path, assets_dir / path.name, f"delete {assets_dir} or name another --assets-dir")


def _compare(part: Split, sha256: NDArray[np.uint8], numbers: range) -> None:
    for number in numbers:
        if hashlib.sha256(part.record(number).data).digest() != sha256[number].tobytes():
            raise DataError(
                f"{part.describe(number)} is another picture than was prepared, or damaged; delete it and "
                f"{manifest.NAME}, then run '{PREPARE_COMMAND}'"
            )


def _prepare_split(
    source: RawData, boxes: RawBoxes, data_dir: Path, split: str, stages: Stages, trust: bool
) -> list[Path]:
    """Write pictures, columns and JSON of a split; return the files that the manifest names."""
    source.require_pictures(split, boxes.picture)
    names = [picture_name(picture) for picture in boxes.picture]
    tasks = {f"{first:07d}": names[first : first + TASK] for first in range(0, len(names), TASK)}
    folder = data_dir / split
    for task, wanted in tasks.items():
        _delete_stale_record(stages, split, task, wanted, folder / "data")
    arguments = {task: (source.folder / split, folder / "data", wanted, trust) for task, wanted in tasks.items()}
    left = (name for task, wanted in tasks.items() if stages.record(split, task) is None for name in wanted)
    new = (source.folder / split / name for name in left if not (folder / "data" / name).exists())
    require_space_to_link(new, data_dir)
    records = list(stages.run(split, arguments, place_pictures).values())
    columns = {key: [value for record in records for value in record[key]] for key in ("width", "height", "bytes")}
    annotations = _annotations(boxes, columns["width"], columns["height"], names, len(source.classes))
    files = annotations.write(folder / BOXES)
    sha256 = [bytes.fromhex(value) for record in records for value in record["sha256"]]
    atomic.save(folder / BOXES / BYTES, np.array(columns["bytes"], np.int64))
    atomic.save(folder / BOXES / SHA256, np.frombuffer(b"".join(sha256), np.uint8).reshape(-1, 32))
    files += [folder / BOXES / BYTES, folder / BOXES / SHA256]
    with atomic.written(folder / LABELS) as temporary, open(temporary, "w", encoding="utf-8") as file:
        write_coco(file, annotations, boxes.flags, source.classes)
    return [*files, folder / LABELS]


def _delete_stale_record(stages: Stages, split: str, task: str, names: list[str], folder: Path) -> None:
    """Delete the record of a task if files of its pictures are missing or differ in size; the task then runs again."""
    record = stages.record(split, task)
    if record is None:
        return
    existing = [(folder / name).stat().st_size if (folder / name).is_file() else -1 for name in names]
    if existing != record.get("bytes") or any(len(column) != len(names) for column in record.values()):
        stages.path(split, task).unlink()


def _annotations(boxes: RawBoxes, widths: list[int], heights: list[int], names: list[str], classes: int) -> Annotations:
    """Return the boxes in pixels. Picture ids start at 1, class ids at 0."""
    width_P, height_P = np.array(widths, np.int64), np.array(heights, np.int64)
    left, right, top, bottom = boxes.edges.T
    width_N, height_N = width_P[boxes.box_picture], height_P[boxes.box_picture]
    xywh = np.stack([left * width_N, top * height_N, (right - left) * width_N, (bottom - top) * height_N], axis=1)
    return Annotations(
        picture_id=np.arange(1, len(names) + 1),
        picture_height=height_P,
        picture_width=width_P,
        class_id=np.arange(classes),
        box_picture=boxes.box_picture + 1,
        box_class=boxes.box_class,
        box_xywh=xywh,
        box_area=xywh[:, 2] * xywh[:, 3],
        box_crowd=boxes.flags[:, FLAGS.index("IsGroupOf")],
        picture_name=np.array([name.encode() for name in names], np.bytes_),
    )


def write_coco(file: IO[str], annotations: Annotations, flags: NDArray[np.bool_], classes: tuple[str, ...]) -> None:
    """Write JSON like the reference's script: COCO's format, with OpenImages' flags of each box."""
    categories = [{"id": number, "name": name, "supercategory": None} for number, name in enumerate(classes)]
    head = {"info": {"description": "openimages-mlperf"}, "licenses": [], "categories": categories}
    file.write(json.dumps(head)[:-1])
    for name, entries in (("images", _images(annotations)), ("annotations", _boxes(annotations, flags))):
        file.write(f', "{name}": [')
        for number, entry in enumerate(entries):
            file.write(f"{',' if number else ''}\n{json.dumps(entry)}")
        file.write("]")
    file.write("}\n")


def _images(annotations: Annotations) -> Iterator[dict[str, Any]]:
    assert annotations.picture_name is not None
    columns = (annotations.picture_id, annotations.picture_name, annotations.picture_height, annotations.picture_width)
    for number, name, height, width in _rows(*columns):
        yield {
            "id": number,
            "file_name": name.decode(),
            "height": height,
            "width": width,
            "license": None,
            "coco_url": None,
        }


def _boxes(annotations: Annotations, flags: NDArray[np.bool_]) -> Iterator[dict[str, Any]]:
    columns = (annotations.box_picture, annotations.box_class, annotations.box_xywh, annotations.box_area, flags)
    for number, (picture, class_id, xywh, area, row_flags) in enumerate(_rows(*columns), 1):
        flag = dict(zip(FLAGS, row_flags, strict=True))
        yield {
            "id": number,
            "image_id": picture,
            "category_id": class_id,
            "bbox": xywh,
            "area": area,
            "iscrowd": int(flag["IsGroupOf"]),
            **flag,
        }


def _rows(*columns: NDArray[Any]) -> Iterator[tuple[Any, ...]]:
    """Yield the rows of ``columns`` as Python values, and convert only ``_ROWS`` rows at a time."""
    for first in range(0, len(columns[0]), _ROWS):
        yield from zip(*(column[first : first + _ROWS].tolist() for column in columns), strict=True)


def place_pictures(raw_folder: Path, folder: Path, names: list[str], trust: bool) -> dict[str, Any]:
    """Place pictures of ``raw_folder`` in ``folder``, with the same bytes.

    Args:
        trust: skip the check that pictures can be decoded.

    Returns:
        Lists ``width`` and ``height`` (px), ``bytes``, and ``sha256`` (hexadecimal), with one entry per picture.

    Raises:
        DataError: a file is not a complete JPEG, or ``folder`` has a different file of the same name.
    """
    records: dict[str, Any] = {"width": [], "height": [], "bytes": [], "sha256": []}
    for name in names:
        path = raw_folder / name
        data = read_bytes(path, PICTURE_BYTES)
        try:
            width, height = checked_size(data, trust)
        except ValueError as error:
            raise DataError(f"{path}: no whole JPEG: {error}; delete it and download it again") from error
        link_or_copy(path, folder / name, "delete it and prepare again")
        entry = (width, height, len(data), hashlib.sha256(data).hexdigest())
        for column, value in zip(records.values(), entry, strict=True):
            column.append(value)
    return records


def download_pictures(raw_dir: Path, sources: Sources, client: Client, check: bool) -> Iterator[str]:
    """Download the pictures that the tables name and ``raw_dir`` lacks.

    There are no published checksums. A download is kept only if it is a complete JPEG.

    Args:
        raw_dir: raw folder with the tables, see :mod:`benchmarks.retinanet.raw`.
        sources: addresses; the entry ``pictures`` is used.
        check: only look for missing files; download nothing.

    Yields:
        One line of text per split.

    Raises:
        DataError: a transfer failed (earlier files are kept), ``check`` found missing pictures, or a file is not a
            JPEG.
    """
    source = raw.open_raw(raw_dir)
    for split in raw.SPLITS:
        pictures = source.boxes(split).picture
        folder = raw_dir / split
        existing = {path.name for path in folder.iterdir()} if folder.is_dir() else set()
        missing = [name for name in map(raw.picture_name, pictures) if name not in existing]
        if missing and check:
            raise DataError(f"{folder} lacks {len(missing)} of {len(pictures)} pictures, such as {missing[0]}")
        addresses = [f"{address}/{split}" for address in sources["pictures"].addresses]
        with ThreadPoolExecutor(FETCHED_AT_ONCE) as pool, client.stopped_by_failure():
            begun = (pool.submit(_download_picture, folder / name, addresses, client) for name in missing)
            ordered = ahead(begun, 4 * FETCHED_AT_ONCE, Future.cancel)
            for done in tqdm(ordered, split, len(missing), unit="picture", disable=None):
                done.result()
        yield f"{folder}: {len(pictures)} pictures, {len(missing)} of them fetched now; no checksum published"


def _download_picture(path: Path, addresses: list[str], client: Client) -> None:
    urls = tuple(f"{address}/{path.name}" for address in addresses)
    client.fetch(RemoteFile(path.name, urls, "CC BY 2.0, no account"), path)
    try:
        jpeg_size(read_bytes(path, PICTURE_BYTES))
    except ValueError as error:
        path.unlink()
        raise DataError(f"{urls[-1]} is no whole JPEG: {error}; run the command again") from error


COMMANDS = DataCommands(
    "retinanet",
    raw="tables and pictures of OpenImages",
    prepared="prepared pictures and boxes",
    real="OpenImages",
    extra=download_pictures,
    generate=generate,
    prepare=prepare,
    verify=verify,
    assets=(raw.BACKBONES,),
    published=PUBLISHED,
)
