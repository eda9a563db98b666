"""Plant faults in the faster implementations of operations and count how many the tests catch.

    python scripts/plant_faults.py common/ops/row_norm benchmarks/rnnt/ops/joint
    python scripts/plant_faults.py --faults 16 --gpu --report faults.json

Each fault changes one expression: an index, a mask, a stride, a sum, a dtype, a scale, an offset or a tile edge. The
script writes it into a copy of the tree and runs the tests that import the operation: its cases through Triton's
interpreter, or with ``--gpu`` its tests on a GPU. A fault is caught if a test fails or runs into the time limit. Some
faults change no result, so that a share of 100 % is not to be expected; compare shares before and after a change. The
update rules of ``common/optim`` are not covered.
"""

from __future__ import annotations

import argparse
import ast
import json
import multiprocessing.dummy
import os
import queue
import random
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
TREE = ("benchmarks", "common", "configs", "scripts", "tests", "pyproject.toml")
NOT_FAST = {"__init__.py", "cases.py", "reference.py"}
"""Files of an operation's package that get no faults."""

COMPARISONS = {ast.Lt: "<=", ast.LtE: "<", ast.Gt: ">=", ast.GtE: ">", ast.Eq: "!="}
NARROWER = {"float32": "float16", "float64": "float32", "int64": "int32"}


class Fault(NamedTuple):
    """A change of one expression.

    Attributes:
        path: file, relative to the tree.
        line: line of the expression.
        kind: ``mask``, ``offset``, ``stride``, ``sum``, ``dtype``, ``scale``, ``index`` or ``tile edge``.
        start, end: byte offsets of the expression in the file.
        text: replacement of the expression.
    """

    path: str
    line: int
    kind: str
    start: int
    end: int
    text: str

    def planted(self, source: bytes) -> bytes:
        """Return the content of the file with the fault."""
        return source[: self.start] + self.text.encode() + source[self.end :]


def faults_of(path: Path, root: Path) -> Iterator[Fault]:
    """Yield all faults that can be planted in a file."""
    source = path.read_bytes()
    starts = [0]
    for line in source.splitlines(keepends=True):
        starts.append(starts[-1] + len(line))

    found: set[tuple[int, str]] = set()

    def span(node: ast.expr | ast.stmt) -> tuple[int, int]:
        assert node.end_lineno is not None
        assert node.end_col_offset is not None
        return starts[node.lineno - 1] + node.col_offset, starts[node.end_lineno - 1] + node.end_col_offset

    def text(node: ast.expr) -> str:
        start, end = span(node)
        return source[start:end].decode()

    for function in ast.walk(ast.parse(source)):
        if isinstance(function, ast.FunctionDef):
            for statement in function.body:
                for node in ast.walk(statement):
                    for kind, replacement in changes(node, text):
                        assert isinstance(node, ast.expr | ast.stmt)
                        if (span(node)[0], replacement) in found:
                            continue  # a nested function is walked more than once
                        found.add((span(node)[0], replacement))
                        yield Fault(str(path.relative_to(root)), node.lineno, kind, *span(node), replacement)


def changes(node: ast.AST, text: Callable[[ast.expr], str]) -> Iterator[tuple[str, str]]:
    """Yield kind and replacement of every fault that can be planted in an expression.

    Args:
        text: function that returns the source of an expression.
    """
    match node:
        case ast.Compare(left=left, ops=[operator], comparators=[right]) if type(operator) in COMPARISONS:
            yield "mask", f"({text(left)}) {COMPARISONS[type(operator)]} ({text(right)})"
        case ast.BinOp(left=left, op=ast.Add(), right=right):
            yield "offset", f"({text(left)}) + ({text(right)}) + 1"
        case ast.BinOp(left=left, op=ast.Mult(), right=ast.Name(id=name)) if name.isupper():
            yield "stride", f"({text(left)}) * ({name} + 1)"
        case ast.BinOp(left=left, op=ast.Div(), right=right):
            yield "scale", f"({text(left)}) / (2 * ({text(right)}))"
        case ast.AugAssign(target=target, op=ast.Add(), value=value):
            yield "sum", f"{text(target)} = {text(value)}"
        case ast.Attribute(value=value, attr=name) if name in NARROWER:
            yield "dtype", f"{text(value)}.{NARROWER[name]}"
        case ast.Call(func=ast.Attribute(attr="arange")):
            yield "index", f"({text(node)} + 1)"
        case ast.Call(func=ast.Attribute(attr="cdiv"), args=[whole, part]):
            yield "tile edge", f"(({text(whole)}) // ({text(part)}))"
        case ast.Constant(value=float(value)) if value:
            yield "scale", repr(2 * value)


