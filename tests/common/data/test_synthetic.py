"""Generated folders are there when they are complete, and say what they are."""

import errno
import itertools
import json
import os
from contextlib import suppress
from pathlib import Path

import pytest

from common.data import synthetic
from common.errors import DataError


def test_real_data_have_no_description(tmp_path):
    assert synthetic.description_of(tmp_path) is None


def test_a_description_is_read_as_it_was_written(tmp_path):
    synthetic.mark(tmp_path, {"kind": "test", "settings": {"patch": (1, 2)}})
    assert json.loads((tmp_path / "SYNTHETIC").read_text()) == {"kind": "test", "settings": {"patch": [1, 2]}}
    assert synthetic.description_of(tmp_path) == {"kind": "test", "settings": {"patch": [1, 2]}}


@pytest.mark.parametrize("content", [b"", b"a test", b"[]", b"\xff\xfe"], ids=["empty", "text", "list", "no UTF-8"])
def test_a_damaged_description_is_named(tmp_path, content):
    (tmp_path / "SYNTHETIC").write_bytes(content)
    with pytest.raises(DataError, match=rf"^{tmp_path}/SYNTHETIC is damaged \(.*\); generate the data again$"):
        synthetic.description_of(tmp_path)


@pytest.mark.parametrize("folder", ["", "train", "train/part"])
def test_the_marker_of_an_earlier_version_is_an_error_that_names_the_new_one(tmp_path, folder):
    sample = tmp_path / "train" / "part" / "sample"
    sample.parent.mkdir(parents=True)
    former = tmp_path / folder / "STAND_IN"
    former.write_text("{}")
    message = f"^{former} marks synthetic data of an earlier version; rename this file to SYNTHETIC$"
    for read in (synthetic.marker_of, synthetic.description_of):
        with pytest.raises(DataError, match=message):
            read(tmp_path, sample)
    former.rename(former.with_name("SYNTHETIC"))
    assert synthetic.description_of(tmp_path, sample) == {}


def test_a_generated_folder_of_an_earlier_version_is_no_target(tmp_path):
    (tmp_path / "STAND_IN").write_text("{}")
    with pytest.raises(DataError, match=r"rename this file to SYNTHETIC$"), synthetic.generated(tmp_path):
        pass


def test_a_used_folder_is_refused(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(DataError, match=f"^{tmp_path} is not empty"), synthetic.generated(tmp_path):
        pass


@pytest.mark.parametrize("there", [False, True])
def test_a_generated_folder_appears_when_it_is_complete(tmp_path, there):
    raw_dir = tmp_path / "a" / "raw"
    if there:
        raw_dir.mkdir(parents=True)
    with synthetic.generated(raw_dir) as folder:
        (folder / "file").write_text("x")
        assert not (raw_dir / "file").exists()
    assert [path.name for path in raw_dir.parent.iterdir()] == ["raw"]
    assert (raw_dir / "file").read_text() == "x"


def test_the_partial_folder_of_a_killed_command_is_replaced(tmp_path):
    with suppress(KeyError), synthetic.generated(tmp_path / "raw") as folder:
        (folder / "old").touch()
        raise KeyError
    with synthetic.generated(tmp_path / "raw") as folder:
        (folder / "new").touch()
    assert [path.name for path in tmp_path.rglob("*")] == ["raw", "new"]


def test_data_are_generated_on_the_disk_to_which_a_link_leads(tmp_path):
    (tmp_path / "disk" / "raw").mkdir(parents=True)
    (tmp_path / "raw").symlink_to(tmp_path / "disk" / "raw")
    with synthetic.generated(tmp_path / "raw") as folder:
        assert folder.parent == tmp_path / "disk"
        (folder / "file").touch()
    assert (tmp_path / "raw").is_symlink()
    assert [path.name for path in (tmp_path / "disk").rglob("*")] == ["raw", "file"]


def test_a_folder_that_cannot_be_replaced_is_refused_before_the_work(tmp_path, monkeypatch):
    (tmp_path / "mounted").mkdir()

    def refuse(path):
        raise OSError(errno.EBUSY, "Device or resource busy", str(path))

    monkeypatch.setattr(Path, "rmdir", refuse)
    message = f"^{tmp_path}/mounted cannot be replaced by the generated folder: Device or .*; name a new folder in it$"
    with pytest.raises(DataError, match=message), synthetic.generated(tmp_path / "mounted"):
        pytest.fail("the work has begun")


def test_two_commands_do_not_generate_into_one_folder(tmp_path):
    with synthetic.generated(tmp_path / "raw") as folder:
        (folder / "first").touch()
        with (
            pytest.raises(DataError, match=r"^another process is generating "),
            synthetic.generated(tmp_path / "raw"),
        ):
            pytest.fail("two at once")
    assert [path.name for path in (tmp_path / "raw").iterdir()] == ["first"]


def halved(number: int) -> float:
    if number < 0:
        os._exit(9)
    return number / 2


@pytest.mark.slow
@pytest.mark.usefixtures("forked_pools")
@pytest.mark.parametrize("workers", [1, 2])
def test_drawn_results_have_the_order_of_their_plans(workers):
    assert list(synthetic.drawn(halved, range(5), workers)) == [0, 0.5, 1, 1.5, 2]


@pytest.mark.usefixtures("forked_pools")
def test_a_killed_worker_is_one_error():
    with pytest.raises(DataError, match="a worker process was killed, perhaps for want of memory"):
        list(synthetic.drawn(halved, [1, -1], 2))


def test_documentation_is_prose_sorted_by_module():
    found = list(itertools.islice(synthetic.documentation(), 200))

    title, paragraphs = found[0]
    assert title == "__future__"
    assert "language" in " ".join(paragraphs)
    assert [name.partition(".")[0] for name, _ in found] == sorted(name.partition(".")[0] for name, _ in found)
    assert not [text for _, texts in found for text in texts if ">>>" in text or "\n" in text]
