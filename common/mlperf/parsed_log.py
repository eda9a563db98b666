"""Reader of run logs: MLLOG lines of any implementation, mixed with other program output.

Lines are read as in the compliance checker: text is latin-1, everything before the last ``:::MLLOG `` of a line is
dropped, the rest is one JSON object. Where the checker only counts a parsing error, :func:`read_log` reports the line
and the error. It also refuses a line with two tokens, of which the checker silently drops the first.

Some programs write a line once for each rank, or repeat lines after ``run_stop``. The checkers ignore most of these
repetitions; here they are kept separately. Memory is bounded for files, lines and numbers of any size.
"""

from __future__ import annotations

import math
import re
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, BinaryIO, TypeGuard

from common.errors import DataError
from common.untrusted.regular_file import open_regular
from common.untrusted.strict_json import StrictJsonError, parse_object

TOKEN = ":::MLLOG "
FIELDS = ("time_ms", "key", "value", "metadata")
"""Fields that the checkers read in every line."""
REPEATED_MS = 1000.0
"""Upper limit of the difference in time between an event and its repetition by another rank, in milliseconds."""
QUALITY_KEYS = ("eval_accuracy", "eval_error")
PROGRESS_KEYS = ("samples_count", "epoch_num", "step_num")
LOGGED_SYNTHETIC = "stand-in"
"""Value of ``data_set`` in logs of runs on synthetic data. Any version of the suite must recognise it in any log."""
OTHER_DATA = {LOGGED_SYNTHETIC: "the data are synthetic", "custom": "the data are custom, not the benchmark's"}
"""Values of ``data_set`` for data that are not the benchmark's -> the same in words."""

CHUNK_BYTES = 2**20
LINE_BYTES = 2**20
"""Longest MLLOG line that is read, in bytes; other lines may have any length."""
EVENTS = 60_000
EVENT_BYTES = 24 * 2**20
ENTRIES = 1_000_000
"""Limits of the MLLOG lines of one log: their number (EVENTS), total bytes (EVENT_BYTES) and JSON values (ENTRIES)."""
FILE_BYTES = 2**30
"""Largest log file that is read, in bytes. Much of it may be other program output."""
_TOKEN = TOKEN.encode()
_DIGITS = re.compile(r"[+-]?\d{1,20}", re.ASCII)


@dataclass(frozen=True, slots=True)
class Event:
    """One MLLOG line.

    Attributes:
        line: line number in the file, from 1.
        time_ms: milliseconds since 1970.
        text: the JSON object as it was logged.
    """

    line: int
    time_ms: float
    event_type: str
    key: str
    value: Any
    metadata: dict[str, Any]
    text: str = ""


@dataclass(frozen=True)
class LoggedEvaluation:
    """One ``eval_accuracy`` or ``eval_error`` event.

    Attributes:
        progress: training progress in the unit of ``progress_key`` (epochs, samples, steps or tokens); NaN if
            missing.
        progress_key: metadata key that states the progress; empty if there is none.
        values: metric name to value. A plain number without a metric name gets the name of the log key.
        time_ms: milliseconds since 1970.
    """

    progress: float
    progress_key: str
    values: dict[str, float]
    time_ms: float
    line: int = 0


@dataclass(frozen=True)
class ParsedLog:
    """Events of one run in file order, and values derived from them. Missing values are None or empty.

    Attributes:
        events: all events except echoes.
        echoes: events that repeat an earlier event with all its content less than a second apart. A repeated seed
            is an echo only after ``run_stop``, because the seed checker refuses it before.
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
        """Return the events with ``key``, in file order."""
        return list(self._by_key.get(key, ()))

    def value(self, key: str) -> Any:
        """Return the value of the first event with ``key``; None if there is none."""
        found = self._by_key.get(key)
        return found[0].value if found else None

    @property
    def benchmark(self) -> str | None:
        """Benchmark name in the log."""
        return self.value("submission_benchmark")

    @property
    def division(self) -> str | None:
        """``closed`` or ``open``."""
        return self.value("submission_division")

    @property
    def global_batch(self) -> int | None:
        """Samples per optimizer step over all ranks."""
        value = self.value("global_batch_size")
        return _whole(value) if isinstance(value, float) else value

    @property
    def seeds(self) -> list[tuple[str, int, Any]]:
        """File, line and value of every logged seed. The rules compare all three.

        Text and floats that are whole numbers count as integers, as in the seed checker.
        """
        return [(e.metadata.get("file", ""), e.metadata.get("lineno", 0), _whole(e.value)) for e in self.all("seed")]

    @property
    def status(self) -> str | None:
        """``status`` of the last ``run_stop``: ``success`` or ``aborted``."""
        stops = self.all("run_stop")
        return stops[-1].metadata.get("status") if stops else None

    @property
    def unfinished(self) -> bool:
        """Whether the run started and the log has no ``run_stop``: the run was killed, or it still trains."""
        return len(self.all("run_start")) == 1 and not self.all("run_stop")

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
    def synthetic(self) -> bool:
        """Whether the log states that its data are synthetic."""
        return self.other_data == OTHER_DATA[LOGGED_SYNTHETIC]

    @property
    def other_data(self) -> str:
        """Description of the data if the log states that they are not the benchmark's; else empty."""
        logged = [event.value for event in self.all("data_set")]
        return next((text for name, text in OTHER_DATA.items() if name in logged), "")

    @property
    def resumed(self) -> bool:
        """Whether the log states that the run continued another run."""
        return bool(self.all("resumed_from"))

    @cached_property
    def evaluations(self) -> list[LoggedEvaluation]:
        """Evaluations in file order, without those whose value has no number."""
        history = [evaluation_of(event) for event in self.events if event.key in QUALITY_KEYS]
        return [evaluation for evaluation in history if evaluation is not None]


