"""The page of `mlperf-suite estimate` has the numbers of the estimates, and loads nothing."""

from __future__ import annotations

import re

import pytest

from common.config.system import Hardware
from common.planning.estimates import Convergence, RunEstimate, RunLayout, StepTimes
from common.planning.page import page_of
from common.planning.recipes import PlannedSettings, StartingRecipe
from common.planning.search import Plan

HARDWARE = Hardware("NVIDIA H200", gpus_per_node=8, memory_gb=141, memory_gbs=4000)
START = StartingRecipe("8xH200", 8, 4608, False, 0, (1, 1, 1))


def plan(gpus: int, batch: int, step: StepTimes, seconds: float, name: str = "<b>run</b>") -> Plan:
    return Plan(
        RunEstimate(
            benchmark="bert",
            layout=RunLayout(gpus, batch, batch // gpus, 1),
            convergence=Convergence(batch, 2.5e6, 0.05, "exact"),
            step=step,
            steps=2.5e6 / batch,
            evaluations=17.0,
            evaluation=0.5,
            last_evaluation=0.0,
            seconds=seconds,
            efficiency=0.9,
            uncertainty={"convergence": 0.05, "network": 0.02},
            joules={"training": 3.6e6, "idle: waiting for input": 1.8e6},
        ),
        PlannedSettings("bert", START, {"output_dir": name}, None, False),
    )


@pytest.fixture(scope="module")
def page() -> str:
    rows = {
        64: [plan(64, 4608, StepTimes(0.06, exposed=0.02), 45.0), plan(64, 1536, StepTimes(0.03), 66.0)],
        8: [plan(8, 768, StepTimes(0.081, update=0.003), 300.0)],
    }
    return page_of("bert", rows, HARDWARE, "h200", "h200")


def test_each_number_of_gpus_has_its_fastest_run_and_interval(page):
    tiles = re.findall(r"<dt>(.*?)</dt><dd>(.*?)<small> (.*?)</small></dd>", page)
    assert [tile[:2] for tile in tiles] == [("8 GPUs", "5.00 min"), ("64 GPUs", "0.750 min")]
    low, high = (float(limit) for limit in tiles[0][2].split(" to "))
    assert low < 5 < high
    assert low * high == pytest.approx(25, rel=0.01)


def test_the_parts_of_a_step_are_those_of_the_fastest_runs(page):
    table = page[page.index("Parts of a step: numbers") :]
    table = table[: table.index("</table>")]
    head = re.findall(r'<th scope="col">(.*?)</th>', table)
    assert head == ["GPUs", "computation", "update", "gradients and weights", "all, ms"]
    rows = re.findall(r"<td>(.*?)</td>", table)
    assert [float(cell) for cell in rows] == [81, 3, 0, 84, 60, 0, 20, 80]


def test_every_estimate_is_in_the_table(page):
    table = page[page.rindex("<h2>All estimates</h2>") :]
    assert [batch in table for batch in ("<td>768</td>", "<td>4608</td>", "<td>1536</td>")] == [True] * 3


def test_settings_are_text_and_not_markup(page):
    assert "output_dir=&lt;b&gt;run&lt;/b&gt;" in page
    assert "<b>run</b>" not in page


def test_the_page_is_one_file(page):
    assert page.startswith("<!DOCTYPE html>")
    assert not re.findall(r'(?:src|href)="(?!#)', page)
    assert "<script" not in page
    assert page.count("<svg") == 5


def test_the_page_says_that_input_is_not_known(page):
    assert "Input: not known, so the estimates have no time for it." in page
