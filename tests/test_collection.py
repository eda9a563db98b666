"""Test that clock, hash seed and addresses do not change the ids of tests."""

from __future__ import annotations

import re
import types
from collections.abc import Callable
from pathlib import Path

import pytest

from tests import collected_twice
from tests.conftest import pytest_collection_modifyitems, pytest_make_parametrize_id

UNSTABLE = """
import datetime
import gzip
import time

import pytest

@pytest.mark.parametrize("value", [gzip.compress(b"a", mtime=None).hex()])
def test_compressed(value):
    pass

@pytest.mark.parametrize("value", [time.strftime("%d"), time.time_ns() // 10**12, time.gmtime().tm_yday])
def test_time(value):
    pass

@pytest.mark.parametrize("value", [str(datetime.date.today()), f"{datetime.datetime.now():%j}"])
def test_date(value):
    pass

@pytest.mark.parametrize("value", {f"name {i}" for i in range(20)})
def test_set(value):
    pass

@pytest.mark.parametrize("value", [hash("a")])
def test_hash(value):
    pass
"""
STABLE = """
import datetime
import gzip

import pytest

@pytest.mark.parametrize("value", [gzip.compress(b"a"), {"a", "b"}, datetime.date.today()], ids=["gzip", None, None])
def test_named(value):
    pass

@pytest.mark.parametrize("value", ["a", 1, 0.5, None, len, datetime.datetime])
def test_plain(value):
    assert isinstance(datetime.datetime.now(), datetime.datetime)
"""


def compared(folder: Path, text: str, capsys: pytest.CaptureFixture[str]) -> tuple[int, str]:
    """Return exit code and output of the command for one file of tests, without the suite's ``conftest.py``."""
    (folder / "test_it.py").write_text(text)
    code = collected_twice.main([f"--rootdir={folder}", "--confcutdir", str(folder), str(folder / "test_it.py")])
    return code, capsys.readouterr().out


def test_every_id_that_depends_on_time_or_hashes_is_named(tmp_path, capsys):
    code, out = compared(tmp_path, UNSTABLE, capsys)
    assert code == 1
    assert set(re.findall(r"^[-+].*::(test_\w+)", out, re.MULTILINE)) == set(re.findall(r"def (test_\w+)", UNSTABLE))
    assert out.count("::test_time[") == 6
    assert "Give the cases ids=[…] of their own." in out


def test_equal_collections_are_accepted(tmp_path, capsys):
    assert compared(tmp_path, STABLE, capsys) == (0, "Both collections have the same 9 tests.\n")


def test_tests_that_cannot_be_collected_are_an_error(tmp_path, capsys):
    code, out = compared(tmp_path, "import no_such_module\n", capsys)
    assert code == 1
    assert "No module named 'no_such_module'" in out
    assert "The tests cannot be collected: pytest ended with the exit code 2." in out


@pytest.mark.parametrize(
    "value", [b"", b"text", re.compile(b"pattern")], ids=["no bytes", "some bytes", "pattern of bytes"]
)
def test_bytes_are_refused_as_an_id(value):
    with pytest.raises(pytest.Collector.CollectError, match=r"The parameter content has the value .* Name the cases"):
        pytest_make_parametrize_id(value, "content")


@pytest.mark.parametrize("value", ["a", 1, None, 0.5, re.compile("a"), pytest.param({"a"}, id="set"), len, dict])
def test_other_values_are_left_to_pytest(value):
    assert pytest_make_parametrize_id(value, "content") is None


def collected(value: object, ids: Callable[[object], str] | str) -> types.SimpleNamespace:
    """Return a collected test with one parameter."""
    text = ids if isinstance(ids, str) else ids(value)
    return types.SimpleNamespace(
        nodeid=f"test_it.py::test_it[{text}]", callspec=types.SimpleNamespace(params={"content": value})
    )


@pytest.mark.parametrize("ids", [str, repr])
@pytest.mark.parametrize("make", [lambda: {"a"}, lambda: frozenset("ab"), {"a": 1}.keys, {"a": 1}.items, object])
def test_texts_of_sets_and_objects_are_refused_as_an_id(make, ids):
    with pytest.raises(pytest.UsageError, match=r"test_it\.py::test_it\[.*contains the text of the parameter content"):
        pytest_collection_modifyitems([collected(make(), ids)])


@pytest.mark.parametrize("make", [lambda: {"a"}, object, lambda: ("a",)])
def test_sets_and_objects_with_a_name_are_accepted(make):
    pytest_collection_modifyitems([collected(make(), "name"), types.SimpleNamespace(nodeid="test_it.py::test_it")])
