"""A series of instances as the launcher records it: its score, its submission, and doctored records that are refused.

Instance 5 of 12 misses the target. The others start two seconds apart, and the last one ends last.
"""

from __future__ import annotations

import datetime
import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from closed_logs import closed_log, drawn_convergence
from launched import (
    FACTS,
    FIRST_LAUNCH,
    SERIES,
    SYSTEM,
    Clone,
    Entry,
    begin_and_end,
    entries_of,
    in_entries,
    log_of,
    package_arguments,
    seed_of,
    submission,
    write_entries,
    write_series,
    write_submission,
)

from common.errors import ConfigError, DataError
from common.submission import package, summarize

LARGE = "24xH200_torch"
RULESET = "3.0.0"
INSTANCES, FAILED = 12, 5
NODES = 2 * INSTANCES


def minutes_of(instance: int) -> float:
    return 10 + instance / 4


def seed_of_instance(instance: int) -> int:
    return seed_of(100 + instance)


def start_ms(instance: int) -> int:
    return round(1000 * FIRST_LAUNCH.timestamp()) + 20_000 + 2000 * instance


def text_of(instance: int, **more: str) -> str:
    convergence = drawn_convergence("cosmoflow")[instance % 10]
    minutes, start = minutes_of(instance), start_ms(instance)
    return closed_log("cosmoflow", seed_of_instance(instance), convergence, minutes=minutes, start=start, **more)


def in_line(event: str, instance: int, **values: object) -> Callable[[Path], None]:
    """Return a function that changes values in the line that begins or ends an instance."""
    return in_entries(lambda e: e | values if (e["event"], e["experiment"]) == (event, instance) else e)


def write_instances(folder: Path, commit: str) -> Path:
    """Write the records and logs of all instances, and the file of `doctor` on all nodes; return ``folder``."""
    folder.mkdir()
    begins, ends = [], []
    for instance in range(1, INSTANCES + 1):
        status = "aborted" if instance == FAILED else "success"
        log_of(folder, instance).write_text(text_of(instance, status=status))
        lines = begin_and_end("cosmoflow", RULESET, instance, INSTANCES, seed_of_instance(instance), commit, status)
        over = FIRST_LAUNCH + datetime.timedelta(minutes=minutes_of(instance) + 2)
        begins.append(lines[0] | {"event": "begin_instance", "time": FIRST_LAUNCH.isoformat()})
        ends.append(lines[1] | {"time": over.isoformat(), "minutes": minutes_of(instance)})
    write_entries(folder, [*begins, *sorted(ends, key=lambda entry: entry["time"])])
    nodes = {f"n{number}": {"facts": FACTS, "measurements": {}} for number in range(1, NODES + 1)}
    doctor = {"time": "2026-05-01T11:59:00+00:00", "nodes": nodes, "findings": [], "ok": True}
    (folder / f"{SERIES}_doctor.json").write_text(json.dumps(doctor))
    return folder


@pytest.fixture(scope="module")
def strong(tmp_path_factory: pytest.TempPathFactory, clone: Clone) -> Path:
    """A series of a time to solution."""
    return write_series(tmp_path_factory.mktemp("strong") / "results", "cosmoflow", clone.commit)


@pytest.fixture(scope="module")
def launched(tmp_path_factory: pytest.TempPathFactory, clone: Clone) -> Path:
    """The undamaged series of instances."""
    return write_instances(tmp_path_factory.mktemp("instances") / "results", clone.commit)


@pytest.fixture
def results(launched: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(launched, tmp_path / "results"))


def run_package(folder: Path, clone: Clone, strong: Path, results: Path, **more: object) -> int:
    content = submission({"system": SYSTEM, "results": str(strong)}, {"system": LARGE, "results": str(results), **more})
    content["systems"][LARGE] = content["systems"][SYSTEM] | {"system_name": "Acme server, 24 nodes of 8x H200"}
    settings = write_submission(folder / "acme.yaml", content)
    return package.main(package_arguments(settings, folder / "out", clone, RULESET))


def score_of(results: Path, folder: Path) -> Entry:
    assert summarize.main([str(results), "--json", str(folder / "score.json")]) == 0
    return dict(json.loads((folder / "score.json").read_text())[0]["throughput"])


def test_the_score_is_of_the_instances_that_reached_the_target(launched, tmp_path, capsys):
    found = score_of(launched, tmp_path)
    last = minutes_of(INSTANCES) + (start_ms(INSTANCES) - start_ms(1)) / 60_000
    assert found.pop("minutes") == pytest.approx(last, abs=0.2 / 60)  # a run starts within 0.2 s of its place
    assert found == {"accelerators": 192, "instance_accelerators": 16, "instances": 11, "launched": 12}
    assert "(T, S, M', TTTa) = (192, 16, 11, 13.3" in capsys.readouterr().out


