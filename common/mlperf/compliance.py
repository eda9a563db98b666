"""mlperf-logging's own compliance checker, run in this process, with its findings as data.

The checker evaluates the expressions of YAML rule files (``training_4.0.0/closed_resnet.yaml`` and so on) on the lines
of a log. It prints its findings and dies with a traceback on some input; here each finding is an object, and a crash
is one more finding. Some rules build the name of a further rule file, whose code is executed, from a value of the log:
only rule files that the package brings are ever read, and :func:`inadmissible` says beforehand which values name none.

A stranger's log comes here in a process of its own only (:mod:`common.mlperf.checker_process`).
"""

from __future__ import annotations

import importlib
import json
import logging
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from types import CodeType
from typing import Any, Literal, TextIO

import yaml
from mlperf_logging.compliance_checker import mlp_compliance
from mlperf_logging.compliance_checker.mlp_parser.ruleset_400 import LogLine

from common.mlperf.parsed_log import Event

FindingKind = Literal["check", "evaluation", "target", "occurrence", "end", "parsing", "crash"]

CHECKER_FOLDER = Path(mlp_compliance.__file__).parent
_PARSERS = "mlperf_logging.compliance_checker.mlp_parser"
MESSAGE = 300
"""Characters of a value or a message that are kept: a log's value may have a million."""
CRASHES = (
    ArithmeticError,
    AssertionError,
    AttributeError,
    LookupError,
    MemoryError,
    NameError,
    OSError,
    RuntimeError,
    SyntaxError,
    TypeError,
    ValueError,
)
"""What the checker is known to die with on input that it does not expect."""


RULE_FILES = frozenset(
    str(path.relative_to(CHECKER_FOLDER)) for path in CHECKER_FOLDER.glob("*_*/*.yaml") if path.is_file()
)
"""The rule files of the package, relative to the checker's folder: no other is ever read."""

_FILE_NAME = re.compile(r"enqueue_config\('([^']*)'(?:\.format\(v\['value'\](\.lower\(\))?\))?\)")
"""In the code of a rule: how it builds the name of a further rule file, in most cases from the value of a log."""


def checker_version() -> str:
    """Return the installed version of mlperf-logging."""
    from importlib.metadata import version  # a tenth of the time that `check` takes for one log

    return version("mlperf-logging")


@dataclass(frozen=True)
class Finding:
    """One complaint of the checker.

    Attributes:
        rule_file: rule file, relative to the checker's folder.
        kind: failed CHECK, CHECK that could not be evaluated, no evaluation at the target, wrong number of
            occurrences, failed END block, unreadable line, or the checker's own crash.
        key: key that it is about; empty if none.
        test: the rule's expression or requirement.
        value: JSON text of the value that failed; empty if none.
        position: which of the events it is about, from 0; None if it is about no single one.
    """

    rule_file: str
    kind: FindingKind
    key: str
    test: str
    value: str = ""
    position: int | None = None

    def sentence(self) -> str:
        """The complaint in words, with the rule and its file."""
        rule = f"rule `{self.test}` of {self.rule_file}"
        if self.kind == "check":
            return f"{self.key} = {self.value} breaks {rule}"
        if self.kind == "evaluation":
            why = "its type is wrong, or a key that the rule needs is not logged before"
            return f"{self.key} = {self.value} cannot be judged by {rule}: {why}"
        if self.kind == "target":
            return f"no {self.key} meets the target: {rule}"
        if self.kind == "occurrence":
            return f"{self.test} ({self.rule_file})"
        return f"{self.test} ({self.rule_file or 'compliance checker'})"


class _RecordingChecker(mlp_compliance.ComplianceChecker):
    """The checker, with its messages kept as findings.

    As in the original, a later rule file that has a rule for a key takes back earlier complaints about that key.
    """

    def __init__(self, usage: str, ruleset: str) -> None:
        super().__init__(usage, ruleset, quiet=False, werror=False)
        self.findings: list[tuple[bool, Finding]] = []  # (can be taken back, finding)
        self.rule_file = ""
        self._position: int | None = None
        self._said: set[tuple[bool, Finding]] = set()

    def configured_checks(self, loglines: list[LogLine], config_file: str) -> None:
        name = config_file.removeprefix(f"{CHECKER_FOLDER}/")
        if name not in RULE_FILES:
            raise FileNotFoundError(2, "no rule file of mlperf-logging", name[:200])
        self.rule_file = name
        super().configured_checks(loglines, config_file)

    def put_message(self, msg: str, key: str | None = None) -> None:
        if msg.startswith("Could not find config file"):
            return  # the checker goes on and dies of it
        finding = _finding(self.rule_file, msg, key)
        if (bool(key), finding) not in self._said:  # of equal ones the first
            self._said.add((bool(key), finding))
            self.findings.append((bool(key), replace(finding, position=self._position)))
        super().put_message(msg[:MESSAGE], key)

    def run_check_eval(self, ll: LogLine, tests: object, state: object) -> None:
        self._position = ll.lineno
        super().run_check_eval(ll, tests, state)
        self._position = None

    def run_check_exec(self, ll: LogLine, code: object, state: object, action: str) -> None:
        self._position = ll.lineno
        super().run_check_exec(ll, code, state, action)
        self._position = None

    def overwrite_messages(self, keys: Iterable[str]) -> None:
        taken_back = set(keys)
        self.findings = [(soft, f) for soft, f in self.findings if not (soft and f.key in taken_back)]
        self._said = {(soft, f) for soft, f in self._said if not (soft and f.key in taken_back)}
        super().overwrite_messages(keys)


