"""A series: experiments launched one after the other with one configuration, and the file that remembers them.

A folder of results holds, beside the logs, ``runs.jsonl``: one JSON object a line, one before and one after each
experiment, never changed afterwards. It is what tells a complete series from a picked one::

    results/
        runs.jsonl
        <series>_<i>.log       everything that experiment i printed; the log of a submission
        <series>_<i>/          its output_dir: mlperf.log, metrics, checkpoints, summary
        <series>_system.yaml   the system's settings and limits
        <series>_doctor.json   what `doctor` found on the nodes before the first experiment
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

from common.errors import DataError

RUNS_FILE = "runs.jsonl"

Status = Literal["success", "aborted", "not started"]


@dataclass(frozen=True)
class Begin:
    """What is known of an experiment before it runs.

    Attributes:
        series: name of the series, the date and time of its first launch.
        experiment: number in the series, from 1.
        declared: experiments that the series was declared to have before its first.
        time: of the launch, ISO 8601 in UTC.
        seed: of the run, drawn by the launcher.
        commit: of the source; None outside of a repository.
        dirty: whether the source differed from the commit; None outside of a repository.
        configuration: SHA-256 of everything that influences training but the seed.
        benchmark: as on the command line.
        scale: nodes x ranks of a node, such as ``8x8``.
        ruleset: version that the run is logged under.
        log, output_dir: names in the folder of results.
        job: of the scheduler; None without one.
        overrides: the arguments of ``train``.
    """

    series: str
    experiment: int
    declared: int
    time: str
    seed: int
    commit: str | None
    dirty: bool | None
    configuration: str
    benchmark: str
    scale: str
    ruleset: str
    log: str
    output_dir: str
    job: str | None
    overrides: tuple[str, ...]


@dataclass(frozen=True)
class End:
    """What came of an experiment.

    Attributes:
        series, experiment: which one.
        time: ISO 8601 in UTC.
        exit_code: of its step; None when the launcher itself was ended before it could know.
        status: ``success``; ``aborted``, the clock ran and the target was not reached; ``not started``, there was no
            ``run_start``.
        minutes: from run_start to run_stop; None without them.
        verdict: the log's.
        reason: why it ended early; empty if it did not.
    """

    series: str
    experiment: int
    time: str
    exit_code: int | None
    status: Status
    minutes: float | None
    verdict: str
    reason: str = ""


@dataclass(frozen=True)
class Experiment:
    """One experiment; ``end`` is None while it runs, or when nothing could be written after it."""

    folder: Path
    begin: Begin
    end: End | None

    @property
    def log(self) -> Path:
        """The experiment's log."""
        return self.folder / self.begin.log


@dataclass(frozen=True)
class Series:
    """The experiments of one series, in launch order."""

    name: str
    folder: Path
    declared: int
    experiments: tuple[Experiment, ...]

    @property
    def started(self) -> int:
        """Experiments that are runs: all but those that ended before ``run_start``."""
        return sum(run.end is None or run.end.status != "not started" for run in self.experiments)

    @property
    def doctors(self) -> tuple[Path, ...]:
        """What `doctor` found on the nodes, in one file for each job that the series ran in; empty without any."""
        first = self.folder / f"{self.name}_doctor.json"
        later = sorted(self.folder.glob(f"{self.name}_doctor_*.json"))
        return tuple(path for path in (first, *later) if path.is_file())


def append(folder: Path, entry: Begin | End) -> None:
    """Add one line to the folder's ``runs.jsonl``, in one write, under a lock.

    Raises:
        OSError: it cannot be written.
    """
    kind = "begin" if isinstance(entry, Begin) else "end"
    line = json.dumps({"event": kind, **asdict(entry)}) + "\n"
    path = folder / RUNS_FILE
    with path.open("ab", buffering=0) as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        before = file.seek(0, os.SEEK_END)
        if file.write(line.encode()) != len(line.encode()):
            file.truncate(before)  # half a line would make the file unreadable
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
        os.fsync(file.fileno())


def read_runs(folder: Path) -> list[Series]:
    """The series of a folder of results, in the order of their first experiment; empty without ``runs.jsonl``.

    Raises:
        DataError: the file is damaged, or contradicts itself.
    """
    path = folder / RUNS_FILE
    try:
        lines = path.read_text().splitlines() if path.exists() else []
    except OSError as error:
        raise DataError(f"{path}: cannot be read: {error.strerror}") from error
    found: dict[str, list[Experiment]] = {}
    for number, line in enumerate(lines, start=1):
        where = f"{path}, line {number}"
        entry = _entry(where, line)
        if isinstance(entry, Begin):
            _begin(where, found.setdefault(entry.series, []), Experiment(folder, entry, None))
        else:
            _end(where, found.get(entry.series, []), entry)
    return [Series(name, folder, runs[0].begin.declared, tuple(runs)) for name, runs in found.items()]


def _entry(where: str, line: str) -> Begin | End:
    try:
        fields: Mapping[str, Any] = json.loads(line)
        values = {name: value for name, value in fields.items() if name != "event"}
        if fields["event"] == "begin":
            return Begin(**{**values, "overrides": tuple(values["overrides"])})
        if fields["event"] == "end":
            return End(**values)
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise DataError(f"{where}: is no entry of a run ({error}): {line[:80]!r}") from error
    raise DataError(f"{where}: unknown event {fields['event']!r}")


def _begin(where: str, runs: list[Experiment], new: Experiment) -> None:
    if any(run.begin.experiment >= new.begin.experiment for run in runs):
        raise DataError(
            f"{where}: experiment {new.begin.experiment} of {new.begin.series} begins twice or out of order"
        )
    if runs and runs[0].begin.declared != new.begin.declared:
        raise DataError(f"{where}: {new.begin.series} was declared with {runs[0].begin.declared} experiments")
    runs.append(new)


def _end(where: str, runs: list[Experiment], end: End) -> None:
    for index, run in enumerate(runs):
        if run.begin.experiment == end.experiment:
            if run.end is not None:
                raise DataError(f"{where}: experiment {end.experiment} of {end.series} ends twice")
            runs[index] = replace(run, end=end)
            return
    raise DataError(f"{where}: experiment {end.experiment} of {end.series} ends without a begin")
