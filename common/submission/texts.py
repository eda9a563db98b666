"""Text files of a submission: README files, and the scripts that install the code and prepare the data."""

from __future__ import annotations

import shlex
from collections.abc import Sequence

from common.data.sources import is_adopted
from common.launch.series import Begin
from common.mlperf.rules import round_name
from common.mlperf.verdict import UNVERIFIED
from common.submission.entries import SubmissionEntry


def submission_readme(submitter: str, ruleset: str, entries: Sequence[SubmissionEntry]) -> str:
    """Return README.md of the submitter's folder, with one row for each entry in a table of the results."""
    lines = [
        f"# {submitter}: MLPerf {round_name(ruleset)} submission",
        "",
        f"Ruleset {ruleset}. Scores are {UNVERIFIED}.",
        "",
        "| system | benchmark | implementation | runs | olympic mean, minutes | RCP factor | score, minutes |",
        "|---|---|---|---|---|---|---|",
    ]
    for entry in entries:
        score = entry.score
        lines.append(
            f"| {entry.system} | {entry.benchmark} | {entry.implementation} | {len(score.chosen)} of {len(score.runs)} "
            f"| {_or_dash(score.olympic_minutes, '.3f')} | {_or_dash(score.factor, '.4f')} | {score.minutes:.3f} |"
        )
    for entry in entries:
        if entry.score.throughput is not None:
            lines += ["", f"Throughput of {entry.benchmark} on {entry.system}: {entry.score.throughput}."]
    return "\n".join(lines) + "\n"


def _or_dash(value: float | None, digits: str) -> str:
    return "-" if value is None else f"{value:{digits}}"


def system_readme(entry: SubmissionEntry, own: str = "") -> str:
    """Return README-<system>.md: how to launch (``own``, or generated if empty), and which runs form the result."""
    title = f"# {entry.benchmark} on {entry.system}"
    return "\n".join([own.rstrip() or _how_to_launch(title, entry), "", *_runs(entry)]) + "\n"


def _how_to_launch(title: str, entry: SubmissionEntry) -> str:
    begin = entry.begin
    assert begin is not None
    code, arguments = f"../{entry.implementation}", _arguments(begin)
    ranks = begin.scale.partition("x")[2]
    launches = [f"sbatch -N{begin.job_nodes} --ntasks-per-node={ranks} scripts/run_and_time.sh {arguments}"]
    where = "in a Slurm cluster"
    if not entry.score.instances:
        launches.append(f"scripts/run.sub {arguments}")
        where += " or alone on one machine"
    commands = "\n".join(launches)
    return f"""{title}

The code is `{code}`, commit {begin.commit}.

1. `./setup.sh` installs it into `{code}/.venv`.
2. `./init_datasets.sh` downloads, prepares and verifies the data.
3. From `{code}`, {where}; paths are those of the machines that ran it:

```
{commands}
```

With `seed=SEED` the first run repeats the one of that seed below.
`{entry.system}_{entry.implementation}.json` has the configuration and the logged hyperparameters."""


def _arguments(begin: Begin) -> str:
    of_one_launch = ("seed=", "output_dir=", "launch.series=")
    return shlex.join(argument for argument in begin.overrides if not argument.startswith(of_one_launch))


def _runs(entry: SubmissionEntry) -> list[str]:
    score, rules = entry.score, entry.rules
    series = score.run_set.series
    lines = ["## Runs", "", f"The result is {score.choice}."]
    if series is not None:
        lines.append(
            f"The series {series.name} was declared with {series.declared} experiments before the first was launched; "
            "an experiment that ended before run_start is no run and does not count."
        )
    lines += [f"Note: {note}." for note in score.run_set.notes]
    lines += ["", f"| file | run | seed | minutes | {rules.unit} to converge |", "|---|---|---|---|---|"]
    for run in score.runs:
        file = next((file for file, submitted in entry.files if submitted is run), "not part of the result")
        minutes = "-" if run.verdict.score is None else f"{run.verdict.score:.3f}"
        converged = "did not converge" if run.convergence is None else f"{run.convergence:.10g}"
        lines.append(f"| {file} | {run.number} | {run.seed} | {minutes} | {converged} |")
    return lines


def setup_script(entry: SubmissionEntry) -> str:
    """Return this suite's setup.sh, which installs the package into a new virtual environment."""
    return f"""#!/usr/bin/env bash
# Installs the code into ../{entry.implementation}/.venv.
set -euo pipefail
cd "$(dirname "${{BASH_SOURCE[0]}}")/../{entry.implementation}"
python3 -m venv .venv
.venv/bin/python -m pip install --constraint constraints.txt .
"""


def init_datasets_script(entry: SubmissionEntry) -> str:
    """Return this suite's init_datasets.sh, which downloads, prepares and verifies the data."""
    assert entry.begin is not None
    benchmark = entry.begin.benchmark
    name = shlex.quote(f"benchmark={benchmark}")
    adopt = f' --adopt "${{MLPERF_DATA_DIR:-data}}/{benchmark}-raw"' if is_adopted(benchmark) else ""
    return f"""#!/usr/bin/env bash
# Downloads, prepares and verifies the data under $MLPERF_DATA_DIR (./data without it).
set -euo pipefail
cd "$(dirname "${{BASH_SOURCE[0]}}")/../{entry.implementation}"
.venv/bin/mlperf-suite download {name}
.venv/bin/mlperf-suite prepare {name}{adopt}
.venv/bin/mlperf-suite verify {name}
"""
