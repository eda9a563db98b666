"""A series is a set of experiments with one configuration, launched one after the other and recorded in a file.

With ``launch.instances=M``, its M experiments are instances, which train at the same time.
The file ``runs.jsonl`` in the results folder has one JSON object per line: one written before and one after each
experiment, and never changed. It proves that no experiment of a series was left out::

    results/
        runs.jsonl
        <series>_<i>.log       complete output of experiment i; the log of a submission
        <series>_<i>/          its output_dir: mlperf.log, metrics, checkpoints, summary
        <series>_system.yaml   the system's settings and limits
        <series>_doctor.json   result of `doctor` on the nodes before the first experiment
        <series>.lock          locked by the driver while it runs; contains the driver's host and process
"""

from __future__ import annotations

import errno
import fcntl
import glob
import json
import os
import shlex
import sys
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from common.config.override import override
from common.errors import DataError
from common.launch.series_entry import Kind, Status, parse_entry
from common.untrusted.regular_file import open_regular

RUNS_FILE = "runs.jsonl"

FILE_BYTES = 16 * 2**20
"""Largest accepted size of ``runs.jsonl``, enough for tens of thousands of experiments."""
LINE_BYTES = 2**20
"""Largest accepted size of one line of ``runs.jsonl``."""


@dataclass(frozen=True)
class Begin:
    """Entry of ``runs.jsonl`` that is written before an experiment.

    Attributes:
        series: name of the series: date and time of its first launch.
        experiment: number in the series, from 1.
        declared: number of experiments in the series, declared before the first one.
        time: time of the launch, ISO 8601 in UTC.
        commit: commit of the source; None outside a repository.
        dirty: whether the source differed from the commit; None outside a repository.
        configuration: SHA-256 of all configuration that influences training, except the seed.
        scale: nodes x ranks per node, such as ``8x8``.
        log, output_dir: names in the results folder.
        job: job ID of the scheduler; None without a scheduler.
        overrides: arguments of ``train``.
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

    @property
    def job_nodes(self) -> int:
        """Number of nodes of the job that launches the experiment."""
        return int(self.scale.partition("x")[0])


@dataclass(frozen=True)
class BeginInstance(Begin):
    """Entry of ``runs.jsonl`` that is written before an instance.

    ``declared`` instances train at the same time, each on nodes of its own. ``scale`` is that of one instance.
    """

    @property
    def job_nodes(self) -> int:
        """Number of nodes of all instances."""
        return super().job_nodes * self.declared


@dataclass(frozen=True)
class End:
    """Entry of ``runs.jsonl`` that is written after an experiment: its outcome.

    Attributes:
        time: ISO 8601 in UTC.
        exit_code: exit code of the run; None if the launcher ended before the run did.
        status: ``success``; ``aborted``: started without reaching the target; ``not started``: no ``run_start``.
        minutes: minutes from run_start to run_stop; None if either is missing.
        reason: why the experiment ended early; empty if it did not.
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
    """One experiment; ``end`` is None while it runs, or if the launcher could not record its end."""

    folder: Path
    begin: Begin
    end: End | None

    @property
    def log(self) -> Path:
        """The experiment's log."""
        return self.folder / self.begin.log


@dataclass(frozen=True)
class Series:
    """The experiments of one series, in launch order; instances have been launched together."""

    name: str
    folder: Path
    declared: int
    experiments: tuple[Experiment, ...]

    @property
    def started(self) -> int:
        """Number of experiments that count as runs: all except those that ended before ``run_start``."""
        return sum(run.end is None or run.end.status != "not started" for run in self.experiments)

    @property
    def instances(self) -> int:
        """Number of experiments that train at the same time."""
        return self.declared if isinstance(self.experiments[0].begin, BeginInstance) else 1

    @property
    def left(self) -> int:
        """Number of experiments that still have to run. An instance is not replaced once another one is a run."""
        if self.instances > 1:
            return 0 if self.started else self.declared
        return max(0, self.declared - self.started)

    @property
    def doctors(self) -> tuple[Path, ...]:
        """Files with the results of `doctor`, one per job that the series ran in; possibly empty."""
        first = self.folder / f"{self.name}_doctor.json"
        later = sorted(self.folder.glob(f"{glob.escape(self.name)}_doctor_*.json"))
        return tuple(path for path in (first, *later) if path.is_file())


def launch_command(series: Series) -> str:
    """Return the command that launches the missing experiments of a series."""
    begin = series.experiments[0].begin
    own = ("launch.series=", "launch.results=")
    kept = [argument for argument in begin.overrides if not argument.startswith(own)]
    settings = [*kept, override("launch.results", series.folder), override("launch.series", series.name)]
    tasks = begin.scale.partition("x")[2]
    job = ["sbatch", f"-N{begin.job_nodes}", f"--ntasks-per-node={tasks}", "scripts/run_and_time.sh"]
    return shlex.join([*(job if begin.job else ["scripts/run.sub"]), *settings])


