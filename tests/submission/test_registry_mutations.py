"""Damaged ``runs.jsonl`` of four benchmarks, and forged series.

What must hold: :mod:`oracle`.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest
from closed_logs import RECIPES, closed_log
from launched import SERIES, Entry, begin_and_end, entries_of, log_of, write_entries
from mutated_lines import registry_mutations
from mutations import Mutation, parametrize, require
from oracle import Workplace, faults
from undamaged import COMMIT, Baseline, copied_series, facts_of_series, registry_text

FILE = "runs.jsonl"
SAMPLE, MANY = 3, 400

pytestmark = [pytest.mark.timeout(120), pytest.mark.usefixtures("answers")]


@cache
def mutations_of(benchmark: str) -> tuple[Mutation, ...]:
    return tuple(each for each in registry_mutations(registry_text(benchmark)) if not each.large)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "case" in metafunc.fixturenames:
        parametrize(metafunc, list(RECIPES), mutations_of, SAMPLE, MANY)


@pytest.fixture(scope="module")
def workplace(tmp_path_factory: pytest.TempPathFactory) -> Workplace:
    return Workplace(tmp_path_factory.mktemp("registries"))


@pytest.fixture(scope="module")
def before(workplace: Workplace) -> Baseline:
    return facts_of_series(workplace)


def test_registry(case, workplace, before):
    facts = before(case.benchmark)
    results = copied_series(workplace, case.benchmark)
    case.mutation.apply(results / FILE)
    require(case, faults(facts, workplace.observe([results]), FILE, case.mutation.line))


def _reseeded(text: str, seed: int) -> str:
    return re.sub(r'("key": "seed", "value": )\d+', rf"\g<1>{seed}", text)


def _added(results: Path, text: str, seed: int, name: str | None = None) -> None:
    """Add an experiment, and increase the declared number by one."""
    number = RECIPES["resnet"].runs + 1
    both = begin_and_end("resnet", "4.0.0", number, number, seed, COMMIT, "success")
    both[0]["log"] = name or both[0]["log"]
    if name is None:
        log_of(results, number).write_text(text)
    entries = [*entries_of(results), *both]
    write_entries(results, [e | ({"declared": number} if "declared" in e else {}) for e in entries])


def copied_under_a_new_seed(results: Path) -> None:
    _added(results, _reseeded(log_of(results, 2).read_text(), 4_000_000_009_999), 4_000_000_009_999)


def two_experiments_of_one_log(results: Path) -> None:
    _added(results, "", 4_000_000_009_999, f"{SERIES}_2.log")


def log_without_an_experiment(results: Path) -> None:
    log_of(results, 6).write_text(closed_log("resnet", 77))


def log_of_a_number_that_is_skipped(results: Path) -> None:
    log_of(results, 8).write_text(closed_log("resnet", 77))


def slowest_run_never_started(results: Path) -> None:
    """Give the slowest run the status "not started", and empty its log; its entry keeps its minutes."""
    log_of(results, 5).write_text("the node is down\n")
    write_entries(results, [e | ({"status": "not started"} if _ends(e, 5) else {}) for e in entries_of(results)])


def half_the_time(results: Path) -> None:
    """Halve all times after run_start in one log, which alone would be the log of a faster run."""
    path = log_of(results, 2)
    text = path.read_text()
    found = re.search(r'"time_ms": (\d+), "event_type": "INTERVAL_START", "key": "run_start"', text)
    assert found is not None
    start = int(found[1])
    path.write_text(
        re.sub(
            r'"time_ms": (\d+)',
            lambda m: f'"time_ms": {start + max(0, int(m[1]) - start) // 2 if int(m[1]) > start else m[1]}',
            text,
        )
    )


def logs_exchanged(results: Path) -> None:
    first, second = log_of(results, 1), log_of(results, 2)
    texts = first.read_text(), second.read_text()
    first.write_text(texts[1])
    second.write_text(texts[0])


def logs_of_another_benchmark(results: Path) -> None:
    log_of(results, 2).write_text(closed_log("bert", 4_000_000_000_017))


def registry_below_its_logs(results: Path) -> None:
    (results / "below").mkdir()
    (results / FILE).rename(results / "below" / FILE)


def second_registry_below(results: Path) -> None:
    (results / "below").mkdir()
    shutil.copyfile(results / FILE, results / "below" / FILE)


def results_beside_the_registry(results: Path) -> None:
    """Copy the logs of the series to the names of result files."""
    for number in range(5):
        shutil.copyfile(log_of(results, number + 1), results / f"result_{number}.txt")


def _ends(entry: Entry, number: int) -> bool:
    return entry["event"] == "end" and entry["experiment"] == number


FORGERIES: dict[str, tuple[Callable[[Path], None], str]] = {
    "a log copied under a new seed": (copied_under_a_new_seed, f"{SERIES}_6.log"),
    "two experiments of one log": (two_experiments_of_one_log, FILE),
    "a log without an experiment": (log_without_an_experiment, f"{SERIES}"),
    "a log of a number that is skipped": (log_of_a_number_that_is_skipped, f"{SERIES}"),
    "the slowest run never started": (slowest_run_never_started, FILE),
    "a run in half its time": (half_the_time, f"{SERIES}_2.log"),
    "two logs exchanged": (logs_exchanged, f"{SERIES}_1.log"),
    "the log of another benchmark": (logs_of_another_benchmark, f"{SERIES}_2.log"),
    "the registry below its logs": (registry_below_its_logs, FILE),
    "a second registry below": (second_registry_below, FILE),
    "results beside the registry": (results_beside_the_registry, "result_"),
}
"""Name to a change of several files, and the file that a refusal must name."""


@pytest.mark.parametrize("name", FORGERIES)
def test_forged_series(name, workplace, before):
    forge, file = FORGERIES[name]
    facts = before("resnet")
    results = copied_series(workplace, "resnet")
    forge(results)
    outcome = workplace.observe([results])
    assert outcome.refused == (True, True)
    assert not faults(facts, outcome, file, None)


def test_registry_is_what_the_mutations_were_made_of():
    entries = [json.loads(line) for line in registry_text("resnet").splitlines()]
    assert [entry["event"] for entry in entries] == ["begin", "end"] * RECIPES["resnet"].runs
