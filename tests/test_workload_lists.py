"""Every list of workloads that a person writes has exactly the entries of ``WORKLOADS``."""

from __future__ import annotations

import re
import runpy
from collections.abc import Iterable
from pathlib import Path

import pytest

from benchmarks import WORKLOADS
from tests import test_contract, toy
from tests.conftest import ROOT
from tests.demos import test_demos


def _in_demo_table() -> list[str]:
    """Return the workloads in the table of the README that says how long demos take."""
    text = (ROOT / "README.md").read_text()
    table = text.partition("| time on two cores | demo |")[2].partition("\n\n")[0]
    return [name for row in table.splitlines()[2:] for name in re.findall(r"`(\w+)`", row.split("|")[2])]


def _stems(folder: Path) -> list[str]:
    return [path.stem for path in folder.glob("*.yaml")]


LISTS: dict[str, Iterable[str]] = {
    "packages of benchmarks": [path.parent.name for path in (ROOT / "benchmarks").glob("*/workload.py")],
    "configs/benchmark": _stems(ROOT / "configs" / "benchmark"),
    "configs/hparams": _stems(ROOT / "configs" / "hparams"),
    "configs/recipe": _stems(ROOT / "configs" / "recipe"),
    "demos in the README": _in_demo_table(),
    "units of samples in scripts/write_tables.py": runpy.run_path(str(ROOT / "scripts" / "write_tables.py"))["UNITS"],
    "demos that the tests train": test_demos.DEMOS,
    "findings on logs of demos": test_demos.OWN,
    "short runs of the contract": [name for name in test_contract.SHORT if name != toy.NAME],
}
"""Where the list is -> its workloads."""


@pytest.mark.parametrize("place", LISTS)
def test_a_list_has_every_workload_once(place):
    assert sorted(LISTS[place]) == sorted(WORKLOADS)
