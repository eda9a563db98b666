"""Archives in a set: their space, the folders that are unpacked, and what must not be."""

from __future__ import annotations

import io
import tarfile
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import pytest

from common.data.sources import RemoteFile, SourceSet
from common.errors import DataError
from tests.common.data.remote_sets import FIRST, content_of, md5, put, serving, source_set
from tests.http_server import Server


@pytest.mark.parametrize(("name", "mode", "times"), [("d.tar", "w", 2), ("d.tar.gz", "w:gz", 3)])
def test_an_archive_needs_space_for_itself_and_its_files(name, mode, times, run, raw, monkeypatch):
    stream = io.BytesIO()
    with tarfile.open(fileobj=stream, mode=mode) as tar:
        member = tarfile.TarInfo("d/1.bin")
        member.size = len(FIRST)
        tar.addfile(member, io.BytesIO(FIRST))
    archive = stream.getvalue()
    with Server(serving({f"/{name}": archive})) as server:
        files = RemoteFile(name, (f"{server.url}/{name}",), "ask nicely", len(archive))
        source = source_set(files, unpack={name: {"d": "d"}})
        monkeypatch.setattr("shutil.disk_usage", lambda path: SimpleNamespace(free=times * len(archive) - 1))
        with pytest.raises(DataError, match=r"needs .* GB more; its disk has"):
            run(source)
        monkeypatch.setattr("shutil.disk_usage", lambda path: SimpleNamespace(free=times * len(archive)))
        run(source)
    assert content_of(raw)["d/1.bin"] == FIRST


def tar_of(members: Mapping[str, bytes | tarfile.TarInfo]) -> bytes:
    """Make a ``.tar.gz`` of files, or of members of another kind."""
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w:gz") as tar:
        for name, content in members.items():
            if isinstance(content, tarfile.TarInfo):
                content.name = name
                tar.addfile(content)
            else:
                member = tarfile.TarInfo(name)
                member.size = len(content)
                tar.addfile(member, io.BytesIO(content))
    return out.getvalue()


def link(kind: bytes, target: str) -> tarfile.TarInfo:
    member = tarfile.TarInfo()
    member.type, member.linkname = kind, target
    return member


SPEECH = {
    "Speech/train/1.flac": b"one",
    "Speech/train/x/2.flac": b"two",
    "Speech/BOOKS.TXT": b"no",
    "Speech/._a": b"no",
}


def archive(url: str, **changes: Any) -> SourceSet:
    """Make a set of one archive, of which one folder is unpacked under another name."""
    return source_set(
        RemoteFile("speech.tar.gz", (f"{url}/s",), "free"),
        **({"unpack": {"speech.tar.gz": {"train": "out"}}, "instead": {"speech.tar.gz": ("out",)}} | changes),
    )


def test_archive_is_unpacked_and_no_longer_needed(run, raw):
    packed = tar_of(SPEECH)
    with Server(serving({"/s": packed})) as server:
        lines = run(archive(server.url))
        (raw / "speech.tar.gz").unlink()
        run(archive(server.url))
    assert lines[0] == f"{raw}/speech.tar.gz: unpacked to out; the archive is no longer needed"
    assert content_of(raw) == {"out/1.flac": b"one", "out/x/2.flac": b"two"}
    assert len(server.requests) == 1


def test_unpacking_that_was_cut_off_starts_again(run, raw):
    put(raw, {"speech.tar.gz": tar_of(SPEECH), "speech.tar.gz.unpacked.partial/out/0.flac": b"old"})
    run(archive("http://nowhere.invalid"))
    assert {name for name in content_of(raw) if name != "speech.tar.gz"} == {"out/1.flac", "out/x/2.flac"}


def test_check_unpacks_nothing(run, raw):
    put(raw, {"speech.tar.gz": tar_of(SPEECH)})
    run(archive("http://nowhere.invalid"), check=True)
    assert list(content_of(raw)) == ["speech.tar.gz"]


@pytest.mark.parametrize(
    "packed",
    [
        tar_of({**SPEECH, "Speech/train/3": link(tarfile.SYMTYPE, "/etc/passwd")}),
        tar_of({**SPEECH, "Speech/train/3": link(tarfile.LNKTYPE, "Speech/train/1.flac")}),
        tar_of({**SPEECH, "Speech/train/3": link(tarfile.CHRTYPE, "")}),
        tar_of({**SPEECH, "Speech/train/../../../3": b"three"}),
        tar_of({**SPEECH, "Speech/train/1.flac/3": b"three"}),
        tar_of({"Speech/test/1.flac": b"one"}),
        tar_of(SPEECH)[:-20],
        tar_of(SPEECH)[:10],
        b"\x1f\x8bno gzip",
    ],
    ids=["link", "hard link", "device", "outside", "below a file", "no folder", "cut", "cut early", "no gzip"],
)
def test_archive_that_cannot_be_unpacked_is_named(packed, run, raw):
    put(raw, {"speech.tar.gz": packed})
    with pytest.raises(DataError, match=r"speech\.tar\.gz.*(again)"):
        run(archive("http://nowhere.invalid"))
    assert not (raw / "out").exists()
    assert not (raw.parent / "3").exists()


@pytest.mark.parametrize(
    ("content", "fault"),
    [(b"two", None), (b"owt", "md5"), (None, "is missing")],
    ids=["right", "wrong", "missing"],
)
def test_unpacked_files_are_compared(content, fault, run, raw):
    put(raw, {"out/1.flac": b"one", "md5sums": f"{md5(b'one')}  1.flac\n{md5(b'two')}  x/2.flac\n".encode()})
    if content is not None:
        put(raw, {"out/x/2.flac": content})
    sums = archive("http://nowhere.invalid", md5s=("md5sums", "out"))
    if fault is None:
        run(sums)
        return
    with pytest.raises(DataError, match=rf"2\.flac.*{fault}.*: delete the unpacked folder and run the command again"):
        run(sums)