@pytest.mark.slow
def test_mlcommons_checkers_accept_the_packaged_series(launched, tmp_path, clone, strong):
    assert run_package(tmp_path, clone, strong, launched) == 0
    weak = tmp_path / "out" / "acme" / "results" / LARGE / "weak" / "cosmoflow"
    numbers = {int(path.stem.removeprefix("result_")) for path in weak.glob("result_*.txt")}
    assert numbers == set(range(INSTANCES)) - {FAILED - 1}
    assert [path.name for path in (weak / "pruned_results").iterdir()] == [f"result_{FAILED - 1}.txt"]
    (readme,) = (tmp_path / "out" / "acme" / "benchmarks").rglob(f"README-{LARGE}.md")
    assert f"\nsbatch -N{NODES} --ntasks-per-node=8 scripts/run_and_time.sh " in readme.read_text()
    assert "\nscripts/run.sub " not in readme.read_text()


def test_a_slow_instance_is_pruned_by_the_submission(launched, tmp_path, clone, strong, capsys):
    assert run_package(tmp_path, clone, strong, launched, pruned=[INSTANCES]) == 0
    assert "10 of 12 instances, 2 pruned" in capsys.readouterr().out
    weak = tmp_path / "out" / "acme" / "results" / LARGE / "weak" / "cosmoflow"
    pruned = {path.name for path in (weak / "pruned_results").iterdir()}
    assert pruned == {f"result_{FAILED - 1}.txt", f"result_{INSTANCES - 1}.txt"}


def test_only_instances_of_a_series_can_be_pruned_by_the_submission(launched, tmp_path, clone, strong):
    with pytest.raises(ConfigError, match="has no run 13, of which"):
        run_package(tmp_path, clone, strong, launched, pruned=[13])
    with pytest.raises(ConfigError, match="is no series of instances"):
        run_package(tmp_path, clone, strong, strong, pruned=[1])


def an_instance_that_never_started(results: Path) -> None:
    log_of(results, 3).write_text("the node failed\n")
    never = {"status": "not started", "exit_code": 1, "minutes": None, "verdict": "refused: has no MLLOG line"}
    in_line("end", 3, **never)(results)


def test_an_instance_that_never_started_is_left_out(results, tmp_path):
    an_instance_that_never_started(results)
    found = score_of(results, tmp_path)
    assert (found["accelerators"], found["instances"], found["launched"]) == (176, 10, 11)


def in_log(instance: int, old: str, new: str) -> Callable[[Path], None]:
    def change(results: Path) -> None:
        text = log_of(results, instance).read_text()
        assert old in text
        log_of(results, instance).write_text(text.replace(old, new))

    return change


def an_instance_missing(results: Path) -> None:
    log_of(results, INSTANCES).unlink()
    write_entries(results, [entry for entry in entries_of(results) if entry["experiment"] != INSTANCES])


def an_instance_in_the_log_of_another(results: Path) -> None:
    with log_of(results, 3).open("a") as file:
        file.write(text_of(4))


FAULTS: dict[str, tuple[Callable[[Path], None], str]] = {
    "an instance missing": (an_instance_missing, "lacks 1 of the 12 instances that"),
    "an instance that never started": (
        an_instance_that_never_started,
        f"11 instances use 176 of the 192 accelerators in the description of {LARGE}: experiments that never reached "
        "run_start: 3",
    ),
    "a seed twice": (in_line("begin_instance", 3, seed=seed_of_instance(4)), "experiments 3 and 4 have the same seed"),
    "the job's node count": (
        in_log(3, '"number_of_nodes", "value": 2', '"number_of_nodes", "value": 24'),
        "number_of_nodes is 24, ",
    ),
    "an instance that did not converge kept": (
        in_line("end", FAILED, status="success", exit_code=0),
        f"_{FAILED}.log: did not converge; an instance that counts has to",
    ),
    "two instances in one log": (
        an_instance_in_the_log_of_another,
        "_3.log is refused: run_start occurs 2 times: each run has its own log",
    ),
    "an instance launched later": (
        in_line("begin_instance", 3, time=(FIRST_LAUNCH + datetime.timedelta(minutes=30)).isoformat()),
        "began at 2026-05-01T12:30:00+00:00, after instance 1 was over: a launcher starts all instances together",
    ),
}
"""A change of the records or logs, and the message about it."""


@pytest.mark.parametrize("fault", FAULTS)
def test_a_doctored_series_is_not_packaged(results, tmp_path, clone, strong, fault):
    change, message = FAULTS[fault]
    change(results)
    with pytest.raises(DataError) as refused:
        run_package(tmp_path, clone, strong, results)
    assert message in str(refused.value)
    assert not (tmp_path / "out" / "acme").exists()
