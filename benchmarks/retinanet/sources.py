"""Where OpenImages comes from: tables in Google's store, pictures in a public bucket; and torchvision's backbone."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

from tqdm import tqdm

from benchmarks.retinanet import raw
from benchmarks.retinanet.raw import picture_name
from common.data.ahead import ahead
from common.data.download import RemoteFile, check_or_download, fetch
from common.data.manifest import digest
from common.errors import DataError
from common.formats.jpeg import jpeg_size

TABLES = "https://storage.googleapis.com/openimages"
BUCKET = "https://open-images-dataset.s3.amazonaws.com"
WEIGHTS = "https://download.pytorch.org/models"
LICENCE = "annotations CC BY 4.0, pictures CC BY 2.0; no account"
FOLDERS = {raw.SPLITS["train"]: "v6", raw.SPLITS["validation"]: "v5", raw.CLASSES: "v5"}
"""Tables to the folder that they lie in."""
CONNECTIONS = 32
"""Pictures at a time: each takes longer to be found than to be sent."""


def download(raw_dir: Path, workers: int = CONNECTIONS) -> Iterator[str]:
    """Fetch what is missing of tables, backbone and the selected pictures; about 360 GB in all.

    Nobody published checksums of the pictures: each is a JPEG that is complete, or is fetched again.

    Args:
        raw_dir: see :mod:`benchmarks.retinanet.raw`.
        workers: pictures at a time.

    Yields:
        A line for each table, the backbone, and each split's pictures.

    Raises:
        DataError: a transfer failed (what arrived is kept), or a file is not what it should be.
    """
    tables = [RemoteFile(name, f"{TABLES}/{folder}/{name}", LICENCE) for name, folder in FOLDERS.items()]
    for path in check_or_download(tables, raw_dir):
        yield f"{path}: {path.stat().st_size} bytes"
    yield _bring_backbone(raw_dir)
    source = raw.open_raw(raw_dir)
    for split in raw.SPLITS:
        pictures = source.boxes(split).picture
        fetched = _bring_pictures(raw_dir / split, split, pictures, workers)
        yield f"{raw_dir / split}: {len(pictures)} pictures, {fetched} of them fetched"


def _bring_backbone(raw_dir: Path) -> str:
    """Fetch torchvision's weights, whose name has the beginning of their SHA-256."""
    name = raw.BACKBONES[0]
    [path] = check_or_download([RemoteFile(name, f"{WEIGHTS}/{name}", "BSD-3-Clause")], raw_dir)
    beginning = path.stem.rpartition("-")[2]
    if not (found := digest(path, "sha256")).startswith(beginning):
        path.unlink()
        raise DataError(f"{path}: SHA-256 {found} where {beginning}... is due; it is deleted, run the command again")
    return f"{path}: as expected"


def _bring_pictures(folder: Path, split: str, pictures: list[str], workers: int) -> int:
    """Fetch the pictures that are missing in ``folder``; returns how many."""
    folder.mkdir(parents=True, exist_ok=True)
    there = {path.name for path in folder.iterdir()}
    missing = [name for name in map(picture_name, pictures) if name not in there]
    with ThreadPoolExecutor(workers) as pool:
        begun = (pool.submit(_bring_picture, folder / name, f"{BUCKET}/{split}/{name}") for name in missing)
        for done in tqdm(ahead(begun, 4 * workers, Future.cancel), split, len(missing), unit="picture", disable=None):
            done.result()
    return len(missing)


def _bring_picture(path: Path, url: str) -> None:
    fetch(RemoteFile(path.name, url, LICENCE), path)
    try:
        jpeg_size(path.read_bytes())
    except ValueError as error:
        path.unlink()
        raise DataError(f"{url} is no whole JPEG: {error}; run the command again") from error
