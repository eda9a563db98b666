"""Raw files are found in the folders of other tools: behind links, beside foreign files, and only as a whole set."""

import contextlib

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
        (["train-00000-of-00002.parquet", "train-00001-of-00002.parquet"], ""),
        (["part-00000-of-00003", "part-00002-of-00003"], "lacks part-00001-of-00003; fetch the files again"),
        (["a-00000-of-00001.gz", "a-00001-of-00001.gz"], "/a-00001-of-00001.gz is none of the 1 parts of this set"),
        (["a-00000-of-00001 (1).gz", "a-00000-of-00001.gz"], r"00001 \(1\)\.gz has no name such as part-0"),
    ],
)
def test_only_a_complete_set_of_parts_is_accepted(names, complaint, tmp_path):
    refused = pytest.raises(DataError, match=rf"^{tmp_path}.*{complaint}")
    with refused if complaint else contextlib.nullcontext():
        require_parts([tmp_path / name for name in names])


def test_download_finds_files_behind_a_link_to_another_disk(tmp_path):
    (tmp_path / "disk" / "train").mkdir(parents=True)
    (tmp_path / "disk" / "train" / "0.tar").touch()
    (tmp_path / "raw").mkdir()
    (tmp_path / "raw" / "LibriSpeech").symlink_to(tmp_path / "disk")
    (tmp_path / "disk" / "above").symlink_to(tmp_path / "raw")  # a cycle
    assert Inventory(tmp_path / "raw").find("train/0.tar") == tmp_path / "raw" / "LibriSpeech" / "train" / "0.tar"


def test_download_does_not_take_an_unreadable_folder_for_an_empty_one(unreadable_folder):
    message = rf"^{unreadable_folder} cannot be searched: Permission denied; make it readable"
    with pytest.raises(DataError, match=message):
        Inventory(unreadable_folder.parent)
