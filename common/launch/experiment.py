"""What the driver ``scripts/run.sub`` asks Python: ``python -m common.cli series COMMAND``.

The driver is a shell script and may run on a host without PyTorch and Hydra. It calls these commands, in the container
if there is one, and evaluates the shell assignments that they print. ``open`` checks the configuration and prints the
driver's settings, such as mounts. ``name`` prints the series' name, which needs the mounted results folder. Both write
nothing. ``begin`` and ``end`` write ``runs.jsonl`` in the results folder.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import hashlib
import json
import os
import shlex
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from common.config.override import override
from common.config.schema import RunConfig, SessionConfig
from common.data.staging import STAGED
from common.distributed.environment import integer
from common.distributed.shared_folder import sharing_needed
from common.distributed.startup import expand_nodelist
from common.errors import ConfigError, DataError, SuiteError, print_error
from common.launch.data_folder import require_prepared
from common.launch.launch_config import LaunchConfig
from common.launch.series import Begin, BeginInstance, End, Experiment, append, read_runs, read_series
from common.launch.series_entry import Status
from common.launch.step_errors import complaint, explain, full_disk
from common.mlperf.admission import Admission
from common.mlperf.events import RunEvents
from common.mlperf.mllog import RunLog
from common.mlperf.parsed_log import PROGRESS_KEYS, read_log
from common.mlperf.rules import rules_for
from common.mlperf.seeds import draw_seed, experiment_seed
from common.mlperf.verdict import judge

LIVE_JOBS = "MLPERF_LIVE_JOBS"
"""Environment variable with the IDs of the scheduler's live jobs, separated by commas. The driver sets it; its value is
``unknown`` if the scheduler did not answer."""

Admit = Callable[[Mapping[str, Any]], tuple[RunConfig, SessionConfig, Admission]]
"""Function that validates a composed configuration and returns the run, the session and its admission."""

NOT_TRAINING = frozenset(
    {
        "assets_dir",
        "bench",
        "cache_cleared",
        "checkpoint_every",
        "data_dir",
        "keep_checkpoints",
        "launch",
        "output_dir",
        "profile",
        "resume",
        "seed",
        "staging_dir",
        "synthetic",
        "tensorboard",
        "timeout_seconds",
    }
)
"""Top-level keys of the configuration that do not influence training, or differ between the runs of a series."""


def main(argv: Sequence[str], compose: Callable[[Sequence[str]], dict[str, Any]], admit: Admit) -> int:
    """Run one of the four commands; return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m common.cli series", description=__doc__.splitlines()[0])
    commands = parser.add_subparsers(dest="command", required=True)
    for name in ("open", "name", "begin", "end"):
        command = commands.add_parser(name)
        command.add_argument("overrides", nargs="*", help="arguments of `mlperf-suite train`")
        if name in ("begin", "end"):
            command.add_argument("--series", required=True)
        if name == "end":
            command.add_argument("--experiment", type=int, required=True)
            command.add_argument("--exit-code", type=int, required=True)
            command.add_argument("--step-errors", type=Path, help="file with srun's messages about its tasks")
            command.add_argument("--reason", default="", help="why the experiment ended early, if known")
    arguments = parser.parse_args(argv)
    try:
        tree = compose(arguments.overrides)
        settings = LaunchConfig.load(tree)
        if arguments.command == "open":
            print(assignments(open_series(tree, settings, os.environ, admit)))
        elif arguments.command == "name":
            name = series_name(settings, os.environ)
            planned = ["seed=SEED", override("output_dir", (settings.results / f"{name}_EXPERIMENT").absolute())]
            print(assignments({"series": name, "planned": planned}))
        elif arguments.command == "begin":
            begun = begin(tree, settings, arguments.series, arguments.overrides, os.environ, admit)
            print(assignments({"begun": [assignments(each) for each in begun]}))
        else:
            known = (arguments.step_errors, arguments.reason)
            left = end(settings, arguments.series, arguments.experiment, arguments.exit_code, *known)
            print(assignments({"left": left}))
    except (SuiteError, OSError) as error:
        print_error(error if isinstance(error, SuiteError) else SuiteError(f"{error.strerror}: {error.filename}"))
        return error.exit_code if isinstance(error, SuiteError) else SuiteError.exit_code
    return 0


def assignments(values: Mapping[str, str | int | Sequence[str]]) -> str:
    """Return ``values`` as shell assignments, one per line; sequences become arrays."""
    lines = []
    for name, value in values.items():
        if isinstance(value, str | int):
            lines.append(f"{name}={shlex.quote(str(value))}")
        else:
            lines.append(f"{name}=({' '.join(shlex.quote(entry) for entry in value)})")
    return "\n".join(lines)


