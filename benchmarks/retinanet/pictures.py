"""Functions that download pictures, place them in the prepared folder, and record their sizes and checksums."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

from tqdm import tqdm

from benchmarks.retinanet import raw
from common.data.ahead import ahead
from common.data.download import Client
from common.data.placing import place
from common.data.remote_file import RemoteFile
from common.data.sources import Sources
from common.errors import DataError
from common.formats.jpeg import checked_size, jpeg_size
from common.untrusted.regular_file import read_bytes

FETCHED_AT_ONCE = 32
"""Number of concurrent picture downloads. The client allows fewer connections per host."""
PICTURE_BYTES = 2**28
"""Size limit of a picture in bytes. Those of OpenImages have less than 30 MB."""


def place_pictures(raw_folder: Path, folder: Path, names: list[str], trust: bool) -> dict[str, Any]:
    """Place pictures of ``raw_folder`` in ``folder``, with the same bytes.

    Args:
        trust: skip the check that pictures can be decoded.

    Returns:
        Lists ``width`` and ``height`` (px), ``bytes``, and ``sha256`` (hexadecimal), with one entry per picture.

    Raises:
        DataError: a file is not a complete JPEG, or ``folder`` has a different file of the same name.
    """
    noted: dict[str, Any] = {"width": [], "height": [], "bytes": [], "sha256": []}
    for name in names:
        path = raw_folder / name
        data = read_bytes(path, PICTURE_BYTES)
        try:
            width, height = checked_size(data, trust)
        except ValueError as error:
            raise DataError(f"{path}: no whole JPEG: {error}; delete it and download it again") from error
        place(path, folder / name, "delete it and prepare again")
        entry = (width, height, len(data), hashlib.sha256(data).hexdigest())
        for column, value in zip(noted.values(), entry, strict=True):
            column.append(value)
    return noted


def bring_pictures(raw_dir: Path, sources: Sources, client: Client, check: bool) -> Iterator[str]:
    """Download the pictures that the tables name and ``raw_dir`` lacks.

    There are no published checksums. A download is kept only if it is a complete JPEG.

    Args:
        raw_dir: raw folder with the tables, see :mod:`benchmarks.retinanet.raw`.
        sources: addresses; the entry ``pictures`` is used.
        client: HTTP client for all transfers.
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
        there = {path.name for path in folder.iterdir()} if folder.is_dir() else set()
        missing = [name for name in map(raw.picture_name, pictures) if name not in there]
        if missing and check:
            raise DataError(f"{folder} lacks {len(missing)} of {len(pictures)} pictures, such as {missing[0]}")
        addresses = [f"{address}/{split}" for address in sources["pictures"].addresses]
        with ThreadPoolExecutor(FETCHED_AT_ONCE) as pool, client.stopped_by_failure():
            begun = (pool.submit(_bring_picture, folder / name, addresses, client) for name in missing)
            ordered = ahead(begun, 4 * FETCHED_AT_ONCE, Future.cancel)
            for done in tqdm(ordered, split, len(missing), unit="picture", disable=None):
                done.result()
        yield f"{folder}: {len(pictures)} pictures, {len(missing)} of them fetched now; no checksum published"


def _bring_picture(path: Path, addresses: list[str], client: Client) -> None:
    urls = tuple(f"{address}/{path.name}" for address in addresses)
    client.fetch(RemoteFile(path.name, urls, "CC BY 2.0, no account"), path)
    try:
        jpeg_size(read_bytes(path, PICTURE_BYTES))
    except ValueError as error:
        path.unlink()
        raise DataError(f"{urls[-1]} is no whole JPEG: {error}; run the command again") from error
