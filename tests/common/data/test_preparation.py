"""What all preparations share: one at a time in a folder, of one source, on a disk that is large enough."""

import errno
import fcntl
import functools
import json
import os
import stat as stat_fields
from collections import namedtuple
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import pytest

from common.data import manifest, preparation
from common.data.manifest import Manifest
from common.data.preparation import is_there, link_or_copy, link_or_copy_all
from common.data.published import Published
from common.errors import DataError

WANTED = {"fingerprint": "f", "settings": "s"}


@pytest.fixture
def prepared(tmp_path):
    manifest.write(tmp_path, Manifest("x/1", {}, {"train_samples": 3, "classes": 2}, False, {**WANTED, "more": "m"}))
    return tmp_path


def test_a_folder_that_another_process_prepares_is_refused(tmp_path):
    with open(tmp_path / "prepare.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with pytest.raises(DataError, match=f"^another process is preparing {tmp_path}$"), preparation.locked(tmp_path):
            pytest.fail("two at once")


def test_the_lock_ends_with_the_block(tmp_path):
    with pytest.raises(KeyError), preparation.locked(tmp_path / "new" / "folder"):
        raise KeyError
    with preparation.locked(tmp_path / "new" / "folder"):
        pass


def test_a_file_system_without_locks_is_named(tmp_path, monkeypatch):
    def refuse(*_):
        raise OSError(errno.ENOSYS, "Function not implemented")

    monkeypatch.setattr(fcntl, "flock", refuse)
    message = f"^{tmp_path}/prepare.lock cannot be locked: Function not implemented; name a folder on a file system"
    with pytest.raises(DataError, match=message), preparation.locked(tmp_path):
        pytest.fail("not locked")


def test_a_folder_that_cannot_be_made_is_named(tmp_path):
    (tmp_path / "file").write_text("")
    with (
        pytest.raises(DataError, match=f"^cannot write to {tmp_path}/file/data: "),
        preparation.locked(tmp_path / "file" / "data"),
    ):
        pytest.fail("no folder to prepare in")


def test_nothing_prepared_is_none(tmp_path):
    assert preparation.already_prepared(tmp_path, "x/1", "prepare it", WANTED) is None


@pytest.mark.parametrize("wanted", [WANTED, None])
def test_the_same_data_are_found(prepared, wanted):
    found = preparation.already_prepared(prepared, "x/1", "prepare it", wanted)
    assert found.counts == {"train_samples": 3, "classes": 2}


OTHERS = [
    ({"fingerprint": "g", "settings": "s"}, "was prepared from other raw data; delete it or name another --data-dir"),
    ({"fingerprint": "f", "settings": "t"}, "was prepared with s, not with t; delete it, name another --data-dir"),
    ({"fingerprint": "f"}, "was prepared with s, not with None; delete it"),
]


@pytest.mark.parametrize(("wanted", "message"), OTHERS)
def test_other_data_are_refused(prepared, wanted, message):
    with pytest.raises(DataError, match=f"^{prepared} {message}"):
        preparation.already_prepared(prepared, "x/1", "prepare it", wanted)


@pytest.mark.parametrize(("wanted", "message"), OTHERS)
def test_an_interrupted_preparation_of_other_data_is_not_continued(tmp_path, wanted, message):
    state = tmp_path / "work" / "state.json"
    preparation.begin_or_continue(tmp_path, state, WANTED)
    with pytest.raises(DataError, match=f"^{tmp_path} {message}"):
        preparation.begin_or_continue(tmp_path, state, wanted)
    assert json.loads(state.read_text()) == WANTED


def test_an_interrupted_preparation_of_the_same_data_is_continued(tmp_path):
    state = tmp_path / "state.json"
    for _ in range(2):
        preparation.begin_or_continue(tmp_path, state, {"fingerprint": "f"})
    assert json.loads(state.read_text()) == {"fingerprint": "f"}


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"\xff\xfe"], ids=["empty", "cut off", "list", "no UTF-8"])
def test_a_damaged_state_is_named(tmp_path, content):
    state = tmp_path / "state.json"
    state.write_bytes(content)
    with pytest.raises(DataError, match=rf"^{state} is damaged \(.*\); delete {tmp_path} and prepare again$"):
        preparation.begin_or_continue(tmp_path, state, WANTED)


@pytest.mark.parametrize(("more", "amount"), [(True, "2.5 GB more"), (False, "2.5 GB")])
def test_a_disk_that_is_too_small_is_named_with_both_sizes(tmp_path, monkeypatch, more, amount):
    usage = namedtuple("usage", "free")
    monkeypatch.setattr("shutil.disk_usage", lambda folder: usage(2_400_000_000))
    preparation.require_space(tmp_path, 2_400_000_000)
    with pytest.raises(DataError, match=f"^{tmp_path} needs {amount}; its disk has 2.4 GB left$"):
        preparation.require_space(tmp_path, 2_500_000_000, more=more)