def open_series(
    tree: Mapping[str, Any], settings: LaunchConfig, environment: Mapping[str, str], admit: Admit
) -> dict[str, str | int | Sequence[str]]:
    """Check the configuration before anything starts; return the settings that the driver needs, by shell variable.

    Args:
        settings: section ``launch`` of it.
        environment: environment variables of the job, such as those of Slurm.

    Raises:
        ConfigError: the configuration is wrong, breaks a rule, or does not fit the job's nodes.
    """
    run, session, admission = admit(tree)
    if settings.instances > 1 and rules_for(run.benchmark.name, admission.ruleset).usage != "hpc":
        raise ConfigError(
            f"launch.instances={settings.instances}: only HPC rounds have a throughput, and {run.benchmark.name} is no "
            "benchmark of theirs; launch.experiments runs one after the other"
        )
    _check_nodes(run, settings, environment)
    if session.resume is not None and (session.seed is None or settings.experiments > 1 or settings.instances > 1):
        raise ConfigError(
            f"resume={session.resume}: a series gives each of its runs a seed, and a checkpoint goes on with its own; "
            "give seed=… as the log of the interrupted run has it, and launch.experiments=1"
        )
    for obstacle in _obstacles(run, session, environment):
        print(f"mlperf-suite: these runs cannot be submitted: {obstacle}", file=sys.stderr, flush=True)
    return {
        "declared": settings.experiments,
        "instances": settings.instances,
        "nodes": run.scale.nodes * settings.instances,
        "tasks_per_node": run.scale.gpus_per_node,
        "results": str(settings.results.absolute()),
        "read_only": [str(path.absolute()) for path in (session.data_dir, run.assets_dir) if path is not None],
        "staging_dir": "" if session.staging_dir is None else str((session.staging_dir / STAGED).absolute()),
        "mounts": settings.mounts,
        "passed_on": settings.environment,
        "clear_caches": int(settings.clear_caches),
        "drop_caches": settings.drop_caches,
        "doctor": int(settings.doctor),
        "folders": _examined_folders(settings, run, session),
        "system": json.dumps(_examined_system(tree["system"], run, session)),
        "run_minutes": settings.run_minutes or "",
        "requeue": int(settings.requeue),
        "pre_job": settings.hooks.pre_job,
        "pre_run": settings.hooks.pre_run,
        "post_run": settings.hooks.post_run,
        "post_job": settings.hooks.post_job,
    }


def _examined_folders(settings: LaunchConfig, run: RunConfig, session: SessionConfig) -> Sequence[str]:
    """Return the options of `doctor` for shared folders: the data, and the results if the runs need them shared."""
    output = ["--output-dir", str(settings.results.absolute())] if sharing_needed(run, session) else []
    return [*output, "--data-dir", str(session.data_dir.absolute())]


def _examined_system(system: Mapping[str, Any], run: RunConfig, session: SessionConfig) -> Mapping[str, Any]:
    """Return the system whose limits `doctor` checks, with the scale's GPUs per node as a lower limit."""
    if not run.scale.gpu or session.device == "cpu":
        return system
    limits = run.system.limits
    node = limits.get("node") or {}
    gpus = node.get("gpus") or {}
    least = max(run.scale.gpus_per_node, gpus.get("min") or 0)
    return {**system, "limits": {**limits, "node": {**node, "gpus": {**gpus, "min": least}}}}


def _obstacles(run: RunConfig, session: SessionConfig, environment: Mapping[str, str]) -> Sequence[str]:
    """Return reasons why the runs could not be submitted, as messages; empty for synthetic data."""
    if run.benchmark.synthetic:
        return ()
    found = [
        f"submission.{name} is not set"
        for name in ("org", "platform")
        if getattr(session.submission, name) in ("", "unset")
    ]
    source = find_source(environment=environment)
    if source.commit is None:
        found.append("the source is in no git checkout, so that no commit can be logged")
    elif source.dirty:
        found.append("the source differs from its commit; commit it")
    return found


def _check_nodes(run: RunConfig, settings: LaunchConfig, environment: Mapping[str, str]) -> None:
    nodes = expand_nodelist(environment.get("SLURM_JOB_NODELIST", ""))
    needed = run.scale.nodes * settings.instances
    if nodes and len(nodes) != needed:
        each = f" for each of {settings.instances} instances" if settings.instances > 1 else ""
        raise ConfigError(f"scale: {run.scale.nodes} nodes{each}, but the job has {len(nodes)}: sbatch -N{needed} …")


def series_name(settings: LaunchConfig, environment: Mapping[str, str]) -> str:
    """Return the name of the series: ``launch.series``, the last series of a requeued job, or the current time.

    Raises:
        ConfigError: ``launch.series`` does not exist.
    """
    if settings.series is not None:
        if read_series(settings.results, settings.series) is None:
            raise ConfigError(f"launch.series={settings.series}: {settings.results} has no such series")
        return settings.series
    job = environment.get("SLURM_JOB_ID")
    if job and integer(environment, "SLURM_RESTART_COUNT", 0):
        mine = [series.name for series in read_runs(settings.results) if series.experiments[0].begin.job == job]
        if mine:
            return mine[-1]
    return datetime.datetime.now(datetime.UTC).strftime("%Y%m%d-%H%M%S-%f")


