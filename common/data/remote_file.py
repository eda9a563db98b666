"""A published file: its addresses, size and checksum, and checks of the content of a local file against them."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path

from common.untrusted.regular_file import open_regular


@dataclass(frozen=True)
class RemoteFile:
    """One file of a data set.

    Attributes:
        name: path below the raw folder, with ``/`` as separator.
        urls: download addresses, in the order in which they are tried; empty if the user must fetch the file.
        licence: licence, and the account that the download needs.
        bytes: published size, None if unknown.
        other_names: paths of the same file in other layouts.
        checksum: ``md5:...``, ``sha1:...`` or ``sha256:...`` in hexadecimal digits, of which the first eight or more
            are enough; None if it is not published.
    """

    name: str
    urls: tuple[str, ...]
    licence: str
    bytes: int | None = None
    checksum: str | None = None
    other_names: tuple[str, ...] = ()


SIGNATURES = {
    ".gz": (0, b"\x1f\x8b"),
    ".tgz": (0, b"\x1f\x8b"),
    ".zip": (0, b"PK"),
    ".npz": (0, b"PK"),
    ".tar": (257, b"ustar"),
    ".jpg": (0, b"\xff\xd8\xff"),
    ".parquet": (0, b"PAR1"),
    ".pkl": (0, b"\x80"),
}
"""File suffix to the offset and the bytes of the signature of this file type."""
_PAGES = (b"<!doctype", b"<html", b"<?xml", b"<head", b"<error", b"version https://git-lfs")
_PAGE_TYPES = ("text/html", "application/xhtml+xml")
BEGINNING = 600
"""Number of bytes at the start of a file that are checked."""


def foreign_content(name: str, beginning: bytes, content_type: str | None = None) -> str | None:
    """Return why the content does not fit the file name, e.g. a login page from a proxy; None if nothing is wrong.

    Args:
        name: file name.
        beginning: first bytes of the file, at least :data:`BEGINNING`; a shorter file is padded with zeros.
        content_type: ``Content-Type`` of the HTTP response, if any.
    """
    begins = beginning[:60].rstrip(b"\0").decode("ascii", "replace")
    text = beginning.lstrip()[:60].lower()
    if text.startswith(_PAGES) and not name.endswith((".xml", ".html")):
        return f"is a page or a pointer that begins with {begins!r} and not {name}"
    if (content_type or "").split(";")[0].strip().lower() in _PAGE_TYPES and not name.endswith(".html"):
        return f"is a page (Content-Type: {content_type}) that begins with {begins!r} and not {name}"
    if text.startswith(b'{"') and not name.endswith((".json", ".jsonl")):
        return f"is JSON that begins with {begins!r} and not {name}"
    offset, expected = SIGNATURES.get(Path(name).suffix, (0, b""))
    found = beginning[offset : offset + len(expected)]
    if found != expected[: len(found)]:
        return f"begins with {begins!r}, as no {Path(name).suffix} file does"
    return None


def fault_of(path: Path, file: RemoteFile) -> str | None:
    """Return how ``path`` differs from the published properties of ``file``, None if it does not.

    Reads the whole file if there is a checksum.
    """
    size = path.stat().st_size
    if file.bytes is not None and size != file.bytes:
        return f"has {size:,} bytes instead of {file.bytes:,}"
    with open_regular(path) as opened:
        if (fault := foreign_content(file.name, opened.read(BEGINNING).ljust(BEGINNING, b"\0"))) is not None:
            return fault
        if file.checksum is not None:
            algorithm, _, expected = file.checksum.partition(":")
            opened.seek(0)
            found = hashlib.file_digest(opened, algorithm).hexdigest()  # type: ignore[arg-type]
            if not found.startswith(expected):
                return f"has {algorithm} {found} instead of {expected}"
    return None
