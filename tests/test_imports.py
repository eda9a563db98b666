"""Imports run one way, and no file knows the machine that it was written on."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.conftest import ROOT

WORKLOAD_TABLE = ("common/cli.py", "common/config.py")
"""The files of the shared layer that may read the table of workloads."""

OTHER_FOLDERS = {".git", ".venv", "build", "data", "runs", "node_modules"}
TEXT = {".cfg", ".ini", ".json", ".md", ".py", ".sh", ".sub", ".toml", ".txt", ".yaml", ".yml"}
MACHINE_PATH = re.compile(r"(?<![\w.:/}])/(?:home|Users)/\w+")


def files(folder: Path) -> Iterator[Path]:
    """All files below ``folder`` that belong to the repository."""
    for path in sorted(folder.iterdir()):
        if path.is_dir():
            if path.name not in OTHER_FOLDERS and not path.name.endswith((".egg-info", "cache__", "_cache")):
                yield from files(path)
        elif path.is_file():
            yield path


def imported(source: str, package: str = "") -> set[str]:
    """Every name that ``source`` imports; of ``from a.b import c`` both ``a.b`` and ``a.b.c``.

    Args:
        source: Python.
        package: the package that relative imports start from.
    """
    found: set[str] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            above = package.split(".")[: len(package.split(".")) - node.level + 1] if node.level else []
            origin = ".".join([*above, *filter(None, [node.module])])
            found |= {origin} | {f"{origin}.{alias.name}" for alias in node.names}
        elif isinstance(node, ast.Call) and ast.unparse(node.func) in ("importlib.import_module", "__import__"):
            found |= {argument.value for argument in node.args if isinstance(argument, ast.Constant)}
    return found


def modules(top: str) -> Iterator[tuple[str, set[str]]]:
    """Path and imports of every module below the folder ``top``."""
    for path in files(ROOT / top):
        if path.suffix == ".py":
            name = path.relative_to(ROOT)
            yield name.as_posix(), imported(path.read_text(), ".".join(name.parts[:-1]))


def within(name: str, package: str) -> bool:
    """Whether ``name`` is ``package`` or inside it."""
    return name == package or name.startswith(package + ".")


def test_the_shared_layer_imports_nothing_of_the_workloads_but_their_table():
    found = {path: {name for name in names if within(name, "benchmarks")} for path, names in modules("common")}
    assert found
    for path, names in found.items():
        allowed = {"benchmarks", "benchmarks.WORKLOADS"} if path in WORKLOAD_TABLE else set()
        assert names <= allowed, f"{path} imports {sorted(names - allowed)}"


def test_no_workload_imports_another():
    checked = 0
    for path, names in modules("benchmarks"):
        own = path.split("/")[1]
        for name in names:
            checked += 1
            assert not within(name, "benchmarks") or name == "benchmarks" or within(name, f"benchmarks.{own}"), (
                f"{path} imports {name}"
            )
    assert checked


def test_only_tests_import_tests():
    for top in ("common", "benchmarks"):
        for path, names in modules(top):
            assert not [name for name in names if within(name, "tests")], path


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("import a.b", {"a.b"}),
        ("from a.b import c", {"a.b", "a.b.c"}),
        ("def f():\n    from a import b", {"a", "a.b"}),
        ("from . import c", {"p.q", "p.q.c"}),
        ("from ..r import c", {"p.r", "p.r.c"}),
        ("import importlib\nimportlib.import_module('a.b')", {"importlib", "a.b"}),
    ],
)
def test_imports_are_found_wherever_they_stand(source, expected):
    assert imported(source, "p.q") == expected


def test_no_file_names_a_path_of_one_machine():
    here = str(ROOT) if len(ROOT.parts) > 2 else "\0"  # a checkout in /app says nothing
    told = []
    for path in files(ROOT):
        if path.suffix in TEXT or path.name in ("Makefile", "Dockerfile"):
            for number, line in enumerate(path.read_text(errors="replace").splitlines(), 1):
                if here in line or MACHINE_PATH.search(line):
                    told.append(f"{path.relative_to(ROOT)}:{number}: {line.strip()}")
    assert not told, "\n".join(told)
