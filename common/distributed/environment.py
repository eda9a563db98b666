"""The environment of a process: its variables (integers, ports, hosts, network interfaces) and the host's memory.

A wrong variable raises a ConfigError that names the variable, its value and the remedy.
"""

from __future__ import annotations

import contextlib
import re
import socket
from collections.abc import Mapping
from pathlib import Path

from common.errors import ConfigError

PROC = Path("/proc")

INTEGER = re.compile(r"-?[0-9]{1,18}")
"""Accepted integers. ``int`` alone also accepts blanks, underscores and other digits, and fails on very long text."""
LARGEST_INTEGER = 2**31 - 1
OF_A_LAUNCHER = "torchrun and srun set the variables of their ranks: start the ranks with one of them, or unset {name}"


def node_name(environment: Mapping[str, str]) -> str:
    """Return Slurm's name of this node or, outside of Slurm, the host name."""
    return environment.get("SLURMD_NODENAME") or socket.gethostname()


def integer(
    environment: Mapping[str, str],
    name: str,
    default: int | None = None,
    *,
    least: int = 0,
    most: int = LARGEST_INTEGER,
    remedy: str = OF_A_LAUNCHER,
) -> int:
    """Return the integer that the environment variable ``name`` holds.

    Args:
        default: value to return if the variable is not set; None if the variable must be set.
        least, most: smallest and largest accepted value.
        remedy: advice for the user about a wrong value; ``{name}`` in it becomes the variable's name.

    Raises:
        ConfigError: the variable is not set and has no default, or its value is not an integer in this range.
    """
    text = environment.get(name)
    advice = remedy.format(name=name)
    if text is None:
        if default is None:
            raise ConfigError(f"{name} is not set although the launcher's other variables are: {advice}")
        return default
    if INTEGER.fullmatch(text) is None or not least <= int(text) <= most:
        what = "is empty" if not text else "is no integer" if INTEGER.fullmatch(text) is None else "is out of range"
        raise ConfigError(f"{name}={text!r} {what}: expected an integer from {least} to {most}; {advice}")
    return int(text)


def port(environment: Mapping[str, str], name: str) -> int:
    """Return the TCP port that the environment variable ``name`` holds."""
    remedy = "set {name} to a free port of the machine of rank 0, the same on all ranks"
    return integer(environment, name, least=1, most=65535, remedy=remedy)


def host(environment: Mapping[str, str], name: str) -> str:
    """Return the host name or address in the environment variable ``name``, after a successful address look-up."""
    remedy = "set it to the name or address, without a port, by which every machine reaches the machine of rank 0"
    text = environment.get(name)
    if not text:
        state = "is not set although the launcher's other variables are" if text is None else "is empty"
        raise ConfigError(f"{name} {state}: {remedy}")
    try:
        socket.getaddrinfo(text, None, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else str(error)
        raise ConfigError(
            f"{name}={text!r}: {node_name(environment)} knows no such host ({reason}); {remedy}"
        ) from error
    return text


def check_interfaces(environment: Mapping[str, str], name: str) -> None:
    """Raise a ConfigError if this machine lacks a network interface of the comma-separated list in ``name``."""
    here = [interface for _, interface in socket.if_nameindex()]
    wanted = environment.get(name, "").split(",")
    if wanted != [""] and (absent := [interface for interface in wanted if interface not in here]):
        raise ConfigError(
            f"{name}={environment[name]!r}: {node_name(environment)} has no network interface {absent[0]!r}; it has "
            f"{', '.join(here)}: name one that all machines have, or unset {name}"
        )


def meminfo(proc: Path = PROC) -> dict[str, int]:
    """Return ``/proc/meminfo`` with sizes in bytes; empty if the file does not exist."""
    with contextlib.suppress(OSError):
        lines = re.findall(r"^(\S+):\s+(\d+)( kB)?$", (proc / "meminfo").read_text(), re.MULTILINE)
        return {name: int(value) * (1024 if unit else 1) for name, value, unit in lines}
    return {}
