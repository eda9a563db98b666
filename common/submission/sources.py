"""Where the runs of a result come from: a series with its ``runs.jsonl``, a folder of results, or logs by name.

A series tells by itself whether it is complete and whether all of its runs had one configuration and one seed each;
:func:`of_series` compares ``runs.jsonl`` with the logs. Logs without one are taken in the order given.

How experiments are counted: a run is an experiment that started the clock. One that ended before ``run_start`` is no
run, is left out with a note, and has to be made up for by another experiment; so a series that was declared with M
experiments is complete when exactly M of them are runs.
"""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from common.errors import DataError
from common.launch.series import RUNS_FILE, Experiment, Series, read_runs
from common.mlperf.parsed_log import read_log

RESULT = re.compile(r"result_(\d+)\.txt")


@dataclass(frozen=True)
class RunSet:
    """The runs of one benchmark on one system, in launch order.

    Attributes:
        name: for messages: the folder, and the series if there is one.
        logs: of the runs.
        numbers: of each run, as its file or experiment is numbered.
        complaints: what is wrong with the set as a whole; each names file and reason.
        notes: what one should know, and which changes nothing.
        series: as ``runs.jsonl`` has it; None for logs without it.
        ruleset: version that the runs were logged under; None if nobody says.
    """

    name: str
    logs: tuple[Path, ...]
    numbers: tuple[int, ...]
    complaints: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    series: Series | None = None
    ruleset: str | None = None


def find_run_sets(paths: Sequence[Path]) -> list[RunSet]:
    """The sets of runs below folders, and the logs that are named themselves, which are one set together.

    Raises:
        DataError: a path does not exist, a folder has no results, or a ``runs.jsonl`` is damaged.
    """
    named = [path for path in paths if not path.is_dir()]
    absent = [str(path) for path in named if not path.exists()]
    if absent:
        raise DataError(f"{absent[0]}: no such file or folder")
    found = [run_set for path in paths if path.is_dir() for run_set in _in_folder(path)]
    return [*found, of_logs(named)] if named else found


def _in_folder(folder: Path) -> list[RunSet]:
    if not os.access(folder, os.R_OK | os.X_OK):
        raise DataError(f"{folder}: cannot be read: permission denied")
    launched = sorted(path.parent for path in folder.rglob(RUNS_FILE))
    found = [of_series(series) for each in launched for series in read_runs(each)]
    copied = sorted({path.parent for path in folder.rglob("result_*.txt") if RESULT.fullmatch(path.name)})
    found += [of_folder(each) for each in copied]
    if not found and (log := folder / "mlperf.log").is_file():  # the output_dir of one run
        return [of_logs([log])]
    if not found:
        raise DataError(f"{folder}: has neither {RUNS_FILE} nor result_*.txt; name the folder of results, or the logs")
    return found


def of_logs(logs: Sequence[Path]) -> RunSet:
    """The set of some logs, given in launch order."""
    name = str(logs[0]) if len(logs) == 1 else f"{len(logs)} logs from {logs[0]}"
    return RunSet(name, tuple(logs), tuple(range(1, len(logs) + 1)))


def of_folder(folder: Path) -> RunSet:
    """The set of a folder's ``result_<i>.txt``, in the order of i.

    Complaints are a gap in the numbers, two files with one number, and files that the package checker would count too.
    """
    numbered: dict[int, Path] = {}
    complaints = []
    for path in sorted(folder.glob("result_*.txt")):
        found = RESULT.fullmatch(path.name)
        if found is None:
            complaints.append(f"{path}: its name is not result_<i>.txt, but the package checker counts it: rename it")
        elif (other := numbered.setdefault(int(found[1]), path)) is not path:
            complaints.append(f"{other} and {path.name} have the same number: remove or renumber one")
    numbers = sorted(numbered)
    gaps = sorted(set(range(min(1, numbers[0]), numbers[-1])) - set(numbers))
    complaints += [f"{folder / f'result_{gap}.txt'} is missing" for gap in gaps]
    return RunSet(str(folder), tuple(numbered[n] for n in numbers), tuple(numbers), tuple(complaints))


