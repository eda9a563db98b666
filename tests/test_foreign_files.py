"""Test that every call that opens or parses a file is in ``foreign_files.txt`` or in ``common/untrusted``.

``common/untrusted`` reads files of unknown origin within bounds. The table gives the reason why another call is safe:
the file is *ours* (this program or its user wrote it), a *library* reads it within its own bounds, or the call is
*bounded*: it reads parts whose sizes were checked.
"""

from __future__ import annotations

import ast
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.conftest import ROOT

TABLE = Path(__file__).with_name("foreign_files.txt")
KINDS = ("ours", "library", "bounded")
EVERYWHERE = {"open", "read_text", "read_bytes", "fromfile", "memmap", "ZipFile", "GzipFile", "TarFile"}
"""Names of functions and methods that open a file, in any module or class."""
OF_MODULES = {
    "json": {"load", "loads"},
    "pickle": {"load", "loads", "Unpickler"},
    "torch": {"load"},
    "np": {"load", "fromfile", "memmap", "loadtxt", "genfromtxt"},
    "yaml": {"load", "safe_load", "load_all", "safe_load_all"},
    "OmegaConf": {"load"},
    "gzip": {"open", "decompress"},
    "zlib": {"decompress", "decompressobj"},
    "tarfile": {"open"},
    "h5py": {"File"},
    "lmdb": {"open"},
    "lzma": {"open"},
    "parquet": {"ParquetFile", "read_table"},
    "soundfile": {"SoundFile", "read"},
}
"""Names that read a file only as attributes of a module."""
OWN_OPENERS = {"os", "Image", "webbrowser", "ZarrArray", "self", "queue"}
"""Objects whose method ``open`` does not read the content of a file."""


def is_reading(call: ast.Call) -> str | None:
    """Return the name of the call if it opens or parses a file for reading; otherwise None."""
    name = ast.unparse(call.func)
    owner, _, method = name.rpartition(".")
    module = owner.rpartition(".")[2] or owner
    if method in OF_MODULES.get(module, ()):
        return f"{module}.{method}"
    if method not in EVERYWHERE or (method == "open" and module in OWN_OPENERS):
        return None
    if not owner and method.startswith("read_"):
        return None  # those of common/untrusted, which are imported by their names
    return None if method == "open" and writes(call, 0 if owner else 1) else method


def writes(call: ast.Call, position: int) -> bool:
    """Return whether a call of ``open`` only writes; ``position`` is that of its mode."""
    modes = [*call.args[position : position + 1], *(key.value for key in call.keywords if key.arg == "mode")]
    return any(isinstance(mode, ast.Constant) and str(mode.value)[:1] in "wax" for mode in modes if mode is not None)


def calls(source: str) -> Iterator[tuple[str, str]]:
    """Return function and name of every reading call in a module's source."""

    def walk(node: ast.AST, function: str) -> Iterator[tuple[str, str]]:
        for child in ast.iter_child_nodes(node):
            inner = function
            if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                inner = f"{function}.{child.name}".removeprefix(".")
            elif isinstance(child, ast.Call) and (name := is_reading(child)):
                yield function or "module", name
            yield from walk(child, inner)

    yield from walk(ast.parse(source), "")


def found_in(root: Path) -> Counter[tuple[str, str, str]]:
    """Return file, function and name of every reading call outside of ``common/untrusted``, with their counts."""
    found: Counter[tuple[str, str, str]] = Counter()
    for top in ("common", "benchmarks"):
        for path in sorted((root / top).rglob("*.py")):
            name = path.relative_to(root).as_posix()
            if not name.startswith("common/untrusted/"):
                found.update((name, *call) for call in calls(path.read_text()))
    return found


def listed(text: str) -> dict[tuple[str, str, str], tuple[int, str, str]]:
    """Return the entries of the table: file, function and call, with count, kind and reason.

    A line without an indent names a file. Each indented line is ``function call [xN]: kind, reason``.
    """
    entries: dict[tuple[str, str, str], tuple[int, str, str]] = {}
    file = ""
    for line in text.splitlines():
        if not line.strip() or line.startswith("#"):
            continue
        if not line.startswith(" "):
            file = line.strip()
            continue
        call, _, description = line.strip().partition(": ")
        function, name, *times = call.split()
        kind, _, reason = description.partition(", ")
        assert (file, function, name) not in entries, f"{file}: {function} {name} is listed twice"
        entries[file, function, name] = (int(times[0][1:]) if times else 1, kind, reason)
    return entries


def test_every_call_that_reads_is_in_the_table():
    found, table = found_in(ROOT), listed(TABLE.read_text())
    counts = {key: count for key, (count, _, _) in table.items()}
    missing = [f"{key}: {count}" for key, count in found.items() if counts.get(key) != count]
    assert not missing, (
        "read a foreign file by common/untrusted, or add the call to tests/foreign_files.txt:\n" + "\n".join(missing)
    )
    gone = [key for key in counts if key not in found]
    assert not gone, f"these calls are no longer in the code; remove them from tests/foreign_files.txt: {gone}"


def test_every_entry_has_a_kind_and_a_reason():
    for key, (_, kind, reason) in listed(TABLE.read_text()).items():
        assert kind in KINDS, key
        assert len(reason.split()) >= 2, key


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("open('a')", [("module", "open")]),
        ("open('a', 'wb')", []),
        ("path.open('w')", []),
        ("path.open()", [("module", "open")]),
        ("os.open('a', os.O_RDONLY)", []),
        ("def f():\n    json.loads(path.read_text())", [("f", "json.loads"), ("f", "read_text")]),
        ("class A:\n    def f(self):\n        torch.load(x)", [("A.f", "torch.load")]),
        ("tl.load(pointer)", []),
        ("read_text(path)", []),
        ("gzip.open(a)", [("module", "gzip.open")]),
    ],
    ids=["open", "writing", "writing path", "path", "descriptor", "json", "torch", "triton", "bounded", "gzip"],
)
def test_calls_are_found(source, expected):
    assert list(calls(source)) == expected
