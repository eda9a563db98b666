"""Mutations that damage a valid file: operators on lines, values, times and whole files, each with a name.

A session runs a fixed sample, or thousands with ``-m slow``. Environment variables: ``MUTATIONS_SEED`` draws others of
these, ``MUTATIONS_COUNT`` changes their number for each test and benchmark, and
``MUTATION="resnet: line 12 (seed) value is NaN"`` runs only the one of this name.
"""

from __future__ import annotations

import gzip
import json
import os
import random
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import pytest

T = TypeVar("T")
TOKEN = ":::MLLOG "
HOUR, TWO_SECONDS = 3_600_000, 2_000
_HOLE = "a hole for a value"


@dataclass(frozen=True)
class Mutation:
    """One change of one file.

    Attributes:
        place: changed part, such as ``line 12 (seed) value``.
        operator: change, such as ``is NaN``.
        apply: changes the file at a path.
        line: number of the damaged line, which a refusal must name; None if the name of the file is enough.
        large: whether the file is so large that a process of its own reads it, whose memory is measured.
    """

    place: str
    operator: str
    apply: Callable[[Path], None]
    line: int | None = None
    large: bool = False

    @property
    def name(self) -> str:
        """The place and the operator."""
        return f"{self.place} {self.operator}"


def drawn(cases: Iterable[T], count: int, seed: int, kind: Callable[[T], str] = attrgetter("operator")) -> list[T]:
    """Return up to ``count`` cases: one of each kind in turn, the same for the same seed."""
    draw = random.Random(seed)
    by_kind: dict[str, list[T]] = {}
    for case in cases:
        by_kind.setdefault(kind(case), []).append(case)
    queues = [by_kind[name] for name in sorted(by_kind)]
    draw.shuffle(queues)
    for queue in queues:
        draw.shuffle(queue)
    found: list[T] = []
    while len(found) < count and any(queues):
        found += [queue.pop() for queue in queues if queue]
    return found[:count]


SEED = int(os.environ.get("MUTATIONS_SEED", "0"))
SAMPLE_SEED = 0


class Case(NamedTuple):
    """A mutation of a valid file of one benchmark."""

    benchmark: str
    mutation: Mutation

    @property
    def name(self) -> str:
        """Value of ``MUTATION`` that selects this case."""
        return f"{self.benchmark}: {self.mutation.name}"


def wants_every_case(config: pytest.Config) -> bool:
    """Whether the session runs the slow tests."""
    expression = str(config.getoption("markexpr", ""))
    return "slow" in expression and "not slow" not in expression


def parametrize(
    metafunc: pytest.Metafunc,
    benchmarks: Sequence[str],
    mutations: Callable[[str], Iterable[Mutation]],
    sample: int,
    many: int,
) -> None:
    """Parametrize the argument ``case``: ``sample`` or, in slow sessions, ``many`` mutations of each benchmark."""
    named = os.environ.get("MUTATION")
    large = wants_every_case(metafunc.config)
    count = int(os.environ.get("MUTATIONS_COUNT", many)) if large else sample
    cases = []
    for number, benchmark in enumerate(benchmarks):
        if named is not None:
            found = [each for each in mutations(benchmark) if Case(benchmark, each).name == named]
        else:
            seed = (SEED if large else SAMPLE_SEED) + number
            found = drawn(mutations(benchmark), count, seed)
        cases += [Case(benchmark, each) for each in found]
    marks = [pytest.mark.slow] if large else []
    metafunc.parametrize("case", [pytest.param(case, id=case.name, marks=marks) for case in cases])


def require(case: Case, wrong: Sequence[str]) -> None:
    """Fail if ``wrong`` has messages; say how to run the case again."""
    if wrong:
        again = f'MUTATION="{case.name}"'
        pytest.fail("\n  ".join([f"{case.name} (seed {SEED}; again with {again}):", *wrong]), pytrace=False)


def _quoted(text: str) -> str:
    return json.dumps(text)