def _finding(rule_file: str, message: str, key: str | None) -> Finding:
    """Sort a message of the checker by its first words."""
    if message.startswith("CHECK for"):
        test = _after(message, "failed test: ")
        line = _after(message, "current line[v]=", to_end=True)
        return Finding(rule_file, "check", key or "", test, _json_value(line))
    if message.startswith("Failed executing"):
        lines = message.splitlines()
        test = lines[1].strip() if "CHECK code" in lines[0] else lines[0]
        triggered = next((line for line in lines if line.startswith(":::MLLOG ")), "")
        return Finding(rule_file, "evaluation", key or "", test, _json_value(triggered.removeprefix(":::MLLOG ")))
    failed = re.match(r"Failed checks for (\S+) : (.*)", message, re.DOTALL)
    if failed:
        return Finding(rule_file, "target", failed[1], failed[2].strip())
    if message.startswith("Required"):
        return Finding(rule_file, "occurrence", key or "", message[:MESSAGE])
    if message.startswith("failed test: "):
        return Finding(rule_file, "end", key or "", "END rule failed: " + " ".join(message.split())[:200])
    return Finding(rule_file, "parsing", key or "", message[:MESSAGE])


def _after(message: str, label: str, to_end: bool = False) -> str:
    rest = message.partition(label)[2]
    return (rest if to_end else rest.partition("\ncurrent ")[0]).strip()


def _json_value(text: str) -> str:
    try:
        record = json.loads(text)
    except ValueError:
        return ""
    return json.dumps(record.get("value"))[:MESSAGE] if isinstance(record, dict) else ""


@contextmanager
def quiet_logging() -> Iterator[None]:
    """Keep mlperf-logging, which logs through the root logger, from printing and from setting up handlers."""
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    root.handlers[:] = [logging.NullHandler()]
    try:
        yield
    finally:
        root.handlers[:] = handlers
        root.setLevel(level)


def _run(checker: _RecordingChecker, lines: list[LogLine], rule_file: str) -> list[Finding]:
    mlp_compliance.enqueued_configs.clear()  # a crash leaves entries behind
    crash: list[Finding] = []
    try:
        with quiet_logging():
            checker.check_loglines(lines, rule_file)
    except FileNotFoundError as error:  # the ruleset names a benchmark or optimizer that it has no rules for
        text = f"the ruleset has no rule file {Path(str(error.filename)).name}"
        crash.append(Finding(str(Path(checker.rule_file).parent), "crash", "", text))
    except CRASHES as error:
        text = f"the checker dies on this log with {type(error).__name__}: {error}"
        crash.append(Finding(checker.rule_file, "crash", "", text))
    finally:
        mlp_compliance.enqueued_configs.clear()
    return [finding for _, finding in checker.findings] + crash


def check_lines(texts: Sequence[str], usage: str, ruleset: str) -> list[Finding]:
    """What the compliance checker has against the events of a log under a ruleset; empty if it passes.

    Args:
        texts: the JSON object of each event.
        usage: ``training`` or ``hpc``.
        ruleset: version that the checker knows for this usage.
    """
    parser = importlib.import_module(f"{_PARSERS}.ruleset_{ruleset.replace('.', '')}")
    lines, unread = [], []
    for number, text in enumerate(texts):
        try:
            lines.append(parser.string_to_logline(number, f":::MLLOG {text.strip()}"))
        except ValueError as error:
            unread.append(Finding("", "parsing", "", f"{error}: {text[:80]}"))
    return unread + _run(_RecordingChecker(usage, ruleset), lines, f"{usage}_{ruleset}/common.yaml")


