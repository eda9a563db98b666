"""Find the sets of runs to judge: series with ``runs.jsonl``, folders with ``result_<i>.txt``, or single logs.

``runs.jsonl`` shows whether a series is complete, has one configuration, and a different seed for each run.
:func:`of_series` checks it and the files beside it; :mod:`common.submission.score` compares it with the logs.
Logs without ``runs.jsonl`` keep the given order.

An experiment counts as a run only if it reached ``run_start``. One that ended earlier is left out with a note, and
another experiment must replace it: a series declared with M experiments is complete with exactly M runs.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Sequence, Set
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path, PurePosixPath

from common.errors import DataError
from common.launch.series import RUNS_FILE, Experiment, Series, launch_command, read_runs
from common.mlperf.parsed_log import TOKEN, read_log
from common.mlperf.refusals import Refusal
from common.submission.found_files import find_files
from common.submission.registry_evidence import own_contradictions
from common.untrusted.regular_file import open_regular

RUN_LOG = "mlperf.log"
"""Name of the log in the ``output_dir`` of a run."""
RESULT = re.compile(r"result_(\d{1,6})\.txt")
WEAK = "weak"
"""Parent folder of the throughput results of HPC rounds, which the rules once called weak scaling."""
PRUNED = "pruned_results"
"""Folder in that of a throughput result, for the logs of instances that do not count."""
NAMED_AT_MOST = 20
"""Largest number of missing runs or folders that are named one by one."""
_OF_RUN = re.compile(r"(.+)_(\d{1,6})(?:\.log)?")
"""Name of an experiment's log or output folder. The groups are the series and the number of the experiment."""
_CHUNK_BYTES = 2**20


@dataclass(frozen=True)
class RunSet:
    """The runs of one benchmark on one system, in launch order.

    Attributes:
        numbers: number of each run: of its experiment or result file, or its position from 1.
        complaints: faults of the set as a whole; each names file and reason.
        notes: information that does not change the verdict.
        gaps: missing numbers of ``result_<i>.txt``. They matter for instances, and if runs are chosen from more runs.
        series: the series in ``runs.jsonl``; None for logs without it.
        ruleset: version in ``runs.jsonl``; None without it.
        declared_together: whether the runs form one result: a series, a result folder, or logs named together.
        follow: whether a log may be a link. Links are allowed only for logs that the caller named.
        instances: whether each log is of one instance: of a series of instances, or in the folder of a throughput
            result.
        pruned: logs of instances that do not count.
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
    instances: bool = False
    pruned: frozenset[Path] = frozenset()

    @property
    def may_be_cut_short(self) -> bool:
        """Whether a log without ``run_stop`` counts as a failed run. The launcher ends every log of a series."""
        return self.declared_together and self.series is None and not self.instances


def find_run_sets(paths: Sequence[Path]) -> list[RunSet]:
    """Return the sets of runs below all folders among ``paths``. Logs among ``paths`` form one more set.

    Raises:
        DataError: a path does not exist, a folder has no results or cannot be listed, or a ``runs.jsonl`` is damaged.
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
    copied = [path for path in copied if path.name != PRUNED or path.parent not in copied or not _weak(folder / path)]
    # For each folder with result_<i>.txt: the folder itself or the one above it that has runs.jsonl.
    registries = {each: next((above for above in launched if each.is_relative_to(above)), None) for each in copied}
    found = []
    for results in launched:
        below = [folder / each for each, registry in registries.items() if registry == results != each]
        found += [replace(each, notes=(*each.notes, *_below_registry(below))) for each in _in_results(folder / results)]
    for each, registry in registries.items():
        if registry in (None, each):
            pruned = [path for path in names if path.parent == each / PRUNED and _weak(folder / each)]
            run_set = _of_names(folder / each, [path for path in names if path.parent == each], pruned)
            found.append(run_set if registry is None else _beside_registry(run_set, folder / registry / RUNS_FILE))
    alone = [path for path in content.files if path.name == RUN_LOG]
    found += _single_runs(folder, [path for path in alone if not any(path.is_relative_to(each) for each in launched)])
    links = [path for path in content.special if os.path.isdir(folder / path)]
    if not found and content.special:
        path = next(iter([*links, *content.special]))
        raise DataError(
            f"{folder / path}: {content.special[path]}, which is not followed; name the folder or the logs themselves"
        )
    if links:
        notes = [f"{folder / path}: is a link to a folder, which is not followed" for path in links[:NAMED_AT_MOST]]
        found[0] = replace(found[0], notes=(*found[0].notes, *notes))
    if not found:
        raise DataError(
            f"{folder}: has neither {RUNS_FILE} nor result_<i>.txt (i is a number) nor {RUN_LOG}; name the folder of "
            "results, or the logs"
        )
    return found


