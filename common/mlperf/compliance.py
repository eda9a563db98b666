"""In-process use of mlperf-logging's compliance checker, with its findings as data.

The checker evaluates the expressions of YAML rule files (``training_4.0.0/closed_resnet.yaml`` and so on) on the
lines of a log. It prints its findings, and crashes on some input; here a crash is also a finding. Some rules build
the name of another rule file, whose code is executed, from a logged value. We read only rule files of the package,
and :func:`inadmissible` finds values that name another file. Untrusted logs reach this module only inside the worker
process of :mod:`common.mlperf.checker_process`.
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
"""Largest number of characters kept of a value or message, because a logged value may have a million."""
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
"""Exceptions that the checker is known to raise on unexpected input."""


RULE_FILES = frozenset(
    str(path.relative_to(CHECKER_FOLDER)) for path in CHECKER_FOLDER.glob("*_*/*.yaml") if path.is_file()
)
"""Rule files of the package, relative to the checker's folder. No other file is read."""

_FILE_NAME = re.compile(r"enqueue_config\('([^']*)'(?:\.format\(v\['value'\](\.lower\(\))?\))?\)")
"""Pattern of the code with which a rule selects another rule file, usually by a logged value."""


def checker_version() -> str:
    """Return the installed version of mlperf-logging."""
    from importlib.metadata import version  # slow import: a tenth of the run time of `check` on one log

    return version("mlperf-logging")


@dataclass(frozen=True)
class RuleFinding:
    """One complaint of the checker.

    Attributes:
        rule_file: path relative to the checker's folder.
        kind: failed CHECK, CHECK that could not be evaluated, no evaluation at the target, wrong number of
            occurrences, failed END block, unreadable line, or crash of the checker.
        key: log key of the complaint; empty if none.
        test: expression or requirement of the rule.
        value: JSON text of the value that failed; empty if none.
        position: index of the event, from 0; None if the complaint is not about a single event.
    """

    rule_file: str
    kind: FindingKind
    key: str
    test: str
    value: str = ""
    position: int | None = None

    def sentence(self) -> str:
        """Return the complaint in words, with the rule and its file."""
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
    """The checker, extended to record its messages as findings.

    As in the original, a later rule file with a rule for a key withdraws earlier complaints about that key.
    """

    def __init__(self, usage: str, ruleset: str) -> None:
        super().__init__(usage, ruleset, quiet=False, werror=False)
        self.findings: list[tuple[bool, RuleFinding]] = []  # (whether it can be withdrawn, finding)
        self.rule_file = ""
        self._position: int | None = None
        self._said: set[tuple[bool, RuleFinding]] = set()

    def configured_checks(self, loglines: list[LogLine], config_file: str) -> None:
        name = config_file.removeprefix(f"{CHECKER_FOLDER}/")
        if name not in RULE_FILES:
            raise FileNotFoundError(2, "no rule file of mlperf-logging", name[:200])
        self.rule_file = name
        super().configured_checks(loglines, config_file)

    def put_message(self, msg: str, key: str | None = None) -> None:
        if msg.startswith("Could not find config file"):
            return  # the checker continues, and crashes because of it
        finding = _finding(self.rule_file, msg, key)
        if (bool(key), finding) not in self._said:  # keep only the first of equal findings
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


def _finding(rule_file: str, message: str, key: str | None) -> RuleFinding:
    """Convert a message of the checker to a finding; its first words determine the kind."""
    if message.startswith("CHECK for"):
        test = _after(message, "failed test: ")
        line = _after(message, "current line[v]=", to_end=True)
        return RuleFinding(rule_file, "check", key or "", test, _json_value(line))
    if message.startswith("Failed executing"):
        lines = message.splitlines()
        test = lines[1].strip() if "CHECK code" in lines[0] else lines[0]
        triggered = next((line for line in lines if line.startswith(":::MLLOG ")), "")
        return RuleFinding(rule_file, "evaluation", key or "", test, _json_value(triggered.removeprefix(":::MLLOG ")))
    failed = re.match(r"Failed checks for (\S+) : (.*)", message, re.DOTALL)
    if failed:
        return RuleFinding(rule_file, "target", failed[1], failed[2].strip())
    if message.startswith("Required"):
        return RuleFinding(rule_file, "occurrence", key or "", message[:MESSAGE])
    if message.startswith("failed test: "):
        return RuleFinding(rule_file, "end", key or "", "END rule failed: " + " ".join(message.split())[:200])
    return RuleFinding(rule_file, "parsing", key or "", message[:MESSAGE])


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
    """Prevent mlperf-logging, which uses the root logger, from printing and from adding handlers.

    Handlers and level of the root logger are restored even if the block fails.
    """
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    root.handlers[:] = [logging.NullHandler()]
    try:
        yield
    finally:
        root.handlers[:] = handlers
        root.setLevel(level)


