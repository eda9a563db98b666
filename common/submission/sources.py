"""Where the runs of a result come from: a series with its ``runs.jsonl``, a folder of results, or logs by name.

A series tells by itself whether it is complete and whether all of its runs had one configuration and one seed each.
:func:`of_series` looks at ``runs.jsonl`` and at what lies beside it; :mod:`common.submission.score`, which reads each
log once, compares the two. Logs without ``runs.jsonl`` are taken in the order given.

How experiments are counted: a run is an experiment that started the clock. One that ended before ``run_start`` is no
run, is left out with a note, and has to be made up for by another experiment; so a series that was declared with M
experiments is complete when exactly M of them are runs.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Sequence, Set
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path, PurePosixPath

from common.errors import DataError
from common.launch.series import RUNS_FILE, Experiment, Series, going_on, read_runs
from common.mlperf.parsed_log import TOKEN, read_log
from common.mlperf.refusals import Refusal
from common.submission.found_files import find_files
from common.submission.registry_evidence import own_contradictions
from common.untrusted.regular_file import open_regular

RUN_LOG = "mlperf.log"
"""The log in the output_dir of a run."""
RESULT = re.compile(r"result_(\d{1,6})\.txt")
NAMED_AT_MOST = 20
"""How many missing numbers are named one by one."""
_OF_RUN = re.compile(r"(.+)_(\d{1,6})(?:\.log)?")
"""An experiment's log, or the folder of its output: the series, and the experiment's number."""
_CHUNK_BYTES = 2**20


@dataclass(frozen=True)
class RunSet:
    """The runs of one benchmark on one system, in launch order.

    Attributes:
        name: for messages: the folder, and the series if there is one.
        logs: of the runs.
        numbers: of each run, as its file or experiment is numbered.
        complaints: what is wrong with the set as a whole; each names file and reason.
        notes: what one should know, and which changes nothing.
        gaps: logs that are missing in the numbering of ``result_<i>.txt``. They forbid a choice of consecutive runs.
        series: as ``runs.jsonl`` has it; None for logs without it.
        ruleset: version that the runs were logged under; None if nobody says.
        declared_together: whether they are meant as one result: a series, a folder of results, logs named together.
        follow: whether a log may be a link: where the caller named it, not where it was found.
    """

    name: str
    logs: tuple[Path, ...]
    numbers: tuple[int, ...]
    complaints: tuple[Refusal, ...] = ()
    notes: tuple[str, ...] = ()
    gaps: tuple[Refusal, ...] = ()
    series: Series | None = None
    ruleset: str | None = None
    declared_together: bool = True
    follow: bool = True


def find_run_sets(paths: Sequence[Path]) -> list[RunSet]:
    """The sets of runs below folders, and the logs that are named themselves, which are one set together.

    Raises:
        DataError: a path does not exist, a folder has no results or cannot be looked through, or a ``runs.jsonl`` is
            damaged.
    """
    named = [path for path in paths if not os.path.isdir(path)]
    absent = [str(path) for path in named if not os.path.lexists(path)]
    if absent:
        raise DataError(f"{absent[0]}: no such file or folder")
    found = [run_set for path in paths if os.path.isdir(path) for run_set in _in_folder(path)]
    return [*found, of_logs(named)] if named else found


def _in_folder(folder: Path) -> list[RunSet]:
    content = find_files(folder)
    if content.unfit:
        raise DataError(content.unfit[0])
    names = [*content.files, *content.special, *content.folders]
    launched = sorted({path.parent for path in names if path.name == RUNS_FILE})
    copied = sorted({path.parent for path in names if RESULT.fullmatch(path.name)})
    registries = {each: next((place for place in launched if each.is_relative_to(place)), None) for each in copied}
    found = []
    for place in launched:
        below = [folder / each for each, registry in registries.items() if registry == place != each]
        found += [replace(each, notes=(*each.notes, *_below_registry(below))) for each in _in_results(folder / place)]
    for each, registry in registries.items():
        if registry in (None, each):
            run_set = _of_names(folder / each, [path for path in names if path.parent == each])
            found.append(run_set if registry is None else _beside_registry(run_set, folder / registry / RUNS_FILE))
    alone = [path for path in content.files if path.name == RUN_LOG]
    found += _single_runs(folder, [path for path in alone if not any(path.is_relative_to(each) for each in launched)])
    if not found and content.special:
        path, kind = next(iter(content.special.items()))
        raise DataError(f"{folder / path}: {kind}, which is not followed; name the folder or the logs themselves")
    if not found:
        raise DataError(
            f"{folder}: has neither {RUNS_FILE} nor result_*.txt nor {RUN_LOG}; name the folder of results, or the logs"
        )
    return found


def _below_registry(folders: Sequence[Path]) -> Iterator[str]:
    """Logs in subfolders of a series, which are not judged: the result is what the series' own logs give."""
    for folder in islice(folders, NAMED_AT_MOST):
        yield f"{folder}: its logs are not judged, because {RUNS_FILE} above it does not name them"