def chosen(found: Sequence[Fault], count: int) -> list[Fault]:
    """Return ``count`` faults, distributed evenly over the kinds; the choice is deterministic."""
    shuffled = random.Random(0).sample(found, len(found))
    by_kind: dict[str, list[Fault]] = {}
    for fault in shuffled:
        by_kind.setdefault(fault.kind, []).append(fault)
    rounds = [fault for turn in range(len(found)) for own in by_kind.values() for fault in own[turn : turn + 1]]
    return rounds[:count]


def find_tests(package: str, root: Path, gpu: bool) -> list[str]:
    """Return the test modules of a package, relative to the tree: the tests of all cases, and those that import it."""
    dotted, parent, name = package.replace("/", "."), *package.replace("/", ".").rsplit(".", 1)
    of_cases = "tests/gpu/test_operations_gpu.py" if gpu else "tests/operation_cases.py"
    found = [of_cases] if (root / package / "cases.py").is_file() else []
    for path in sorted(root.glob("tests/gpu/test_*.py" if gpu else "tests/*/**/*_cases.py")):
        for node in ast.walk(ast.parse(path.read_bytes())):
            match node:
                case ast.ImportFrom(module=module, names=names) if (
                    module == dotted
                    or (module or "").startswith(f"{dotted}.")
                    or (module == parent and name in {each.name for each in names})
                ):
                    found.append(str(path.relative_to(root)))
                    break
    return found


def run(package: str, tests: Sequence[str], tree: Path, gpu: bool, seconds: float) -> tuple[bool, str]:
    """Run the tests of a package in a tree.

    Returns:
        Whether the tests passed, at least one of them, and the last lines of the output: the first failed test, with
        its error, and the counts.
    """
    options = ["-x", "-q", "-p", "no:cacheprovider", "-m", "gpu and not slow" if gpu else "not slow"]
    environment = {
        **os.environ,
        "PYTEST_ADDOPTS": "",
        "OPERATION": package.replace("/", "."),
        "PYTHONPATH": os.pathsep.join([str(tree), *filter(None, [os.environ.get("PYTHONPATH")])]),
        **({} if gpu else {"TRITON_INTERPRET": "1"}),
    }
    command = [sys.executable, "-m", "pytest", *options, *tests]
    process = subprocess.Popen(
        command, cwd=tree, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        start_new_session=True,
    )  # fmt: skip
    try:
        lines = process.communicate(timeout=seconds)[0].strip().splitlines() or [""]
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)  # includes the child processes of the tests
        process.communicate()
        return False, f"timed out after {seconds:.0f} s"
    failed = [line for line in lines if line.startswith(("FAILED ", "ERROR "))][:1]
    return process.returncode == 0 and " passed" in lines[-1], "; ".join([*failed, lines[-1]])


