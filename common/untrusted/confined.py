"""MLCommons' checkers in separate confined processes, with limits on environment, time and memory.

The checkers read untrusted files, but were not written for that. Such a process starts in a temporary empty folder,
without the caller's environment variables, and can open only the installed packages and the files that it is given
(:mod:`common.untrusted.confinement`).
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from common.errors import SuiteError

ROOT = Path(__file__).resolve().parents[2]
"""Folder from which the suite is imported."""
MEGABYTES = 256
"""Memory limit of a confined process for data; Python with NumPy and SciPy needs 130."""
OUTPUT_BYTES = 4_000_000
"""Largest part of a confined process's output that is kept."""

ENVIRONMENT = {
    "OPENBLAS_NUM_THREADS": "1",  # each thread takes memory
    "OMP_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    "LC_ALL": "C.UTF-8",
}
"""Environment variables of a confined process, in addition to those that its interpreter may need for loading."""
_LOADER = ("LD_LIBRARY_PATH",)

_BOOT = (
    "import json, sys; start = json.loads(sys.argv[1]); sys.path[:] = start['path']; "
    "from common.untrusted.confinement import confine, run_module; confine(**start['limits']); "
    "run_module(start['module'], start['arguments'])"
)


@dataclass(frozen=True)
class ConfinedResult:
    """Result of a confined process.

    Attributes:
        code: exit status; negative for the signal that ended it.
        text: its standard error, at most :data:`OUTPUT_BYTES`.
        stopped: reason why it was stopped early, as text; empty if it was not.
    """

    code: int
    text: str
    stopped: str


def environment() -> dict[str, str]:
    """Return all environment variables of a confined process."""
    return ENVIRONMENT | {name: os.environ[name] for name in _LOADER if name in os.environ}


def import_path() -> list[str]:
    """Return the import path for a process that reads untrusted files: without the current folder, except ROOT."""
    try:
        here = os.getcwd()
    except OSError:
        here = ""
    entries = (os.path.abspath(entry) for entry in sys.path if entry)
    return list(dict.fromkeys([str(ROOT), *(entry for entry in entries if entry != here or entry == str(ROOT))]))


def command(
    module: str, arguments: Sequence[str], *, folder: str | Path, readable: Sequence[Path], cpu_seconds: int
) -> list[str]:
    """Return the command that runs a module confined.

    Args:
        folder: the only folder to which it may write.
        readable: files and folders that it may read.
        cpu_seconds: limit of its CPU time.
    """
    limits = {
        "megabytes": MEGABYTES,
        "seconds": cpu_seconds,
        "readable": [str(path.resolve()) for path in readable],
        "writable": str(folder),
    }
    start = {"path": import_path(), "limits": limits, "module": module, "arguments": list(arguments)}
    return [sys.executable, "-I", "-B", "-c", _BOOT, json.dumps(start)]


def run_confined(
    module: str, arguments: Sequence[str], *, readable: Sequence[Path], seconds: float, folder: Path | None = None
) -> ConfinedResult:
    """Run ``mlperf_logging.<module>`` as a program.

    Args:
        module: module name, such as ``package_checker``.
        arguments: command-line arguments. They must not contain untrusted values, except validated paths.
        folder: working folder, which it may write to; None for a temporary empty folder.
        readable: files and folders that it may read.
        seconds: limit of its run time.

    Raises:
        SuiteError: it cannot be started.
    """
    if folder is None:
        try:
            with tempfile.TemporaryDirectory(prefix="mlperf-checker-") as own:
                return run_confined(module, arguments, readable=readable, seconds=seconds, folder=Path(own))
        except OSError as error:
            raise SuiteError(f"{module} of mlperf-logging has no folder to run in: {error.strerror}") from error
    start = command(
        f"mlperf_logging.{module}", arguments, folder=folder, readable=readable, cpu_seconds=int(seconds) + 1
    )
    with tempfile.TemporaryFile() as errors:
        try:
            code = subprocess.run(
                start, cwd=folder, env=environment(), stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL,
                stderr=errors, timeout=seconds, check=False,
            ).returncode  # fmt: skip
            stopped = f"it reached a limit of time or memory (signal {-code})" if code < 0 else ""
        except subprocess.TimeoutExpired:
            code, stopped = -9, f"it was stopped after {seconds:g} seconds"
        except OSError as error:
            raise SuiteError(f"{module} of mlperf-logging cannot be started: {error.strerror}") from error
        errors.seek(0)
        return ConfinedResult(code, errors.read(OUTPUT_BYTES).decode(errors="replace"), stopped)
