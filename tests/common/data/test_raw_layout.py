"""Raw files are found in the folders of other tools: behind links, beside foreign files, and only as a whole set."""

import os

import pytest

from common.data.raw_layout import find_file, require_parts
from common.data.sources import Inventory
from common.errors import DataError


def test_a_foreign_file_does_not_stand_for_the_data(tmp_path):
    for name in ("train/._0.h5", "archive/train/0.h5"):
        (tmp_path / name).parent.mkdir(parents=True)
        (tmp_path / name).touch()
    assert find_file(tmp_path, "train/*.h5") == tmp_path / "archive" / "train" / "0.h5"


@pytest.mark.parametrize(
    ("names", "complaint"),
    [
        (["part-00000-of-00003", "part-00002-of-00003"], "lacks part-00001-of-00003; fetch the files again"),
        (["a-00000-of-00001.gz", "a-00001-of-00001.gz"], "/a-00001-of-00001.gz does not belong to 1 parts beside it"),
        (["a-00000-of-00001 (1).gz", "a-00000-of-00001.gz"], r"00001 \(1\)\.gz does not have a name such as part-0"),
    ],
)
def test_an_incomplete_or_doubled_set_of_parts_is_refused(names, complaint, tmp_path):
    with pytest.raises(DataError, match=rf"^{tmp_path}.*{complaint}"):
        require_parts([tmp_path / name for name in names])


def test_a_complete_set_of_parts_is_accepted(tmp_path):
    require_parts([tmp_path / f"train-{number:05d}-of-00002.parquet" for number in range(2)])


def test_download_finds_files_behind_a_link_to_another_disk(tmp_path):
    (tmp_path / "disk" / "train").mkdir(parents=True)
    (tmp_path / "disk" / "train" / "0.tar").touch()
    (tmp_path / "raw").mkdir()
    (tmp_path / "raw" / "LibriSpeech").symlink_to(tmp_path / "disk")
    (tmp_path / "disk" / "above").symlink_to(tmp_path / "raw")  # a cycle
    assert Inventory(tmp_path / "raw").find("train/0.tar") == tmp_path / "raw" / "LibriSpeech" / "train" / "0.tar"


def test_download_does_not_take_an_unreadable_folder_for_an_empty_one(tmp_path, monkeypatch):
    (tmp_path / "closed").mkdir()
    scandir = os.scandir

    def refuse(folder):
        if os.fspath(folder).endswith("closed"):
            raise PermissionError(13, "Permission denied", os.fspath(folder))
        return scandir(folder)

    monkeypatch.setattr(os, "scandir", refuse)
    with pytest.raises(DataError, match=rf"^{tmp_path}/closed cannot be searched: Permission denied; make it readable"):
        Inventory(tmp_path)