def _beside_registry(run_set: RunSet, registry: Path) -> RunSet:
    """Logs beside a registry without being in it: runs picked from a series would look like a whole one."""
    first = run_set.logs[0] if run_set.logs else run_set.name
    complaint = Refusal("registry-contradiction", f"{first}: lies beside {registry}, which does not name it")
    return replace(run_set, complaints=(*run_set.complaints, complaint))


def _single_runs(folder: Path, logs: Sequence[PurePosixPath]) -> list[RunSet]:
    """Runs below a folder that nobody launched as a series, in a set for each benchmark."""
    if len(logs) == 1:
        return [of_logs([folder / logs[0]])]
    benchmarks: dict[str, list[Path]] = {}
    for log in sorted(logs):
        try:
            name = str(read_log(folder / log).benchmark)
        except DataError:  # the log's own verdict says why
            name = "unreadable logs"
        benchmarks.setdefault(name, []).append(folder / log)
    return [
        RunSet(
            f"{len(paths)} runs below {folder}", tuple(paths), tuple(range(1, len(paths) + 1)), declared_together=False
        )
        for paths in benchmarks.values()
    ]


def _in_results(folder: Path) -> list[RunSet]:
    """The sets of one ``runs.jsonl``."""
    known = read_runs(folder)
    if not known:
        raise DataError(f"{folder / RUNS_FILE}: is empty; no launcher leaves it so: what it said of the logs is lost")
    try:
        names = os.listdir(folder)
    except OSError as error:
        raise DataError(f"{folder}: cannot be read: {error.strerror}") from error
    on_disk: dict[str, set[int]] = {}
    for name in names:
        if found := _OF_RUN.fullmatch(name):
            on_disk.setdefault(found[1], set()).add(int(found[2]))
    strays = tuple(_stray_refusals(folder, names, {series.name for series in known}))
    return [of_series(series, on_disk.get(series.name, set()), strays) for series in known]


def of_logs(logs: Sequence[Path]) -> RunSet:
    """The set of some logs, given in launch order.

    Complaints are one file under two names, and logs picked out of a series.
    """
    name = str(logs[0]) if len(logs) == 1 else f"{len(logs)} logs from {logs[0]}"
    complaints = [*_same_files(logs), *(_picked(logs) if len(logs) > 1 else ())]
    return RunSet(name, tuple(logs), tuple(range(1, len(logs) + 1)), tuple(complaints))


def _picked(logs: Sequence[Path]) -> Iterator[Refusal]:
    """Logs of a series that are named one by one: what else the series has would not be seen."""
    for log in logs:
        for folder in dict.fromkeys((log.parent, log.parent.parent)):
            if os.path.lexists(folder / RUNS_FILE):
                text = f"{log}: is beside or below {folder / RUNS_FILE}: name the folder, so that all runs are counted"
                yield Refusal("not-consecutive", text)
                return


