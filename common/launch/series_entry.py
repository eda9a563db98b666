"""Parse one line of ``runs.jsonl`` and accept only values that the launcher could have written.

The file is evidence, and anybody may have written or edited it. Every field must be present, with its type and a valid
value. File names must be plain names, without a folder.
"""

from __future__ import annotations

import datetime
import math
import re
from collections.abc import Callable, Mapping
from typing import Any, Literal, get_args

from common.errors import DataError
from common.mlperf.rules import RULESETS
from common.untrusted.strict_json import StrictJsonError, parse_object

Status = Literal["success", "aborted", "not started"]
Kind = Literal["begin", "begin_instance", "end"]
"""Kinds of lines: before an experiment, before an instance (one of several that train together), and after either."""

EXPERIMENTS = 100_000
"""Largest number of experiments in a series."""
NAME_CHARACTERS = 200
ARGUMENTS = 10_000
_INT64_MAX = 2**63 - 1
_COMMIT = re.compile(r"[0-9a-f]{7,64}")
_HASH = re.compile(r"[0-9a-f]{64}")
_WORD = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.+-]{0,63}")
_SCALE = re.compile(r"[1-9]\d{0,5}x[1-9]\d{0,5}")


class _Wrong(Exception):
    """A value is invalid; the message describes a valid one."""


def _text(value: object) -> str:
    if not isinstance(value, str):
        raise _Wrong("text")
    return value


def _name(value: object) -> str:
    name = _text(value)
    if not name or len(name) > NAME_CHARACTERS or not name.isprintable() or name[0] in "-." or set(name) & set("/\\"):
        raise _Wrong("the plain name of a file: no folder, no leading dash or dot, printable")
    return name


def _matching(pattern: re.Pattern[str], description: str) -> Callable[[object], str]:
    def check(value: object) -> str:
        if not isinstance(value, str) or not pattern.fullmatch(value):
            raise _Wrong(description)
        return value

    return check


def _whole(least: int, most: int) -> Callable[[object], int]:
    def check(value: object) -> int:
        if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
            raise _Wrong(f"a whole number from {least} to {most}")
        return value

    return check


def _or_none(check: Callable[[object], Any]) -> Callable[[object], Any]:
    def checked(value: object) -> Any:
        try:
            return None if value is None else check(value)
        except _Wrong as wrong:
            raise _Wrong(f"{wrong}, or null") from wrong

    return checked


def _flag(value: object) -> bool:
    if not isinstance(value, bool):
        raise _Wrong("true or false")
    return value


def _number(value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise _Wrong("a finite number")
    return float(value)


def _time(value: object) -> str:
    wrong = _Wrong("a date and time with its zone, such as 2026-05-01T12:00:00+00:00")
    if not isinstance(value, str):
        raise wrong
    try:
        time = datetime.datetime.fromisoformat(value)
        time.astimezone(datetime.UTC)
    except (ValueError, OverflowError) as error:
        raise wrong from error
    if time.tzinfo is None:
        raise wrong
    return value


def _status(value: object) -> str:
    if value not in get_args(Status):
        raise _Wrong(f"one of {', '.join(get_args(Status))}")
    return str(value)


def _ruleset(value: object) -> str:
    if not isinstance(value, str) or not any(value in versions for versions in RULESETS.values()):
        raise _Wrong(f"a known ruleset, such as {RULESETS['training'][-1]}")
    return value


def _arguments(value: object) -> tuple[str, ...]:
    if not isinstance(value, list) or len(value) > ARGUMENTS or not all(isinstance(each, str) for each in value):
        raise _Wrong("a list of texts")
    return tuple(value)


_number_of_experiment = _whole(1, EXPERIMENTS)

_BEGIN: dict[str, Callable[[object], Any]] = {
    "series": _name,
    "experiment": _number_of_experiment,
    "declared": _number_of_experiment,
    "time": _time,
    "seed": _whole(0, _INT64_MAX),
    "commit": _or_none(_matching(_COMMIT, "7 to 64 hexadecimal digits")),
    "dirty": _or_none(_flag),
    "configuration": _matching(_HASH, "64 hexadecimal digits"),
    "benchmark": _matching(_WORD, "the name of a benchmark"),
    "scale": _matching(_SCALE, "nodes x ranks of a node, such as 8x8"),
    "ruleset": _ruleset,
    "log": _name,
    "output_dir": _name,
    "job": _or_none(_name),
    "overrides": _arguments,
}
FIELDS: dict[Kind, dict[str, Callable[[object], Any]]] = {
    "begin": _BEGIN,
    "begin_instance": _BEGIN,
    "end": {
        "series": _name,
        "experiment": _number_of_experiment,
        "time": _time,
        "exit_code": _or_none(_whole(0, 255)),
        "status": _status,
        "minutes": _or_none(_number),
        "verdict": _text,
        "reason": _text,
    },
}
"""Fields of the three kinds of lines, each with the function that checks and converts its value."""


def parse_entry(where: str, line: bytes) -> tuple[Kind, dict[str, Any]]:
    """Return the kind and the checked values of one line.

    Args:
        where: file and line number, for messages.

    Raises:
        DataError: the line is not a JSON object in UTF-8, or a field is unknown, missing or wrong.
    """
    try:
        fields = parse_object(line.decode())
    except UnicodeDecodeError as error:
        raise DataError(f"{where}: is no UTF-8 text, so that it is no entry of a run") from error
    except StrictJsonError as error:
        raise DataError(f"{where}: is {error}, so that it is no entry of a run: {line[:80]!r}") from error
    event = fields.pop("event", None)
    kind = next((kind for kind in FIELDS if kind == event), None)
    if kind is None:
        raise DataError(f"{where}: event is {_shown(event)}, expected {', '.join(FIELDS)}")
    return kind, _values(where, fields, FIELDS[kind])


def _values(where: str, fields: Mapping[str, object], checks: Mapping[str, Callable[[object], Any]]) -> dict[str, Any]:
    missing, unknown = [name for name in checks if name not in fields], [name for name in fields if name not in checks]
    if missing or unknown:
        what = f"lacks {missing[0]}" if missing else f"has {_shown(unknown[0])}, which no entry has"
        raise DataError(f"{where}: {what}: the file was damaged or edited")
    values = {}
    for name, check in checks.items():
        try:
            values[name] = check(fields[name])
        except _Wrong as wrong:
            raise DataError(f"{where}: {name} is {_shown(fields[name])}, expected {wrong}") from wrong
    return values


def _shown(value: object) -> str:
    return ascii(value) if len(ascii(value)) <= 80 else ascii(value)[:80] + "…"