def begin(
    tree: Mapping[str, Any],
    settings: LaunchConfig,
    name: str,
    overrides: Sequence[str],
    environment: Mapping[str, str],
    admit: Admit,
) -> list[dict[str, str | int | Sequence[str]]]:
    """Record the next experiment, or all instances, in ``runs.jsonl`` before they run.

    Experiments that an earlier job left without an end are closed first.

    Arguments are those of :func:`open_series`, with the name of the series and the command-line overrides.

    Returns:
        the values of each experiment for the driver, by shell variable; empty if the series is complete.

    Raises:
        ConfigError: the series has another configuration or number of instances, a log exists, or an earlier job may
            still run.
    """
    run, session, admission = admit(tree)
    if run.evaluation.by_command:
        raise ConfigError("evaluation.by_command=true: the runs of a series are judged when they end: leave it out")
    settings.results.mkdir(parents=True, exist_ok=True)
    for left in _experiments(settings.results, name):
        if left.end is None:
            _require_over(left, environment)
            append(settings.results, _ending(left, None, "the job ended before the launcher could say how"))
    series = read_series(settings.results, name)
    configuration = configuration_hash(tree)
    if series is not None:
        first = series.experiments[0].begin
        if first.configuration != configuration:
            raise ConfigError(
                f"launch: the configuration differs from that of series {name}, which began at {first.time}; a series "
                "has one configuration: start another"
            )
        if series.instances != settings.instances:
            raise ConfigError(
                f"launch.instances={settings.instances}: series {name} was launched with {series.instances}"
            )
        if not series.left:
            return []
    require_prepared(run, session)
    first_number = len(series.experiments) + 1 if series else 1
    given = series.experiments[0].begin.seed if series else session.seed
    base = draw_seed() if given is None else given
    source = find_source(environment=environment)
    kind = BeginInstance if settings.instances > 1 else Begin
    entries = [
        kind(
            series=name,
            experiment=number,
            declared=series.declared if series else max(settings.experiments, settings.instances),
            time=_now(),
            seed=experiment_seed(base, number),
            commit=source.commit,
            dirty=source.dirty,
            configuration=configuration,
            benchmark=run.benchmark.name,
            scale=f"{run.scale.nodes}x{run.scale.gpus_per_node}",
            ruleset=admission.ruleset,
            log=f"{name}_{number}.log",
            output_dir=f"{name}_{number}",
            job=environment.get("SLURM_JOB_ID"),
            overrides=tuple(overrides),
        )
        for number in range(first_number, first_number + settings.instances)
    ]
    with contextlib.ExitStack() as undo:
        for entry in entries:
            log = settings.results / entry.log
            try:
                log.touch(exist_ok=False)
            except FileExistsError as error:
                raise ConfigError(f"{log} exists; a run never overwrites a log") from error
            undo.callback(log.unlink)
        append(settings.results, *entries)
        undo.pop_all()
    return [_for_driver(entry, settings.results, run) for entry in entries]


def _for_driver(entry: Begin, results: Path, run: RunConfig) -> dict[str, str | int | Sequence[str]]:
    """Return the values of an experiment, by shell variable."""
    output_dir = (results / entry.output_dir).absolute()
    return {
        "experiment": entry.experiment,
        "of": entry.declared,
        "seed": entry.seed,
        "log": str((results / entry.log).absolute()),
        "output_dir": str(output_dir),
        "own": [
            f"seed={entry.seed}",
            override("output_dir", output_dir),
            # The rules require one run per result to evaluate all checkpoints up to the passing one.
            *(["evaluation.all=true"] if entry.experiment == 1 and run.evaluation.offline else []),
        ],
    }


def _require_over(left: Experiment, environment: Mapping[str, str]) -> None:
    """Raise a ConfigError if the unfinished experiment belongs to another job, which may still run."""
    job, this_job = left.begin.job, environment.get("SLURM_JOB_ID")
    if job is None or job == this_job:  # a lock admits one driver per series
        return
    live = environment.get(LIVE_JOBS, "unknown").split(",")
    what = f"launch.series={left.begin.series}: job {job}"
    if job in live:
        raise ConfigError(
            f"{what} is still there, with experiment {left.begin.experiment}; go on with the series when it is over"
        )
    if live == ["unknown"] or (this_job is not None and this_job not in live):
        raise ConfigError(
            f"{what} may still be there, with experiment {left.begin.experiment}: squeue failed, or did not even list "
            f"this job. Look with `squeue --jobs {job}`, and go on when squeue works and the job is over"
        )


