"""Sets of remote files, and a server that has them."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from common.data.sources import RemoteFile, Sources, SourceSet
from tests.http_server import Answer, Request, Script, reply, stored

FIRST, SECOND = b"first file" * 90, b"second file" * 90
FILES = {"/d/a/1.bin": FIRST, "/d/a/2.bin": SECOND}


def md5(content: bytes) -> str:
    return hashlib.md5(content).hexdigest()


def sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def serving(contents: Mapping[str, bytes]) -> Script:
    """Make the script of a server that has these files."""

    def script(request: Request) -> Answer:
        content = contents.get(request.target)
        return reply("404 Not Found") if content is None else stored(content)(request)

    return script


def source_set(*files: RemoteFile, **changes: Any) -> SourceSet:
    known = SourceSet(
        name="set",
        what="numbers",
        licence="ask nicely",
        seen="2026-11",
        bytes=None,
        files=files,
        addresses=files[0].urls if files else ("http://nowhere.invalid",),
        account=None,
        folder="",
        beside=None,
        instead={},
        unpack={},
        contents=(),
        list_name=None,
        md5s=None,
        tree=None,
        named=0,
        choice=None,
        optional=False,
    )
    return replace(known, **changes)


def pair(url: str, **changes: Any) -> SourceSet:
    """Make a set of two files, of which the second has a published MD5."""
    return source_set(
        RemoteFile("a/1.bin", (f"{url}/d/a/1.bin",), "ask nicely", len(FIRST)),
        RemoteFile("a/2.bin", (f"{url}/d/a/2.bin",), "ask nicely", len(SECOND), f"md5:{md5(SECOND)}"),
        **changes,
    )


def sources_of(*sets: SourceSet, **stores: tuple[str, ...]) -> Sources:
    return Sources("toy", {item.name: item for item in sets}, 0, stores)


def put(folder: Path, contents: Mapping[str, bytes]) -> None:
    for name, content in contents.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)


def content_of(folder: Path) -> dict[str, bytes]:
    """Return the files below a folder, without those that ``download`` keeps for itself."""
    paths = [path for path in folder.rglob("*") if path.is_file() and not path.name.startswith(".download")]
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in paths}
