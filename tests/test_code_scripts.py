"""Test ``--help`` of all programs, and scripts that count tokens, sample docstrings, and count files of a step."""

from __future__ import annotations

import itertools
import re
import runpy
import subprocess
import sys

import pytest

from common.data.direct_reader import NoDirectReads
from scripts import measure_file_reads
from scripts.count_entered_files import entered
from scripts.count_tokens import Size, size_of, total
from tests import toy
from tests.conftest import ROOT

CODE = '''"""A docstring
of two lines."""

# a comment
LIMIT = 3  # another
"""A docstring of a name."""


def double(x):
    """A docstring."""
    text = "no docstring"
    return (
        x * 2
    )


class Doubled(Exception): """A docstring on a line of code."""
'''


def test_only_code_counts():
    """3 of LIMIT, 6 of def, 3 of text, 6 of return, 6 of class; brackets stand on lines of their own."""
    assert size_of(CODE) == Size(1, 24, 7)


def test_layout_does_not_change_the_tokens():
    assert size_of(CODE.replace("(\n        x * 2\n    )", "(x * 2)"))[1:] == (24, 5)


def test_files_below_the_folders_of_an_area_are_added_up_once(tmp_path):
    for name in ("a/ops/one.py", "b/ops/deep/two.py", "b/other/three.py"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(CODE)
    assert total(tmp_path, ("*/ops/*", "b/ops/*")) == Size(2, 48, 14)
    assert total(tmp_path, ("c/*",)) == Size(0, 0, 0)


# sample_docstrings.py


SOURCE = '''
class Public:
    """A class."""

    def method(self, rows: int = 1) -> int:
        """Return rows.

        More.
        """

    def _private(self): "No sample."

def _hidden(): "No sample."

def bare(): ...
'''


def sample(*arguments: str) -> str:
    command = [sys.executable, str(ROOT / "scripts" / "sample_docstrings.py"), *arguments]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def test_public_docstrings_are_shown_with_place_and_signature(tmp_path):
    (tmp_path / "common").mkdir()
    (tmp_path / "common" / "a.py").write_text(SOURCE)
    (tmp_path / "benchmarks").mkdir()
    shown = sample("--root", str(tmp_path), "--count", "2")
    assert "common/a.py:2\nclass Public\n\n    A class.\n" in shown
    assert "def Public.method(self, rows: int=1) -> int\n\n    Return rows.\n\n    More.\n" in shown
    assert "No sample" not in shown


@pytest.mark.slow
def test_a_seed_always_gives_the_same_sample():
    assert sample("--seed", "2", "--count", "3") == sample("--seed", "2", "--count", "3") != sample("--count", "3")


# count_entered_files.py


def test_a_step_enters_the_trainer_and_the_optimizer_and_no_files_of_start_and_end(data_of, tmp_path):
    overrides = [f"benchmark={toy.NAME}", "scale=test", "device=cpu", f"data_dir={data_of(toy.NAME)}"]
    with toy.known(pictures=False):
        files = entered(["train", *overrides, "benchmark.schedule.last_epoch=1", f"output_dir={tmp_path}"])
    assert files == sorted(set(files))
    assert {"common/run/trainer.py", "common/step/train_step.py", "common/optim/optimizer.py"} <= set(files)
    assert not {"common/cli.py", "common/run/start.py", "common/run/conclusion.py"} & set(files)
    assert all((ROOT / name).is_file() and name.startswith(("common/", "benchmarks/")) for name in files)


def test_a_run_without_a_second_step_is_an_error():
    with pytest.raises(RuntimeError, match="exit code 2 before its second step"):
        entered(["train", "benchmark=none"])


def programs() -> list[str]:
    """Return the scripts, and the modules that a document runs as ``python -m``; docs/notes has former commands."""
    pages = [
        *ROOT.glob("*.md"),
        *ROOT.glob("docs/*.md"),
        *ROOT.glob("*/README.md"),
        *ROOT.glob("benchmarks/*/README.md"),
    ]
    named = (re.findall(r"python -m ((?:common|benchmarks)[\w.]+)", page.read_text()) for page in pages)
    return sorted({*itertools.chain(*named), *(f"scripts.{path.stem}" for path in ROOT.glob("scripts/*.py"))})


@pytest.mark.parametrize("program", programs())
def test_every_program_explains_itself(program, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", [program, "--help"])
    monkeypatch.delitem(sys.modules, program, raising=False)
    code = 0
    try:
        runpy.run_module(program, run_name="__main__")
    except SystemExit as ended:
        code = ended.code
    assert not code
    assert "--help" in capsys.readouterr().out


# measure_file_reads.py


def test_each_way_to_read_files_is_measured_and_no_file_stays(tmp_path, capsys):
    arguments = [str(tmp_path), "--files", "3", "--bytes", "9000", "--threads", "2", "--repetitions", "1"]
    try:
        measure_file_reads.main(arguments)
    except NoDirectReads:
        pytest.skip("temporary files cannot be read past the page cache here")
    finally:
        assert list(tmp_path.iterdir()) == []
    title, _, *table = capsys.readouterr().out.splitlines()
    assert title.startswith("0.00 GB in 3 files, 2 threads")
    assert [line.split()[0] for line in table] == ["blocks", "direct", "buffered"]
