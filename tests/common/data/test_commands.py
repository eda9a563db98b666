"""What the data commands of all workloads do alike: options, checks, messages and exit codes."""

from __future__ import annotations

import argparse
import errno
import importlib
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import pytest

from common.data.commands import AssetsDir, DataCommands
from common.data.manifest import Manifest
from common.data.options import Option, Options, call, comma_separated, options_of, parse
from common.errors import ConfigError, DataError

COUNTS = {"classes": 2, "train_samples": 3}
FOLDERS = {
    "generate": {"raw_dir"},
    "prepare": {"raw_dir", "data_dir"},
    "verify": {"data_dir"},
}


class Called:
    """Commands of a workload whose functions note what they got.

    Args:
        few: ``prepare`` has workers and an option ``--few``.
        placing: ``prepare`` has a folder of assets.
        adopting: ``prepare`` can adopt.
    """

    def __init__(
        self,
        synthetic: bool = False,
        error: Exception | None = None,
        few: bool = False,
        placing: bool = False,
        adopting: bool = False,
        **more: object,
    ) -> None:
        self.options: dict[str, object] = {}

        def note(**options: object) -> Manifest:
            self.options = options
            if error is not None:
                raise error
            return Manifest("x/1", {}, COUNTS, synthetic, {})

        def generate(raw_dir: Path) -> str:
            note(raw_dir=raw_dir)
            return "many pictures"

        def prepare(raw_dir: Path, data_dir: Path) -> Manifest:
            return note(raw_dir=raw_dir, data_dir=data_dir)

        def prepare_few(
            raw_dir: Path, data_dir: Path, less: Annotated[int, Option("less", "--few", least=2)] = 5, workers: int = 1
        ) -> Manifest:
            return note(raw_dir=raw_dir, data_dir=data_dir, less=less, workers=workers)

        def prepare_assets(raw_dir: Path, data_dir: Path, assets_dir: AssetsDir = None) -> Manifest:
            return note(raw_dir=raw_dir, data_dir=data_dir, assets_dir=assets_dir)

        def adopt(folder: Path, data_dir: Path, many: int | None = None) -> Manifest:
            return note(folder=folder, data_dir=data_dir, many=many)

        def verify(data_dir: Path) -> Manifest:
            return note(data_dir=data_dir)

        self.commands = DataCommands(
            "name",
            raw="raw data",
            prepared="prepared data",
            real="Real",
            generate=generate,
            prepare=prepare_few if few else prepare_assets if placing else prepare,
            verify=verify,
            adopt=adopt if adopting else None,
            **more,
        )


@pytest.mark.parametrize("command", FOLDERS)
def test_commands_have_the_folders_that_they_need(command, monkeypatch):
    monkeypatch.setenv("MLPERF_DATA_DIR", "/elsewhere")
    called = Called()
    assert called.commands.run(command, []) == 0
    raw = "/elsewhere/name-synthetic-raw" if command == "generate" else "/elsewhere/name-raw"
    where = {"raw_dir": Path(raw), "data_dir": Path("/elsewhere/name")}
    assert called.options == {folder: where[folder] for folder in FOLDERS[command]}


@pytest.mark.parametrize("given", ["name-raw", "./name-raw", "name-raw/", "other/../name-raw"])
def test_nothing_is_generated_into_the_default_folder_of_the_real_data(given, tmp_path, monkeypatch):
    monkeypatch.setenv("MLPERF_DATA_DIR", str(tmp_path))
    called = Called()
    with pytest.raises(ConfigError, match="is the default folder of name's real raw data"):
        called.commands.run("generate", ["--raw-dir", f"{tmp_path}/{given}"])
    assert called.options == {}


def test_the_default_folder_of_generated_data_names_the_scale(monkeypatch):
    monkeypatch.setenv("MLPERF_DATA_DIR", "/elsewhere")
    called = Called()
    called.commands.run("generate", [], "demo")
    assert called.options == {"raw_dir": Path("/elsewhere/name-demo-raw")}


@pytest.mark.parametrize("command", FOLDERS)
def test_folders_that_are_given_are_taken(command):
    called = Called()
    called.commands.run(command, [text for name in FOLDERS[command] for text in (f"--{name[:-4]}-dir", f"/at/{name}")])
    assert called.options == {name: Path(f"/at/{name}") for name in FOLDERS[command]}


