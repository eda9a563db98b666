"""Files that a command writes are checked before its work, and written whole."""

from __future__ import annotations

import pytest

from common.config.output_files import require_writable, write_file
from common.errors import ConfigError, SuiteError


def test_missing_folders_are_made(tmp_path):
    path = tmp_path / "a" / "b" / "page.html"
    require_writable("--page", path)
    assert not path.parent.exists()
    write_file(path, "text")
    assert path.read_text() == "text"
    assert [found.name for found in path.parent.iterdir()] == ["page.html"]


def test_a_path_that_cannot_become_a_file_is_refused_before_the_work(tmp_path):
    (tmp_path / "file").touch()
    for path, reason in ((tmp_path, "is a folder"), (tmp_path / "file" / "a" / "b", "file is no folder")):
        with pytest.raises(ConfigError, match=f"--json .*{reason}"):
            require_writable("--json", path)


def test_a_file_that_cannot_be_written_leaves_nothing(tmp_path):
    with pytest.raises(SuiteError, match="cannot be written: Is a directory"):
        write_file(tmp_path, "text")
    assert not list(tmp_path.iterdir())
    assert not list(tmp_path.parent.glob(f".{tmp_path.name}.*"))