def check_values(
    values: Mapping[str, object],
    usage: str,
    ruleset: str,
    log_name: str,
    division: str = "closed",
    tensors: Sequence[str] = (),
) -> list[Finding]:
    """What a division's rule files of a benchmark have against values, as if each were logged once.

    Args:
        values: log key to value, in the order in which they are logged.
        usage: ``training`` or ``hpc``.
        ruleset: version that the checker knows for this usage.
        log_name: value of ``submission_benchmark``.
        division: ``closed`` or ``open``.
        tensors: names of tensors that are logged as initialised.
    """
    logged: list[tuple[str, object, dict[str, str]]] = [("submission_benchmark", log_name, {})]
    logged += [(key, value, {}) for key, value in values.items()]
    logged += [("weights_initialization", None, {"tensor": tensor}) for tensor in tensors]
    lines = []
    for number, (key, value, metadata) in enumerate(logged):
        content = {"value": value, "metadata": metadata}
        text = ":::MLLOG " + json.dumps({"key": key, **content}, default=str)
        lines.append(LogLine(text, float(number), key, content, number))
    return _run(_RecordingChecker(usage, ruleset), lines, f"{usage}_{ruleset}/{division}_common.yaml")


def reached_rule_files(events: Iterable[Event], usage: str, ruleset: str) -> tuple[frozenset[str], list[str]]:
    """Return the rule files that the values of a log select, and why the log must not be shown to the checker.

    The complaints name values that would select a rule file that the package does not have.

    Args:
        events: of the whole file, including those after the run.
        usage: ``training`` or ``hpc``.
        ruleset: that the log is to be checked under.
    """
    by_key: dict[str, list[Event]] = {}
    for event in events:
        by_key.setdefault(event.key, []).append(event)
    complaints: list[str] = []
    waiting, read = [f"{usage}_{ruleset}/common.yaml"], set()
    while waiting:
        read.add(file := waiting.pop())
        for key, patterns in _file_names(file).items():
            for event in by_key.get(key, ()):
                for pattern, lower in patterns:
                    further = _named(pattern, event.value, lower)
                    if further is None:
                        shown = json.dumps(event.value)[:80]
                        complaints.append(f"line {event.line}: {key} = {shown} is nothing that ruleset {ruleset} knows")
                    elif further not in read:
                        waiting.append(further)
    return frozenset(read), list(dict.fromkeys(complaints))


def inadmissible(events: Iterable[Event], usage: str, ruleset: str) -> list[str]:
    """Return the complaints of :func:`reached_rule_files`."""
    return reached_rule_files(events, usage, ruleset)[1]


def judged_keys(rule_files: Iterable[str]) -> set[str]:
    """Return the keys that the rules of some files judge; the checker passes over events with any other key."""
    return {key for file in rule_files for key in rule_records(file)}


def _named(pattern: str, value: object, lower: bool) -> str | None:
    """The rule file that a value of a log names; None if there is none of that name."""
    if "{}" not in pattern:
        return pattern if pattern in RULE_FILES else None
    if not isinstance(value, str):
        return None
    name = pattern.format(value.lower() if lower else value)
    return name if name in RULE_FILES else None


@cache
def _file_names(rule_file: str) -> dict[str, list[tuple[str, bool]]]:
    """Key to the patterns that a rule file makes names of further ones with, and whether in lower case."""
    found: dict[str, list[tuple[str, bool]]] = {}
    for key, record in rule_records(rule_file).items():
        for match in _FILE_NAME.finditer(str(record.get("POST", "")) + str(record.get("PRE", ""))):
            found.setdefault(key, []).append((match[1], bool(match[2])))
    return found


@cache
def rule_records(rule_file: str) -> dict[str, dict[str, Any]]:
    """Key to rule of one rule file, in the file's order; empty if there is no such file."""
    blocks = _rules(rule_file) if rule_file in RULE_FILES else []
    return {block["KEY"]["NAME"]: block["KEY"] for block in blocks if "KEY" in block}


@cache
def _rules(rule_file: str) -> list[dict[str, Any]]:
    with (CHECKER_FOLDER / rule_file).open() as file:
        return yaml.load(file, Loader=getattr(yaml, "CBaseLoader", yaml.BaseLoader)) or []


class _CachedYaml:
    """What the checker uses of PyYAML: a rule file is parsed once, by the C parser where there is one."""

    BaseLoader = yaml.BaseLoader

    @staticmethod
    def load(file: TextIO, Loader: type) -> list[dict[str, Any]] | None:
        return _rules(str(Path(file.name).relative_to(CHECKER_FOLDER))) or None


@cache
def _compiled(source: str, mode: Literal["eval", "exec"]) -> CodeType:
    return compile(source, "rule of mlperf-logging", mode)


def _evaluate(source: str, *scopes: dict[str, object]) -> object:
    """Evaluate an expression as the built-in ``eval`` does, compiled once instead of for every event."""
    return eval(_compiled(source, "eval"), *scopes)


def _execute(source: str, *scopes: dict[str, object]) -> None:
    """Execute statements as the built-in ``exec`` does, compiled once instead of for every event."""
    exec(_compiled(source, "exec"), *scopes)


mlp_compliance.eval, mlp_compliance.exec = _evaluate, _execute
mlp_compliance.yaml = _CachedYaml
