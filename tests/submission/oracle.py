"""Rules for every mutation of a valid file: the commands find the same facts, or they refuse.

*Facts* are the exit codes, the verdict of each run and set, minutes, convergence, seeds, the choice of runs and the
score. Whatever a command reads, it must not end in a traceback, write files, leave a process or a temporary file, or
print a value of the file as a line of its own.

:func:`faults` is the strict rule, for results with a registry: the same facts, or a refusal that names the file, and
the line if the line is damaged. :func:`unearned` is the rule for a log alone. A change may turn it into the log of
another run, which nobody can find; but it must not claim more than before.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import os
import re
import shutil
import stat
import tempfile
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest

from common.errors import SuiteError
from common.mlperf.checker_process import CheckerProcess, one_checker_process
from common.mlperf.parsed_log import ParsedLog
from common.submission import check, summarize

CLOCK_SECONDS = 1.0
"""Allowed difference of minutes: a clock may step back by this time within a log."""
RANKS = ("REFUSED", "FORMAT", "VALID RUN", "SUBMITTABLE")
_HEADLINE = re.compile(rf"^(.*): ({'|'.join(RANKS)}) \(.*\)$", re.MULTILINE)
_LARGEST_HASHED = 2**24


@dataclass(frozen=True)
class Run:
    """The values of one run in the output of `summarize`."""

    number: int
    verdict: str
    minutes: float | None
    converged: bool
    convergence: float | None
    seed: object
    chosen: bool


@dataclass(frozen=True)
class Facts:
    """The results of the commands.

    Attributes:
        codes: exit codes of `check` and `summarize`.
        verdicts: verdicts of the runs and sets that `check` names, in its order.
        sets: for each set of runs in `summarize`, its runs, and its olympic mean and score.
    """

    codes: tuple[int, int]
    verdicts: tuple[str, ...]
    sets: tuple[tuple[tuple[Run, ...], tuple[float | None, ...]], ...]

    @property
    def numbers(self) -> list[float | None]:
        """Minutes of runs, means and scores."""
        runs = [run.minutes for group, _ in self.sets for run in group]
        return [*runs, *(value for _, values in self.sets for value in values)]

    @property
    def rest(self) -> object:
        """Values that are compared exactly."""
        groups = [
            [(r.number, r.verdict, r.converged, r.convergence, r.seed, r.chosen) for r in group]
            for group, _ in self.sets
        ]
        return self.codes, self.verdicts, groups


@dataclass(frozen=True)
class Outcome:
    """The results of `check` and `summarize` on the same paths.

    Attributes:
        facts: None if one of them ended in an error of the suite.
        messages: output or error message of each.
        refused: whether each of them refused.
        wrongs: messages about actions that are forbidden for every command.
    """

    facts: Facts | None
    messages: tuple[str, str]
    refused: tuple[bool, bool]
    wrongs: tuple[str, ...]


@contextlib.contextmanager
def kept_answers() -> Iterator[None]:
    """Use one process of MLCommons' checkers, and its first answer for the same events; do not cache anything else."""
    ask, known = CheckerProcess.ask, {}

    def ask_once(process: CheckerProcess, task: str, logs: Sequence[ParsedLog] = (), **values: object) -> Any:
        texts = [hashlib.sha256("\n".join(event.text for event in log.events).encode()).digest() for log in logs]
        question = (task, tuple(texts), repr(sorted(values.items())))
        if question not in known:
            known[question] = ask(process, task, logs, **values)
        return known[question]

    with one_checker_process(), pytest.MonkeyPatch.context() as patched:
        patched.setattr(CheckerProcess, "ask", ask_once)
        yield


