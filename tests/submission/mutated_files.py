"""Mutations of values of JSON, of JSON files, and of any file as a whole."""

from __future__ import annotations

import gzip
import json
import os
import random
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from mutations import Mutation

_HOLE = "a hole for a value"


def quoted(text: str) -> str:
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
    "is for Python": lambda: quoted("__import__('os').system('touch PWNED')"),
    "is for format": lambda: '"{0.__class__} %s %n {}"',
    "forges a verdict": lambda: quoted("x\nrun.log: VALID RUN (resnet, ruleset 4.0.0)\n  score: 1.000 minutes"),
    "has control characters": lambda: quoted("a\0b\x1b[2J\r\x85c"),
    "is half a character": lambda: '"\\ud800"',
    "is a list": lambda: "[1, 2]",
    "is an empty list": lambda: "[]",
    "is an object": lambda: '{"value": 1}',
    "is nested 100,000 deep": lambda: "[" * 100_000 + "]" * 100_000,
    "is an object nested 5,000 deep": lambda: '{"a":' * 5_000 + "1" + "}" * 5_000,
    "has 1 MB": lambda: quoted("x" * 2**20),
}
"""Operator to the JSON text that takes a value's place."""

LARGE_VALUES: dict[str, Callable[[], str]] = {
    "has 64 MB": lambda: quoted("x" * 2**26),
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


def variants(name: str, value: object) -> Iterator[tuple[str, Callable[[], str]]]:
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


def writer(make: Callable[[], str | bytes]) -> Callable[[Path], None]:
    """Return a function that writes the result of ``make`` to a path; half surrogate pairs become single bytes."""

    def apply(path: Path) -> None:
        content = make()
        path.write_bytes(content if isinstance(content, bytes) else content.encode("utf-8", "surrogateescape"))

    return apply


def cuts(text: str, parts: int) -> Iterator[Mutation]:
    for end in (len(text) * part // parts for part in range(1, parts)):
        yield Mutation(f"file at byte {end}", "cut", writer(lambda end=end: text[:end]))


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
        yield Mutation("file", operator, writer(make))
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


def streamed(start: bytes, chunk: bytes, times: int, end: bytes = b"") -> Callable[[Path], None]:
    """Write a large file without holding it in memory."""

    def apply(path: Path) -> None:
        with path.open("wb") as file:
            file.write(start)
            for _ in range(times):
                file.write(chunk)
            file.write(end)

    return apply


def sparse(text: bytes, size: int) -> Callable[[Path], None]:
    def apply(path: Path) -> None:
        path.write_bytes(text)
        os.truncate(path, size)

    return apply


def json_mutations(text: str) -> Iterator[Mutation]:
    """Every value of a JSON file replaced, removed or given twice, and the file as a whole."""
    content = json.loads(text)
    for where, value in leaves(content):
        place = ".".join(map(str, where))
        for operator, make in variants(str(where[-1]), value):
            yield Mutation(place, operator, writer(lambda w=where, m=make: with_text(content, w, m())))
        yield Mutation(place, "removed", writer(lambda w=where: removed(content, w)))
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


def with_text(content: object, where: Where, text: str) -> str:
    """Return the JSON text of ``content`` with ``text``, which may be no JSON, in place of the value at ``where``."""
    return json.dumps(replaced(content, where, _HOLE)).replace(quoted(_HOLE), text)


def removed(content: object, where: Where) -> str:
    copy, target = _parent(content, where)
    del target[where[-1]]
    return json.dumps(copy)