def _whole(value: Any) -> Any:
    """Return text of digits, or a float that is a whole number, as an integer; other values unchanged."""
    if isinstance(value, str) and _DIGITS.fullmatch(value):
        return int(value)
    return int(value) if isinstance(value, float) and value.is_integer() and abs(value) < 2**53 else value


def is_number(value: object) -> TypeGuard[int | float]:
    """Return whether ``value`` is a number; True and False are not."""
    return isinstance(value, int | float) and not isinstance(value, bool)


def evaluation_of(event: Event, progress_key: str | None = None) -> LoggedEvaluation | None:
    """Return the evaluation in an ``eval_accuracy`` or ``eval_error`` event; None if its value has no number.

    Args:
        progress_key: metadata key of the progress in the rules; None for the first of PROGRESS_KEYS that is present.
    """
    value, metadata = event.value, event.metadata
    if isinstance(value, Mapping):
        values = {str(name): float(entry) for name, entry in value.items() if is_number(entry)}
    elif is_number(value):
        values = {str(metadata.get("metric", event.key)): float(value)}
    else:
        values = {}
    if not values:
        return None
    for key in PROGRESS_KEYS if progress_key is None else (progress_key,):
        if is_number(metadata.get(key)):
            return LoggedEvaluation(float(metadata[key]), key, values, event.time_ms, event.line)
    return LoggedEvaluation(math.nan, "", values, event.time_ms, event.line)


def read_log(path: Path, follow: bool = True) -> ParsedLog:
    """Read the MLLOG lines of a file. Symbolic links are refused unless ``follow`` is set.

    Raises:
        DataError: if the file cannot be read, is not a regular file or has no MLLOG line, or an MLLOG line is
            truncated, corrupt, mixed with another, or too large; the message names the line.
    """
    events: list[Event] = []
    size = entries = 0
    with open_regular(path, follow) as file:
        lines = _TokenLines(path, file)
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
    return ParsedLog(path, *_without_echoes(events))


def _without_echoes(events: Sequence[Event]) -> tuple[tuple[Event, ...], tuple[Event, ...]]:
    """Split events into those of the run and those that repeat one of them; see :class:`ParsedLog`."""
    latest: dict[str, float] = {}
    own: list[Event] = []
    echoes: list[Event] = []
    stopped = False
    for event in events:
        content = repr((event.event_type, event.key, event.value, event.metadata))
        repeats = abs(event.time_ms - latest.get(content, -math.inf)) < REPEATED_MS
        if repeats and (stopped or event.key != "seed"):
            echoes.append(event)
            continue
        latest[content] = event.time_ms
        own.append(event)
        stopped = stopped or event.key == "run_stop"
    return tuple(own), tuple(echoes)


class _TokenLines:
    """Iterator over the lines of a file that contain the token, with their numbers. Line ends are as in text mode.

    Attributes:
        head: first bytes of the file.
        last: end of the last line, after all lines are read.
        ended: whether the last line ends with a line break.
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
            held = b"\r" if data.endswith(b"\r") else b""  # its \n may be in the next chunk
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
    """Return why a readable file has no MLLOG line, judged by its first bytes."""
    if not head:
        return "is empty"
    if head.startswith((b"\x1f\x8b", b"\xfd7zXZ", b"(\xb5/\xfd", b"BZh", b"PK\x03\x04")):
        return "is compressed; unpack it first"
    if head.startswith((b"\xff\xfe", b"\xfe\xff")):
        return "is UTF-16 text, which no checker reads; convert it to UTF-8"
    return "has no MLLOG line; is it the log of a run?"


def _token_begun(text: str) -> str:
    """Return the incomplete token at the end of ``text``; empty if there is none or the token is complete."""
    tail = ":::" + text.rpartition(":::")[2]
    return tail if ":::" in text and TOKEN.startswith(tail) and len(tail) < len(TOKEN) else ""


def _reject_torn(path: Path, number: int, text: str) -> None:
    """Refuse a line in which one event begins within another. The checkers would silently drop the first event."""
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
    missing = [field for field in FIELDS if field not in record]
    if missing:
        raise DataError(f"{where}: MLLOG line lacks {', '.join(missing)}: {text[:80]!r}")
    key, kind = record["key"], record.get("event_type", "")
    metadata = {} if record["metadata"] is None else record["metadata"]
    if not isinstance(key, str) or not isinstance(kind, str) or not isinstance(metadata, dict):
        raise DataError(
            f"{where}: MLLOG line needs a string as key and as event_type and an object or null as metadata: "
            f"{text[:80]!r}"
        )
    time_ms = _whole(record["time_ms"])
    if not is_number(time_ms) or not math.isfinite(time_ms):
        raise DataError(f"{where}: time_ms is not a number of milliseconds: {str(time_ms)[:80]!r}")
    return Event(number, float(time_ms), sys.intern(kind), sys.intern(key), record["value"], metadata, text)


def distinct_names(paths: Iterable[Path]) -> dict[Path, str]:
    """Map each path to its shortest trailing part, in whole path components, that no other path shares."""
    waiting = set(paths)
    found: dict[Path, str] = {}
    length = 1
    while waiting:
        ends = {path: "/".join(path.parts[-length:]) for path in waiting}
        shared = Counter(ends.values())
        done = {path for path in waiting if shared[ends[path]] == 1 or length >= len(path.parts)}
        found |= {path: ends[path] for path in done}
        waiting -= done
        length += 1
    return found