@pytest.mark.parametrize(
    ("given", "taken"), [("~/x", "{home}/x"), ("a/~", "a/~"), (".", "{cwd}"), ("..", "{above}"), ("x/", "x")]
)
def test_a_folder_has_a_name_and_may_begin_with_the_home_directory(given, taken, tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path / "me"))
    monkeypatch.chdir(tmp_path)
    called = Called()
    called.commands.run("verify", [f"--data-dir={given}"])
    assert called.options == {"data_dir": Path(taken.format(home=tmp_path / "me", cwd=tmp_path, above=tmp_path.parent))}


@pytest.mark.parametrize("given", ["", "/"])
def test_an_empty_folder_name_is_refused(given, capsys):
    with pytest.raises(SystemExit):
        Called().commands.run("verify", [f"--data-dir={given}"])
    assert f"--data-dir: {given!r} is no path of a file or folder" in capsys.readouterr().err


def test_the_folder_of_all_data_may_begin_with_the_home_directory(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path / "me"))
    monkeypatch.setenv("MLPERF_DATA_DIR", "~/sets")
    called = Called()
    called.commands.run("verify", [])
    assert called.options == {"data_dir": tmp_path / "me" / "sets" / "name"}


def test_raw_files_are_not_replaced_by_prepared_ones(tmp_path):
    (tmp_path / "link").symlink_to(tmp_path / "raw")
    called = Called()
    with pytest.raises(ConfigError, match=f"^prepare --data-dir {tmp_path}/link: is also --raw-dir"):
        called.commands.run("prepare", ["--raw-dir", f"{tmp_path}/raw", "--data-dir", f"{tmp_path}/link"])
    assert called.options == {}


def test_a_name_that_is_not_utf_8_is_an_error_that_shows_it():
    name = os.fsdecode(b"M\xfcller.jpg")
    try:
        f"a.jpg\t1\n{name}\t2\nb.jpg\t3\n".encode()
    except UnicodeEncodeError as error:
        found = error
    with pytest.raises(DataError, match=r"^prepare: the name 'M\\udcfcller\.jpg\\t2' is not UTF-8; rename the file"):
        Called(error=found).commands.run("prepare", [])


@pytest.mark.parametrize(
    ("command", "arguments", "options"),
    [
        ("verify", ["--raw-dir", "x"], "--data-dir"),
        ("download", ["--data-dir", "x"], "--raw-dir, --workers, --sets, --mirror, --list, --check"),
        ("prepare", ["raw_dir=x"], "--raw-dir, --data-dir, --workers, --few"),
        ("prepare", ["x"], "--raw-dir, --data-dir, --workers, --few"),
    ],
)
def test_an_unknown_option_of_a_command_is_an_error_that_lists_the_options(command, arguments, options):
    called = Called(few=True)
    with pytest.raises(ConfigError) as refused:
        called.commands.run(command, arguments)
    assert str(refused.value) == f"{command} {' '.join(arguments)}: no such option; the options are {options}"
    assert called.options == {}


def test_an_option_reaches_the_function_of_its_command_alone():
    called = Called(few=True)
    called.commands.run("prepare", [])
    assert called.options["less"] == 5
    called.commands.run("prepare", ["--few", "7"])
    assert called.options["less"] == 7
    called.commands.run("verify", [])
    assert "less" not in called.options


@pytest.mark.parametrize(("memory", "workers"), [(0, os.cpu_count()), (1 << 60, 1)])
def test_workers_have_a_default_for_each_command_that_has_workers(memory, workers):
    called = Called(few=True, memory_per_worker=memory)
    called.commands.run("prepare", [])
    assert called.options["workers"] == workers
    called.commands.run("prepare", ["--workers", "2"])
    assert called.options["workers"] == 2
    called.commands.run("verify", [])
    assert "workers" not in called.options


@pytest.mark.parametrize(("option", "value", "least"), [("--workers", 0, 1), ("--workers", -1, 1), ("--few", 1, 2)])
def test_values_out_of_range_are_refused_before_anything_is_done(option, value, least):
    called = Called(few=True)
    with pytest.raises(ConfigError, match=f"^{option}={value}: at least {least}$"):
        called.commands.run("prepare", [option, str(value)])
    assert called.options == {}


@pytest.mark.parametrize(
    ("command", "synthetic", "output"),
    [
        ("generate", True, "/raw: many pictures\n"),
        ("prepare", False, "/data: Real, classes 2, train_samples 3\n"),
        ("prepare", True, "/data: synthetic, classes 2, train_samples 3\n"),
        ("verify", False, "/data: Real, classes 2, train_samples 3\n"),
    ],
)
def test_every_command_prints_its_result(command, synthetic, output, capsys):
    folders = {"raw_dir": ["--raw-dir", "/raw"], "data_dir": ["--data-dir", "/data"]}
    Called(synthetic).commands.run(command, [text for name in FOLDERS[command] for text in folders[name]])
    assert capsys.readouterr().out == output