def _below_registry(folders: Sequence[Path]) -> Iterator[str]:
    """Yield notes on subfolders of a series whose logs are not judged, because ``runs.jsonl`` does not name them."""
    for folder in islice(folders, NAMED_AT_MOST):
        yield f"{folder}: its logs are not judged, because {RUNS_FILE} above it does not name them"


def _beside_registry(run_set: RunSet, registry: Path) -> RunSet:
    """Add a complaint about logs that ``registry`` does not name; they may be a selection from a series."""
    first = run_set.logs[0] if run_set.logs else run_set.name
    complaint = Refusal("registry-contradiction", f"{first}: lies beside {registry}, which does not name it")
    return replace(run_set, complaints=(*run_set.complaints, complaint))


def _single_runs(folder: Path, logs: Sequence[PurePosixPath]) -> list[RunSet]:
    """Return sets of runs that were not launched as a series, one set per benchmark."""
    if len(logs) == 1:
        return [of_logs([folder / logs[0]])]
    benchmarks: dict[str, list[Path]] = {}
    for log in sorted(logs):
        try:
            name = str(read_log(folder / log).benchmark)
        except DataError:  # the verdict on the log gives the reason
            name = "unreadable logs"
        benchmarks.setdefault(name, []).append(folder / log)
    return [
        RunSet(
            f"{len(paths)} runs below {folder}", tuple(paths), tuple(range(1, len(paths) + 1)), declared_together=False
        )
        for paths in benchmarks.values()
    ]


def _in_results(folder: Path) -> list[RunSet]:
    """Return the set of each series in the ``runs.jsonl`` of a folder."""
    known = read_runs(folder)
    if not known:
        raise DataError(
            f"{folder / RUNS_FILE}: is empty, which no launcher leaves it; what it recorded about the logs is lost"
        )
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
    """Return the set of the given logs, which must be in launch order.

    It has complaints if one file appears under two names, or if several logs include one of a series.
    """
    name = str(logs[0]) if len(logs) == 1 else f"{len(logs)} logs from {logs[0]}"
    complaints = [*_same_files(logs), *(_picked(logs) if len(logs) > 1 else ())]
    return RunSet(name, tuple(logs), tuple(range(1, len(logs) + 1)), tuple(complaints))


def _picked(logs: Sequence[Path]) -> Iterator[Refusal]:
    """Yield a refusal for the first log of a series, because the other runs of the series may be hidden."""
    for log in logs:
        for folder in dict.fromkeys((log.parent, log.parent.parent)):
            if os.path.lexists(folder / RUNS_FILE):
                text = f"{log}: is beside or below {folder / RUNS_FILE}: name the folder, so that all runs are counted"
                yield Refusal("not-consecutive", text)
                return


def _weak(folder: Path) -> bool:
    """Return whether a folder is that of a throughput result, or of its pruned instances."""
    parts = folder.absolute().parts
    return parts[-3 if parts[-1] == PRUNED else -2 :][:1] == (WEAK,)


def _of_names(folder: Path, names: Sequence[PurePosixPath], in_pruned: Sequence[PurePosixPath]) -> RunSet:
    """Return the set of the logs ``names`` of a folder and ``in_pruned`` of pruned instances, which share numbers."""
    numbered, complaints = _numbered(folder, names)
    pruned, more = _numbered(folder / PRUNED, in_pruned)
    first, last = min(numbered), max(numbered)
    absent = (n for n in range(min(1, first), last) if n not in numbered and n not in pruned)
    gaps = tuple(
        Refusal("not-consecutive", f"{folder / f'result_{number}.txt'} is missing")
        for number in islice(absent, NAMED_AT_MOST)
    )
    runs = [*sorted(numbered.items()), *sorted(pruned.items())]
    logs = [path for _, path in runs]
    complaints += [*more, *_links(logs), *_same_files(logs), *_picked(logs)]
    return RunSet(
        name=str(folder),
        logs=tuple(logs),
        numbers=tuple(number for number, _ in runs),
        complaints=tuple(complaints),
        gaps=gaps,
        follow=False,
        instances=_weak(folder),
        pruned=frozenset(pruned.values()),
    )


def _numbered(folder: Path, names: Sequence[PurePosixPath]) -> tuple[dict[int, Path], list[Refusal]]:
    """Return the logs ``result_<i>.txt`` of a folder by number, and complaints about other names and equal numbers."""
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
    return numbered, complaints


def _links(logs: Sequence[Path]) -> Iterator[Refusal]:
    for path in logs:
        if os.path.islink(path):
            yield Refusal("log-is-link", f"{path} is a link: put the log itself there")


