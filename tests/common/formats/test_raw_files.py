"""Listings of folders and tars have all files of the data set, and none of operating systems and notebooks."""

from __future__ import annotations

import io
import shutil
import tarfile
import zipfile
from pathlib import Path

import pytest

from benchmarks.rnnt import raw
from common import cli
from common.data.fetching import unpack
from common.detection.coco_raw import SPLITS, RawData
from common.errors import DataError
from common.formats.raw_files import add_member, data_members, is_data, listed

FOREIGN = (
    ".DS_Store", "._{}", "Thumbs.db", "desktop.ini", ".ipynb_checkpoints/{}", "__MACOSX/._{}", "__MACOSX/{}",
    "@eaDir/{}", "$RECYCLE.BIN/{}", ".nfs0001",
)  # fmt: skip


def litter(folder: Path) -> None:
    """Write every kind of foreign file into each folder."""
    for inside in [folder, *(path for path in folder.rglob("*") if path.is_dir())]:
        neighbour = next((path.name for path in sorted(inside.iterdir()) if path.is_file()), "picture.jpg")
        for name in FOREIGN:
            path = inside / name.format(neighbour)
            path.parent.mkdir(exist_ok=True)
            path.write_bytes(b"\0\5\x16\7")


@pytest.mark.parametrize("name", [*(name.format("a.JPEG") for name in FOREIGN), "a/THUMBS.DB", "a/.git/config"])
def test_foreign_files_are_no_data(name):
    assert not is_data(name)


@pytest.mark.parametrize("name", ["a.JPEG", "./n01440764/a.JPEG", "_a.npy", "a.DS_Store", "macosx/a", "..", "/raw/a"])
def test_others_are_data(name):
    assert is_data(name)


@pytest.mark.parametrize("workload", ["resnet", "retinanet", "ssd300", "stable_diffusion", "unet3d"])
def test_raw_data_with_foreign_files_are_the_same_data(workload, data_of, tmp_path, capsys):
    data = data_of(workload)
    folder = shutil.copytree(data.parent / "raw", tmp_path / "raw")
    litter(folder)
    # Fails if anything in the fingerprint of the raw data changed, or if a file is taken for one of the data set.
    code = cli.run(["prepare", f"benchmark={workload}", "--raw-dir", str(folder), "--data-dir", str(data)])
    assert code == 0, capsys.readouterr().err


@pytest.mark.parametrize("workload", ["retinanet", "stable_diffusion", "unet3d"])
def test_prepared_data_with_foreign_files_are_as_they_were(workload, data_of, tmp_path, capsys):
    data = shutil.copytree(data_of(workload), tmp_path / "data")
    litter(data)
    code = cli.run(["verify", f"benchmark={workload}", "--data-dir", str(data)])
    assert code == 0, capsys.readouterr().err


def test_foreign_members_of_tars_are_passed_over(tmp_path):
    with tarfile.open(tmp_path / "a.tar", "w") as tar:
        for name in ("a.jpg", *(name.format("a.jpg") for name in FOREIGN), "b/c.jpg"):
            add_member(tar, name, b"1")
    with (tmp_path / "a.tar").open("rb") as file:
        assert [name for name, _, _ in data_members(file, tmp_path / "a.tar")] == ["a.jpg", "c.jpg"]


def test_foreign_members_of_zips_are_passed_over(tmp_path):
    folder = SPLITS["train"]
    with zipfile.ZipFile(tmp_path / f"{folder}.zip", "w") as archive:
        for name in ("a.jpg", *(name.format("a.jpg") for name in FOREIGN)):
            archive.writestr(f"{folder}/{name}", b"1")
        archive.writestr(f"__MACOSX/{folder}/._a.jpg", b"1")
        archive.writestr(f"{folder}/README.txt", b"1")
    found = RawData(tmp_path, None, "ssd300", ())._pictures(folder)
    assert found.sizes == {"a.jpg": 1}


def test_foreign_files_beside_speech_are_no_utterances(tmp_path):
    chapter = tmp_path / "1" / "2"
    chapter.mkdir(parents=True)
    (chapter / "1-2.trans.txt").write_text("1-2-0000 YES\n")
    (chapter / "1-2-0000.flac").write_bytes(b"1")
    litter(tmp_path)
    assert [utterance.name for utterance in raw._subset(tmp_path)] == ["1-2-0000"]