VALUES: dict[str, Callable[[], str]] = {
    "is null": lambda: "null",
    "is true": lambda: "true",
    "is false": lambda: "false",
    "is 0": lambda: "0",
    "is -1": lambda: "-1",
    "is 1.5": lambda: "1.5",
    "is -0.0": lambda: "-0.0",
    "is NaN": lambda: "NaN",
    "is Infinity": lambda: "Infinity",
    "is -Infinity": lambda: "-Infinity",
    "is 1e308": lambda: "1e308",
    "is 1e400": lambda: "1e400",
    "is 2**53 + 1": lambda: str(2**53 + 1),
    "is 10**400": lambda: "1" + "0" * 400,
    "has 5,000 digits": lambda: "7" * 5_000,
    "is empty text": lambda: '""',
    "is text": lambda: '"abc"',
    "is numeric text": lambda: '"1024"',
    "is 32k": lambda: '"32k"',
    "is a path up": lambda: '"../../../../x"',
    "is an absolute path": lambda: '"/etc/passwd"',
    "is for a shell": lambda: '"$(touch PWNED)"',
    "is for Python": lambda: _quoted("__import__('os').system('touch PWNED')"),
    "is for format": lambda: '"{0.__class__} %s %n {}"',
    "forges a verdict": lambda: _quoted("x\nrun.log: VALID RUN (resnet, ruleset 4.0.0)\n  score: 1.000 minutes"),
    "has control characters": lambda: _quoted("a\0b\x1b[2J\r\x85c"),
    "is half a character": lambda: '"\\ud800"',
    "is a list": lambda: "[1, 2]",
    "is an empty list": lambda: "[]",
    "is an object": lambda: '{"value": 1}',
    "is nested 100,000 deep": lambda: "[" * 100_000 + "]" * 100_000,
    "is an object nested 5,000 deep": lambda: '{"a":' * 5_000 + "1" + "}" * 5_000,
    "has 1 MB": lambda: _quoted("x" * 2**20),
}
"""Operator to the JSON text that takes a value's place."""

