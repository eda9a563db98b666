"""Run the scripts of ``scripts/`` outside of a Slurm job, really or as dry runs."""

from __future__ import annotations

import csv
import os
import shlex
import shutil
import stat
import subprocess
from pathlib import Path

from tests.conftest import ROOT, SECONDS, Finished

SCRIPTS = ROOT / "scripts"
ENV = shutil.which("env") or "env"
RESNET = ("benchmark=resnet", "scale=test", "device=cpu", "launch.doctor=false")
RESNET_KEEPING_CACHES = (*RESNET, "launch.clear_caches=false")
"""Arguments of a short series on a CPU; with the second, the driver does not drop the page cache."""


def script(name: str, *arguments: str, cwd: Path, **environment: str) -> Finished:
    """Run a script of ``scripts/`` outside of a Slurm job, with the default action of SIGINT, as in a terminal."""
    settings = {name: value for name, value in os.environ.items() if not name.startswith(("SLURM", "MLPERF_"))}
    settings |= {"MLPERF_SUITE_PYTHON": os.environ["MLPERF_SUITE_PYTHON"]}
    settings |= {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [ENV, "--default-signal=INT", "bash", str(SCRIPTS / name), *arguments],
        cwd=cwd, env={**settings, **environment},
        capture_output=True, text=True, errors="replace", timeout=SECONDS, check=False,
    )  # fmt: skip
    return Finished(done.returncode, done.stdout, done.stderr)


def planned(tmp_path: Path, *arguments: str, script_name: str = "run.sub", **environment: str) -> list[list[str]]:
    """Return the commands that a dry run prints, as words."""
    done = script(script_name, "--dry-run", *arguments, cwd=tmp_path, **environment)
    assert done.code == 0, done.errors
    commands = [shlex.split(line) for line in done.output.splitlines() if not line.startswith(("#", "PROLOG_"))]
    assert list(tmp_path.iterdir()) == [], "a dry run writes nothing"
    return commands


def bind_mounts(words: list[str]) -> list[list[str]]:
    """Return the fields of each --mount of a docker command, which are CSV."""
    return list(csv.reader(words[i + 1] for i, word in enumerate(words) if word == "--mount"))


def fake_docker(tmp_path: Path) -> Path:
    """Write a program that runs what follows the image ``the-image``.

    It notes its commands in the file DOCKER_CALLS, and their labels and filters in DOCKER_CALLS.labels.
    """
    fake = tmp_path / "bin" / "docker"
    fake.parent.mkdir()
    fake.write_text(
        '#!/bin/bash\necho "$1" >>"$DOCKER_CALLS"\n'
        'printf "%s\\n" "$@" | grep "mlperf[.]" >>"$DOCKER_CALLS.labels"\n[[ $1 == run ]] || exit 0\n'
        'while [[ $1 != the-image ]]; do shift; done\nshift\nexec "$@"\n'
    )
    fake.chmod(fake.stat().st_mode | stat.S_IXUSR)
    return fake