class Workplace:
    """Folders in which commands run: one to read, an empty current folder, and one for temporary files."""

    def __init__(self, root: Path) -> None:
        self.read = root / "read"
        self._current, self._temporary, self._out = root / "current", root / "temporary", root / "out"
        for folder in (self.read, self._current, self._temporary, self._out):
            folder.mkdir(parents=True)

    def clear(self) -> None:
        """Empty the folder that is read."""
        shutil.rmtree(self.read)
        self.read.mkdir()

    def observe(self, paths: Sequence[Path], *options: str, runs: Sequence[Path] | None = None) -> Outcome:
        """Run `check` on ``paths`` and `summarize` on ``runs``, which are ``paths`` by default."""
        before = _snapshot(self.read), _snapshot(self._current)
        children = set(_children())
        summary = self._out / "summary.json"
        summary.unlink(missing_ok=True)
        with self._here():
            judged = _run(check.main, [*map(str, paths), *options])
            scored = _run(summarize.main, [*map(str, runs or paths), *options, "--json", str(summary)])
        wrongs = [*judged.wrongs, *scored.wrongs]
        if (_snapshot(self.read), _snapshot(self._current)) != before:
            wrongs.append("a file was written, changed or removed")
        if left := [path.name for path in self._temporary.iterdir()]:
            wrongs.append(f"temporary files are left: {left}")
        if left := [text for pid, text in _children().items() if pid not in children]:
            wrongs.append(f"processes are left: {left}")
        facts = None
        if judged.code is not None and scored.code is not None and summary.exists():
            sets = json.loads(summary.read_text())
            facts = Facts(
                (judged.code, scored.code),
                tuple(found[2] for found in _HEADLINE.finditer(judged.text)),
                tuple(
                    (tuple(map(_run_of, each["runs"])), (each["olympic_minutes"], each["score_minutes"]))
                    for each in sets
                ),
            )
        return Outcome(
            facts, (judged.text, scored.text), (judged.code != 0, scored.code != 0), tuple(dict.fromkeys(wrongs))
        )

    @contextlib.contextmanager
    def _here(self) -> Iterator[None]:
        before = tempfile.tempdir
        tempfile.tempdir = str(self._temporary)
        try:
            with contextlib.chdir(self._current):
                yield
        finally:
            tempfile.tempdir = before


def _children() -> dict[int, str]:
    """Return the child processes, except that of the checkers, which ends with its context."""
    found = {}
    for child in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.Error):
            found[child.pid] = " ".join(child.cmdline())[:300]
    return {pid: text for pid, text in found.items() if "checker_worker" not in text}


def _run_of(run: dict[str, object]) -> Run:
    return Run(**{name: run[name] for name in Run.__dataclass_fields__})  # type: ignore[arg-type]


@dataclass(frozen=True)
class _Ran:
    code: int | None
    text: str
    wrongs: tuple[str, ...]


def _run(command: Callable[[list[str]], int], arguments: list[str]) -> _Ran:
    """Run a command in this process; for an error of the suite, return its message and no code."""
    raw = io.BytesIO()
    stream = io.TextIOWrapper(raw, encoding="utf-8", write_through=True)  # as strict as a terminal's
    code, wrongs, error = None, [], ""
    with contextlib.redirect_stdout(stream), contextlib.redirect_stderr(stream):
        try:
            code = command(arguments)
        except SuiteError as caught:
            error = str(caught)
        except (Exception, SystemExit) as caught:  # noqa: BLE001
            where = traceback.extract_tb(caught.__traceback__)[-1]
            short = f"{type(caught).__name__}: {str(caught)[:200]}"
            wrongs.append(f"traceback: {short} in {Path(where.filename).name}:{where.lineno} ({where.name})")
    text = raw.getvalue().decode() + error
    if found := re.search(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]", text):
        wrongs.append(f"control character {found[0]!r} is printed: {text[max(0, found.start() - 60) :][:100]!r}")
    if re.search(r"^(run\.log: VALID|  score: 1\.000)", text, re.MULTILINE):
        wrongs.append("a line of the output is what a value says")
    if len(text) > 100_000:
        wrongs.append(f"the output has {len(text)} characters")
    return _Ran(code, text, tuple(wrongs))


def _snapshot(folder: Path) -> dict[str, tuple[object, ...]]:
    """Return type, size, modification time and digest of everything below a folder by name; follow no links."""
    found: dict[str, tuple[object, ...]] = {}
    for base, folders, files in os.walk(folder):
        for name in (*folders, *files):
            path = Path(base, name)
            status = path.lstat()
            content = ""
            if stat.S_ISREG(status.st_mode) and status.st_size <= _LARGEST_HASHED and status.st_mode & 0o400:
                content = hashlib.sha256(path.read_bytes()).hexdigest()
            found[str(path)] = (status.st_mode, status.st_size, status.st_mtime_ns, content)
    return found