def _same_files(logs: Sequence[Path]) -> Iterator[Refusal]:
    """Yield a refusal for each log that is the same file as an earlier one."""
    seen: dict[tuple[int, int], Path] = {}
    for path in logs:
        try:
            status = os.stat(path)
        except (OSError, ValueError):
            continue  # reading the log later reports the error
        other = seen.setdefault((status.st_dev, status.st_ino), path)
        if other is not path:
            yield Refusal("file-twice", f"{path} and {other} are one file: a result counts each run once")


def of_series(series: Series, on_disk: Set[int] = frozenset(), strays: Sequence[Refusal] = ()) -> RunSet:
    """Return the set of runs of a series, with all complaints from ``runs.jsonl`` and the files beside it.

    Args:
        on_disk: numbers of the experiments that have a log or an output folder.
        strays: complaints about other files in the folder.
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
        f"experiment {run.begin.experiment} ended before run_start: it is no run and does not count" for run in left_out
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
        instances=series.instances > 1,
        pruned=frozenset(run.log for run in runs if series.instances > 1 and not _reached_target(run)),
    )


def _reached_target(run: Experiment) -> bool:
    return run.end is not None and run.end.status == "success"


def _count_refusals(series: Series, where: Path, ran: int, on_disk: Set[int]) -> list[Refusal]:
    """Return complaints about experiments that ``runs.jsonl`` lacks, and if more or fewer ran than were declared.

    Fewer instances may have run, because one that fails is not replaced.
    """
    numbers = {run.begin.experiment for run in series.experiments}
    gaps = {n for n in range(1, max(numbers)) if n not in numbers}
    missing = sorted(gaps | (on_disk - numbers - {0}))
    complaints = [
        Refusal("registry-contradiction", f"{where}: experiment {number} of {series.name} is missing")
        for number in islice(missing, NAMED_AT_MOST)
    ]
    if series.instances > 1:
        if lacking := -len(series.experiments) % series.declared:
            text = f"{where}: lacks {lacking} of the {series.declared} instances that {series.name} was declared with"
            complaints.append(Refusal("instance-missing", text))
    elif ran < series.declared:
        text = (
            f"{where}: {series.name} was declared with {series.declared} experiments, {ran} ran: launch the other "
            f"{series.declared - ran} in the same series: {launch_command(series)}"
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
    """Yield complaints about logs of series that ``runs.jsonl`` does not have, because their lines were removed.

    Only names ``<series>_<i>.log``, which the launcher writes, are checked. Files ``result_<i>.txt`` form another set.
    """
    for name in sorted(names):
        found = _OF_RUN.fullmatch(name)
        if found is None or not name.endswith(".log") or found[1] in known:
            continue
        try:
            stray = _has_run_start(folder / name)
        except DataError:
            continue  # not a regular readable file, so the launcher did not write it
        if stray:
            text = f"{folder / name}: is the log of a run, but {RUNS_FILE} has no experiment with it"
            yield Refusal("registry-contradiction", text)


def _change_refusals(series: Series, where: Path) -> list[Refusal]:
    """Return complaints about values that changed within the series, unclean sources, and repeated seeds."""
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
    """Return a complaint if the log of a run or its ``end`` line is missing."""
    number = run.begin.experiment
    if not os.path.lexists(run.log):
        return [Refusal("run-without-end", f"{run.log} is missing: {where} has experiment {number}")]
    if run.end is None:
        text = f"{where}: experiment {number} has no end: it still runs, or the launcher died with it"
        return [Refusal("run-without-end", text)]
    return []


def _not_started_refusals(run: Experiment, where: Path) -> list[Refusal]:
    """Return a complaint unless the log proves that an experiment with status "not started" has no ``run_start``."""
    unseen = f"nobody can see that experiment {run.begin.experiment} never started"
    if not os.path.lexists(run.log):
        return [Refusal("run-without-end", f"{run.log} is missing: without it {unseen}")]
    try:
        started = _has_run_start(run.log)
    except DataError as error:
        return [Refusal("run-without-end", f"{error}: {unseen}")]
    if started:
        text = f"{run.log}: has a run_start, {where} says that experiment {run.begin.experiment} was not started"
        return [Refusal("registry-contradiction", text)]
    return []


def _has_run_start(path: Path) -> bool:
    """Return whether a log has a ``run_start`` event, even if the log is damaged.

    Raises:
        DataError: the path is not a regular file, or cannot be read.
    """
    try:
        log = read_log(path)
    except DataError:  # the run may have crashed before its first event or in the middle of one
        return _has_both(path, TOKEN.encode(), b"run_start")
    return any(event.key == "run_start" for event in (*log.events, *log.echoes))


def _has_both(path: Path, *wanted: bytes) -> bool:
    missing, end = set(wanted), b""
    with open_regular(path, follow=False) as file:
        while missing and (chunk := file.read(_CHUNK_BYTES)):
            missing -= {each for each in missing if each in end + chunk}
            end = chunk[-32:]
    return not missing