def test_foreign_members_of_librispeech_stay_packed(tmp_path):
    archive = tmp_path / "dev-clean.tar.gz"
    with tarfile.open(archive, "w:gz") as tar:
        for name in ("1/a.flac", *(f"1/{name.format('a.flac')}" for name in FOREIGN)):
            add_member(tar, f"LibriSpeech/dev-clean/{name}", b"1")
    unpack(archive, tmp_path, {"LibriSpeech/dev-clean": "dev-clean"})
    assert [path.name for path in (tmp_path / "dev-clean").rglob("*") if path.is_file()] == ["a.flac"]


def test_a_listing_is_sorted_and_has_folders(tmp_path):
    (tmp_path / "b" / "c.npy").parent.mkdir()
    (tmp_path / "b" / "c.npy").touch()
    (tmp_path / "a.npy").touch()
    litter(tmp_path)
    assert listed(tmp_path) == [tmp_path / "a.npy", tmp_path / "b"]
    assert listed(tmp_path, "*/*.npy") == [tmp_path / "b" / "c.npy"]


def test_a_listing_of_all_levels_follows_links_and_ends_at_cycles(tmp_path):
    for name in ("disk/1.h5", "raw/2.h5", "raw/a/b/3.h5"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    (tmp_path / "raw" / "disk").symlink_to(tmp_path / "disk")
    (tmp_path / "raw" / "a" / "above").symlink_to(tmp_path / "raw")
    names = [path.relative_to(tmp_path / "raw").as_posix() for path in listed(tmp_path / "raw", "**/*.h5")]
    assert names == ["2.h5", "a/b/3.h5", "disk/1.h5"]
    assert listed(tmp_path / "none", "**/*.h5") == []


@pytest.mark.parametrize("pattern", ["**/*.h5", "*/*.h5"])
def test_files_in_a_folder_that_cannot_be_read_are_not_missed_unnoticed(pattern, unreadable_folder):
    with pytest.raises(PermissionError, match=str(unreadable_folder)):
        listed(unreadable_folder.parent, pattern)


CONTENTS = {"a.bin": b"x" * 700, "b.bin": b"", "c.bin": b"y" * 512}


def _tar(**options: int) -> bytes:
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode="w", **options) as tar:
        for name, content in CONTENTS.items():
            add_member(tar, name, content)
    return file.getvalue()


def _found(content: bytes, start: int = 0) -> dict[str, bytes]:
    file = io.BytesIO(content)
    return {name: content[at : at + size] for name, at, size in data_members(file, Path("made.tar"), start)}


@pytest.mark.parametrize("format", [tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT])
@pytest.mark.parametrize("start", [0, 100])
def test_members_have_their_offset_and_size(format, start):
    assert _found(b"-" * start + _tar(format=format), start) == CONTENTS


@pytest.mark.parametrize("format", [tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT])
def test_members_of_a_folder_without_a_name_are_found(format, tmp_path):
    folder = tmp_path / "folder"
    folder.mkdir()
    for name, content in CONTENTS.items():
        (folder / name).write_bytes(content)
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode="w", format=format) as tar:
        tar.add(folder, arcname="")

    content = file.getvalue()
    with tarfile.open(fileobj=io.BytesIO(content)) as tar:
        assert tar.getmembers()[0].name == ""
    assert _found(content) == CONTENTS


@pytest.mark.parametrize("end", [300, 1000, 1536, 2048, 3071])
def test_tars_that_are_cut_off_are_refused(end):
    with pytest.raises(DataError, match=r"made\.tar: the tar at byte 0 is truncated or damaged"):
        _found(_tar()[:end])


def test_a_damaged_header_is_not_taken_for_the_end():
    content = bytearray(_tar())
    offset = content.index(b"b.bin")
    content[offset] ^= 255
    with pytest.raises(DataError, match=rf"made\.tar: the tar .* no end mark at byte {offset}"):
        _found(bytes(content))
