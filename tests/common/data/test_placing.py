"""A file under a second name: linked, copied to another disk, or another file already."""

import errno
import os

import pytest

from common.data.placing import is_there, place
from common.errors import DataError


@pytest.fixture
def path(tmp_path):
    path = tmp_path / "file"
    path.write_bytes(b"content")
    return path


def test_a_file_is_linked_into_a_new_folder(path, tmp_path):
    target = tmp_path / "new/folder/other"
    place(path, target, "")
    assert target.samefile(path)
    assert is_there(path, target, "")
    place(path, target, "")
    assert [entry.name for entry in target.parent.iterdir()] == ["other"]


def test_it_is_copied_where_it_cannot_be_linked(path, tmp_path, monkeypatch):
    def refuse(*_):
        raise OSError(errno.EXDEV, "another disk")

    monkeypatch.setattr(os, "link", refuse)
    target = tmp_path / "other"
    place(path, target, "")
    assert not target.samefile(path)
    assert target.read_bytes() == b"content"
    assert is_there(path, target, "")
    place(path, target, "")


def test_other_errors_are_not_hidden(path, tmp_path, monkeypatch):
    def refuse(*_):
        raise OSError(errno.EIO, "broken disk")

    monkeypatch.setattr(os, "link", refuse)
    with pytest.raises(OSError, match="broken disk"):
        place(path, tmp_path / "other", "")
    assert not (tmp_path / "other").exists()


def test_what_a_killed_command_left_is_in_nobodys_way(path, tmp_path):
    (tmp_path / "other.partial").write_bytes(b"cont")
    place(path, tmp_path / "other", "")
    assert (tmp_path / "other").read_bytes() == b"content"


def test_another_file_stays_and_is_named(path, tmp_path):
    target = tmp_path / "other"
    target.write_bytes(b"mine")
    with pytest.raises(DataError, match=r"other is another file than .*/file; delete it$"):
        place(path, target, "delete it")
    assert target.read_bytes() == b"mine"


def test_a_disk_that_is_too_small_is_said_so(path, tmp_path, monkeypatch):
    def refuse(*_):
        raise OSError(errno.EXDEV, "another disk")

    monkeypatch.setattr(os, "link", refuse)
    monkeypatch.setattr("shutil.disk_usage", lambda _: type("Usage", (), {"free": 3}))
    with pytest.raises(DataError, match=r"needs 0.0 GB more; its disk has 0.0 GB left"):
        place(path, tmp_path / "other", "")
