"""Overrides of paths and free text survive Hydra's grammar, OmegaConf's and the shell's."""

import subprocess
import sys
from pathlib import Path

import pytest
from hydra.core.override_parser.overrides_parser import OverridesParser

from common.config.composition import compose
from common.config.override import override, parsed
from common.errors import ConfigError
from tests.conftest import ROOT

NASTY = (
    "/users/jürgen", "/data/数据", "/a=b", "/a,b", "/a(b)", "/a'b", "/a#b", '/a"b', "/a\\b", "/a\\", "/a\\\\", '/a\\"b',
    "/$HOME", "/a${b}", "/a\\${b}", "/a${", "/{a}", "/[a]", "[a]", "{a: b}", "/a:b", "/a b", " a ", "~/a", "/100%",
    "/a\nb", "/a\tb", "/a;b&c|d", "/*?", "`a`", "!a", "-a", "null", "true", "12", "1_000", "1e3", "", "'a'", '"', "???",
    "a@b", "+a", "./a", "jürgen's (runs), #1 = a",
)  # fmt: skip


@pytest.mark.parametrize("text", NASTY)
def test_hydra_reads_the_same_text(text):
    argument = override("output_dir", text)
    assert OverridesParser.create().parse_override(argument).key_or_group == "output_dir"
    assert parsed(argument) == ("output_dir", text)


def test_composed_values_are_the_same_texts():
    """One composition for all: as entries of a section, whose keys are numbers."""
    overrides = [override(f"+system.environment.v{number}", text) for number, text in enumerate(NASTY)]
    tree = compose(["benchmark=resnet", "scale=test", *overrides])
    assert tuple(tree["system"]["environment"][f"v{number}"] for number in range(len(NASTY))) == NASTY


@pytest.mark.parametrize("text", NASTY)
def test_a_plain_path_has_no_quotes_and_others_do(text):
    argument = override("data_dir", text)
    assert argument == f"data_dir={text}" if text == "./a" else argument.startswith('data_dir="')


def test_a_shell_passes_on_what_the_command_prints():
    """In a shell: ``train "$(python -m common.config.override data_dir "$folder")"``."""
    folder = "/jürgen's (runs), #1 = $a `b` \\\n"
    script = 'printf %s "$("$1" -m common.config.override data_dir "$2")"'
    printed = subprocess.run(
        ["bash", "-c", script, "bash", sys.executable, folder], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert parsed(printed.stdout) == ("data_dir", folder)


TYPED = ("/users/jürgen", "/a=b(", "/a,b", "/a(b)", "/it's", "/a#b", "/a\nb")


@pytest.mark.parametrize("text", TYPED)
def test_the_message_has_a_form_that_bash_and_hydra_read(text):
    with pytest.raises(ConfigError, match="in bash: ") as caught:
        compose(["benchmark=resnet", "scale=test", f"data_dir={text}"])
    typed = str(caught.value).rpartition("in bash: ")[2]
    words = subprocess.run(["bash", "-c", f"printf %s {typed}"], capture_output=True, text=True, check=True)
    assert compose(["benchmark=resnet", "scale=test", words.stdout])["data_dir"] == text


def test_the_message_expands_the_home_folder(monkeypatch):
    monkeypatch.setenv("HOME", "/users/jürgen")
    with pytest.raises(ConfigError, match="/users/jürgen/data"):
        parsed("data_dir=~/data")


@pytest.mark.parametrize("argument", ["foo", "foo=[1", "foo={a", "foo='a"])
def test_quotes_are_not_advised_where_something_else_is_missing(argument):
    with pytest.raises(ConfigError) as caught:
        parsed(argument)
    assert "in bash" not in str(caught.value)


def test_no_program_composes_an_override_of_a_path_by_hand():
    """``f"data_dir={…}"`` as an element of a list, which is how arguments are composed."""
    keys = ("data_dir", "output_dir", "assets_dir", "resume", "bench.report", "launch.results", "launch.series")
    found = [
        f"{path.relative_to(ROOT)}: {line.strip()}"
        for folder in ("common", "benchmarks", "scripts", "docker")
        for path in sorted(Path(ROOT, folder).rglob("*"))
        if path.suffix in (".py", ".sh", ".sub")
        for line in path.read_text().splitlines()
        if any(f'[f"{key}={{' in line or f', f"{key}={{' in line or f'"{key}=$' in line for key in keys)
    ]
    assert found == []
