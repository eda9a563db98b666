"""Fetch or check the files of a data set: resumable, verified, renamed only when complete."""

from __future__ import annotations

import hashlib
import shutil
import urllib.error
import urllib.request
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from common.errors import DataError

_CHUNK = 1 << 20
_TIMEOUT_S = 60


@dataclass(frozen=True)
class RemoteFile:
    """One file of a data set.

    Attributes:
        name: its name below the raw folder.
        url: where it is; None when its licence demands an account, so that the user places it.
        licence: licence, and what it takes to get the file.
        bytes: its size, None if unknown.
        checksum: ``md5:...`` or ``sha256:...`` (hexadecimal), None if unknown.
    """

    name: str
    url: str | None
    licence: str
    bytes: int | None = None
    checksum: str | None = None


def check_or_download(files: Iterable[RemoteFile], folder: Path) -> list[Path]:
    """Bring every file to ``folder``: check those that are there, fetch those that have a URL.

    Raises:
        DataError: a file without a URL is missing (all such files are named), a transfer failed, or a file's size or
            checksum differs.
    """
    files = list(files)
    missing = [file for file in files if file.url is None and not (folder / file.name).is_file()]
    if missing:
        lines = [f"  {file.name}{_facts(file)}: {file.licence}" for file in missing]
        raise DataError(f"{folder} lacks files that have to be fetched by hand:\n" + "\n".join(lines))
    paths = []
    for file in files:
        path = folder / file.name
        if path.is_file():
            check(path, file)
        else:
            fetch(file, path)
        paths.append(path)
    return paths


def check(path: Path, file: RemoteFile) -> None:
    """Compare ``path`` with what is known of ``file``; reads all of it when there is a checksum.

    Raises:
        DataError: size or checksum differ.
    """
    size = path.stat().st_size
    if file.bytes is not None and size != file.bytes:
        raise DataError(f"{path} has {size} bytes instead of {file.bytes}: fetch it again ({file.licence})")
    if file.checksum is not None:
        algorithm, _, expected = file.checksum.partition(":")
        with open(path, "rb") as opened:
            actual = hashlib.file_digest(opened, algorithm).hexdigest()
        if actual != expected:
            raise DataError(f"{path}: {algorithm} {actual} instead of {expected}: fetch it again ({file.licence})")


def fetch(file: RemoteFile, path: Path) -> None:
    """Download ``file`` to ``path`` through ``path.partial``, continuing a partial one where the server allows.

    Raises:
        DataError: the transfer failed or ended early (what arrived is kept), or size or checksum differ.
    """
    if file.url is None:
        raise DataError(f"{file.name} has no URL: {file.licence}")
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(path.name + ".partial")
    have = partial.stat().st_size if partial.exists() else 0
    if not (file.bytes is not None and have == file.bytes):
        _transfer(file.url, partial, have)
    if file.bytes is not None and (got := partial.stat().st_size) < file.bytes:
        raise DataError(f"{file.url} ended after {got} of {file.bytes} bytes; run the command again to continue")
    try:
        check(partial, file)
    except DataError:
        partial.unlink()  # complete but wrong: nothing to continue
        raise
    partial.replace(path)


def _transfer(url: str, partial: Path, have: int) -> None:
    request = urllib.request.Request(url, headers={"Range": f"bytes={have}-"} if have else {})
    try:
        with urllib.request.urlopen(request, timeout=_TIMEOUT_S) as answer:
            resumed = have > 0 and answer.status == 206
            with open(partial, "ab" if resumed else "wb") as out:
                shutil.copyfileobj(answer, out, _CHUNK)
                got = out.tell()
            promised = answer.headers.get("Content-Length")  # what http.client does not compare
            if promised is not None and got != (whole := int(promised) + (have if resumed else 0)):
                raise DataError(f"{url} ended after {got} of {whole} bytes; run the command again to continue")
    except urllib.error.HTTPError as error:
        if error.code == 416 and have:  # the range is empty: all bytes are there
            return
        raise DataError(f"{url}: HTTP {error.code} {error.reason}") from error
    except (urllib.error.URLError, TimeoutError, ConnectionError) as error:
        raise DataError(f"{url}: {error}; run the command again to continue") from error


def _facts(file: RemoteFile) -> str:
    facts = [f"{file.bytes} bytes"] if file.bytes is not None else []
    facts += [file.checksum] if file.checksum is not None else []
    return f" ({', '.join(facts)})" if facts else ""