_ENTRIES: dict[Kind, type[Begin | End]] = {"begin": Begin, "begin_instance": BeginInstance, "end": End}


def append(folder: Path, *entries: Begin | End) -> None:
    """Append one line per entry to the folder's ``runs.jsonl``, in one write, under a lock.

    Raises:
        OSError: the file cannot be written; it has none of the lines.
    """
    kinds = {entry_type: kind for kind, entry_type in _ENTRIES.items()}
    lines = "".join(json.dumps({"event": kinds[type(entry)], **asdict(entry)}) + "\n" for entry in entries).encode()
    path = folder / RUNS_FILE
    with path.open("ab", buffering=0) as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        before = file.seek(0, os.SEEK_END)
        try:
            if file.write(lines) != len(lines):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
            os.fsync(file.fileno())
        except OSError:
            file.truncate(before)  # half a line would make the file unreadable
            raise


def read_runs(folder: Path) -> list[Series]:
    """Return the series of a results folder, in the order of their first experiments; empty without ``runs.jsonl``.

    A series with contradictory entries is skipped with a message on standard error, if there are valid ones.

    Raises:
        DataError: the file is damaged or too large, or every series has contradictory entries.
    """
    sound, damaged = _read(folder)
    for name, error in damaged.items():
        if not sound:
            raise error
        print(f"mlperf-suite: {error}; series {name} is left out", file=sys.stderr, flush=True)
    return sound


def read_series(folder: Path, name: str) -> Series | None:
    """Return the series ``name`` of a results folder, or None if it does not exist; ignore invalid other series.

    Raises:
        DataError: the file is damaged or too large, or the series has contradictory entries.
    """
    sound, damaged = _read(folder)
    if name in damaged:
        raise damaged[name]
    return next((series for series in sound if series.name == name), None)


def _read(folder: Path) -> tuple[list[Series], dict[str, DataError]]:
    """Return the valid series, and the first contradiction of each invalid series by its name."""
    path = folder / RUNS_FILE
    if not os.path.lexists(path):
        return [], {}
    found: dict[str, dict[int, Experiment]] = {}
    damaged: dict[str, DataError] = {}
    for number, line in enumerate(_lines(path), start=1):
        where = f"{path}, line {number}"
        kind, values = parse_entry(where, line)
        runs = found.setdefault(values["series"], {})
        try:
            entry = _ENTRIES[kind](**values)
            if isinstance(entry, Begin):
                _begin(where, runs, Experiment(folder, entry, None))
            else:
                _end(where, runs, entry)
        except DataError as error:
            damaged.setdefault(values["series"], error)
    sound = {name: tuple(runs.values()) for name, runs in found.items() if name not in damaged}
    return [Series(name, folder, runs[0].begin.declared, runs) for name, runs in sound.items()], damaged


def _lines(path: Path) -> list[bytes]:
    with open_regular(path, follow=False) as file:
        try:
            content = file.read(FILE_BYTES + 1)
        except OSError as error:
            raise DataError(f"{path}: cannot be read: {error.strerror}") from error
    if len(content) > FILE_BYTES:
        raise DataError(f"{path}: is larger than {FILE_BYTES >> 20} MiB: no launcher wrote it")
    lines = content.removesuffix(b"\n").split(b"\n") if content else []
    for number, line in enumerate(lines, start=1):
        if len(line) > LINE_BYTES:
            raise DataError(f"{path}, line {number}: is longer than {LINE_BYTES >> 20} MiB: no launcher wrote it")
    return lines


def _begin(where: str, runs: dict[int, Experiment], new: Experiment) -> None:
    begin = new.begin
    if runs and next(reversed(runs)) >= begin.experiment:  # numbers must ascend
        raise DataError(f"{where}: experiment {begin.experiment} of {begin.series} begins twice or out of order")
    if runs and (declared := next(iter(runs.values())).begin.declared) != begin.declared:
        raise DataError(
            f"{where}: declared is {begin.declared}, but {begin.series} was declared with {declared} experiments"
        )
    if runs and type(next(iter(runs.values())).begin) is not type(begin):
        raise DataError(f"{where}: {begin.series} has instances, which train together, and other experiments")
    runs[begin.experiment] = new


def _end(where: str, runs: dict[int, Experiment], end: End) -> None:
    run = runs.get(end.experiment)
    if run is None:
        raise DataError(f"{where}: experiment {end.experiment} of {end.series} ends without a begin")
    if run.end is not None:
        raise DataError(f"{where}: experiment {end.experiment} of {end.series} ends twice")
    runs[end.experiment] = replace(run, end=end)