def _of_names(folder: Path, names: Sequence[PurePosixPath]) -> RunSet:
    numbered: dict[int, Path] = {}
    complaints = []
    for name in sorted(path.name for path in names if path.match("result_*.txt")):
        path, found = folder / name, RESULT.fullmatch(name)
        if found is None:
            text = f"{path}: its name is not result_<i>.txt, but the package checker counts it: rename it"
            complaints.append(Refusal("result-name", text))
        elif (other := numbered.setdefault(int(found[1]), path)) is not path:
            text = f"{other} and {name} have the same number: remove or renumber one"
            complaints.append(Refusal("result-name", text))
    numbers = sorted(numbered)
    absent = (n for n in range(min(1, numbers[0]), numbers[-1]) if n not in numbered)
    gaps = tuple(
        Refusal("not-consecutive", f"{folder / f'result_{number}.txt'} is missing")
        for number in islice(absent, NAMED_AT_MOST)
    )
    logs = [numbered[number] for number in numbers]
    complaints += [*_links(logs), *_same_files(logs), *_picked(logs)]
    return RunSet(str(folder), tuple(logs), tuple(numbers), tuple(complaints), gaps=gaps, follow=False)


def _links(logs: Sequence[Path]) -> Iterator[Refusal]:
    for path in logs:
        if os.path.islink(path):
            yield Refusal("log-is-link", f"{path} is a link: put the log itself there")


def _same_files(logs: Sequence[Path]) -> Iterator[Refusal]:
    """Logs that are one file under two names."""
    seen: dict[tuple[int, int], Path] = {}
    for path in logs:
        try:
            status = os.stat(path)
        except (OSError, ValueError):
            continue  # reading it says so
        other = seen.setdefault((status.st_dev, status.st_ino), path)
        if other is not path:
            yield Refusal("file-twice", f"{path} and {other} are one file: a result counts each run once")


def of_series(series: Series, on_disk: Set[int] = frozenset(), strays: Sequence[Refusal] = ()) -> RunSet:
    """The set of a series' runs, with everything that ``runs.jsonl`` and the files beside it say against it.

    Args:
        series: it.
        on_disk: numbers of the experiments that have a log or a folder.
        strays: what is wrong with the folder.
    """
    where = series.folder / RUNS_FILE
    left_out = [run for run in series.experiments if run.end is not None and run.end.status == "not started"]
    runs = [run for run in series.experiments if run.end is None or run.end.status != "not started"]
    complaints = [
        *_count_refusals(series, where, len(runs), on_disk),
        *strays,
        *_change_refusals(series, where),
        *(Refusal("registry-contradiction", text) for text in own_contradictions(series)),
        *_links([run.log for run in series.experiments]),
        *_same_files([run.log for run in series.experiments]),
        *(refusal for run in runs for refusal in _run_refusals(run, where)),
        *(refusal for run in left_out for refusal in _not_started_refusals(run, where)),
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
        follow=False,
    )


def _count_refusals(series: Series, where: Path, ran: int, on_disk: Set[int]) -> list[Refusal]:
    """Whether every experiment that there was is remembered, and as many ran as were declared."""
    numbers = {run.begin.experiment for run in series.experiments}
    gaps = {n for n in range(1, max(numbers)) if n not in numbers}
    missing = sorted(gaps | (on_disk - numbers - {0}))
    complaints = [
        Refusal("registry-contradiction", f"{where}: experiment {number} of {series.name} is missing")
        for number in islice(missing, NAMED_AT_MOST)
    ]
    if ran < series.declared:
        text = (
            f"{where}: {series.name} was declared with {series.declared} experiments, {ran} ran: launch the other "
            f"{series.declared - ran} in the same series: {going_on(series)}"
        )
        complaints.append(Refusal("declared-count", text))
    if ran > series.declared:
        text = (
            f"{where}: {series.name} was declared with {series.declared} experiments, {ran} ran: runs that were added "
            "later cannot be chosen from"
        )
        complaints.append(Refusal("declared-count", text))
    return complaints


