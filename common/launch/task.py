"""Run one rank, or the ranks of one machine: ``python -m common.cli task [COMMAND] OVERRIDE…``.

Rank 0 prints lines for timing the job: when the program started and ended, and
``RESULT,<name>,<seed>,<seconds>,<user>,<start>``. The seconds are wall-clock time of the process, including
initialization; they are not the MLPerf score.
"""

from __future__ import annotations

import datetime
import getpass
import os
import time
from collections.abc import Callable, Sequence

from common.distributed.startup import find_rank_info
from common.errors import ConfigError, print_error

COMMANDS = ("train", "bench", "doctor")


def main(argv: Sequence[str], run: Callable[[Sequence[str]], int]) -> int:
    """Pass ``COMMAND`` (default ``train``) and its arguments to ``run``; return the exit code."""
    command, rest = (argv[0], list(argv[1:])) if argv and argv[0] in COMMANDS else ("train", list(argv))
    try:
        first = find_rank_info(os.environ).rank == 0
    except ConfigError as error:
        print_error(error)
        return error.exit_code
    began, clock = datetime.datetime.now().astimezone(), time.monotonic()
    if first:
        print(f"STARTING TIMING RUN AT {_moment(began)}", flush=True)
    try:
        return run([command, *rest])
    finally:
        if first:
            print(f"ENDING TIMING RUN AT {_moment(datetime.datetime.now().astimezone())}", flush=True)
            print(_result(command, rest, round(time.monotonic() - clock), began), flush=True)


def _result(command: str, arguments: Sequence[str], seconds: int, began: datetime.datetime) -> str:
    name = _value(arguments, "benchmark", "resnet") if command != "doctor" else ""
    return f"RESULT,{(name or command).upper()},{_value(arguments, 'seed', '')},{seconds},{_user()},{_moment(began)}"


def _value(arguments: Sequence[str], key: str, default: str) -> str:
    return next((text.partition("=")[2] for text in reversed(arguments) if text.startswith(f"{key}=")), default)


def _user() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError):  # a container may have no name for the user
        return str(os.getuid())


def _moment(when: datetime.datetime) -> str:
    return when.strftime("%Y-%m-%d %H:%M:%S %z")
