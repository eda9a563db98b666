"""What must hold of every mutation of a valid file: the facts that the commands judge stay, or they refuse.

*Facts* are the exit codes, the verdict of each run and set, minutes, convergence, seeds, the choice of runs and the
score. :func:`complaints` says what a command may never do, whatever it reads: end in a traceback, write, leave a
process or a temporary file behind, or print what a stranger wrote as if it were its own line.

:func:`faults` is the strict rule, for results that a registry describes: facts as before, or refused with a message
that names the file, and the line if the line is damaged. :func:`unearned` is the rule for a log that nothing else
describes. A change may make it the log of another run, and nobody can tell; but it must not claim more than before.
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
"""By how much minutes may differ: a clock may step back by as much within a log."""
RANKS = ("REFUSED", "FORMAT", "VALID RUN", "SUBMITTABLE")
_HEADLINE = re.compile(rf"^(.*): ({'|'.join(RANKS)}) \(.*\)$", re.MULTILINE)
_LARGEST_HASHED = 2**24


@dataclass(frozen=True)
class Run:
    """What `summarize` says of one run."""

    number: int
    verdict: str
    minutes: float | None
    converged: bool
    convergence: float | None
    seed: object
    chosen: bool


@dataclass(frozen=True)
class Facts:
    """What the commands judged.

    Attributes:
        codes: exit codes of `check` and `summarize`.
        verdicts: of each run and set that `check` names, in its order.
        sets: of each set of runs in `summarize`: its runs, olympic mean, convergence and score.
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
        """Everything that is compared exactly."""
        groups = [
            [(r.number, r.verdict, r.converged, r.convergence, r.seed, r.chosen) for r in group]
            for group, _ in self.sets
        ]
        return self.codes, self.verdicts, groups


@dataclass(frozen=True)
class Outcome:
    """What `check` and `summarize` did with the same paths.

    Attributes:
        facts: None if one of them ended in an error of the suite.
        messages: what each of them said, on standard output or as its error.
        refused: whether each of them refused.
        wrongs: what they did that no command may do.
    """

    facts: Facts | None
    messages: tuple[str, str]
    refused: tuple[bool, bool]
    wrongs: tuple[str, ...]


@contextlib.contextmanager
def kept_answers() -> Iterator[None]:
    """One process of MLCommons' checkers, asked once about the same events; the suite's own judging is done anew."""
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
    """Where commands are run: a folder to read, an empty one to stand in, one for temporary files, all watched."""

    def __init__(self, root: Path) -> None:
        self.root, self.read = root, root / "read"
        self._stand, self._temporary, self._out = root / "stand", root / "temporary", root / "out"
        for folder in (self.read, self._stand, self._temporary, self._out):
            folder.mkdir(parents=True)

    def clear(self) -> None:
        """Empty the folder that is read."""
        shutil.rmtree(self.read)
        self.read.mkdir()

    def observe(self, paths: Sequence[Path], *options: str, runs: Sequence[Path] | None = None) -> Outcome:
        """Run `check` and `summarize` on ``paths``, or `summarize` on ``runs`` where those are submissions."""
        before = _snapshot(self.read), _snapshot(self._stand)
        children = set(_children())
        summary = self._out / "summary.json"
        summary.unlink(missing_ok=True)
        with self._here():
            judged = _run(check.main, [*map(str, paths), *options])
            scored = _run(summarize.main, [*map(str, runs or paths), *options, "--json", str(summary)])
        wrongs = [*judged.wrongs, *scored.wrongs]
        if (_snapshot(self.read), _snapshot(self._stand)) != before:
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
            with contextlib.chdir(self._stand):
                yield
        finally:
            tempfile.tempdir = before


def _children() -> dict[int, str]:
    """Processes that this one started, but for the checkers' own, which answers until its block ends."""
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
    """One command in this process; an error of the suite is its text and no code."""
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
    """Name to kind, size, time of change and content of everything below a folder, without following a link."""
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
    """What breaks the strict rule; empty if nothing does.

    Args:
        before: of the valid files.
        after: of the mutated ones.
        file: name of the mutated file.
        line: that a refusal must name; None if the name of the file will do.
        refusing: commands that must refuse, and name it.
    """
    found = list(after.wrongs)
    if after.facts is not None and _same(before, after.facts):
        return found
    answers = dict(zip(("check", "summarize"), zip(after.refused, after.messages, strict=True), strict=True))
    if not all(answers[command][0] for command in refusing):
        return [*found, f"facts changed and were not refused: {_difference(before, after.facts)}"]
    for command in refusing:
        message = answers[command][1]
        if file not in message:
            found.append(f"{command} refuses without naming {file}: {_short(message)}")
        elif line is not None and not re.search(rf"\blines?\b[^\n]*\b{line}\b", message):
            found.append(f"{command} refuses without naming line {line}: {_short(message)}")
    return found


def unearned(before: Facts, after: Outcome, file: str, line: int | None) -> list[str]:
    """What a log claims after a mutation that it did not claim before; arguments as of :func:`faults`.

    A summary of one log has no score and exits with 1 in any case, so that a refusal is that of `check`.
    """
    found = list(after.wrongs)
    if after.refused[0]:
        message = after.messages[0]
        if file not in message:
            found.append(f"check refuses without naming {file}: {_short(message)}")
        elif line is not None and not re.search(rf"\blines?\b[^\n]*\b{line}\b", message):
            found.append(f"check refuses without naming line {line}: {_short(message)}")
        return found
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