def _stray_refusals(folder: Path, names: Sequence[str], known: Set[str]) -> Iterator[Refusal]:
    """Logs of runs of which ``runs.jsonl`` knows not even the series: its lines were taken out.

    Only names as a launcher gives them are looked at, ``<series>_<i>.log``; a folder's ``result_<i>.txt`` are judged as
    a set of their own.
    """
    for name in sorted(names):
        found = _OF_RUN.fullmatch(name)
        if found is None or not name.endswith(".log") or found[1] in known:
            continue
        try:
            stray = _clock_started(folder / name)
        except DataError:
            continue  # no file that a launcher made
        if stray:
            text = f"{folder / name}: is the log of a run, but {RUNS_FILE} has no experiment with it"
            yield Refusal("registry-contradiction", text)


def _change_refusals(series: Series, where: Path) -> list[Refusal]:
    """What changed within the series though it must not, and seeds that did not change though they must."""
    first = series.experiments[0].begin
    complaints = []
    for run in series.experiments:
        begin = run.begin
        for name in ("configuration", "commit", "benchmark", "scale", "ruleset"):
            before, now = getattr(first, name), getattr(begin, name)
            if before != now:
                text = (
                    f"{where}: the {name} changed within {series.name}: {before} in experiment {first.experiment}, "
                    f"{now} in experiment {begin.experiment}"
                )
                complaints.append(Refusal("series-changed", text))
        if begin.dirty:
            text = f"{where}: experiment {begin.experiment} ran a source that differs from its commit (dirty)"
            complaints.append(Refusal("source-unknown", text))
    seen: dict[int, int] = {}
    for run in series.experiments:
        if run.begin.seed in seen:
            text = (
                f"{where}: experiments {seen[run.begin.seed]} and {run.begin.experiment} have the same seed "
                f"{run.begin.seed}"
            )
            complaints.append(Refusal("seed-repeated", text))
        seen.setdefault(run.begin.seed, run.begin.experiment)
    return complaints


def _run_refusals(run: Experiment, where: Path) -> list[Refusal]:
    """Whether the log of a run is there, and its end."""
    number = run.begin.experiment
    if not os.path.lexists(run.log):
        return [Refusal("run-without-end", f"{run.log} is missing: {where} has experiment {number}")]
    if run.end is None:
        text = f"{where}: experiment {number} has no end: it still runs, or the launcher died with it"
        return [Refusal("run-without-end", text)]
    return []


def _not_started_refusals(run: Experiment, where: Path) -> list[Refusal]:
    """Whether an experiment that is left out as "not started" really never started the clock."""
    unseen = f"nobody can see that experiment {run.begin.experiment} never started"
    if not os.path.lexists(run.log):
        return [Refusal("run-without-end", f"{run.log} is missing: without it {unseen}")]
    try:
        started = _clock_started(run.log)
    except DataError as error:
        return [Refusal("run-without-end", f"{error}: {unseen}")]
    if started:
        text = f"{run.log}: has a run_start, {where} says that experiment {run.begin.experiment} was not started"
        return [Refusal("registry-contradiction", text)]
    return []


def _clock_started(path: Path) -> bool:
    """Whether a log has a ``run_start``, be it damaged or not.

    Raises:
        DataError: it is no regular file, or cannot be read.
    """
    try:
        log = read_log(path)
    except DataError:  # it may have died before its first event, or within one
        return _has_both(path, TOKEN.encode(), b"run_start")
    return any(event.key == "run_start" for event in (*log.events, *log.echoes))


def _has_both(path: Path, *wanted: bytes) -> bool:
    missing, end = set(wanted), b""
    with open_regular(path, follow=False) as file:
        while missing and (chunk := file.read(_CHUNK_BYTES)):
            missing -= {each for each in missing if each in end + chunk}
            end = chunk[-32:]
    return not missing