def test_remarks_follow_the_summary(capsys):
    def remarks(made, data_dir):
        return [f"{made.format} in {data_dir}"]

    Called(remarks=remarks).commands.run("verify", ["--data-dir", "d"])
    assert capsys.readouterr().out.splitlines() == ["d: Real, classes 2, train_samples 3", "x/1 in d"]


@pytest.mark.parametrize("there", [(), ("other.pth",), ("other.pth", "words.txt")])
def test_prepare_prints_which_assets_are_missing(there, tmp_path, capsys):
    for name in there:
        (tmp_path / name).touch()
    called = Called(placing=True, assets=(("weights.pth", "other.pth"), ("words.txt",)))
    called.commands.run("prepare", ["--data-dir", "d", "--assets-dir", str(tmp_path)])
    missing = ["weights.pth, words.txt", "words.txt", ""][len(there)]
    state = (
        f"lacks {missing}; put it there, or give its folder as assets_dir" if missing else "complete, for assets_dir"
    )
    assert capsys.readouterr().out.splitlines()[1] == f"{tmp_path}: {state}"


@pytest.mark.parametrize(
    ("number", "remedy"),
    [(errno.ENOSPC, "free some space"), (errno.EACCES, "solve this problem")],
)
def test_a_file_that_cannot_be_written_is_an_error_of_the_data(number, remedy):
    error = OSError(number, os.strerror(number), "/data/x")
    with pytest.raises(DataError, match=rf"^prepare: .*'/data/x'; {remedy} and run the command again$"):
        Called(error=error).commands.run("prepare", [])


@pytest.mark.parametrize("found", ["nothing", "file", "empty folder"])
@pytest.mark.parametrize("benchmark", ["bert", "dlrm_dcnv2", "unet3d"])
def test_a_wrong_folder_to_adopt_is_named_and_nothing_is_written(tmp_path, benchmark, found):
    folder, data = tmp_path / "others", tmp_path / "data"
    if found == "file":
        folder.touch()
    elif found == "empty folder":
        folder.mkdir()
    more = ["--eval-file", str(tmp_path / "none")] if benchmark == "bert" else []
    commands = importlib.import_module(f"benchmarks.{benchmark}.prepare").COMMANDS
    with pytest.raises(DataError, match=f"{folder} (does not exist or is no folder|lacks|holds no)"):
        commands.run("prepare", ["--adopt", str(folder), "--data-dir", str(data), *more])
    assert not data.exists()


@pytest.mark.parametrize("benchmark", ["dlrm", "resnet", "ssd300"])
def test_other_workloads_have_nothing_to_adopt(tmp_path, benchmark):
    commands = importlib.import_module(f"benchmarks.{benchmark}.prepare").COMMANDS
    with pytest.raises(ConfigError, match=f"^prepare --adopt {tmp_path}: no such option"):
        commands.run("prepare", ["--adopt", str(tmp_path)])


def test_options_of_adopting_and_of_preparing_do_not_go_together(tmp_path):
    called = Called(few=True, adopting=True)
    assert called.commands.run("prepare", ["--adopt", str(tmp_path), "--many", "3", "--data-dir", "d"]) == 0
    assert called.options == {"folder": tmp_path, "data_dir": Path("d"), "many": 3}
    assert called.commands.run("prepare", ["--few", "3", "--raw-dir", "r", "--data-dir", "d"]) == 0
    assert called.options == {"raw_dir": Path("r"), "data_dir": Path("d"), "less": 3, "workers": os.cpu_count()}
    for wrong in (
        ["--adopt", str(tmp_path), "--few", "3"],
        ["--many", "3"],
        ["--adopt", str(tmp_path), "--raw-dir", "r"],
    ):
        called.options = {}
        with pytest.raises(ConfigError, match=f"{' '.join(wrong[-2:])}: no such option; the options are "):
            called.commands.run("prepare", wrong)
        assert called.options == {}


def test_whoever_reads_the_output_may_stop():
    with pytest.raises(BrokenPipeError):
        Called(error=BrokenPipeError()).commands.run("prepare", [])


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
    dry: Annotated[bool, Option("write nothing, 0 %")] = False,
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
    output = " ".join(capsys.readouterr().out.split())
    for text in ("of a table (default 3)", "of it (default 4,5)", "--dry write nothing, 0 %"):
        assert text in output
    assert "SIDES SIDES (default 1 2)" in output