LARGE_VALUES: dict[str, Callable[[], str]] = {
    "has 64 MB": lambda: _quoted("x" * 2**26),
    "has 64 MB of digits": lambda: "7" * 2**26,
    "has 16 MB of lists": lambda: "[" + "[]," * (2**24 // 3) + "[]]",
    "is nested 10 million deep": lambda: "[" * 10_000_000,
}

OTHER_MEANINGS: Mapping[str, tuple[object, ...]] = {
    "submission_benchmark": ("bert", "resnet", "gpt3", "resnet/../bert"),
    "submission_division": ("open", "Closed", "closed "),
    "submission_status": ("cloud", "preview"),
    "submission_org": ("other",),
    "status": ("aborted", "success", "not started", "Success"),
    "opt_name": ("adam", "sgd", "lars"),
    "verdict": ("format", "refused", "submittable"),
    "event": ("begin", "end", "middle"),
    "benchmark": ("bert", "resnet", "../bert"),
    "ruleset": ("5.0.0", "3.1.0", "training_4.0.0/../training_3.0.0"),
    "log": ("../x.log", "/etc/hostname", ".", "", "runs.jsonl", "a\nb.log", "--help", "*.log", "a/b.log"),
    "output_dir": ("../x", "/etc"),
    "series": ("../x", "2026-05-01T12-00-00*", "[!a]", "/"),
    "commit": ("--output=PWNED", "HEAD", "0" * 40),
    "scale": ("8x8", "0x0"),
    "exit_code": (0, 10, 137),
    "dirty": (True, None),
    "seed": (4_000_000_000_001, "4000000000017", 4_000_000_000_017.0),
}
"""Key to values that mean something else in its place."""


def _variants(name: str, value: object) -> Iterator[tuple[str, Callable[[], str]]]:
    """Operator and JSON text of everything that may stand in place of ``value``."""
    yield from VALUES.items()
    for other in OTHER_MEANINGS.get(name, ()):
        if other != value or type(other) is not type(value):
            yield f"means {json.dumps(other)}", lambda other=other: json.dumps(other)
    others: dict[str, object] = {}
    if isinstance(value, int | float) and not isinstance(value, bool):
        others = {
            "is one more": value + 1,
            "is one less": value - 1,
            "is doubled": value * 2,
            "is halved": value / 2,
            "is negated": -value,
            "is a hair larger": value * (1 + 1e-9),
            "is its own text": str(value),
            "is in a list": [value],
        }
    elif isinstance(value, str):
        others = {"is in capitals": value.upper() + "X", "has a space": value + " "}
    for operator, other in others.items():
        yield operator, lambda other=other: json.dumps(other)


def _writer(make: Callable[[], str | bytes]) -> Callable[[Path], None]:
    """Return a function that writes the result of ``make`` to a path; half surrogate pairs become single bytes."""

    def apply(path: Path) -> None:
        content = make()
        path.write_bytes(content if isinstance(content, bytes) else content.encode("utf-8", "surrogateescape"))

    return apply


def line_mutations(lines: Sequence[str], indices: Iterable[int], label: Callable[[int], str]) -> Iterator[Mutation]:
    """Lines dropped, doubled, moved and swapped.

    Args:
        lines: of the whole file, with their ends.
        indices: of the lines to be changed.
        label: place of the line at an index.
    """

    def mutation(index: int, operator: str, changed: Callable[[], list[str]]) -> Mutation:
        return Mutation(label(index), operator, _writer(lambda: "".join(changed())))

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
        return Mutation(place, operator, _writer(lambda: self.changed(index, make())), index + 1 if damaged else None)

    def with_value(self, index: int, where: tuple[str, ...], text: str) -> str:
        """JSON text of a record with ``text`` in place of the value at ``where``."""
        return _with_text(self.records[index], where, text)

    def without(self, index: int, where: tuple[str, ...]) -> str:
        """JSON text of a record without the entry at ``where``."""
        return _removed(self.records[index], where)

    def form_mutations(self, index: int, place: str) -> Iterator[Mutation]:
        """A line that is no longer one whole JSON object, or an ambiguous one."""
        text = json.dumps(self.records[index])
        forms = {
            "cut in the middle": text[: len(text) // 2],
            "without its last character": text[:-1],
            "with something behind": text + " x",
            "doubled within the line": text + text,
            "in a list": f"[{text}]",
            "as text": _quoted(text),
            "with quotes of Python": str(self.records[index]),
            "with a comma too many": text[:-1] + ",}",
            "with a bare line feed in it": text.replace('": ', '":\n ', 1),
            "with a null byte": text[:9] + "\0" + text[9:],
        }
        for operator, form in forms.items():
            yield self.rewritten(place, operator, index, lambda form=form: form, True)
        for name, value in self.records[index].items():
            equal = f"{_quoted(name)}: {json.dumps(value)}"
            other = f"{_quoted(name)}: 1"
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
    for operator, make in _variants(name, value):
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
        lambda: log.with_value(index, ("time_ms",), _quoted(str(time_ms))), True,
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
                f"{place} key", operator, index, lambda o=other: log.with_value(index, ("key",), _quoted(o)), False
            )
    for operator in ("is null", "is 0", "is a list", "is an object"):
        yield log.rewritten(
            f"{place} key", operator, index, lambda o=operator: log.with_value(index, ("key",), VALUES[o]()), True
        )
    for kind in ("POINT_IN_TIME", "INTERVAL_START", "INTERVAL_END", "INTERVAL_MIDDLE"):
        if kind != log.records[index]["event_type"]:
            yield log.rewritten(
                f"{place} event_type", f"is {kind}", index,
                lambda k=kind: log.with_value(index, ("event_type",), _quoted(k)), False,
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
            _writer(lambda line=line: "".join([*log.lines[:index], f"{line}\n", *log.lines[index + 1 :]])),
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
        yield Mutation("file", operator, _writer(lambda w=whole: w))
    yield from _cuts(text, 40)
    yield from file_mutations(text)


def _cuts(text: str, parts: int) -> Iterator[Mutation]:
    for end in (len(text) * part // parts for part in range(1, parts)):
        yield Mutation(f"file at byte {end}", "cut", _writer(lambda end=end: text[:end]))


def file_mutations(text: str) -> Iterator[Mutation]:
    """What may be done to any file of text."""
    raw = text.encode()
    wholes: dict[str, Callable[[], bytes]] = {
        "empty": lambda: b"",
        "a line feed": lambda: b"\n",
        "with a null byte in front": lambda: b"\0" + raw,
        "with null bytes behind": lambda: raw + bytes(4096),
        "with null bytes in the middle": lambda: raw[: len(raw) // 2] + bytes(64) + raw[len(raw) // 2 :],
        "in UTF-16": lambda: text.encode("utf-16"),
        "with a byte order mark": lambda: b"\xef\xbb\xbf" + raw,
        "with CRLF": lambda: raw.replace(b"\n", b"\r\n"),
        "with CR alone": lambda: raw.replace(b"\n", b"\r"),
        "with form feeds": lambda: raw.replace(b"\n", b"\f\x0b\x1c\x85\n"),
        "on one line": lambda: raw.replace(b"\n", b" "),
        "compressed": lambda: gzip.compress(raw, mtime=0),
        "binary": lambda: random.Random(0).randbytes(20_000),
        "with bytes of latin-1": lambda: b"\xe9\xff\xfe\n" + raw,
        "JSON of another shape": lambda: b'[{"a": [1, 2, null]}]\n',
        "a number": lambda: b"1\n",
        "null": lambda: b"null\n",
    }
    for operator, make in wholes.items():
        yield Mutation("file", operator, _writer(make))
    yield Mutation("file", "removed", Path.unlink)
    yield Mutation("file", "a folder", _instead(Path.mkdir))
    yield Mutation("file", "a pipe", _instead(os.mkfifo))
    yield Mutation("file", "a link to itself", _instead(lambda path: path.symlink_to(path.name)))
    yield Mutation("file", "a dangling link", _instead(lambda path: path.symlink_to("absent")))
    yield Mutation("file", "a link to an endless device", _instead(lambda path: path.symlink_to("/dev/zero")))
    yield Mutation("file", "a link to a file outside", _instead(lambda path: path.symlink_to("/etc/hostname")))
    yield Mutation("file", "a link to its folder", _instead(lambda path: path.symlink_to(".")))
    yield Mutation("file", "a link to its copy", _linked_copy)
    if os.geteuid() != 0:
        yield Mutation("file", "unreadable", lambda path: path.chmod(0))


def _instead(make: Callable[[Path], None]) -> Callable[[Path], None]:
    def apply(path: Path) -> None:
        path.unlink()
        make(path)

    return apply


def _linked_copy(path: Path) -> None:
    """A link to a file with the same content elsewhere, in a folder that the test has made."""
    copy = path.parent.parent / f"copy-of-{path.name}"
    copy.write_bytes(path.read_bytes())
    path.unlink()
    path.symlink_to(copy)


def _streamed(start: bytes, chunk: bytes, times: int, end: bytes = b"") -> Callable[[Path], None]:
    """Write a large file without holding it in memory."""

    def apply(path: Path) -> None:
        with path.open("wb") as file:
            file.write(start)
            for _ in range(times):
                file.write(chunk)
            file.write(end)

    return apply


def _sparse(text: bytes, size: int) -> Callable[[Path], None]:
    def apply(path: Path) -> None:
        path.write_bytes(text)
        os.truncate(path, size)

    return apply


def large_log_mutations(text: str) -> Iterator[Mutation]:
    """Logs with something so large in them that reading it carelessly takes gigabytes."""
    raw, mega = text.encode(), b"x" * 2**20
    log = _Records(text, _log_split)
    seed = next(index for index, record in log.records.items() if record["key"] == "seed")
    for operator, make in LARGE_VALUES.items():
        line = seed + 1
        yield Mutation(
            f"line {line} (seed) value", operator,
            _writer(lambda m=make: log.changed(seed, log.with_value(seed, ("value",), m()))), line, large=True,
        )  # fmt: skip
    noise = b"1: loss 0.123\n" * 2**14
    token = TOKEN.encode()
    yield Mutation("file", "with a line of 100 MB behind", _streamed(raw, mega, 100), large=True)
    yield Mutation("file", "with a line of 100 MB before", _streamed(b"", mega, 100, b"\n" + raw), large=True)
    yield Mutation(
        "file", "with an event of 100 MB", _streamed(raw + token + b'{"key": "', mega, 100, b'"}\n'),
        raw.count(b"\n") + 1, large=True,
    )  # fmt: skip
    yield Mutation("file", "with 100 MB of tokens", _streamed(raw, token * 2**16, 180), large=True)
    yield Mutation("file", "with 100 MB of events", _streamed(raw, _noise_event() * 2**11, 400), large=True)
    yield Mutation("file", "of 3 GB of null bytes", _sparse(b"", 3 * 2**30), large=True)
    yield Mutation("file", "with 2 TB of null bytes behind", _sparse(raw, 2**41), large=True)
    yield Mutation("file", "with 10 million lines of other output", _streamed(raw, noise, 611), large=True)
    yield Mutation("file", "with 100 MB of empty lines", _streamed(raw, b"\n" * 2**20, 100), large=True)


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
            for operator, make in _variants(name, value):
                yield runs.rewritten(
                    field, operator, index, lambda i=index, n=name, m=make: runs.with_value(i, (n,), m()), False
                )
        extra = json.dumps({**record, "a field of nobody": 1})
        yield runs.rewritten(place, "with an unknown field", index, lambda e=extra: e, True)
        latin = "".join([*runs.lines[:index], "{\udce9\udcff}\n", *runs.lines[index + 1 :]])
        yield Mutation(place, "is no UTF-8", _writer(lambda t=latin: t), index + 1)
        spaced = "".join([*runs.lines[:index], "\n", *runs.lines[index:]])
        yield Mutation(place, "behind an empty line", _writer(lambda t=spaced: t))
    yield from _cuts(text, 20)
    yield from file_mutations(text)
    yield from _registry_forgeries(runs)


def _registry_forgeries(runs: _Records) -> Iterator[Mutation]:
    """Changes of many lines at once."""
    entries = list(runs.records.values())

    def all_with(change: Callable[[dict[str, object]], dict[str, object]]) -> Callable[[Path], None]:
        return _writer(lambda: "".join(json.dumps(change(entry)) + "\n" for entry in entries))

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
        yield Mutation("all lines", f"without the last experiment, {declared} declared", _writer(
            lambda d=declared: "".join(
                json.dumps(e | ({"declared": d} if "declared" in e else {})) + "\n" for e in fewer
            )))  # fmt: skip
    yield Mutation("all lines", "as one list", _writer(lambda: json.dumps(entries)))
    yield Mutation("all lines", "twice", _writer(lambda: "".join(runs.lines * 2)))
    many = "".join(runs.lines)
    yield Mutation("file", "100,000 times", _writer(lambda: many * (100_000 // len(entries))), large=True)
    yield Mutation("file", "with a line of 100 MB", _streamed(many.encode(), b"x" * 2**20, 100), large=True)
    yield Mutation("file", "of 3 GB of null bytes", _sparse(b"", 3 * 2**30), large=True)
    yield Mutation("file", "nested 10 million deep", _streamed(b"", b"[" * 2**20, 10), large=True)


def json_mutations(text: str) -> Iterator[Mutation]:
    """Every value of a JSON file replaced, removed or given twice, and the file as a whole."""
    content = json.loads(text)
    for where, value in leaves(content):
        place = ".".join(map(str, where))
        for operator, make in _variants(str(where[-1]), value):
            yield Mutation(place, operator, _writer(lambda w=where, m=make: _with_text(content, w, m())))
        yield Mutation(place, "removed", _writer(lambda w=where: _removed(content, w)))
    yield from file_mutations(text)


Where = tuple[str | int, ...]
"""Keys and indices that lead to a value of nested JSON."""


def leaves(content: object, where: Where = ()) -> Iterator[tuple[Where, object]]:
    """Yield position and value of everything below ``content``."""
    items: Iterable[tuple[str | int, object]] = ()
    if isinstance(content, dict):
        items = content.items()
    elif isinstance(content, list):
        items = enumerate(content)
    for name, value in items:
        yield (*where, name), value
        yield from leaves(value, (*where, name))


def _parent(content: object, where: Where) -> tuple[Any, Any]:
    """Return a copy of ``content``, and the list or object in it that has the value at ``where``."""
    copy = json.loads(json.dumps(content))
    target = copy
    for name in where[:-1]:
        target = target[name]
    return copy, target


def replaced(content: object, where: Where, value: object) -> Any:
    """Return a copy of ``content`` with another value at ``where``."""
    copy, target = _parent(content, where)
    target[where[-1]] = value
    return copy


def _with_text(content: object, where: Where, text: str) -> str:
    """Return the JSON text of ``content`` with ``text``, which may be no JSON, in place of the value at ``where``."""
    return json.dumps(replaced(content, where, _HOLE)).replace(_quoted(_HOLE), text)


def _removed(content: object, where: Where) -> str:
    copy, target = _parent(content, where)
    del target[where[-1]]
    return json.dumps(copy)
