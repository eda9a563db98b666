"""Test the script that measures how many planted faults the tests of an operation catch."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from scripts.plant_faults import Fault, chosen, faults_of, find_tests, main, operations
from tests.conftest import ROOT

KERNEL = '''"""A docstring: 1.5."""


def kernel(x_ptr, T, E):
    row = tl.arange(0, 8)
    mask = row < T
    place = row.to(tl.int64) * E + 3
    total = 0.0
    total += x[place] / E
    return total * 0.5, tl.cdiv(T, 8), mask, T == E
'''


def planted(tmp_path: Path) -> dict[str, list[str]]:
    """Kind of fault to the lines that it changes."""
    path = tmp_path / "kernels.py"
    path.write_text(KERNEL)
    found: dict[str, list[str]] = {}
    for fault in faults_of(path, tmp_path):
        changed = fault.planted(path.read_bytes()).decode().splitlines()
        (line,) = [new.strip() for old, new in zip(KERNEL.splitlines(), changed, strict=True) if old != new]
        found.setdefault(fault.kind, []).append(line)
    return found


def test_every_kind_of_fault_changes_one_expression(tmp_path):
    assert planted(tmp_path) == {
        "index": ["row = (tl.arange(0, 8) + 1)"],
        "mask": ["mask = (row) <= (T)", "return total * 0.5, tl.cdiv(T, 8), mask, (T) != (E)"],
        "offset": ["place = (row.to(tl.int64) * E) + (3) + 1"],
        "stride": ["place = (row.to(tl.int64)) * (E + 1) + 3"],
        "dtype": ["place = row.to(tl.int32) * E + 3"],
        "sum": ["total = x[place] / E"],
        "scale": ["total += (x[place]) / (2 * (E))", "return total * 1.0, tl.cdiv(T, 8), mask, T == E"],
        "tile edge": ["return total * 0.5, ((T) // (8)), mask, T == E"],
    }


def test_faults_are_spread_over_the_kinds():
    found = [Fault("f", line, kind, line, line, "") for line in range(9) for kind in ("mask", "sum")]
    found.append(Fault("f", 20, "dtype", 0, 0, ""))
    kinds = [fault.kind for fault in chosen(found, 5)]
    assert sorted(kinds) == ["dtype", "mask", "mask", "sum", "sum"]
    assert chosen(found, 5) == chosen(found, 5)
    assert len(chosen(found, 100)) == len(found)


def test_all_operations_and_their_tests_are_found():
    assert {"common/ops/row_norm", "benchmarks/rnnt/ops/joint"} <= set(operations(ROOT))
    of_cases = ["tests/operation_cases.py", "tests/common/ops/triton_language_cases.py"]
    assert find_tests("common/ops/row_norm", ROOT, gpu=False) == of_cases
    on_gpu = ["tests/gpu/test_operations_gpu.py", "tests/gpu/test_transformer_ops_gpu.py"]
    assert find_tests("common/ops/row_norm", ROOT, gpu=True) == on_gpu
    assert find_tests("common/ops/norm", ROOT, gpu=False) == []


OPERATION = """def plus(x, y):
    z = x + y
    return z * 2.0 / 2.0


def unused(x):
    return x * 3.0
"""


@pytest.mark.slow_cases("assert plus(1, 2)-0")
@pytest.mark.parametrize(("test", "caught"), [("assert plus(1, 2) == 3", 4), ("assert plus(1, 2)", 0)])
def test_faults_are_planted_in_a_copy_and_counted(test, caught, tmp_path, capsys):
    tree, report = tmp_path / "tree", tmp_path / "report.json"
    for name, text in {
        "common/ops/plus/__init__.py": "Operation = dict\nPLUS = Operation()\n",
        "common/ops/plus/kernels.py": OPERATION,
        "tests/common/triton_plus_cases.py": "from common.ops.plus.kernels import plus\n\n\ndef test_plus():\n"
        f"    {test}\n",
        "pyproject.toml": "",
    }.items():
        (tree / name).parent.mkdir(parents=True, exist_ok=True)
        (tree / name).write_text(text)
    assert main(["--root", str(tree), "--report", str(report)]) == 0
    found = json.loads(report.read_text())["common/ops/plus"]
    assert (found["faults"], found["caught"]) == (5, caught)
    assert any("kernels.py:7 scale: 6.0" in line for line in found["missed"])
    assert f"{caught} of 5 caught" in capsys.readouterr().out
    assert (tree / "common/ops/plus/kernels.py").read_text() == OPERATION


@pytest.mark.parametrize(
    ("test", "message"),
    [("assert not kernels", "1 failed"), ("pytest.skip()", "1 skipped"), ("", "no test imports the operation")],
    ids=["failed", "skipped", "none"],
)
def test_operations_whose_tests_do_not_pass_without_a_fault_are_an_error(test, message, tmp_path, capsys):
    for name, text in {
        "common/ops/plus/__init__.py": "Operation = dict\nPLUS = Operation()\n",
        "common/ops/plus/kernels.py": OPERATION,
        "tests/common/triton_plus_cases.py": f"import pytest\nfrom common.ops.plus import kernels\ndef test(): {test}\n"
        if test
        else "",
    }.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    assert main(["--root", str(tmp_path)]) == 1
    assert re.search(f"without a fault: .*{message}", capsys.readouterr().out)


def test_a_folder_without_an_operation_is_an_error(capsys):
    with pytest.raises(SystemExit):
        main(["common/ops/norm"])
    assert "common/ops/norm declares no operation" in capsys.readouterr().err
