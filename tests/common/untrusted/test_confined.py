"""Confined processes can do only what they are allowed to."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from common.untrusted.confined import ENVIRONMENT, ConfinedResult, command, run_confined


def run(tmp_path: Path, code: str, readable: tuple[Path, ...] = (), cpu_seconds: int = 20) -> ConfinedResult:
    """Execute ``code`` in a confined process, as the module ``tried``."""
    modules, folder = tmp_path / "modules", tmp_path / "folder"
    modules.mkdir()
    folder.mkdir()
    (modules / "tried.py").write_text(code)
    sys.path.append(str(modules))
    try:
        start = command("tried", (), folder=folder, readable=readable, cpu_seconds=cpu_seconds)
    finally:
        sys.path.remove(str(modules))
    done = subprocess.run(start, cwd=folder, env=ENVIRONMENT, capture_output=True, text=True, check=False, timeout=120)
    return ConfinedResult(done.returncode, done.stderr, "")


def test_it_computes_and_prints(tmp_path):
    ended = run(tmp_path, "import math, sys; sys.stderr.write(f'{math.sqrt(49):g}')")
    assert (ended.code, ended.text) == (0, "7")


def test_it_reads_only_given_files(tmp_path):
    given, other = tmp_path / "given", tmp_path / "other"
    given.write_text("given")
    other.write_text("other")
    code = f"import sys; sys.stderr.write(open({str(given)!r}).read()); open({str(other)!r})"
    ended = run(tmp_path, code, readable=(given,))
    assert ended.text.startswith("given")
    assert f"may not read {str(other)!r}" in ended.text
    assert ended.code == 1


def test_it_does_not_follow_a_link_to_another_file(tmp_path):
    (tmp_path / "secret").write_text("secret")
    folder = tmp_path / "given"
    folder.mkdir()
    (folder / "link").symlink_to(tmp_path / "secret")
    ended = run(tmp_path, f"open({str(folder / 'link')!r})", readable=(folder,))
    assert "may not read" in ended.text


@pytest.mark.parametrize(
    "code",
    [
        "open('{target}', 'w')",
        "import os; os.open('{target}', os.O_CREAT | os.O_WRONLY)",
        "import pathlib; pathlib.Path('{target}').write_text('x')",
        "import os; os.mkdir('{target}')",
        "import os; os.symlink('/', '{target}')",
        "import os; os.symlink('own', '{target}')",
        "import os; open('own', 'w').close(); os.rename('own', '{target}')",
        "import os; open('own', 'w').close(); os.link('own', '{target}')",
        "import os; os.system('touch {target}')",
        "import subprocess; subprocess.run(['touch', '{target}'])",
        "import os; os.posix_spawn('/usr/bin/touch', ['touch', '{target}'], {{}})",
        "import os; os.execv('/usr/bin/touch', ['touch', '{target}'])",
        "import os; os.fork() or os.execv('/usr/bin/touch', ['touch', '{target}'])",
        "import socket; socket.create_connection(('127.0.0.1', 9))",
    ],
)
def test_it_neither_writes_elsewhere_nor_starts_a_process_nor_connects(tmp_path, code):
    target = tmp_path / "made"
    ended = run(tmp_path, code.format(target=target))
    assert "PermissionError: a confined process may not" in ended.text
    assert ended.code == 1
    assert not target.exists()


def test_it_writes_into_its_own_folder(tmp_path):
    assert run(tmp_path, "open('own', 'w').write('x')").code == 0
    assert (tmp_path / "folder" / "own").read_text() == "x"


def test_it_has_no_variables_of_the_caller(tmp_path, monkeypatch):
    monkeypatch.setenv("PASSWORD", "secret")
    monkeypatch.setenv("PYTHONSTARTUP", "/nowhere")
    ended = run(tmp_path, "import os, sys; sys.stderr.write(' '.join(sorted(os.environ)))")
    assert set(ENVIRONMENT) <= set(ended.text.split()) <= {*ENVIRONMENT, "LC_CTYPE", "LD_LIBRARY_PATH", "PWD"}


def test_it_ends_when_it_takes_too_much_memory(tmp_path):
    assert "MemoryError" in run(tmp_path, "x = bytearray(2 ** 30)").text


def test_it_ends_when_it_takes_too_much_time(tmp_path):
    assert run(tmp_path, "while True: pass", cpu_seconds=1).code < 0


def test_a_checker_that_does_not_end_is_stopped(tmp_path):
    ended = run_confined("compliance_checker", ["--ruleset", "4.0.0", "/dev/stdin"], readable=(), seconds=0.01)
    assert ended.stopped == "it was stopped after 0.01 seconds"
