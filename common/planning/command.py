"""Implementation of ``mlperf-suite schedule``: when to run each of several trainings, on how many GPUs of a node."""

from __future__ import annotations

import argparse
import json
import shlex
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Annotated

from common.config.loading import build
from common.config.output_files import require_writable, write_file
from common.config.ranges import Positive
from common.config.yaml_files import read_small_yaml
from common.errors import ConfigError, DataError
from common.measure.table import gpu_count, positive, read_results
from common.planning.gpu_schedule import (
    MOST_GPUS,
    MOST_JOBS,
    GpuSchedule,
    Objective,
    in_turn,
    longest_first,
    one_gpu_each,
    optimal,
)
from common.untrusted.strict_json import read_json_object

DESCRIPTION = "Find the best order of several trainings on the GPUs of one node, and the number of GPUs for each."
EPILOG = f"""The file lists the jobs:

  jobs:
    bert:
      measured: measured/results.json      # written by `mlperf-suite measure`
      samples: 2.6e6                       # samples that the training needs
      command: mlperf-suite train benchmark=bert scale={{gpus}}xH200 data_dir=/data/bert
    resnet:
      estimated: resnet.json               # written by `mlperf-suite estimate --json`
      command: mlperf-suite train benchmark=resnet scale={{gpus}}xH200 data_dir=/data/resnet
    other:
      seconds: {{1: 5400, 2: 2800, 4: 1500}} # times by number of GPUs
      command: python train.py --gpus {{gpus}}

benchmark: names the benchmark in `measured` or `estimated`, if it is not the name of the job. Only --script needs
`command`; in it, {{gpus}} becomes the number of GPUs. Up to {MOST_JOBS} jobs on {MOST_GPUS} GPUs, the schedule is
optimal."""

TIME_FACTOR = 1.5
"""Time limit of the Slurm job, as a multiple of the makespan."""
LARGEST_NODE = 1024
"""Largest number of GPUs of a node."""
OBJECTIVES: dict[Objective, str] = {"makespan": "makespan", "mean": "mean completion time"}


@dataclass(frozen=True)
class JobSettings:
    """A job of the file.

    Attributes:
        seconds: time of the training by number of GPUs.
        measured: results of ``mlperf-suite measure``, instead of ``seconds``; relative to the file.
        estimated: JSON file of ``mlperf-suite estimate``, instead of ``seconds``; relative to the file.
        benchmark: name of the benchmark in ``measured`` or ``estimated``; None for the name of the job.
        samples: samples of the training, for ``measured``.
        command: command line of the training; ``{gpus}`` stands for the number of GPUs.
    """

    seconds: dict[int, Annotated[float, Positive]] | None = None
    measured: Path | None = None
    estimated: Path | None = None
    benchmark: str | None = None
    samples: Annotated[float, Positive] | None = None
    command: str | None = None

    def __post_init__(self) -> None:
        if [self.seconds, self.measured, self.estimated].count(None) != 2:
            raise ConfigError("seconds, measured, estimated: give one of them")
        if (self.measured is None) != (self.samples is None):
            raise ConfigError("samples: belongs to measured, which needs it")
        if self.seconds is not None and not (self.seconds and all(type(g) is int and g > 0 for g in self.seconds)):
            raise ConfigError(f"seconds={self.seconds}: expected times by number of GPUs, from 1 on")


@dataclass(frozen=True)
class JobsFile:
    """Content of the file; ``jobs`` are the jobs by name."""

    jobs: dict[str, JobSettings] = field(default_factory=dict)


