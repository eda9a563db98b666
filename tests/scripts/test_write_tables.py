"""Tables and plot of the documents are what scripts/write_tables.py makes of docs/results."""

from __future__ import annotations

import json
import runpy
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import ROOT

SCRIPT = runpy.run_path(str(ROOT / "scripts" / "write_tables.py"))
RESULT = ROOT / "docs" / "results" / "2026-11-29-one-h200.json"


@pytest.mark.parametrize("document", SCRIPT["DOCUMENTS"], ids=lambda path: path.name)
def test_the_tables_of_a_document_are_those_of_the_results(document: Path) -> None:
    text = document.read_text()
    assert SCRIPT["filled"](text, SCRIPT["read"]()) == text, "run: python scripts/write_tables.py"


def test_the_plot_is_that_of_the_results() -> None:
    assert SCRIPT["PLOT"].read_text() == SCRIPT["plot"](SCRIPT["read"]()), "run: python scripts/write_tables.py"


def changed(folder: Path, **provenance: Any) -> Path:
    """Write a result of one GPU whose provenance has other values into a folder."""
    values = json.loads(RESULT.read_text())
    for each in values["results"]:
        each["figures"]["provenance"] |= provenance
    (folder / "result.json").write_text(json.dumps(values))
    return folder


def test_unchanged_results_are_read(tmp_path: Path) -> None:
    assert SCRIPT["read"](changed(tmp_path)).step("gpt3")["device"] == "NVIDIA H200"


@pytest.mark.parametrize("key", ["date", "commit", "machine", "command"])
def test_a_result_of_unknown_origin_is_refused(tmp_path: Path, key: str) -> None:
    with pytest.raises(SystemExit, match=f"has no {key}"):
        SCRIPT["read"](changed(tmp_path, **{key: None}))


@pytest.mark.parametrize("state", [True, None])
def test_a_result_of_source_that_is_not_committed_is_refused(tmp_path: Path, state: bool | None) -> None:
    with pytest.raises(SystemExit, match="differs from its commit"):
        SCRIPT["read"](changed(tmp_path, changed=state))


def test_a_step_that_updated_nothing_is_not_shown(tmp_path: Path) -> None:
    values = json.loads(RESULT.read_text())
    for each in values["results"]:
        each["figures"]["updated"] = False
    (tmp_path / "result.json").write_text(json.dumps(values))
    assert SCRIPT["read"](tmp_path).step("gpt3") is None


def test_efficiency_is_the_slower_step_of_the_same_gpus_divided_by_their_common_one() -> None:
    results = SCRIPT["read"]()
    pair = results.pair("bert")
    singles = [figures["step_ms"] for figures in results.alone("bert")]
    assert min(singles) <= results.efficiency("bert") * pair["step_ms"] <= max(singles)
    assert results.efficiency("bert") < 1
    assert results.efficiency("dlrm_dcnv2") is None
