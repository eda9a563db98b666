"""Find out why a Slurm step failed, from the error output of ``srun``."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Iterable
from pathlib import Path

from common.distributed.launcher import LOST_PEER_EXIT_CODE, OWN_EXIT_CODES
from common.errors import FULL_DISK

TASK_LINE = re.compile(r"srun: error: (?P<node>\S+): tasks? (?P<tasks>[\d,\-]+): (?P<what>.+)")
LAST_BYTES = 2**16
"""Size of the end of a log that is searched for the message of a failed run."""
EXITED = re.compile(r"Exited with exit code (\d+)")


def complaint(lines: Iterable[str]) -> str | None:
    """Return the first error of srun that concerns no task, such as a job too small for the step; None without one."""
    prefix = "srun: error: "
    words = (line.partition(prefix)[2].strip() for line in lines if prefix in line and not TASK_LINE.search(line))
    return next((f"srun: {text}" for text in words if text), None)


def full_disk(log: Path) -> str | None:
    """Return a message if a full disk ended the run, according to its log or the log's disk; else None."""
    try:
        with log.open("rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - LAST_BYTES))
            lines = file.read().decode(errors="replace").splitlines()
    except FileNotFoundError:
        lines = []
    words = [os.strerror(code) for code in FULL_DISK]
    for line in reversed(lines):
        if any(word in line for word in words):
            return f"full disk: {line.partition('mlperf-suite: ')[2] or line}"
    if shutil.disk_usage(log.parent).free < LAST_BYTES:
        return f"full disk: {log.parent} has less than {LAST_BYTES >> 10} KiB left"
    return None


def explain(lines: Iterable[str]) -> str | None:
    """Return a message about the rank that failed first; None if that rank printed the reason itself, or none failed.

    Ranks that lost the connection to another rank are skipped, as not the cause; if all did, the message says so.
    """
    lost = False
    for line in lines:
        found = TASK_LINE.search(line)
        if found is None:
            continue
        code = EXITED.search(found["what"])
        if code is not None and int(code[1]) == LOST_PEER_EXIT_CODE:
            lost = True
            continue
        if code is not None and int(code[1]) in OWN_EXIT_CODES:
            return None
        several = "," in found["tasks"] or "-" in found["tasks"]
        who = f"{'ranks' if several else 'rank'} {found['tasks']} on {found['node']}"
        if code is not None:
            return f"{who} ended with exit code {code[1]}"
        hint = "; the kernel may have run out of memory (see dmesg)" if found["what"].startswith("Killed") else ""
        return f"{who} {'were' if several else 'was'} ended by a signal ({found['what'].strip()}){hint}"
    return "ranks lost the connection to another one, which no message names" if lost else None