def configuration_hash(tree: Mapping[str, Any]) -> str:
    """Return the SHA-256 of all configuration that influences training, except the seed."""
    kept = {key: value for key, value in tree.items() if key not in NOT_TRAINING}
    kept["staged"] = tree["staging_dir"] is not None  # a node of a staged run reads only the samples of its shard
    return hashlib.sha256(json.dumps(kept, sort_keys=True, default=str).encode()).hexdigest()


def end(
    settings: LaunchConfig, name: str, number: int, exit_code: int, step_errors: Path | None, reason: str = ""
) -> int:
    """Record the outcome of an experiment, close its log if it is open, and report on standard error why it failed.

    The reported cause is ``reason`` if given, else a full disk, the rank that failed first, or the error of srun.

    Args:
        step_errors: file with the error output of srun.

    Returns:
        the number of experiments of the series that still have to run.

    Raises:
        DataError: the series has no such experiment, or the experiment has already ended.
    """
    left = [run for run in _experiments(settings.results, name) if run.begin.experiment == number]
    if not left:
        raise DataError(f"{settings.results}: series {name} has no experiment {number}")
    if left[0].end is not None:
        raise DataError(
            f"{settings.results}: experiment {number} of series {name} ended already, at {left[0].end.time}; nothing "
            "was written. Another driver of the series closed it"
        )
    if not reason and exit_code:
        reason = full_disk(left[0].log) or ""
    if not reason and step_errors is not None and step_errors.exists():
        lines = step_errors.read_text(errors="replace").splitlines()
        if failed := explain(lines):
            reason = f"{failed}; the other ranks were stopped"
        elif exit_code:
            reason = complaint(lines) or ""
    if reason:
        print(f"error: {reason}", file=sys.stderr, flush=True)
    append(settings.results, _ending(left[0], exit_code, reason))
    series = read_series(settings.results, name)
    assert series is not None  # it has just been written
    return series.left


def _ending(run: Experiment, exit_code: int | None, reason: str) -> End:
    with contextlib.redirect_stdout(sys.stderr):
        close_if_open(run.log)
    status: Status = "not started"
    minutes = None
    try:
        log = read_log(run.log)
    except DataError as error:
        verdict = f"refused: {error}"
    else:
        minutes = log.run_minutes
        if log.all("run_start"):
            status = "success" if log.status == "success" else "aborted"
        verdict = judge(run.log, run.begin.ruleset).kind
    return End(run.begin.series, run.begin.experiment, _now(), exit_code, status, minutes, verdict, reason)


def _experiments(results: Path, name: str) -> Sequence[Experiment]:
    series = read_series(results, name)
    return series.experiments if series else ()


def _now() -> str:
    return datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")


def close_if_open(path: Path) -> bool:
    """Append ``run_stop`` with the status ``aborted`` to a log that has a ``run_start`` but no ``run_stop``.

    The interrupted run counts as not converged.

    A log that cannot be parsed (its last line may be cut off) is not changed; its verdict reports the problem.

    Returns:
        whether a line was appended.

    Raises:
        OSError: the log cannot be written.
    """
    try:
        log = read_log(path)
    except DataError:
        return False
    if not log.all("run_start") or log.all("run_stop"):
        return False
    last = log.evaluations[-1] if log.evaluations else None
    unit = last.progress_key if last and last.progress_key else PROGRESS_KEYS[0]
    done = int(last.progress) if last and last.progress_key else 0
    if not path.read_bytes().endswith(b"\n"):
        with path.open("ab") as file:
            file.write(b"\n")
    with RunLog(path, rank=0, append=True) as tail:
        RunEvents(tail, unit).run_stop("aborted", done, time.time_ns() // 1_000_000)
    return True


ROOT = Path(__file__).resolve().parents[2]
COMMIT, DIRTY = "MLPERF_SUITE_COMMIT", "MLPERF_SUITE_DIRTY"
"""Environment variables that give the source's state inside a container, where git is missing."""


@dataclass(frozen=True)
class Source:
    """Commit of the source, and whether the source differs from it; None if unknown."""

    commit: str | None
    dirty: bool | None


def find_source(root: Path = ROOT, environment: Mapping[str, str] = os.environ) -> Source:
    """Return the state of the source below ``root``; the environment variables take precedence over git."""
    if environment.get(COMMIT):
        return Source(environment[COMMIT], environment.get(DIRTY, "true") != "false")
    commit = _git(root, "rev-parse", "HEAD")
    changes = _git(root, "status", "--porcelain")
    return Source(commit or None, None if changes is None else bool(changes))


def _git(root: Path, *arguments: str) -> str | None:
    try:
        done = subprocess.run(["git", *arguments], cwd=root, capture_output=True, text=True, timeout=60, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None
