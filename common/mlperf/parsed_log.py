"""Reading a run's log: MLLOG lines of any implementation, among whatever else a program printed.

The reading is that of the compliance checker: latin-1 text, everything before the last ``:::MLLOG `` of a line is
dropped, the rest is one JSON object. Where the checker only counts a parsing error, :func:`read_log` says which line
is bad and how; and it refuses a line with two tokens, of which the checker drops the first without a word.

The run ends with its first ``run_stop``: what some programs print again behind it is kept apart. Files, lines and
numbers of any size are read within bounds of memory.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, BinaryIO

from common.errors import DataError
from common.untrusted.regular_file import open_regular
from common.untrusted.strict_json import StrictJsonError, parse_object

TOKEN = ":::MLLOG "
FIELDS = ("namespace", "time_ms", "event_type", "key", "value", "metadata")
QUALITY_KEYS = ("eval_accuracy", "eval_error")
PROGRESS_KEYS = ("samples_count", "epoch_num", "step_num")
STAND_IN = "stand-in"
OTHER_DATA = {STAND_IN: "the data are a stand-in", "custom": "the data are custom, not the benchmark's"}
"""Values of ``data_set`` that say that the data are not the benchmark's, and what they say, in words."""

CHUNK_BYTES = 2**20
LINE_BYTES = 2**20
"""The longest MLLOG line that is read; other lines may have any length."""
EVENTS = 60_000
EVENT_BYTES = 24 * 2**20
ENTRIES = 1_000_000
"""How many MLLOG lines a log may have, how long they may be together, and how many values they may hold."""
FILE_BYTES = 2**30
"""The largest log that is read: what a program prints besides may be much."""
_TOKEN = TOKEN.encode()


@dataclass(frozen=True, slots=True)
class Event:
    """One MLLOG line.

    Attributes:
        line: its number in the file, from 1.
        time_ms: milliseconds since the epoch.
        event_type, key, value, metadata: as logged.
        text: the JSON object as it stands in the line.
    """

    line: int
    time_ms: float
    event_type: str
    key: str
    value: Any
    metadata: dict[str, Any]
    text: str = ""


@dataclass(frozen=True)
class Evaluation:
    """One ``eval_accuracy`` or ``eval_error`` line.

    Attributes:
        progress: how far training was, in the unit of ``progress_key`` (epochs, samples, steps or tokens).
        progress_key: metadata entry that says so; empty if there is none.
        values: metric name to value; a plain number is called by its key.
        time_ms: milliseconds since the epoch.
        line: number of its line in the file.
    """

    progress: float
    progress_key: str
    values: dict[str, float]
    time_ms: float
    line: int = 0


@dataclass(frozen=True)
class ParsedLog:
    """The events of one run in file order, and what follows from them. Missing things are None or empty.

    Attributes:
        path: the file.
        events: all but echoes.
        echoes: repetitions, to the letter, of earlier events after the first ``run_stop``: no part of the run.
    """

    path: Path
    events: tuple[Event, ...]
    echoes: tuple[Event, ...] = ()

    @cached_property
    def _by_key(self) -> dict[str, list[Event]]:
        found: dict[str, list[Event]] = {}
        for event in self.events:
            found.setdefault(event.key, []).append(event)
        return found

    def all(self, key: str) -> list[Event]:
        """The events with ``key``, in file order."""
        return list(self._by_key.get(key, ()))

    def value(self, key: str) -> Any:
        """Value of the first event with ``key``; None if there is none."""
        found = self._by_key.get(key)
        return found[0].value if found else None

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
        value = self.value("global_batch_size")
        return int(value) if isinstance(value, float) and value.is_integer() and abs(value) < 2**53 else value

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
        return self.other_data == OTHER_DATA[STAND_IN]

    @property
    def other_data(self) -> str:
        """What the data are, in words, where the run says that they are not the benchmark's; else empty."""
        logged = [event.value for event in self.all("data_set")]
        return next((text for name, text in OTHER_DATA.items() if name in logged), "")

    @property
    def resumed(self) -> bool:
        """Whether the run says that it continued another."""
        return bool(self.all("resumed_from"))

    @cached_property
    def evaluations(self) -> list[Evaluation]:
        """Accuracy history in file order; lines whose value is not a number or numbers are left out."""
        history = [evaluation_of(event) for event in self.events if event.key in QUALITY_KEYS]
        return [evaluation for evaluation in history if evaluation is not None]


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def evaluation_of(event: Event, progress_key: str | None = None) -> Evaluation | None:
    """The evaluation that an ``eval_accuracy`` or ``eval_error`` event reports; None if its value has no number.

    Args:
        event: it.
        progress_key: where the rules have its progress; None for the first of PROGRESS_KEYS that it has.
    """
    value, metadata = event.value, event.metadata
    if isinstance(value, Mapping):
        values = {str(name): float(entry) for name, entry in value.items() if _is_number(entry)}
    elif _is_number(value):
        values = {str(metadata.get("metric", event.key)): float(value)}
    else:
        values = {}
    if not values:
        return None
    for key in PROGRESS_KEYS if progress_key is None else (progress_key,):
        if _is_number(metadata.get(key)):
            return Evaluation(float(metadata[key]), key, values, event.time_ms, event.line)
    return Evaluation(math.nan, "", values, event.time_ms, event.line)


