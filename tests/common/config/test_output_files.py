"""Files that a command writes are checked before its work, and written whole."""

from __future__ import annotations

import os
import subprocess
import sys
from contextlib import nullcontext

import pytest

from common import cli
from common.config.output_files import require_writable, write_file
from common.errors import ConfigError, SuiteError
from tests.conftest import ROOT


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


@pytest.mark.parametrize("words", [["report", "FILE", "--output", "LINK"], ["schedule", "FILE", "--json", "LINK"]])
def test_a_command_does_not_replace_the_file_that_it_reads(words, tmp_path, capsys):
    file, link = tmp_path / "file", tmp_path / "link"
    file.write_text("text")
    link.symlink_to(file)
    assert cli.run([{"FILE": str(file), "LINK": str(link)}.get(word, word) for word in words]) == ConfigError.exit_code
    assert f"{link}: the command reads this file, and would replace it" in capsys.readouterr().err
    assert file.read_text() == "text"


def test_a_file_that_cannot_be_written_leaves_nothing(tmp_path):
    with pytest.raises(SuiteError, match="cannot be written: Is a directory"):
        write_file(tmp_path, "text")
    assert not list(tmp_path.iterdir())
    assert not list(tmp_path.parent.glob(f".{tmp_path.name}.*"))


def test_a_link_stays_a_link_and_its_file_is_replaced(tmp_path):
    file, link = tmp_path / "folder" / "file", tmp_path / "link"
    link.symlink_to(file)
    for text in ("first", "second"):  # the file of the link is missing at first
        require_writable("--json", link)
        write_file(link, text)
        assert link.readlink() == file
        assert file.read_text() == text
    assert [found.name for found in file.parent.iterdir()] == ["file"]


def test_a_pipe_receives_the_content_and_stays(tmp_path):
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    reading = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    try:
        write_file(pipe, "text")
        assert os.read(reading, 100) == b"text"
    finally:
        os.close(reading)
    assert pipe.is_fifo()
    assert list(tmp_path.iterdir()) == [pipe]


@pytest.mark.parametrize("writable", ["pipe", "folder"])
def test_of_a_pipe_the_permission_of_the_pipe_itself_counts(tmp_path, monkeypatch, writable):
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    allowed = {"pipe": pipe, "folder": tmp_path}[writable]
    monkeypatch.setattr(os, "access", lambda path, mode: path == allowed)
    with pytest.raises(ConfigError, match="may not be written") if writable == "folder" else nullcontext():
        require_writable("--json", pipe)


@pytest.mark.parametrize("mode", ["wb", "ab"])
def test_standard_output_keeps_the_other_output_of_the_command(tmp_path, mode):
    """Standard output is redirected to a file with `>` or `>>`. /dev/stdout is a link to /proc/self/fd/1."""
    code = (
        "from pathlib import Path; from common.config.output_files import require_writable, write_file; print('table');"
        "path = Path('/proc/self/fd/1'); require_writable('--json', path); write_file(path, 'json\\n'); print('end')"
    )
    output = tmp_path / "output"
    output.write_text("before\n")
    with output.open(mode) as file:
        subprocess.run([sys.executable, "-c", code], stdout=file, check=True, cwd=ROOT)
    assert output.read_text() == ("before\n" if mode == "ab" else "") + "table\njson\nend\n"
