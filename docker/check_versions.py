#!/usr/bin/env python3
"""End the build of an image if a pinned package is missing, or if PyTorch has another version or is for another CUDA.

Run ``check_versions.py REQUIREMENTS…``. The versions of PyTorch are those in ``constraints.txt`` beside this file.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

CONSTRAINTS = Path(__file__).resolve().parent / "constraints.txt"
BASE_IMAGE = ("torch", "torchvision", "triton")
CUDA = "13.0"
"""CUDA version that PyTorch is built for. The version of an official package need not name it."""


def read_pins(path: Path) -> dict[str, str]:
    """Return the ``name==version`` lines of a requirements file.

    Raises:
        ValueError: a line is no pin.
    """
    pins = {}
    for line in path.read_text().splitlines():
        requirement = line.partition("#")[0].strip()
        if not requirement:
            continue
        match = re.fullmatch(r"([A-Za-z0-9._-]+)==([A-Za-z0-9.+!]+)", requirement)
        if match is None:
            raise ValueError(f"{path}: {requirement!r} is not of the form name==version")
        pins[match[1]] = match[2]
    return pins


def installed(name: str) -> str | None:
    """Return the installed version; None if the package is not installed."""
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def cuda_of_torch() -> str | None:
    """Return the CUDA version that the installed PyTorch is built for; None without PyTorch or CUDA."""
    try:
        import torch
    except ImportError:
        return None
    return torch.version.cuda


def problems(required: dict[str, str], constraints: dict[str, str]) -> list[str]:
    """Return what is wrong with the installed packages, one sentence each."""
    found = []
    for name, wanted in {**{name: constraints[name] for name in BASE_IMAGE}, **required}.items():
        have = installed(name)
        if have is None:
            found.append(f"{name} {wanted} is not installed")
        elif have.partition("+")[0] != wanted:
            found.append(f"{name} is {have}, not {wanted}")
        elif name == "torch" and (cuda := cuda_of_torch()) != CUDA:
            found.append(f"torch {have} is for CUDA {cuda}, not {CUDA}")
    return found


def main(argv: Sequence[str]) -> int:
    """Check the pins of the named files; return 1 if something is wrong."""
    required = {name: wanted for path in argv for name, wanted in read_pins(Path(path)).items()}
    found = problems(required, read_pins(CONSTRAINTS))
    print("\n".join(found) or f"{len(required)} pinned packages and PyTorch have the right versions")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
