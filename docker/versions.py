#!/usr/bin/env python3
"""Versions of the packages of an image: ``constraints.txt`` beside this file, one ``name==version`` a line.

``versions.py pin "NAME==VERSION …"`` replaces or adds lines, for a base image with other packages than ours.
``versions.py check FILE…`` ends the build if a package that a requirements file names is missing or has another
version, or if PyTorch is another one than the base image's. The environment variable ``PYTORCH_CUDA`` is the CUDA
version that PyTorch must be built for, because the version of an official package need not name it.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

CONSTRAINTS = Path(__file__).resolve().parent / "constraints.txt"
BASE_IMAGE = ("torch", "torchvision", "triton")


def canonical(name: str) -> str:
    """Return the form of a package's name in which equal names are equal text (PEP 503)."""
    return re.sub(r"[-_.]+", "-", name).lower()


def read_pins(text: str) -> dict[str, str]:
    """Return version by canonical name, of ``name==version`` separated by white space; comments begin with ``#``.

    Raises:
        ValueError: a word is no pin, or two pins of one package differ.
    """
    pins: dict[str, str] = {}
    for word in re.sub(r"#.*", "", text).split():
        match = re.fullmatch(r"([A-Za-z0-9._-]+)==([A-Za-z0-9.+!]+)", word)
        if match is None:
            raise ValueError(f"{word!r} is not of the form name==version")
        if pins.setdefault(canonical(match[1]), match[2]) != match[2]:
            raise ValueError(f"two versions of {match[1]}")
    return pins


def read_names(text: str) -> list[str]:
    """Return the canonical names of a requirements file, whose lines are bare names and comments.

    Raises:
        ValueError: a line is no name, for example because it has a version.
    """
    names = [line.partition("#")[0].strip() for line in text.splitlines()]
    for name in filter(None, names):
        if re.fullmatch(r"[A-Za-z0-9._-]+", name) is None:
            raise ValueError(f"{name!r} is not a bare name; versions stand in constraints.txt")
    return [canonical(name) for name in names if name]


def replace_pins(text: str, pins: Mapping[str, str]) -> str:
    """Return a constraints file with the lines of ``pins`` replaced, and those of packages that it lacks at its end."""
    left = dict(pins)
    lines = []
    for line in text.splitlines():
        for name in read_pins(line):
            if name in left:
                line = f"{name}=={left.pop(name)}"
        lines.append(line)
    return "\n".join([*lines, *(f"{name}=={wanted}" for name, wanted in left.items())]) + "\n"


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


def problems(names: Sequence[str], constraints: Mapping[str, str], cuda: str) -> list[str]:
    """Return what is wrong with the base image's packages and with those named, one sentence each."""
    found = []
    for name in dict.fromkeys([*BASE_IMAGE, *names]):
        wanted, have = constraints.get(name), installed(name)
        if wanted is None:
            found.append(f"{name} has no version in {CONSTRAINTS}")
        elif have is None:
            found.append(f"{name} {wanted} is not installed")
        elif wanted not in (have, have.partition("+")[0]):
            found.append(f"{name} is {have}, not {wanted}")
        elif name == "torch" and (built_for := cuda_of_torch()) != cuda:
            found.append(f"torch {have} is for CUDA {built_for}, not {cuda}")
    return found


def main(argv: Sequence[str]) -> int:
    """Run a command; return 1 if the check finds something, 2 if the arguments are wrong."""
    match argv:
        case ["pin", pins]:
            try:
                replaced = replace_pins(CONSTRAINTS.read_text(), read_pins(pins))
            except ValueError as error:
                print(f"--build-arg PINS: {error}", file=sys.stderr)
                return 2
            CONSTRAINTS.write_text(replaced)
            return 0
        case ["check", *paths]:
            names = [name for path in paths for name in read_names(Path(path).read_text())]
            found = problems(names, read_pins(CONSTRAINTS.read_text()), os.environ["PYTORCH_CUDA"])
            print("\n".join(found) or f"PyTorch and {len(names)} packages have the right versions")
            return 1 if found else 0
        case _:
            print(__doc__, file=sys.stderr)
            return 2


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