def of_series(series: Series) -> RunSet:
    """The set of a series' runs, with everything that ``runs.jsonl`` and the logs say against it."""
    where = series.folder / RUNS_FILE
    runs = [run for run in series.experiments if run.end is None or run.end.status != "not started"]
    left_out = [run for run in series.experiments if run not in runs]
    complaints = [
        *_count_complaints(series, where, len(runs)),
        *_change_complaints(series, where),
        *(text for run in runs for text in _run_complaints(run, where)),
        *(text for run in left_out for text in _not_started_complaints(run, where)),
    ]
    notes = [
        f"experiment {run.begin.experiment} never started the clock: it is no run and does not count"
        for run in left_out
    ]
    return RunSet(
        name=f"{series.folder}, series {series.name}",
        logs=tuple(run.log for run in runs),
        numbers=tuple(run.begin.experiment for run in runs),
        complaints=tuple(complaints),
        notes=tuple(notes),
        series=series,
        ruleset=series.experiments[0].begin.ruleset,
    )


def _count_complaints(series: Series, where: Path, ran: int) -> list[str]:
    """Whether every experiment that there was is remembered, and as many ran as were declared."""
    numbers = {run.begin.experiment for run in series.experiments}
    pattern = re.compile(re.escape(series.name) + r"_(\d+)\.log")
    on_disk = {int(found[1]) for path in series.folder.iterdir() if (found := pattern.fullmatch(path.name))}
    missing = sorted((set(range(1, max(numbers | on_disk) + 1))) - numbers)
    complaints = [f"{where}: experiment {number} of {series.name} is missing" for number in missing]
    if ran < series.declared:
        complaints.append(
            f"{where}: {series.name} was declared with {series.declared} experiments, {ran} ran: launch the other "
            f"{series.declared - ran} in the same series"
        )
    if ran > series.declared:
        complaints.append(
            f"{where}: {series.name} was declared with {series.declared} experiments, {ran} ran: runs that were added "
            "later cannot be chosen from"
        )
    return complaints


def _change_complaints(series: Series, where: Path) -> list[str]:
    """What changed within the series though it must not, and seeds that did not change though they must."""
    first = series.experiments[0].begin
    complaints = []
    for run in series.experiments:
        begin = run.begin
        for name in ("configuration", "commit", "benchmark", "scale", "ruleset"):
            before, now = getattr(first, name), getattr(begin, name)
            if before != now:
                complaints.append(
                    f"{where}: the {name} changed within {series.name}: {before} in experiment {first.experiment}, "
                    f"{now} in experiment {begin.experiment}"
                )
        if begin.dirty:
            complaints.append(
                f"{where}: experiment {begin.experiment} ran a source that differs from its commit (dirty)"
            )
    seen: dict[int, int] = {}
    for run in series.experiments:
        if run.begin.seed in seen:
            complaints.append(
                f"{where}: experiments {seen[run.begin.seed]} and {run.begin.experiment} have the same seed "
                f"{run.begin.seed}"
            )
        seen.setdefault(run.begin.seed, run.begin.experiment)
    return complaints


def _run_complaints(run: Experiment, where: Path) -> list[str]:
    """Whether the log of a run is there and is the one that the launcher saw."""
    number = run.begin.experiment
    if not run.log.is_file():
        return [f"{run.log} is missing: {where} has experiment {number}"]
    if run.end is None:
        return [f"{where}: experiment {number} has no end: it still runs, or the launcher died with it"]
    try:
        log = read_log(run.log)
    except DataError:
        return []  # the log's own verdict says so
    complaints = []
    if log.all("run_stop") and log.status != run.end.status:
        complaints.append(f"{run.log}: run_stop says {log.status}, {where} says {run.end.status}")
    seeds = [seed for _, _, seed in log.seeds]
    if seeds and run.begin.seed not in seeds:
        complaints.append(f"{run.log}: has the seed {seeds[0]}, {where} has {run.begin.seed} for experiment {number}")
    return complaints


def _not_started_complaints(run: Experiment, where: Path) -> list[str]:
    """Whether an experiment that is left out as "not started" really never started the clock."""
    if not run.log.is_file():
        return [f"{run.log} is missing: without it nobody can see that experiment {run.begin.experiment} never started"]
    try:
        started = bool(read_log(run.log).all("run_start"))
    except DataError:  # it may have died before its first event, or within one
        started = ":::MLLOG" in (text := run.log.read_text(encoding="latin-1")) and '"run_start"' in text
    if started:
        return [f"{run.log}: has a run_start, {where} says that experiment {run.begin.experiment} was not started"]
    return []
