"""What annotations of a function or a class say about its options."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import pytest

from common.data.options import Option, Options, call, comma_separated, options_of, parse
from common.errors import ConfigError


@dataclass(frozen=True)
class Sizes(Options):
    rows: Annotated[int, Option("of a table", least=1, most=9)] = 3
    sides: tuple[int, int] = (1, 2)
    parts: Annotated[tuple[int, ...], Option("of it", parse=comma_separated)] = (4, 5)
    kind: Literal["one", "other"] = "one"
    rate: Annotated[float | None, Option(name="--speed")] = None
    files: Annotated[tuple[int, ...], Option(least=0)] = (1,)


def function(
    folder: Path,
    sizes: Sizes,
    dry: Annotated[bool, Option("write nothing")] = False,
    names: Sequence[str] | None = None,
    mirror: list[str] | None = None,
    form: Annotated[str, Option(choices={"a": 1, "b": 2})] = "a",
):
    return folder, sizes, dry, names, mirror, form


def called(*argv: str):
    values, strays = parse(argparse.ArgumentParser(), list(options_of(function)), ["--folder", "f", *argv])
    assert not strays
    return call(function, values)


def test_every_parameter_has_a_default_or_must_be_given(capsys):
    assert called() == (Path("f"), Sizes(), False, None, None, "a")
    with pytest.raises(SystemExit):
        parse(argparse.ArgumentParser(), list(options_of(function)), [])
    assert "the following arguments are required: --folder" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("argv", "expected"),
    [
        ("--rows 9 --sides 5 6 --parts 7,8,9", (Path("f"), Sizes(9, (5, 6), (7, 8, 9)), False, None, None, "a")),
        ("--kind other --speed 0.5", (Path("f"), Sizes(kind="other", rate=0.5), False, None, None, "a")),
        ("--files 3 4 --dry", (Path("f"), Sizes(files=(3, 4)), True, None, None, "a")),
        ("--names x y", (Path("f"), Sizes(), False, ("x", "y"), None, "a")),
        ("--mirror x --mirror y --form b", (Path("f"), Sizes(), False, None, ["x", "y"], "b")),
    ],
)
def test_types_decide_how_values_are_written(argv, expected):
    assert called(*argv.split()) == expected


@pytest.mark.parametrize("argv", ["--kind none", "--form c", "--sides 1", "--rows many"])
def test_other_values_end_the_command(argv, capsys):
    with pytest.raises(SystemExit):
        called(*argv.split())
    assert f"argument {argv.split()[0]}" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("argv", "made", "message"),
    [
        ("--rows 10", {"rows": 10}, "^--rows=10: 1 to 9$"),
        ("--rows 0", {"rows": 0}, "^--rows=0: 1 to 9$"),
        ("--files 2 -1", {"files": (2, -1)}, "^--files=2 -1: at least 0$"),
    ],
)
def test_ranges_hold_on_the_command_line_and_in_python(argv, made, message):
    with pytest.raises(ConfigError, match=message):
        called(*argv.split())
    with pytest.raises(ConfigError, match=message):
        Sizes(**made)


def test_other_choices_are_refused_in_python():
    with pytest.raises(ConfigError, match=r"^--kind=none: one of one, other$"):
        Sizes(kind="none")


def test_the_help_has_text_and_default(capsys):
    with pytest.raises(SystemExit):
        called("--help")
    said = " ".join(capsys.readouterr().out.split())
    for text in ("of a table (default 3)", "SIDES SIDES (default 1 2)", "of it (default 4,5)", "--dry write nothing"):
        assert text in said
