"""Run commands with an audit hook that looks for canaries: ``audited.py JOBS.json FOUND.json PYTHON``.

A canary is a value of an untrusted file. No argument of an audit event (``open``, ``compile``, ``exec``, ``import``,
``subprocess.Popen``, ``os.listdir`` and all others) may contain one. Child processes run ``PYTHON`` instead of the
interpreter, so that they are recorded as well.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

MARK = "CANARY_"


def texts(value: Any, depth: int = 4) -> Iterator[str]:
    """Yield every text within the arguments of an audited event."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, bytes | bytearray):
        yield value.decode("latin-1")
    elif isinstance(value, os.PathLike):
        yield from texts(os.fspath(value))
    elif isinstance(value, list | tuple | set | frozenset) and depth:
        for each in value:
            yield from texts(each, depth - 1)
    elif isinstance(value, dict) and depth:
        for pair in value.items():
            yield from texts(pair, depth - 1)


def main() -> None:
    jobs, out, python = json.loads(Path(sys.argv[1]).read_text()), Path(sys.argv[2]), sys.argv[3]
    from common.errors import SuiteError
    from common.submission import check, package, summarize

    commands = {"check": check.main, "summarize": summarize.main, "package": package.main}
    seen: list[tuple[str, str]] = []
    starts: list[list[str]] = []
    listening = False

    def hook(event: str, arguments: tuple[Any, ...]) -> None:
        if not listening:
            return
        if event == "subprocess.Popen":
            starts.append([*texts(arguments[1]), *texts(arguments[3])])
        seen.extend((event, text[:300]) for text in texts(arguments) if MARK in text)

    sys.addaudithook(hook)
    sys.executable = python
    results = []
    for job in jobs:
        code, printed = -1, io.StringIO()
        seen.clear()
        starts.clear()
        with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(printed):
            listening = True
            try:
                code = commands[job["command"]](job["arguments"])
            except SuiteError as error:
                code, _ = error.exit_code, printed.write(str(error))
            finally:
                listening = False
        results.append(
            {"code": code, "printed": printed.getvalue()[-4000:], "seen": list(seen), "starts": list(starts)}
        )
    out.write_text(json.dumps(results))


if __name__ == "__main__":
    main()
