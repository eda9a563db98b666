"""A series: experiments launched one after the other with one configuration, and the file that remembers them.

A folder of results holds, beside the logs, ``runs.jsonl``: one JSON object a line, one before and one after each
experiment, never changed afterwards. It is what tells a complete series from a picked one::

    results/
        runs.jsonl
        <series>_<i>.log       everything that experiment i printed; the log of a submission
        <series>_<i>/          its output_dir: mlperf.log, metrics, checkpoints, summary
        <series>_system.yaml   the system's settings and limits
        <series>_doctor.json   what `doctor` found on the nodes before the first experiment
        <series>.lock          locked by the series' driver while it runs; names its host and process
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
from common.launch.series_entry import Status, parse_entry
from common.untrusted.regular_file import open_regular

RUNS_FILE = "runs.jsonl"

FILE_BYTES = 16 * 2**20
"""The largest ``runs.jsonl`` that is read: tens of thousands of experiments."""
LINE_BYTES = 2**20


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
        later = sorted(self.folder.glob(f"{glob.escape(self.name)}_doctor_*.json"))
        return tuple(path for path in (first, *later) if path.is_file())


def going_on(series: Series) -> str:
    """Return the command that launches the missing experiments of a series."""
    begin = series.experiments[0].begin
    own = ("launch.series=", "launch.results=")
    kept = [argument for argument in begin.overrides if not argument.startswith(own)]
    settings = [*kept, override("launch.results", series.folder), override("launch.series", series.name)]
    nodes, tasks = begin.scale.split("x")
    job = ["sbatch", f"-N{nodes}", f"--ntasks-per-node={tasks}", "scripts/run_and_time.sh"]
    return shlex.join([*(job if begin.job else ["scripts/run.sub"]), *settings])


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
    """Return the series of a folder of results, in the order of their first experiment; empty without ``runs.jsonl``.

    A series whose entries contradict each other is left out, with a message on standard error, if there are others.

    Raises:
        DataError: the file is damaged or larger than any launcher's, or all of its series contradict themselves.
    """
    sound, damaged = _read(folder)
    for name, error in damaged.items():
        if not sound:
            raise error
        print(f"mlperf-suite: {error}; series {name} is left out", file=sys.stderr, flush=True)
    return sound


def read_series(folder: Path, name: str) -> Series | None:
    """Return one series of a folder of results, whatever state the others are in; None if there is none of the name.

    Raises:
        DataError: the file is damaged or larger than any launcher's, or the series contradicts itself.
    """
    sound, damaged = _read(folder)
    if name in damaged:
        raise damaged[name]
    return next((series for series in sound if series.name == name), None)


def _read(folder: Path) -> tuple[list[Series], dict[str, DataError]]:
    """Return the sound series, and by the names of the others the first contradiction in each."""
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
            if kind == "begin":
                _begin(where, runs, Experiment(folder, Begin(**values), None))
            else:
                _end(where, runs, End(**values))
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
    if runs and next(reversed(runs)) >= begin.experiment:  # they ascend
        raise DataError(f"{where}: experiment {begin.experiment} of {begin.series} begins twice or out of order")
    if runs and (declared := next(iter(runs.values())).begin.declared) != begin.declared:
        raise DataError(
            f"{where}: declared is {begin.declared}, but {begin.series} was declared with {declared} experiments"
        )
    runs[begin.experiment] = new


def _end(where: str, runs: dict[int, Experiment], end: End) -> None:
    run = runs.get(end.experiment)
    if run is None:
        raise DataError(f"{where}: experiment {end.experiment} of {end.series} ends without a begin")
    if run.end is not None:
        raise DataError(f"{where}: experiment {end.experiment} of {end.series} ends twice")
    runs[end.experiment] = replace(run, end=end)