def main(argv: Sequence[str]) -> int:
    """Print the schedule beside two simple ones; write it as JSON or as a Slurm script on request.

    Args:
        argv: see ``mlperf-suite schedule --help``.

    Raises:
        ConfigError: the file is wrong, or a job cannot run on these GPUs.
    """
    parser = argparse.ArgumentParser(
        prog="mlperf-suite schedule",
        description=DESCRIPTION,
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("file", type=Path, metavar="FILE", help="YAML file with the jobs")
    parser.add_argument("--gpus", type=int, default=8, help="GPUs of the node (default: 8)")
    parser.add_argument(
        "--objective", choices=list(OBJECTIVES), default="makespan", help="smallest end of the last job, or mean end"
    )
    parser.add_argument("--json", type=Path, help="file for all schedules as JSON")
    parser.add_argument("--script", type=Path, help="file for a Slurm batch script that runs the schedule")
    arguments = parser.parse_args(argv)
    if not 1 <= arguments.gpus <= LARGEST_NODE:
        raise ConfigError(f"schedule: --gpus={arguments.gpus}: expected from 1 to {LARGEST_NODE:,}")
    for option in ("json", "script"):
        require_writable(f"schedule: --{option}", getattr(arguments, option), [arguments.file])
    jobs, gpus, objective = _read(arguments.file), arguments.gpus, arguments.objective
    curves = {name: _curve(name, job, arguments.file) for name, job in jobs.items()}
    small = len(jobs) <= MOST_JOBS and gpus <= MOST_GPUS
    try:
        best = (optimal if small else longest_first)(curves, gpus, objective)
        schedules = {
            "optimal" if small else "longest job first" if objective == "makespan" else "shortest job first": best,
            "all GPUs, one job at a time": in_turn(curves, gpus),
        }
    except ValueError as error:
        raise ConfigError(f"{arguments.file}: {error}") from error
    if single := one_gpu_each(curves, gpus, objective):
        schedules["one GPU for each job"] = single
    print(_text(schedules, best, gpus, objective))
    if arguments.json is not None:
        content = {"gpus": gpus, "objective": objective, "curves": curves}
        content["schedules"] = {name: asdict(schedule) for name, schedule in schedules.items()}
        write_file(arguments.json, json.dumps(content, indent=1) + "\n")
    if arguments.script is not None:
        write_file(arguments.script, slurm_script(best, {name: job.command for name, job in jobs.items()}, gpus))
    return 0


def _read(path: Path) -> dict[str, JobSettings]:
    """Return the jobs of a file.

    Raises:
        ConfigError: the file cannot be read, or a key or value is wrong.
    """
    content = read_small_yaml(path, "the jobs")
    try:
        jobs: dict[str, JobSettings] = build(JobsFile, content, "").jobs
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from error
    if not jobs:
        raise ConfigError(f"{path}: jobs: none")
    for name in jobs:
        if not isinstance(name, str) or not name.isidentifier():
            raise ConfigError(f"{path}: jobs: {name!r} names a job: letters, digits and _ only")
    return jobs


def _curve(name: str, job: JobSettings, file: Path) -> dict[int, float]:
    """Return the seconds of a job by number of GPUs. Of several copies of a measurement, the median counts."""
    if job.estimated is not None:
        return _estimated(name, job, file.parent / job.estimated, file)
    if job.measured is None or job.samples is None:
        return dict(job.seconds or {})
    path, benchmark = file.parent / job.measured, job.benchmark or name
    rates: dict[int, list[float]] = {}
    try:
        for each in read_results(path):
            if each.job.benchmark == benchmark and each.figures is not None and each.figures["updated"]:
                rate = positive(each.figures, "samples_per_second")
                rates.setdefault(gpu_count(vars(each.job), "gpus"), []).append(rate)
    except (DataError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(
            f"{file}: jobs.{name}.measured: {path} has no results of `mlperf-suite measure`: {error}"
        ) from error
    if not rates:
        raise ConfigError(f"{file}: jobs.{name}: {path} has no valid measurement of {benchmark}")
    return {gpus: job.samples / statistics.median(found) for gpus, found in sorted(rates.items())}


def _estimated(name: str, job: JobSettings, path: Path, file: Path) -> dict[int, float]:
    """Return the seconds of the best estimate of each number of GPUs."""
    benchmark = job.benchmark or name
    try:
        found = {
            gpu_count(each["layout"], "gpus"): positive(each, "seconds")
            for each in read_json_object(path)["estimates"]
            if each["benchmark"] == benchmark and each["best"]
        }
    except (DataError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(
            f"{file}: jobs.{name}.estimated: {path} is no file of `mlperf-suite estimate --json`: {error}"
        ) from error
    if not found:
        raise ConfigError(f"{file}: jobs.{name}: {path} has no estimate of {benchmark}")
    return found


def _text(schedules: Mapping[str, GpuSchedule], best: GpuSchedule, gpus: int, objective: Objective) -> str:
    """Return the table of the schedules' objectives and the table of the best one's jobs."""
    name = max(map(len, schedules))
    job = max(len("job"), *(len(each.name) for each in best.jobs))
    jobs = "1 job" if len(best.jobs) == 1 else f"{len(best.jobs)} jobs"
    lines = [f"{jobs} on {gpus} GPUs, smallest {OBJECTIVES[objective]}", ""]
    lines.append(f"{'schedule':<{name}}  {'makespan, h':>12}  {'mean completion, h':>18}")
    lines += [
        f"{each:<{name}}  {schedule.makespan / 3600:>12.2f}  {schedule.mean / 3600:>18.2f}"
        for each, schedule in schedules.items()
    ]
    lines += ["", f"{'job':<{job}}  {'start, h':>8}  {'end, h':>8}  GPUs"]
    for each in best.jobs:
        indices = ",".join(map(str, each.gpus))
        lines.append(f"{each.name:<{job}}  {each.start / 3600:>8.2f}  {each.end / 3600:>8.2f}  {indices}")
    return "\n".join(lines)


def slurm_script(schedule: GpuSchedule, commands: Mapping[str, str | None], gpus: int) -> str:
    """Return a Slurm batch script that runs a schedule in one allocation of a whole node.

    A job starts when the jobs that had its GPUs before have ended, in the order of the schedule. A job that fails does
    not stop the others; the script then ends with exit code 1.

    Raises:
        ConfigError: a job has no command.
    """
    minutes = max(1, round(schedule.makespan * TIME_FACTOR / 60))
    lines = [
        "#!/usr/bin/env bash",
        "#SBATCH --nodes=1",
        "#SBATCH --exclusive",
        f"#SBATCH --gpus-per-node={gpus}",
        f"#SBATCH --time={minutes}",
        f"# Schedule of `mlperf-suite schedule`: {schedule.makespan / 3600:.2f} h planned. Each job writes JOB.out.",
        "set -u",
        f'IFS=, read -ra device <<< "${{CUDA_VISIBLE_DEVICES:-{",".join(map(str, range(gpus)))}}}"',
        "declare -A pid code",
        "",
        "# start JOB GPUS COMMAND: run a command on the GPUs with these indices.",
        "start() {",
        "  local name=$1 index own=()",
        '  for index in ${2//,/ }; do own+=("${device[index]}"); done',
        '  (IFS=,; export CUDA_VISIBLE_DEVICES="${own[*]}"; unset IFS; exec bash -c "$3") > "$name.out" 2>&1 &',
        "  pid[$name]=$!",
        "}",
        "",
        "# after JOB: wait until a job has ended.",
        "after() {",
        "  [[ -z ${code[$1]:-} ]] || return 0",
        '  wait "${pid[$1]}"',
        "  code[$1]=$?",
        "}",
        "",
    ]
    user: dict[int, str] = {}
    for job in schedule.jobs:
        command = commands[job.name]
        if command is None:
            raise ConfigError(f"jobs.{job.name}.command: missing; --script needs it")
        lines += [f"after {name}" for name in dict.fromkeys(user[gpu] for gpu in job.gpus if gpu in user)]
        line = shlex.quote(command.replace("{gpus}", str(len(job.gpus))))
        lines.append(f"start {job.name} {','.join(map(str, job.gpus))} {line}")
        user |= dict.fromkeys(job.gpus, job.name)
    names = " ".join(job.name for job in schedule.jobs)
    lines += [
        "",
        "failed=()",
        f"for name in {names}; do",
        '  after "$name"',
        '  [[ ${code[$name]} == 0 ]] || failed+=("$name")',
        "done",
        '[[ ${#failed[@]} == 0 ]] || { echo "failed: ${failed[*]}" >&2; exit 1; }',
    ]
    return "\n".join(lines) + "\n"
