"""Storage is read without the page cache, up to the given size, and is not changed."""

import errno
import os

import pytest

from common.doctor import storage
from common.doctor.storage import BLOCK, read_storage


@pytest.fixture
def folder(tmp_path):
    probe = tmp_path / "probe"
    probe.touch()
    try:
        os.close(os.open(probe, os.O_RDONLY | os.O_DIRECT))
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        pytest.skip("the file system of temporary files has no O_DIRECT")
    finally:
        probe.unlink()
    return tmp_path


@pytest.fixture
def reads(monkeypatch):
    """Offsets and sizes of all reads."""
    seen = []
    preadv = os.preadv

    def watched(descriptor, buffers, offset):
        size = preadv(descriptor, buffers, offset)
        seen.append((os.path.basename(os.readlink(f"/proc/self/fd/{descriptor}")), offset, size))
        return size

    monkeypatch.setattr(storage.os, "preadv", watched)
    return seen


def test_a_folder_is_measured_and_left_empty(folder, reads):
    assert read_storage(folder, 3 * BLOCK, 60.0).value > 0
    assert sorted((offset, size) for _, offset, size in reads) == [(i * BLOCK, BLOCK) for i in range(3)]
    assert list(folder.iterdir()) == []


def test_a_file_is_read_to_its_end_and_not_changed(folder, reads):
    path = folder / "data"
    content = os.urandom(BLOCK + 5000)
    path.write_bytes(content)
    assert read_storage(path, 100 * BLOCK, 60.0).value > 0
    assert sorted(reads) == [("data", 0, BLOCK), ("data", BLOCK, 5000)]
    assert path.read_bytes() == content
    assert list(folder.iterdir()) == [path]


def test_no_more_is_read_than_asked_for(folder, reads):
    path = folder / "data"
    path.write_bytes(bytes(4 * BLOCK))
    read_storage(path, 2 * BLOCK, 60.0)
    assert sorted(offset for _, offset, _ in reads) == [0, BLOCK]


def test_a_folder_that_may_not_be_written_is_measured_by_its_files(folder, reads, monkeypatch):
    (folder / "a").mkdir()
    for name in ("a/first", "second"):
        (folder / name).write_bytes(bytes(BLOCK))
    monkeypatch.setattr(storage.os, "access", lambda path, mode: mode != os.W_OK)
    assert read_storage(folder, 100 * BLOCK, 60.0).value > 0
    assert sorted(name for name, _, _ in reads) == ["first", "second"]


def test_an_empty_folder_that_may_not_be_written_is_a_failure(folder, monkeypatch):
    monkeypatch.setattr(storage.os, "access", lambda path, mode: False)
    assert "no file to read" in read_storage(folder, BLOCK, 60.0).failed


def test_a_path_that_is_not_there_is_a_failure(tmp_path):
    assert read_storage(tmp_path / "nothing", BLOCK, 1.0).failed == f"no {tmp_path / 'nothing'}"


def test_an_empty_file_is_a_failure(folder):
    (folder / "empty").touch()
    assert "is empty" in read_storage(folder / "empty", BLOCK, 1.0).failed


def test_a_file_system_without_direct_reads_counts_as_not_measured(tmp_path, monkeypatch):
    (tmp_path / "data").write_bytes(bytes(BLOCK))

    def refuse(path, flags):
        raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))

    monkeypatch.setattr(storage.os, "open", refuse)
    reading = read_storage(tmp_path / "data", BLOCK, 1.0)
    assert "O_DIRECT" in reading.missing
    assert not reading.failed


def test_a_read_error_is_a_failure(folder, monkeypatch):
    (folder / "data").write_bytes(bytes(BLOCK))

    def fail(*arguments):
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(storage.os, "preadv", fail)
    assert read_storage(folder / "data", BLOCK, 1.0).failed == f"{folder / 'data'}: Input/output error"


def test_a_full_disk_is_a_failure_and_leaves_nothing(folder, monkeypatch):
    def full(descriptor, content):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(storage.os, "write", full)
    assert "No space left" in read_storage(folder, BLOCK, 1.0).failed
    assert list(folder.iterdir()) == []
