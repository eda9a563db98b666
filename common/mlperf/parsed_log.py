"""Reading a run's log: MLLOG lines of any implementation, among whatever else a program printed.

The reading is that of the compliance checker: latin-1 text, everything before the last ``:::MLLOG `` of a line is
dropped, the rest is one JSON object. Where the checker only counts a parsing error, :func:`read_log` says which line
is bad and how; and it refuses a line with two tokens, of which the checker drops the first without a word.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from common.errors import DataError

TOKEN = ":::MLLOG "
FIELDS = ("namespace", "time_ms", "event_type", "key", "value", "metadata")
QUALITY_KEYS = ("eval_accuracy", "eval_error")
PROGRESS_KEYS = ("samples_count", "epoch_num", "step_num")
STAND_IN = "stand-in"


@dataclass(frozen=True)
class Event:
    """One MLLOG line: its line number in the file (from 1), time in milliseconds since the epoch, and content."""

    line: int
    time_ms: float
    event_type: str
    key: str
    value: Any
    metadata: dict[str, Any]


@dataclass(frozen=True)
class Evaluation:
    """One ``eval_accuracy`` or ``eval_error`` line.

    Attributes:
        progress: how far training was, in the unit of ``progress_key`` (epochs, samples, steps or tokens).
        progress_key: metadata entry that says so; empty if there is none.
        values: metric name to value; a plain number is called by its key.
        time_ms: milliseconds since the epoch.
    """

    progress: float
    progress_key: str
    values: dict[str, float]
    time_ms: float


@dataclass(frozen=True)
class ParsedLog:
    """The events of one run in file order, and what follows from them. Missing things are None or empty."""

    path: Path
    events: tuple[Event, ...]

    def all(self, key: str) -> list[Event]:
        """The events with ``key``, in file order."""
        return [event for event in self.events if event.key == key]

    def value(self, key: str) -> Any:
        """Value of the first event with ``key``; None if there is none."""
        return next((event.value for event in self.events if event.key == key), None)

    @property
    def benchmark(self) -> str | None:
        """The name under which the run was logged."""
        return self.value("submission_benchmark")

    @property
    def division(self) -> str | None:
        """``closed`` or ``open``."""
        return self.value("submission_division")

    @property
    def global_batch(self) -> int | None:
        """Samples per optimizer step over all ranks."""
        return self.value("global_batch_size")

    @property
    def seeds(self) -> list[tuple[str, int, Any]]:
        """File, line and value of every logged seed; the rules compare all three."""
        return [(e.metadata.get("file", ""), e.metadata.get("lineno", 0), e.value) for e in self.all("seed")]

    @property
    def status(self) -> str | None:
        """``status`` of the last ``run_stop``: ``success`` or ``aborted``."""
        stops = self.all("run_stop")
        return stops[-1].metadata.get("status") if stops else None

    @property
    def run_minutes(self) -> float | None:
        """Minutes from the first ``run_start`` to the last ``run_stop``."""
        starts, stops = self.all("run_start"), self.all("run_stop")
        return (stops[-1].time_ms - starts[0].time_ms) / 60_000 if starts and stops else None

    @property
    def init_minutes(self) -> float | None:
        """Minutes from the first ``init_start`` to the last ``init_stop``: untimed."""
        starts, stops = self.all("init_start"), self.all("init_stop")
        return (stops[-1].time_ms - starts[0].time_ms) / 60_000 if starts and stops else None

    @property
    def stand_in(self) -> bool:
        """Whether the run says that its data are a stand-in."""
        return any(event.value == STAND_IN for event in self.all("data_set"))

    @property
    def resumed(self) -> bool:
        """Whether the run says that it continued another."""
        return bool(self.all("resumed_from"))

    @property
    def evaluations(self) -> list[Evaluation]:
        """Accuracy history in file order; lines whose value is not a number or numbers are left out."""
        history = [evaluation_of(event) for event in self.events if event.key in QUALITY_KEYS]
        return [evaluation for evaluation in history if evaluation is not None]


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def evaluation_of(event: Event) -> Evaluation | None:
    """The evaluation that an ``eval_accuracy`` or ``eval_error`` event reports; None if its value has no number."""
    value, metadata = event.value, event.metadata
    if isinstance(value, Mapping):
        values = {str(name): float(entry) for name, entry in value.items() if _is_number(entry)}
    elif _is_number(value):
        values = {str(metadata.get("metric", event.key)): float(value)}
    else:
        values = {}
    if not values:
        return None
    for key in PROGRESS_KEYS:
        if _is_number(metadata.get(key)):
            return Evaluation(float(metadata[key]), key, values, event.time_ms)
    return Evaluation(math.nan, "", values, event.time_ms)


def read_log(path: Path) -> ParsedLog:
    """Read the MLLOG lines of a file.

    Raises:
        DataError: if the file cannot be read or has no MLLOG line, or an MLLOG line is truncated, corrupt or mixed
            with another; the message names the line.
    """
    events: list[Event] = []
    text = ""
    if path.exists() and not path.is_file():
        raise DataError(f"{path}: is {'a folder' if path.is_dir() else 'no regular file'}; name the log of a run")
    try:
        with open(path, encoding="latin-1") as file:
            for number, text in enumerate(file, start=1):
                if TOKEN in text:
                    _reject_torn(path, number, text)
                    events.append(_event(path, number, text.rpartition(TOKEN)[2].strip()))
    except OSError as error:
        raise DataError(f"{path}: cannot be read: {error.strerror}") from error
    if not text.endswith("\n") and (tail := _token_begun(text)):
        raise DataError(f"{path}: the last line ends within an MLLOG token ({tail!r}); the file is truncated")
    if not events:
        raise DataError(f"{path}: {_why_no_events(path)}")
    return ParsedLog(path, tuple(events))


def _why_no_events(path: Path) -> str:
    """What a readable file without any MLLOG line is instead, as far as its first bytes tell."""
    with open(path, "rb") as file:
        head = file.read(6)
    if not head:
        return "is empty"
    if head.startswith((b"\x1f\x8b", b"\xfd7zXZ", b"(\xb5/\xfd", b"BZh", b"PK\x03\x04")):
        return "is compressed; unpack it first"
    if head.startswith((b"\xff\xfe", b"\xfe\xff")):
        return "is UTF-16 text, which no checker reads; convert it to UTF-8"
    return "has no MLLOG line; is it the log of a run?"


def _token_begun(text: str) -> str:
    """The beginning of a token with which ``text`` ends; empty if it ends with none, or a whole one."""
    tail = ":::" + text.rpartition(":::")[2]
    return tail if ":::" in text and TOKEN.startswith(tail) and len(tail) < len(TOKEN) else ""


def _reject_torn(path: Path, number: int, text: str) -> None:
    """Refuse a line in which a second writer's event begins within another: the checkers drop the first unseen."""
    before = text.rpartition(TOKEN)[0]
    if TOKEN in before or _token_begun(before):
        raise DataError(
            f"{path}, line {number}: one MLLOG event begins within another: two writers wrote into this log at once, "
            f"and an event is lost: {text.strip()[:80]!r}"
        )


def _event(path: Path, number: int, text: str) -> Event:
    where = f"{path}, line {number}"
    try:
        record = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise DataError(f"{where}: MLLOG line is truncated or corrupt ({error}): {text[:80]!r}") from error
    if not isinstance(record, dict):
        raise DataError(f"{where}: MLLOG line is not a JSON object: {text[:80]!r}")
    missing = [field for field in FIELDS if field not in record and field != "namespace"]
    if missing:
        raise DataError(f"{where}: MLLOG line lacks {', '.join(missing)}: {text[:80]!r}")
    if not isinstance(record["key"], str) or not isinstance(record["metadata"], dict):
        raise DataError(f"{where}: MLLOG line needs a string as key and an object as metadata: {text[:80]!r}")
    try:
        time_ms = math.nan if isinstance(record["time_ms"], bool) else float(record["time_ms"])
    except (TypeError, ValueError, OverflowError):
        time_ms = math.nan
    if not math.isfinite(time_ms):
        shown = repr(record["time_ms"])[:80]
        raise DataError(f"{where}: time_ms is not a number of milliseconds: {shown}")
    return Event(number, time_ms, str(record["event_type"]), record["key"], record["value"], record["metadata"])
