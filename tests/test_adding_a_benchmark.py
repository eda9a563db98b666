"""Test that the excerpts in docs/adding_a_benchmark.md equal the files that they name."""

import re

import pytest

from common import cli
from tests import toy
from tests.conftest import ROOT

PAGE = (ROOT / "docs" / "adding_a_benchmark.md").read_text()
SHOWN = re.findall(r"^```(?:python|yaml)\n# ((?:tests/toy|common)/\S+)\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)


@pytest.mark.parametrize(("name", "text"), SHOWN, ids=[f"{number}-{name}" for number, (name, _) in enumerate(SHOWN)])
def test_an_excerpt_is_the_file_s(name, text):
    assert text in (ROOT / name).read_text()


def test_the_page_shows_every_part_and_nothing_that_is_not_checked():
    assert {name.rpartition("/")[2] for name, _ in SHOWN} >= {
        "config.py", "data.py", "evaluate.py", "prepare.py", "workload.py", "toy.yaml",
    }  # fmt: skip
    assert len(SHOWN) == len(re.findall(r"^```(?:python|yaml)$", PAGE, re.MULTILINE))


def test_the_list_has_the_example(capsys):
    with toy.known():
        assert cli.run(["list"]) == 0
    (row,) = [line.split() for line in capsys.readouterr().out.splitlines() if line.startswith("toy ")]
    assert row[:4] == ["toy", "mean_absolute_error", "<=", "0.124"]
    assert "test" in row


def test_the_example_is_as_small_as_the_page_says():
    python, yaml = (
        sum(len([line for line in path.read_text().splitlines() if line.strip()]) for path in files)
        for files in (
            [path for path in (ROOT / "tests" / "toy").glob("[!_]*.py") if path.name != "pictures.py"],
            [path for path in (ROOT / "tests" / "toy" / "configs").rglob("*.yaml") if "pictures" not in str(path)],
        )
    )
    claimed = re.search(r"(\d+) lines of Python and (\d+) of YAML", PAGE)
    assert (python, yaml) <= (int(claimed[1]) + 5, int(claimed[2]) + 5)
    assert python < 300