def faults(
    before: Facts, after: Outcome, file: str, line: int | None, refusing: Sequence[str] = ("check", "summarize")
) -> list[str]:
    """Return violations of the strict rule.

    Args:
        before: facts of the valid files.
        after: outcome with the mutated files.
        file: name of the mutated file.
        line: line that a refusal must name; None if the name of the file is enough.
        refusing: commands that must refuse and name the file.
    """
    found = list(after.wrongs)
    if after.facts is not None and _same(before, after.facts):
        return found
    answers = dict(zip(("check", "summarize"), zip(after.refused, after.messages, strict=True), strict=True))
    if not all(answers[command][0] for command in refusing):
        return [*found, f"facts changed and were not refused: {_difference(before, after.facts)}"]
    return [*found, *(text for command in refusing for text in _unnamed(command, answers[command][1], file, line))]


def _unnamed(command: str, message: str, file: str, line: int | None) -> list[str]:
    """Return a complaint if the refusal of a command does not name the file, or the line."""
    if file not in message:
        return [f"{command} refuses without naming {file}: {_short(message)}"]
    if line is not None and not re.search(rf"\blines?\b[^\n]*\b{line}\b", message):
        return [f"{command} refuses without naming line {line}: {_short(message)}"]
    return []


def unearned(before: Facts, after: Outcome, file: str, line: int | None) -> list[str]:
    """Return claims of a log that it did not make before its mutation; arguments as for :func:`faults`.

    `summarize` exits with 1 for every single log, because one log has no score; so only `check` counts.
    """
    found = list(after.wrongs)
    if after.refused[0]:
        return [*found, *_unnamed("check", after.messages[0], file, line)]
    if after.facts is None:
        return [*found, f"check accepts what summarize cannot read: {_short(after.messages[1])}"]
    earlier, later = (list(facts.sets[0][0]) for facts in (before, after.facts))
    if len(later) != len(earlier):
        return [*found, f"{len(later)} runs instead of {len(earlier)}"]
    ranks = [[RANKS.index(verdict) for verdict in facts.verdicts] for facts in (before, after.facts)]
    if len(ranks[0]) != len(ranks[1]) or any(b > a for a, b in zip(*ranks, strict=True)):
        found.append(f"verdicts {before.verdicts} became {after.facts.verdicts}")
    for a, b in zip(earlier, later, strict=True):
        if b.minutes is not None and (a.minutes is None or b.minutes < a.minutes - CLOCK_SECONDS / 60):
            found.append(f"{a.minutes} minutes became {b.minutes}")
        if b.convergence not in (a.convergence, None):
            found.append(f"convergence {a.convergence} became {b.convergence}")
    return found


def _same(before: Facts, after: Facts) -> bool:
    pairs = list(zip(before.numbers, after.numbers, strict=False))
    return (
        before.rest == after.rest
        and len(before.numbers) == len(after.numbers)
        and all(a == b or (None not in (a, b) and abs(a - b) <= CLOCK_SECONDS / 60) for a, b in pairs)
    )


def _difference(before: Facts, after: Facts | None) -> str:
    if after is None:
        return "one command refuses, the other does not"
    changes = []
    if before.codes != after.codes:
        changes.append(f"exit codes {before.codes} -> {after.codes}")
    if before.verdicts != after.verdicts:
        changes.append(f"verdicts {before.verdicts} -> {after.verdicts}")
    for (runs, values), (later, others) in zip(before.sets, after.sets, strict=False):
        changes += [f"{a} -> {b}" for a, b in zip(runs, later, strict=False) if a != b]
        if values != others:
            changes.append(f"olympic mean and score {values} -> {others}")
    return "; ".join(changes)[:600] or f"{len(before.sets)} sets -> {len(after.sets)}"


def _short(message: str) -> str:
    refusals = [line for line in message.splitlines() if line.startswith("  - ")]
    return " | ".join(refusals or message.splitlines())[:400]
