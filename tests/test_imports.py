"""Test the direction of imports, and that no file contains paths of a developer's machine."""

from __future__ import annotations

import ast
import functools
import re
import runpy
import subprocess
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path

import pytest

from common import LAYERS
from tests.conftest import ROOT

WORKLOAD_TABLE = ("common/cli.py",)
"""The file of the shared layer that reads the table of workloads."""

OTHER_FOLDERS = {".git", ".venv", "build", "node_modules"}
OF_RUNS = {"data", "measured", "outputs", "results", "runs"}
"""Folders that runs create at the top of a checkout."""
TEXT = {".cfg", ".ini", ".json", ".md", ".py", ".sh", ".sub", ".toml", ".txt", ".yaml", ".yml"}
MACHINE_PATH = re.compile(r"(?<![\w.:/}])/(?:home|Users)/\w+")


def files(folder: Path) -> Iterator[Path]:
    """Return all files below ``folder`` that belong to the repository."""
    for path in sorted(folder.iterdir()):
        if path.is_dir():
            others = OTHER_FOLDERS | OF_RUNS if folder == ROOT else OTHER_FOLDERS
            if path.name not in others and not path.name.endswith((".egg-info", "cache__", "_cache")):
                yield from files(path)
        elif path.is_file():
            yield path


def imported(source: str, package: str = "") -> set[str]:
    """Return the names that ``source`` in ``package`` imports; for ``from a.b import c``, ``a.b`` and ``a.b.c``."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            above = package.split(".")[: len(package.split(".")) - node.level + 1] if node.level else []
            origin = ".".join([*above, *filter(None, [node.module])])
            found |= {origin} | {f"{origin}.{alias.name}" for alias in node.names}
        elif isinstance(node, ast.Call) and _name(node.func) in ("import_module", "__import__"):
            found |= {argument.value for argument in node.args if isinstance(argument, ast.Constant)}
    return found


def _name(function: ast.expr) -> str:
    """Return the last part of the name of a function that is called, and an empty text for other expressions."""
    match function:
        case ast.Name(name) | ast.Attribute(attr=name):
            return name
        case _:
            return ""


@functools.cache
def modules(top: str) -> list[tuple[str, set[str]]]:
    """Yield path and imports of every module below the folder ``top``."""
    names = [path.relative_to(ROOT) for path in files(ROOT / top) if path.suffix == ".py"]
    return [(name.as_posix(), imported((ROOT / name).read_text(), ".".join(name.parts[:-1]))) for name in names]


def within(name: str, package: str) -> bool:
    """Return whether ``name`` is ``package`` or inside it."""
    return name == package or name.startswith(package + ".")


def test_what_runs_leave_is_no_part_of_the_repository(tmp_path, monkeypatch):
    monkeypatch.setattr("tests.test_imports.ROOT", tmp_path)
    for name in ("data", "outputs", "results", "runs", "common/data"):
        (tmp_path / name).mkdir(parents=True)
        (tmp_path / name / "a.txt").touch()
    assert list(files(tmp_path)) == [tmp_path / "common" / "data" / "a.txt"]


def test_the_shared_layer_imports_nothing_of_the_workloads_but_their_table():
    found = {path: {name for name in names if within(name, "benchmarks")} for path, names in modules("common")}
    assert found
    for path, names in found.items():
        allowed = {"benchmarks", "benchmarks.WORKLOADS"} if path in WORKLOAD_TABLE else set()
        assert names <= allowed, f"{path} imports {sorted(names - allowed)}"


def packages_used() -> Iterator[tuple[str, str, str]]:
    """Yield the path of each module of ``common``, its package, and each other part of ``common`` that it imports."""
    for path, names in modules("common"):
        package = path.split("/")[1].removesuffix(".py")
        for name in names:
            if within(name, "common") and name.count("."):
                other = name.split(".")[1]
                if other != package:
                    yield path, package, other


def test_every_package_has_a_layer():
    found = {path.name.removesuffix(".py") for path in (ROOT / "common").iterdir() if not path.name.startswith("__")}
    assert found == {package for layer in LAYERS for package in layer}


def test_imports_go_down():
    layer = {package: number for number, packages in enumerate(LAYERS) for package in packages}
    used = sorted(set(packages_used()))
    assert used
    assert [(path, other) for path, package, other in used if layer[other] <= layer[package]] == []


def test_the_picture_of_the_layers_is_drawn_from_the_code():
    drawn = runpy.run_path(str(ROOT / "scripts" / "draw_layers.py"))["draw"]()
    assert (ROOT / "docs" / "layers.svg").read_text() == drawn, "run: python scripts/draw_layers.py"


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


def module_graph() -> dict[str, set[str]]:
    """Return the modules that each module of ``common`` and ``benchmarks`` imports, also inside functions.

    A package counts only if one of its own names is imported, not if one of its modules is.
    """
    found = {}
    for top in ("common", "benchmarks"):
        for path, names in modules(top):
            found[path.removesuffix(".py").removesuffix("/__init__").replace("/", ".")] = names
    return {
        module: {name for name in names if _counts(name, names, found)} - {module} for module, names in found.items()
    }


def _counts(name: str, names: set[str], existing: Collection[str]) -> bool:
    below = [other for other in names if other.rpartition(".")[0] == name]
    return name in existing and not (below and all(other in existing for other in below))


def circles(graph: Mapping[str, set[str]]) -> set[tuple[str, ...]]:
    """Return the sets of modules that import each other, each sorted."""

    def reached(start: str) -> set[str]:
        seen: set[str] = set()
        waiting = [start]
        while waiting:
            for other in graph[waiting.pop()] - seen:
                seen.add(other)
                waiting.append(other)
        return seen

    reach = {module: reached(module) for module in graph}
    return {
        tuple(sorted(other for other in reach[module] if module in reach[other]))
        for module in graph
        if module in reach[module]
    }


def test_no_modules_import_each_other():
    assert circles(module_graph()) == set()


def test_circles_are_found_through_any_number_of_modules():
    graph = {"a": {"b"}, "b": {"c"}, "c": {"a", "d"}, "d": {"e"}, "e": set(), "f": {"g"}, "g": {"f"}}
    assert circles(graph) == {("a", "b", "c"), ("f", "g")}


def test_a_package_counts_where_a_name_of_its_own_is_imported():
    existing = ("p", "p.q")
    assert not _counts("p", imported("from p import q"), existing)
    assert _counts("p", imported("from p import q, NAME"), existing)
    assert _counts("p", imported("import p"), existing)


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
    wrong = []
    for path in files(ROOT):
        if path.suffix in TEXT or path.name in ("Makefile", "Dockerfile"):
            for number, line in enumerate(path.read_text(errors="replace").splitlines(), 1):
                if here in line or MACHINE_PATH.search(line):
                    wrong.append(f"{path.relative_to(ROOT)}:{number}: {line.strip()}")
    assert not wrong, "\n".join(wrong)


@pytest.mark.skipif(not (ROOT / ".git").exists(), reason="not a git checkout")
@pytest.mark.parametrize("folder", sorted(OF_RUNS))
def test_results_in_a_default_folder_leave_the_source_unchanged(folder):
    """Git ignores the folder. Otherwise, logs and reports would say that the source differs from its commit."""
    assert subprocess.run(["git", "-C", ROOT, "check-ignore", "--quiet", f"{folder}/file"], check=False).returncode == 0
