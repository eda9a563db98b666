"""Mutations of files whose lines are JSON objects: logs and registries of runs."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path

from mutated_files import (
    LARGE_VALUES,
    VALUES,
    cuts,
    file_mutations,
    quoted,
    removed,
    sparse,
    streamed,
    variants,
    with_text,
    writer,
)
from mutations import Mutation

TOKEN = ":::MLLOG "
HOUR, TWO_SECONDS = 3_600_000, 2_000


def line_mutations(lines: Sequence[str], indices: Iterable[int], label: Callable[[int], str]) -> Iterator[Mutation]:
    """Lines dropped, doubled, moved and swapped.

    Args:
        lines: of the whole file, with their ends.
        indices: of the lines to be changed.
        label: place of the line at an index.
    """

    def mutation(index: int, operator: str, changed: Callable[[], list[str]]) -> Mutation:
        return Mutation(label(index), operator, writer(lambda: "".join(changed())))

    for i in indices:
        rest = [*lines[:i], *lines[i + 1 :]]
        yield mutation(i, "dropped", lambda rest=rest: rest)
        yield mutation(i, "doubled", lambda i=i: [*lines[: i + 1], *lines[i:]])
        yield mutation(i, "doubled at the end", lambda i=i: [*lines, lines[i]])
        yield mutation(i, "doubled at the front", lambda i=i: [lines[i], *lines])
        yield mutation(i, "moved to the front", lambda i=i, rest=rest: [lines[i], *rest])
        yield mutation(i, "moved to the end", lambda i=i, rest=rest: [*rest, lines[i]])
        if i + 1 < len(lines):
            yield mutation(
                i, "swapped with the next", lambda i=i: [*lines[:i], lines[i + 1], lines[i], *lines[i + 2 :]]
            )


class _Records:
    """A file whose lines are JSON objects behind a prefix, and its mutations."""

    def __init__(self, text: str, split: Callable[[str], tuple[str, str] | None]) -> None:
        self.lines = text.splitlines(keepends=True)
        self.prefixes: dict[int, str] = {}
        self.records: dict[int, dict[str, object]] = {}
        for index, line in enumerate(self.lines):
            if (found := split(line)) is not None:
                self.prefixes[index] = found[0]
                self.records[index] = json.loads(found[1])

    def changed(self, index: int, text: str) -> str:
        """The file with another JSON text in one line."""
        return "".join([*self.lines[:index], f"{self.prefixes[index]}{text}\n", *self.lines[index + 1 :]])

    def rewritten(self, place: str, operator: str, index: int, make: Callable[[], str], damaged: bool) -> Mutation:
        return Mutation(place, operator, writer(lambda: self.changed(index, make())), index + 1 if damaged else None)

    def with_value(self, index: int, where: tuple[str, ...], text: str) -> str:
        """JSON text of a record with ``text`` in place of the value at ``where``."""
        return with_text(self.records[index], where, text)

    def without(self, index: int, where: tuple[str, ...]) -> str:
        """JSON text of a record without the entry at ``where``."""
        return removed(self.records[index], where)

    def form_mutations(self, index: int, place: str) -> Iterator[Mutation]:
        """A line that is no longer one whole JSON object, or an ambiguous one."""
        text = json.dumps(self.records[index])
        forms = {
            "cut in the middle": text[: len(text) // 2],
            "without its last character": text[:-1],
            "with something behind": text + " x",
            "doubled within the line": text + text,
            "in a list": f"[{text}]",
            "as text": quoted(text),
            "with quotes of Python": str(self.records[index]),
            "with a comma too many": text[:-1] + ",}",
            "with a bare line feed in it": text.replace('": ', '":\n ', 1),
            "with a null byte": text[:9] + "\0" + text[9:],
        }
        for operator, form in forms.items():
            yield self.rewritten(place, operator, index, lambda form=form: form, True)
        for name, value in self.records[index].items():
            equal = f"{quoted(name)}: {json.dumps(value)}"
            other = f"{quoted(name)}: 1"
            yield self.rewritten(
                f"{place} {name}", "given twice", index, lambda e=equal: "{" + e + ", " + text[1:], False
            )
            yield self.rewritten(
                f"{place} {name}", "given another time before", index, lambda o=other: "{" + o + ", " + text[1:], True
            )
            yield self.rewritten(
                f"{place} {name}", "given another time behind", index, lambda o=other: text[:-1] + ", " + o + "}", True
            )


def _log_split(line: str) -> tuple[str, str] | None:
    before, token, text = line.rpartition(TOKEN)
    return (before + token, text) if token else None


def log_mutations(text: str) -> Iterator[Mutation]:
    """Every mutation of the text of a log."""
    log = _Records(text, _log_split)

    def label(index: int) -> str:
        return f"line {index + 1} ({log.records[index]['key']})"

    yield from line_mutations(log.lines, log.records, label)
    for index, record in log.records.items():
        place = label(index)
        yield from log.form_mutations(index, place)
        yield from _time_mutations(log, index, place)
        yield from _key_mutations(log, index, place)
        for name in record:
            yield log.rewritten(
                f"{place} {name}", "removed", index, lambda i=index, n=name: log.without(i, (n,)), name != "namespace"
            )
        yield from _value_mutations(log, index, f"{place} value", str(record["key"]), ("value",), record["value"])
        metadata = record["metadata"]
        assert isinstance(metadata, dict)
        for operator in ("is null", "is text", "is a list", "is 0"):
            yield log.rewritten(
                f"{place} metadata", operator, index,
                lambda i=index, o=operator: log.with_value(i, ("metadata",), VALUES[o]()), True,
            )  # fmt: skip
        for name, value in metadata.items():
            entry = f"{place} metadata.{name}"
            yield log.rewritten(entry, "removed", index, lambda i=index, n=name: log.without(i, ("metadata", n)), False)
            yield from _value_mutations(log, index, entry, name, ("metadata", name), value)
    yield from _log_file_mutations(text)


def _value_mutations(
    log: _Records, index: int, place: str, name: str, where: tuple[str, ...], value: object
) -> Iterator[Mutation]:
    for operator, make in variants(name, value):
        yield log.rewritten(place, operator, index, lambda m=make: log.with_value(index, where, m()), False)


def _time_mutations(log: _Records, index: int, place: str) -> Iterator[Mutation]:
    time_ms = log.records[index]["time_ms"]
    assert isinstance(time_ms, int)
    shifts: dict[str, object] = {
        "an hour earlier": time_ms - HOUR,
        "2 s earlier": time_ms - TWO_SECONDS,
        "2 s later": time_ms + TWO_SECONDS,
        "an hour later": time_ms + HOUR,
        "half a millisecond later": time_ms + 0.5,
        "in seconds": time_ms // 1000,
        "in microseconds": time_ms * 1000,
        "at 0": 0,
        "negative": -time_ms,
        "of 1e308": 1e308,
    }
    for operator, value in shifts.items():
        yield log.rewritten(
            f"{place} time", operator, index,
            lambda v=value: log.with_value(index, ("time_ms",), json.dumps(v)), False,
        )  # fmt: skip
    broken = ("is null", "is true", "is NaN", "is Infinity", "is 1e400", "is 10**400", "is text", "is a list")
    for operator in (*broken, "has 5,000 digits", "is an object", "is nested 100,000 deep"):
        yield log.rewritten(
            f"{place} time", operator, index,
            lambda o=operator: log.with_value(index, ("time_ms",), VALUES[o]()), True,
        )  # fmt: skip
    yield log.rewritten(
        f"{place} time", "is its own text", index,
        lambda: log.with_value(index, ("time_ms",), quoted(str(time_ms))), True,
    )  # fmt: skip


def _key_mutations(log: _Records, index: int, place: str) -> Iterator[Mutation]:
    key = str(log.records[index]["key"])
    others = {
        "is cut": key[:-1],
        "is in capitals": key.upper(),
        "has a space": key + " ",
        "is a path": "../" + key,
        "is nobody's": "a key of nobody",
        "is empty text": "",
        **{f"is {other}": other for other in ("run_start", "run_stop", "eval_accuracy", "seed", "cache_clear")},
    }
    for operator, other in others.items():
        if other != key:
            yield log.rewritten(
                f"{place} key", operator, index, lambda o=other: log.with_value(index, ("key",), quoted(o)), False
            )
    for operator in ("is null", "is 0", "is a list", "is an object"):
        yield log.rewritten(
            f"{place} key", operator, index, lambda o=operator: log.with_value(index, ("key",), VALUES[o]()), True
        )
    for kind in ("POINT_IN_TIME", "INTERVAL_START", "INTERVAL_END", "INTERVAL_MIDDLE"):
        if kind != log.records[index]["event_type"]:
            yield log.rewritten(
                f"{place} event_type", f"is {kind}", index,
                lambda k=kind: log.with_value(index, ("event_type",), quoted(k)), False,
            )  # fmt: skip
    for operator in ("is null", "is 0", "is a list"):
        yield log.rewritten(
            f"{place} event_type", operator, index,
            lambda o=operator: log.with_value(index, ("event_type",), VALUES[o]()), True,
        )  # fmt: skip
    prefix, text = log.prefixes[index], json.dumps(log.records[index])
    for operator, line in (
        ("without its token", prefix.replace(TOKEN, "") + text),
        ("with a short token", prefix.replace(":::", "::") + text),
        ("with two tokens", prefix + prefix + text),
        ("behind a part of itself", prefix + text[:20] + prefix + text),
    ):
        yield Mutation(
            place, operator,
            writer(lambda line=line: "".join([*log.lines[:index], f"{line}\n", *log.lines[index + 1 :]])),
            index + 1 if "itself" in operator else None,
        )  # fmt: skip


def _log_file_mutations(text: str) -> Iterator[Mutation]:
    """The log as a whole."""
    from closed_logs import closed_log

    lines = text.splitlines(keepends=True)
    other = closed_log("resnet" if '"bert"' in text else "bert", 991)
    like = text.replace("_000_000", "_000_001")
    mixed = [part for pair in zip(lines, other.splitlines(keepends=True), strict=False) for part in pair]
    wholes = {
        "mixed with the log of another benchmark": "".join(mixed),
        "with the log of another benchmark behind": text + other,
        "with the log of another benchmark before": other + text,
        "with itself behind": text + like,
        "in reverse order": "".join(reversed(lines)),
        "in order of the alphabet": "".join(sorted(lines)),
    }
    for operator, whole in wholes.items():
        yield Mutation("file", operator, writer(lambda w=whole: w))
    yield from cuts(text, 40)
    yield from file_mutations(text)


def large_log_mutations(text: str) -> Iterator[Mutation]:
    """Logs with something so large in them that reading it carelessly takes gigabytes."""
    raw, mega = text.encode(), b"x" * 2**20
    log = _Records(text, _log_split)
    seed = next(index for index, record in log.records.items() if record["key"] == "seed")
    for operator, make in LARGE_VALUES.items():
        line = seed + 1
        yield Mutation(
            f"line {line} (seed) value", operator,
            writer(lambda m=make: log.changed(seed, log.with_value(seed, ("value",), m()))), line, large=True,
        )  # fmt: skip
    noise = b"1: loss 0.123\n" * 2**14
    token = TOKEN.encode()
    yield Mutation("file", "with a line of 100 MB behind", streamed(raw, mega, 100), large=True)
    yield Mutation("file", "with a line of 100 MB before", streamed(b"", mega, 100, b"\n" + raw), large=True)
    yield Mutation(
        "file", "with an event of 100 MB", streamed(raw + token + b'{"key": "', mega, 100, b'"}\n'),
        raw.count(b"\n") + 1, large=True,
    )  # fmt: skip
    yield Mutation("file", "with 100 MB of tokens", streamed(raw, token * 2**16, 180), large=True)
    yield Mutation("file", "with 100 MB of events", streamed(raw, _noise_event() * 2**11, 400), large=True)
    yield Mutation("file", "of 3 GB of null bytes", sparse(b"", 3 * 2**30), large=True)
    yield Mutation("file", "with 2 TB of null bytes behind", sparse(raw, 2**41), large=True)
    yield Mutation("file", "with 10 million lines of other output", streamed(raw, noise, 611), large=True)
    yield Mutation("file", "with 100 MB of empty lines", streamed(raw, b"\n" * 2**20, 100), large=True)


def _noise_event() -> bytes:
    record = {"namespace": "", "time_ms": 1_700_000_000_000, "event_type": "POINT_IN_TIME", "key": "tracked_stats",
              "value": {"throughput": 1.0}, "metadata": {}}  # fmt: skip
    return f"{TOKEN}{json.dumps(record)}\n".encode()


def registry_mutations(text: str) -> Iterator[Mutation]:
    """Every mutation of the text of ``runs.jsonl``."""
    runs = _Records(text, lambda line: ("", line))

    def label(index: int) -> str:
        return f"line {index + 1} ({runs.records[index]['event']})"

    yield from line_mutations(runs.lines, runs.records, label)
    for index, record in runs.records.items():
        place = label(index)
        yield from runs.form_mutations(index, place)
        for name, value in record.items():
            field = f"{place} {name}"
            yield runs.rewritten(
                field, "removed", index, lambda i=index, n=name: runs.without(i, (n,)), name != "reason"
            )
            for operator, make in variants(name, value):
                yield runs.rewritten(
                    field, operator, index, lambda i=index, n=name, m=make: runs.with_value(i, (n,), m()), False
                )
        extra = json.dumps({**record, "a field of nobody": 1})
        yield runs.rewritten(place, "with an unknown field", index, lambda e=extra: e, True)
        latin = "".join([*runs.lines[:index], "{\udce9\udcff}\n", *runs.lines[index + 1 :]])
        yield Mutation(place, "is no UTF-8", writer(lambda t=latin: t), index + 1)
        spaced = "".join([*runs.lines[:index], "\n", *runs.lines[index:]])
        yield Mutation(place, "behind an empty line", writer(lambda t=spaced: t))
    yield from cuts(text, 20)
    yield from file_mutations(text)
    yield from _registry_forgeries(runs)


def _registry_forgeries(runs: _Records) -> Iterator[Mutation]:
    """Changes of many lines at once."""
    entries = list(runs.records.values())

    def all_with(change: Callable[[dict[str, object]], dict[str, object]]) -> Callable[[Path], None]:
        return writer(lambda: "".join(json.dumps(change(entry)) + "\n" for entry in entries))

    def number(entry: dict[str, object]) -> int:
        found = entry["experiment"]
        assert isinstance(found, int)
        return found

    yield Mutation("all lines", "renumbered from 2", all_with(lambda e: e | {"experiment": number(e) + 1}))
    yield Mutation("all lines", "renumbered from 0", all_with(lambda e: e | {"experiment": number(e) - 1}))
    yield Mutation("all lines", "renumbered backwards", all_with(lambda e: e | {"experiment": -number(e)}))
    yield Mutation("all lines", "of another series", all_with(lambda e: e | {"series": "2026-05-02T12-00-00"}))
    yield Mutation("all lines", "of another benchmark", all_with(
        lambda e: e | ({"benchmark": "ssd"} if "benchmark" in e else {})))  # fmt: skip
    for field, value in (("log", "2026-05-01T12-00-00_1.log"), ("seed", 7), ("declared", 3), ("declared", 4000)):
        yield Mutation("all lines", f"with {field} {value}", all_with(
            lambda e, f=field, v=value: e | ({f: v} if f in e else {})))  # fmt: skip
    last = max(number(entry) for entry in entries)
    fewer = [entry for entry in entries if number(entry) != last]
    for declared in (last, last - 1):
        yield Mutation("all lines", f"without the last experiment, {declared} declared", writer(
            lambda d=declared: "".join(
                json.dumps(e | ({"declared": d} if "declared" in e else {})) + "\n" for e in fewer
            )))  # fmt: skip
    yield Mutation("all lines", "as one list", writer(lambda: json.dumps(entries)))
    yield Mutation("all lines", "twice", writer(lambda: "".join(runs.lines * 2)))
    many = "".join(runs.lines)
    yield Mutation("file", "100,000 times", writer(lambda: many * (100_000 // len(entries))), large=True)
    yield Mutation("file", "with a line of 100 MB", streamed(many.encode(), b"x" * 2**20, 100), large=True)
    yield Mutation("file", "of 3 GB of null bytes", sparse(b"", 3 * 2**30), large=True)
    yield Mutation("file", "nested 10 million deep", streamed(b"", b"[" * 2**20, 10), large=True)
