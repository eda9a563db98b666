"""The table of reasons: complete, the same in code and documents, and cited by every refusal for a rule."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from common.mlperf.refusals import REASONS, Refusal

ROOT = Path(__file__).resolve().parents[3]


def used_reasons() -> dict[str, str]:
    """Name of each reason that the code refuses for, and a source line of such a refusal."""
    found = {}
    for path in sorted((ROOT / "common").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "Refusal":
                constants = (each.value for each in ast.walk(node.args[0]) if isinstance(each, ast.Constant))
                found |= {name: f"{path.relative_to(ROOT)}:{node.lineno}" for name in constants}
    return found


def test_the_table_has_exactly_the_reasons_that_the_code_refuses_for():
    by_the_clock = {"run-stop-early", "clock-backwards", "phase-order", "outside-run", "run-without-length"}
    by_the_clock |= {"initialization-too-long", "evaluation-after-target"}  # arguments of _Clock.refuse
    by_the_clock |= {"staging-not-started"}
    assert set(used_reasons()) | by_the_clock == set(REASONS)
    clock = (ROOT / "common/mlperf/run_clock.py").read_text()
    assert all(f'"{reason}"' in clock for reason in by_the_clock)


def test_the_documents_show_the_same_table():
    rows = [f"| `{name}` | {each.kind} | {each.text} | {each.source} |" for name, each in REASONS.items()]
    table = "\n".join(["| name | kind | what must hold | source |", "|---|---|---|---|", *rows])
    assert table in (ROOT / "docs/compliance.md").read_text()


@pytest.mark.parametrize("name", REASONS)
def test_a_refusal_for_a_rule_cites_the_rule_and_its_source(name):
    reason = REASONS[name]
    refusal = Refusal(name, "line 7: something is wrong").about("log.txt, ")
    assert refusal.startswith("log.txt, line 7: something is wrong")
    assert refusal.reason == name
    assert (reason.text in refusal and reason.source in refusal) == (reason.kind == "rule")


def test_a_reason_that_is_not_in_the_table_cannot_be_used():
    with pytest.raises(KeyError):
        Refusal("no-such-reason", "something is wrong")
