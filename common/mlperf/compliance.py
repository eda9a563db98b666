"""mlperf-logging's own compliance checker, run in this process, with its findings as data.

The checker evaluates the expressions of YAML rule files (``training_4.0.0/closed_resnet.yaml`` and so on) on the lines
of a log. It prints its findings and dies with a traceback on some input; here each finding is an object, and a crash
is one more finding.
"""

from __future__ import annotations

import importlib.metadata
import json
import logging
import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Literal

import yaml
from mlperf_logging.compliance_checker import mlp_compliance, mlp_parser
from mlperf_logging.compliance_checker.mlp_parser.ruleset_400 import LogLine

FindingKind = Literal["check", "evaluation", "target", "occurrence", "end", "parsing", "crash"]

CHECKER_FOLDER = Path(mlp_compliance.__file__).parent
CRASHES = (
    ArithmeticError,
    AssertionError,
    AttributeError,
    LookupError,
    NameError,
    OSError,
    RuntimeError,
    SyntaxError,
    TypeError,
    ValueError,
)
"""What the checker is known to die with on input that it does not expect."""


def checker_version() -> str:
    """Installed version of mlperf-logging."""
    return importlib.metadata.version("mlperf-logging")


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
    """

    rule_file: str
    kind: FindingKind
    key: str
    test: str
    value: str = ""

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

    def configured_checks(self, loglines: list[LogLine], config_file: str) -> None:
        self.rule_file = str(Path(config_file).relative_to(CHECKER_FOLDER))
        super().configured_checks(loglines, config_file)

    def put_message(self, msg: str, key: str | None = None) -> None:
        if msg.startswith("Could not find config file"):
            return  # the checker goes on and dies of it
        finding = _finding(self.rule_file, msg, key)
        if (bool(key), finding) not in self.findings:
            self.findings.append((bool(key), finding))
        super().put_message(msg, key)

    def overwrite_messages(self, keys: Iterable[str]) -> None:
        replaced = set(keys)
        self.findings = [(soft, f) for soft, f in self.findings if not (soft and f.key in replaced)]
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
        return Finding(rule_file, "occurrence", key or "", message)
    if message.startswith("failed test: "):
        return Finding(rule_file, "end", key or "", "END rule failed: " + " ".join(message.split())[:200])
    return Finding(rule_file, "parsing", key or "", message)


def _after(message: str, label: str, to_end: bool = False) -> str:
    rest = message.partition(label)[2]
    return (rest if to_end else rest.partition("\ncurrent ")[0]).strip()


def _json_value(text: str) -> str:
    try:
        record = json.loads(text)
    except ValueError:
        return ""
    return json.dumps(record.get("value")) if isinstance(record, dict) else ""


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


def check_file(path: Path, usage: str, ruleset: str) -> list[Finding]:
    """What the compliance checker has against the log at ``path`` under a ruleset; empty if it passes.

    Args:
        path: a log that :func:`common.mlperf.parsed_log.read_log` can read.
        usage: ``training`` or ``hpc``.
        ruleset: version that the checker knows for this usage.
    """
    with quiet_logging():
        lines, errors = mlp_parser.parse_file(str(path), ruleset=ruleset)
    checker = _RecordingChecker(usage, ruleset)
    unread = [Finding("", "parsing", "", f"{error}: {text[:80]}") for text, error in errors]
    return unread + _run(checker, lines, f"{usage}_{ruleset}/common.yaml")


def check_values(values: Mapping[str, object], usage: str, ruleset: str, log_name: str) -> list[Finding]:
    """What the closed division's rule files of a benchmark have against values, as if each were logged once.

    Args:
        values: log key to value, in the order in which they are logged.
        usage: ``training`` or ``hpc``.
        ruleset: version that the checker knows for this usage.
        log_name: value of ``submission_benchmark``.
    """
    logged = {"submission_benchmark": log_name, **values}
    lines = []
    for number, (key, value) in enumerate(logged.items()):
        content = {"value": value, "metadata": {}}
        text = ":::MLLOG " + json.dumps({"key": key, **content}, default=str)
        lines.append(LogLine(text, float(number), key, content, number))
    return _run(_RecordingChecker(usage, ruleset), lines, f"{usage}_{ruleset}/closed_common.yaml")


@cache
def rule_records(rule_file: str) -> dict[str, dict[str, Any]]:
    """Key to rule of one rule file, in the file's order; empty if there is no such file."""
    path = CHECKER_FOLDER / rule_file
    if not path.is_file():
        return {}
    blocks = yaml.load(path.read_text(), Loader=yaml.BaseLoader) or []
    return {block["KEY"]["NAME"]: block["KEY"] for block in blocks if "KEY" in block}
