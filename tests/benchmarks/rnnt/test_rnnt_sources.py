"""LibriSpeech's archives: fetched, checked and unpacked."""

from __future__ import annotations

import io
import tarfile
from pathlib import Path

import pytest

from benchmarks.rnnt import sources
from benchmarks.rnnt.sources import ARCHIVES, download, unpack
from common.data.download import RemoteFile
from common.data.manifest import digest
from common.errors import ConfigError, DataError


def pack(path: Path, files: dict[str, bytes], *others: tarfile.TarInfo) -> Path:
    with tarfile.open(path, "w:gz") as tar:
        for name, content in files.items():
            member = tarfile.TarInfo(name)
            member.size = len(content)
            tar.addfile(member, io.BytesIO(content))
        for member in others:
            tar.addfile(member)
    return path


@pytest.fixture
def archives(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with two small archives in the place of the real ones."""
    raw = tmp_path / "raw"
    raw.mkdir()
    for subset in ("dev-clean", "train-clean-100"):
        path = pack(
            raw / f"{subset}.tar.gz",
            {"LibriSpeech/README.TXT": b"about", f"LibriSpeech/{subset}/1/2/1-2.trans.txt": b"1-2-0000 A\n"},
        )
        known = RemoteFile(path.name, None, "CC BY 4.0", path.stat().st_size, f"md5:{digest(path, 'md5')}")
        monkeypatch.setitem(sources.ARCHIVES, subset, known)
    return raw


def test_the_archives_are_openslrs():
    assert {name: (file.url, file.bytes) for name, file in ARCHIVES.items()} == {
        "dev-clean": ("https://www.openslr.org/resources/12/dev-clean.tar.gz", 337926286),
        "train-clean-100": ("https://www.openslr.org/resources/12/train-clean-100.tar.gz", 6387309499),
        "train-clean-360": ("https://www.openslr.org/resources/12/train-clean-360.tar.gz", 23049477885),
        "train-other-500": ("https://www.openslr.org/resources/12/train-other-500.tar.gz", 30593501606),
    }
    assert all("CC BY 4.0" in file.licence for file in ARCHIVES.values())


def test_archives_are_unpacked_once(archives):
    lines = list(download(archives, ["train-clean-100"]))
    text = archives / "LibriSpeech" / "dev-clean" / "1" / "2" / "1-2.trans.txt"
    assert text.read_text() == "1-2-0000 A\n"
    assert [path.name for path in sorted((archives / "LibriSpeech").iterdir())] == ["dev-clean", "train-clean-100"]
    assert all("unpacked to" in line for line in lines)
    text.write_text("mine")
    assert all("unpacked before" in line for line in download(archives, ["train-clean-100"]))
    assert text.read_text() == "mine"


def test_an_unpacking_that_was_cut_off_begins_anew(archives):
    left = archives / "LibriSpeech" / "dev-clean.partial" / "stray"
    left.parent.mkdir(parents=True)
    left.write_text("left")
    list(download(archives, ["train-clean-100"]))
    assert [path.name for path in (archives / "LibriSpeech" / "dev-clean").iterdir()] == ["1"]


def test_another_md5_is_refused(archives):
    path = archives / "dev-clean.tar.gz"
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    with pytest.raises(DataError, match=r"dev-clean.tar.gz: md5 [0-9a-f]{32} instead of [0-9a-f]{32}"):
        list(download(archives, ["train-clean-100"]))


def test_a_subset_that_is_none_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="--train-subsets test-clean: some of train-clean-100"):
        list(download(tmp_path, ["test-clean"]))


def test_a_truncated_archive_is_one_error(archives, tmp_path):
    path = archives / "dev-clean.tar.gz"
    path.write_bytes(path.read_bytes()[:-30])
    with pytest.raises(DataError, match=r"dev-clean\.tar\.gz is damaged"):
        unpack(path, tmp_path / "dev-clean")
    assert not (tmp_path / "dev-clean").exists()


def link(name: str, target: str) -> tarfile.TarInfo:
    member = tarfile.TarInfo(name)
    member.type, member.linkname = tarfile.SYMTYPE, target
    return member


@pytest.mark.parametrize(
    "archive",
    [
        lambda path: pack(path, {"LibriSpeech/dev-clean/../../../stolen": b"x"}),
        lambda path: pack(path, {}, link("LibriSpeech/dev-clean/1", "/etc")),
    ],
    ids=["a path that leads out", "a link"],
)
def test_what_is_no_file_of_the_subset_is_refused(archive, tmp_path):
    with pytest.raises(DataError, match="is no file of the subset"):
        unpack(archive(tmp_path / "a.tar.gz"), tmp_path / "in" / "dev-clean")
    assert not (tmp_path / "stolen").exists()


def test_an_archive_of_something_else_is_refused(tmp_path):
    path = pack(tmp_path / "a.tar.gz", {"/absolute": b"x", "LibriSpeech/dev-other/1": b"x"})
    with pytest.raises(DataError, match="has nothing in LibriSpeech/dev-clean"):
        unpack(path, tmp_path / "dev-clean")