@pytest.mark.parametrize("synthetic", [None, {"kind": "noise"}])
def test_a_finished_preparation_is_found_and_leaves_nothing_else(tmp_path, synthetic):
    published = Published({"samples": 1})
    opened = functools.partial(preparation.preparing, tmp_path, "x/1", "prepare it", WANTED, published, synthetic)
    (tmp_path / "file").write_text("x")
    with opened() as job:
        assert job.found is None
        (job.begin("work") / "part").write_text("")
        made = job.finish(manifest.describe_files(tmp_path, ["file"]), {"samples": 1}, "real", {"version": "2"})
    assert made.synthetic == (synthetic is not None)
    assert made.source.items() >= {**WANTED, "version": "2"}.items()
    assert made.source["description"] == ("real" if synthetic is None else '{"kind": "noise"}')
    assert {path.name for path in tmp_path.iterdir()} == {"file", "manifest.json", "prepare.lock"}
    with opened() as job:
        assert job.found == made


@pytest.mark.parametrize("same", [True, False])
def test_files_that_were_prepared_by_others_may_lie_where_they_are(prepared, tmp_path_factory, same):
    folder = prepared if same else tmp_path_factory.mktemp("elsewhere")
    wanted = {"fingerprint": "other"}
    job = preparation.preparing(prepared, "x/1", "prepare it", wanted, Published({"classes": 2}), None, adopted=folder)
    refused = pytest.raises(DataError, match="was prepared from other raw data")
    with nullcontext() if same else refused, job as found:
        assert found.found is not None


@pytest.fixture
def path(tmp_path):
    path = tmp_path / "file"
    path.write_bytes(b"content")
    return path


def test_a_file_is_linked_into_a_new_folder(path, tmp_path):
    target = tmp_path / "new/folder/other"
    link_or_copy(path, target, "")
    assert target.samefile(path)
    assert is_there(path, target, "")
    link_or_copy(path, target, "")
    assert [entry.name for entry in target.parent.iterdir()] == ["other"]


def test_a_file_on_another_disk_is_copied(path, tmp_path, monkeypatch):
    def refuse(*_):
        raise OSError(errno.EXDEV, "another disk")

    monkeypatch.setattr(os, "link", refuse)
    target = tmp_path / "other"
    link_or_copy(path, target, "")
    assert not target.samefile(path)
    assert target.read_bytes() == b"content"
    assert is_there(path, target, "")
    link_or_copy(path, target, "")


@pytest.mark.parametrize(("copy", "same"), [(b"content", True), (b"another", False)], ids=["same bytes", "other bytes"])
def test_a_copy_that_has_lost_its_time_is_compared_by_its_bytes(path, tmp_path, copy, same):
    target = tmp_path / "other"
    target.write_bytes(copy)
    os.utime(target, ns=(0, 0))
    with nullcontext() if same else pytest.raises(DataError, match="is another file than"):
        assert is_there(path, target, "")


def test_other_errors_are_not_hidden(path, tmp_path, monkeypatch):
    def refuse(*_):
        raise OSError(errno.EIO, "broken disk")

    monkeypatch.setattr(os, "link", refuse)
    with pytest.raises(OSError, match="broken disk"):
        link_or_copy(path, tmp_path / "other", "")
    assert not (tmp_path / "other").exists()


def test_the_partial_copy_of_a_killed_command_is_replaced(path, tmp_path):
    (tmp_path / "other.partial").write_bytes(b"cont")
    link_or_copy(path, tmp_path / "other", "")
    assert (tmp_path / "other").read_bytes() == b"content"


def test_another_file_stays_and_is_named(path, tmp_path):
    target = tmp_path / "other"
    target.write_bytes(b"mine")
    with pytest.raises(DataError, match=r"other is another file than .*/file; delete it$"):
        link_or_copy(path, target, "delete it")
    assert target.read_bytes() == b"mine"


def test_a_disk_that_is_too_small_is_an_error(path, tmp_path, monkeypatch):
    def refuse(*_):
        raise OSError(errno.EXDEV, "another disk")

    monkeypatch.setattr(os, "link", refuse)
    monkeypatch.setattr("shutil.disk_usage", lambda _: type("Usage", (), {"free": 3}))
    with pytest.raises(DataError, match=r"needs 0.0 GB more; its disk has 0.0 GB left"):
        link_or_copy(path, tmp_path / "other", "")


def test_no_file_of_another_disk_is_copied_if_not_all_fit(path, tmp_path, monkeypatch):
    other = tmp_path / "second"
    other.write_bytes(b"x" * 10)
    data_dir = tmp_path / "data"
    data_dir.mkdir()
    real = Path.stat

    def stat(path: Path, **options: bool) -> os.stat_result:
        """Return the status of a file, and for ``data_dir`` another device."""
        found = list(real(path, **options))
        if path == data_dir:
            found[stat_fields.ST_DEV] += 1
        return os.stat_result(found)

    monkeypatch.setattr(Path, "stat", stat)
    monkeypatch.setattr("shutil.disk_usage", lambda _: SimpleNamespace(free=12))
    files = [(each, data_dir / each.name) for each in (path, other)]  # 7 and 10 bytes
    with pytest.raises(DataError, match=r"data needs 0.0 GB more; its disk has 0.0 GB left"):
        link_or_copy_all(files, data_dir, "")
    assert list(data_dir.iterdir()) == []
    link_or_copy_all(files[1:], data_dir, "")
    assert (data_dir / "second").read_bytes() == b"x" * 10
