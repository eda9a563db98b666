"""Record where a measurement comes from, so that others can repeat it: date, source, command, machine and versions."""

from __future__ import annotations

import importlib.metadata
import shlex
import sys
from datetime import UTC, datetime
from typing import Any

from common.doctor.facts import collect_facts
from common.launch.experiment import find_source

PACKAGES = ("triton", "flash-attn-4", "transformer-engine", "nvidia-cudnn-frontend", "nvidia-dali-cuda130")
"""Packages whose version decides which kernels run; PyTorch's own libraries are part of the machine's facts."""


def provenance() -> dict[str, Any]:
    """Return the origin of a measurement that ``mlperf-suite bench`` makes now, in this process.

    Returns:
        ``date`` (UTC, ISO 8601); ``commit`` and ``changed`` (whether the source differs from the commit), None if
        unknown; ``command``, without ``bench.report``; ``machine`` (the fields of MLPerf's system description that the
        machine reports); ``packages`` (versions of the installed ones among :data:`PACKAGES`).
    """
    source = find_source()
    words = [word for word in sys.argv[1:] if not word.startswith("bench.report=")]
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "commit": source.commit,
        "changed": source.dirty,
        "command": shlex.join(["mlperf-suite", "bench", *words]),
        "machine": _machine(),
        "packages": _versions(),
    }


def _machine() -> dict[str, Any]:
    """Return the known facts, without the kernel's version, which often has a name of the site."""
    facts: dict[str, Any] = {name: fact for name, fact in collect_facts().items() if fact}
    facts["other_software_stack"].pop("kernel_version")
    return facts


def _versions() -> dict[str, str]:
    found = {}
    for name in PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found