def _run(checker: _RecordingChecker, lines: list[LogLine], rule_file: str) -> list[RuleFinding]:
    mlp_compliance.enqueued_configs.clear()  # a crash leaves entries behind
    crash: list[RuleFinding] = []
    try:
        with quiet_logging():
            checker.check_loglines(lines, rule_file)
    except FileNotFoundError as error:  # the ruleset has no rules for a logged name
        text = f"the ruleset has no rule file {Path(str(error.filename)).name}"
        crash.append(RuleFinding(str(Path(checker.rule_file).parent), "crash", "", text))
    except CRASHES as error:
        text = f"the checker dies on this log with {type(error).__name__}: {error}"
        crash.append(RuleFinding(checker.rule_file, "crash", "", text))
    finally:
        mlp_compliance.enqueued_configs.clear()
    return [finding for _, finding in checker.findings] + crash


def check_lines(texts: Sequence[str], usage: str, ruleset: str) -> list[RuleFinding]:
    """Return the compliance checker's findings on the events of a log under a ruleset; empty if it passes.

    Args:
        texts: JSON object of each event.
    """
    parser = importlib.import_module(f"{_PARSERS}.ruleset_{ruleset.replace('.', '')}")
    lines, unread = [], []
    for number, text in enumerate(texts):
        try:
            lines.append(parser.string_to_logline(number, f":::MLLOG {text.strip()}"))
        except ValueError as error:
            unread.append(RuleFinding("", "parsing", "", f"{error}: {text[:80]}"))
    return unread + _run(_RecordingChecker(usage, ruleset), lines, f"{usage}_{ruleset}/common.yaml")


def check_values(
    values: Mapping[str, object],
    usage: str,
    ruleset: str,
    log_name: str,
    division: str = "closed",
    tensors: Sequence[str] = (),
) -> list[RuleFinding]:
    """Return the findings of a division's rule files on values, as if each value were logged once.

    Args:
        values: log key to value, in the order of logging.
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
    """Return the rule files that a log selects, and reasons why the checker must not read the log.

    The reasons name values that would select a rule file that the package does not have.

    Args:
        events: events of the whole file, including those after the run.
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
    """Return the reasons of :func:`reached_rule_files`."""
    return reached_rule_files(events, usage, ruleset)[1]


def judged_keys(rule_files: Iterable[str]) -> set[str]:
    """Return the keys that the rules of the given files check. The checker ignores events with other keys."""
    return {key for file in rule_files for key in rule_records(file)}


def _named(pattern: str, value: object, lower: bool) -> str | None:
    """Return the rule file that a logged value selects; None if it does not exist."""
    if "{}" not in pattern:
        return pattern if pattern in RULE_FILES else None
    if not isinstance(value, str):
        return None
    name = pattern.format(value.lower() if lower else value)
    return name if name in RULE_FILES else None


@cache
def _file_names(rule_file: str) -> dict[str, list[tuple[str, bool]]]:
    """Return key -> name patterns of the rule files that this file selects, and whether the value is lower-cased."""
    found: dict[str, list[tuple[str, bool]]] = {}
    for key, record in rule_records(rule_file).items():
        for match in _FILE_NAME.finditer(str(record.get("POST", "")) + str(record.get("PRE", ""))):
            found.setdefault(key, []).append((match[1], bool(match[2])))
    return found


@cache
def rule_records(rule_file: str) -> dict[str, dict[str, Any]]:
    """Return key -> rule of one rule file, in file order; empty if there is no such file."""
    blocks = _rules(rule_file) if rule_file in RULE_FILES else []
    return {block["KEY"]["NAME"]: block["KEY"] for block in blocks if "KEY" in block}


@cache
def _rules(rule_file: str) -> list[dict[str, Any]]:
    with (CHECKER_FOLDER / rule_file).open() as file:
        return yaml.load(file, Loader=getattr(yaml, "CBaseLoader", yaml.BaseLoader)) or []


class _CachedYaml:
    """Replacement for the checker's PyYAML module that parses each rule file once, with the C parser if available."""

    BaseLoader = yaml.BaseLoader

    @staticmethod
    def load(file: TextIO, Loader: type) -> list[dict[str, Any]] | None:
        return _rules(str(Path(file.name).relative_to(CHECKER_FOLDER))) or None


@cache
def _compiled(source: str, mode: Literal["eval", "exec"]) -> CodeType:
    return compile(source, "rule of mlperf-logging", mode)


def _evaluate(source: str, *scopes: dict[str, object]) -> object:
    """Evaluate an expression like the built-in ``eval``, but compile it only once instead of for every event."""
    return eval(_compiled(source, "eval"), *scopes)


def _execute(source: str, *scopes: dict[str, object]) -> None:
    """Execute statements like the built-in ``exec``, but compile them only once instead of for every event."""
    exec(_compiled(source, "exec"), *scopes)


mlp_compliance.eval, mlp_compliance.exec = _evaluate, _execute
mlp_compliance.yaml = _CachedYaml