def measure(package: str, tree: Path, count: int, gpu: bool, seconds: float) -> dict[str, object]:
    """Plant the faults of one operation, one after another.

    Args:
        package: folder of the operation, relative to the tree.
        tree: a copy of the repository; its files are changed and restored.
        count: number of faults.
        gpu: run the tests on the GPU instead of Triton's interpreter.
        seconds: time limit of a run.

    Returns:
        ``faults``, ``caught``, ``tests`` and ``missed``, a list of texts; ``error`` if the tests fail without a fault.
    """
    modules = sorted((tree / package).glob("*.py"))
    files = [path for path in modules if path.name not in NOT_FAST]
    planted = chosen([fault for path in files for fault in faults_of(path, tree)], count)
    tests = find_tests(package, tree, gpu)
    if not planted:
        return {"faults": 0, "caught": 0, "tests": tests, "missed": []}
    passed, said = run(package, tests, tree, gpu, 10 * seconds) if tests else (False, "no test imports the operation")
    if not passed:
        return {"tests": tests, "error": f"without a fault: {said}"}
    missed = []
    for fault in planted:
        path = tree / fault.path
        source = path.read_bytes()
        path.write_bytes(fault.planted(source))
        try:
            if run(package, tests, tree, gpu, seconds)[0]:
                missed.append(f"{fault.path}:{fault.line} {fault.kind}: {fault.text}")
        finally:
            path.write_bytes(source)
    return {"faults": len(planted), "caught": len(planted) - len(missed), "tests": tests, "missed": missed}


def operations(root: Path) -> list[str]:
    """Return the folders of all operations, relative to the tree."""
    found = [*root.glob("common/ops/*/__init__.py"), *root.glob("benchmarks/*/ops/*/__init__.py")]
    return sorted(str(path.parent.relative_to(root)) for path in found if "= Operation(" in path.read_text())


def copied(root: Path, tree: Path) -> Path:
    """Copy the files that the tests need from ``root`` to ``tree``; return ``tree``."""
    for name in TREE:
        source = root / name
        if source.is_dir():
            shutil.copytree(source, tree / name, ignore=shutil.ignore_patterns("__pycache__"))
        elif source.is_file():
            shutil.copy(source, tree / name)
    return tree


def main(argv: list[str] | None = None) -> int:
    """Measure the operations named on the command line, by default all, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("operation", nargs="*", help="folder of an operation; default: all")
    parser.add_argument("--faults", type=int, default=8, help="faults for each operation (default: 8)")
    parser.add_argument("--gpu", action="store_true", help="run the tests of tests/gpu instead of the interpreter's")
    parser.add_argument("--processes", type=int, default=1, help="operations at the same time (default: 1)")
    parser.add_argument("--seconds", type=float, default=600.0, help="time limit of one run of the tests")
    parser.add_argument("--report", type=Path, help="file for the results, JSON")
    parser.add_argument("--root", type=Path, default=ROOT, help=argparse.SUPPRESS)
    arguments = parser.parse_args(argv)
    known = operations(arguments.root)
    wanted = arguments.operation or known
    if unknown := [package for package in wanted if package not in known]:
        parser.error(f"{', '.join(unknown)} declares no operation")
    results: dict[str, dict[str, object]] = {}
    trees: queue.SimpleQueue[Path] = queue.SimpleQueue()

    def measured(package: str) -> tuple[str, dict[str, object]]:
        tree = trees.get()
        try:
            return package, measure(package, tree, arguments.faults, arguments.gpu, arguments.seconds)
        finally:
            trees.put(tree)

    with tempfile.TemporaryDirectory() as folder, multiprocessing.dummy.Pool(arguments.processes) as pool:
        for number in range(arguments.processes):
            trees.put(copied(arguments.root, Path(folder) / str(number)))
        for package, found in pool.imap_unordered(measured, wanted):
            results[package] = found
            said = found.get("error") or f"{found['caught']} of {found['faults']} caught"
            print(f"{package:48s} {said}", flush=True)
            for line in found.get("missed", []):  # type: ignore[attr-defined]
                print(f"    missed {line}", flush=True)
            if arguments.report:
                arguments.report.write_text(json.dumps(results, indent=1, sort_keys=True) + "\n")
    return 1 if any("error" in found for found in results.values()) else 0


if __name__ == "__main__":
    sys.exit(main())