def read_log(path: Path, follow: bool = True) -> ParsedLog:
    """Read the MLLOG lines of a file; of one behind a link only if ``follow`` says so.

    Raises:
        DataError: if the file cannot be read, is no regular file or has no MLLOG line, or an MLLOG line is truncated,
            corrupt, mixed with another, or larger than any log's; the message names the line.
    """
    events: list[Event] = []
    size = entries = 0
    with open_regular(path, follow) as file:
        lines = _Lines(path, file)
        for number, text in lines:
            _reject_torn(path, number, text)
            content = text.rpartition(TOKEN)[2].strip()
            size += len(content)
            entries += content.count(",") + content.count("[")
            if len(events) == EVENTS or size > EVENT_BYTES or entries > ENTRIES:
                raise DataError(
                    f"{path}, line {number}: more than {EVENTS} MLLOG lines, {EVENT_BYTES >> 20} MiB or {ENTRIES} "
                    "entries of them: no run's log has as many"
                )
            events.append(_event(path, number, content))
        if not lines.ended and (tail := _token_begun(lines.last)):
            raise DataError(f"{path}: the last line ends within an MLLOG token ({tail!r}); the file is truncated")
        if not events:
            raise DataError(f"{path}: {_why_no_events(lines.head)}")
    stop = next((index for index, event in enumerate(events, start=1) if event.key == "run_stop"), len(events))
    said = {event.text for event in events[:stop]}
    later = events[stop:]
    echoes = tuple(event for event in later if event.text in said)
    return ParsedLog(path, (*events[:stop], *(event for event in later if event.text not in said)), echoes)


class _Lines:
    """The lines of a file that have the token, with their numbers; a line ends as in Python's text files.

    Attributes:
        head: the first bytes of the file.
        last: the end of the last line, once all are read.
        ended: whether the last line has its end.
    """

    def __init__(self, path: Path, file: BinaryIO) -> None:
        self._path, self._file = path, file
        self.head, self.last, self.ended = b"", "", True

    def __iter__(self) -> Iterator[tuple[int, str]]:
        number, read, pending = 0, 0, b""
        while chunk := self._file.read(CHUNK_BYTES):
            self.head = self.head or chunk[:8]
            read += len(chunk)
            if read > FILE_BYTES:
                raise DataError(f"{self._path}: is larger than {FILE_BYTES >> 30} GiB; is it the log of a run?")
            data = pending + chunk
            held = b"\r" if data.endswith(b"\r") else b""  # whose \n may come with the next chunk
            data = data[: len(data) - len(held)].replace(b"\r\n", b"\n").replace(b"\r", b"\n")
            if _TOKEN in data:
                *lines, rest = data.split(b"\n")
                for line in lines:
                    number += 1
                    if _TOKEN in line:
                        yield number, self._short(number, line)
            else:
                number += data.count(b"\n")
                rest = data.rpartition(b"\n")[2]
            if len(rest) > LINE_BYTES:
                rest = rest if _TOKEN in rest else rest[-len(_TOKEN) - 8 :]
                self._short(number + 1, rest)
            pending = rest + held
        self.ended = not pending or pending.endswith(b"\r")
        self.last = pending[-LINE_BYTES:].decode("latin-1")
        if _TOKEN in pending:
            yield number + 1, self._short(number + 1, pending)

    def _short(self, number: int, line: bytes) -> str:
        if len(line) > LINE_BYTES:
            raise DataError(f"{self._path}, line {number}: MLLOG line of more than {LINE_BYTES >> 20} MiB")
        return line.decode("latin-1")


def _why_no_events(head: bytes) -> str:
    """What a readable file without any MLLOG line is instead, as far as its first bytes tell."""
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
        record = parse_object(text)
    except StrictJsonError as error:
        raise DataError(f"{where}: MLLOG line is {error}: {text[:80]!r}") from error
    missing = [field for field in FIELDS if field not in record and field != "namespace"]
    if missing:
        raise DataError(f"{where}: MLLOG line lacks {', '.join(missing)}: {text[:80]!r}")
    key, kind, metadata = record["key"], record["event_type"], record["metadata"]
    if not isinstance(key, str) or not isinstance(kind, str) or not isinstance(metadata, dict):
        raise DataError(
            f"{where}: MLLOG line needs a string as key and as event_type and an object as metadata: {text[:80]!r}"
        )
    time_ms = record["time_ms"]
    if not _is_number(time_ms) or not math.isfinite(time_ms):
        raise DataError(f"{where}: time_ms is not a number of milliseconds: {str(time_ms)[:80]!r}")
    return Event(number, float(time_ms), sys.intern(kind), sys.intern(key), record["value"], metadata, text)
