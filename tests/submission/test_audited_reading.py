"""No value of an untrusted file reaches ``open``, ``exec``, a shell or a process without a check, by an audit hook.

Every value of logs, ``runs.jsonl``, the file of `doctor`, the YAML of a submission and the JSON of a tree becomes a
canary, one at a time, as a plain name and as a path. :mod:`audited` runs the commands and records where canaries
appear.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml
from audited import MARK
from closed_logs import POINT, closed_log, event
from launched import (
    SERIES,
    SYSTEM,
    Clone,
    entries_of,
    log_of,
    package_arguments,
    submission,
    write_entries,
    write_series,
    write_submission,
)
from mlperf_logging.compliance_checker import mlp_compliance
from mutated_files import Where, leaves, replaced
from mutated_lines import TOKEN
from mutations import SEED, drawn, wants_every_case

from common.errors import SuiteError
from common.mlperf.rules import RULESETS
from common.submission import check

ROOT = Path(__file__).resolve().parents[2]
AUDITED = Path(__file__).with_name("audited.py")
SAMPLE = 3

pytestmark = pytest.mark.timeout(280)

FILE_NAMES = {
    ("runs.jsonl", "log"): "a file of the same folder: a plain name",
    ("runs.jsonl", "series"): "begins the names of files of the same folder: a plain name",
    ("submission.yaml", "submitter"): "names the folder that is made: a plain name",
    ("submission.yaml", f"systems.{SYSTEM}"): "names folders and files that are made: a plain name",
    ("submission.yaml", "results.0.implementation"): "names a folder that is made: a plain name",
}
"""Values that become names of files after a check: the plain canary may appear, the path never."""

OWN_PATHS = {("submission.yaml", f"results.0.{key}") for key in ("results", "logs.0", "code", "readme", "setup",
                                                               "init_datasets", "doctor")} | {
    ("submission.yaml", "license")
}  # fmt: skip
"""Values that name files of the submitter's own machine, which are opened."""


@dataclass(frozen=True)
class Canary:
    """A value that is replaced.

    Attributes:
        file: kind of file, such as ``log``.
        key: path of the value in it.
        text: new value.
        prepare: writes the changed copy into a folder and returns the commands to run on it.
    """

    file: str
    key: str
    text: str
    prepare: Callable[[Path], list[tuple[str, list[str]]]]

    @property
    def name(self) -> str:
        return f"{self.file} {self.key} {self.text}"

    @property
    def may_appear(self) -> bool:
        """Whether the value names a file, after a check."""
        value = (self.file, self.key)
        return value in OWN_PATHS or (value in FILE_NAMES and self.text.startswith(MARK))


def _forms(number: int) -> tuple[str, ...]:
    return f"{MARK}{number}", f"../{MARK}{number}"


def _with_log(results: Path, change: Callable[[dict[str, Any]], None]) -> None:
    """Apply ``change`` to the record of every event of one log."""
    path = log_of(results, 2)
    lines = []
    for line in path.read_text().splitlines():
        before, token, text = line.rpartition(TOKEN)
        if token:
            record = json.loads(text)
            change(record)
            line = before + token + json.dumps(record)
        lines.append(f"{line}\n")
    path.write_text("".join(lines))


def _of_logs(results: Path) -> Iterator[Canary]:
    """Every value and metadata entry of every key of a log; and time, type, key and namespace."""
    keys: dict[tuple[str, str], None] = {}
    for line in log_of(results, 2).read_text().splitlines():
        if TOKEN in line:
            record = json.loads(line.rpartition(TOKEN)[2])
            for name in ("value", "key", "event_type", "time_ms", "namespace"):
                keys[record["key"], name] = None
            for name in record["metadata"]:
                keys[record["key"], f"metadata.{name}"] = None
    for number, (key, name) in enumerate(keys):
        for text in _forms(number):

            def change(record: dict[str, Any], key: str = key, name: str = name, text: str = text) -> None:
                if record["key"] == key:
                    target = record["metadata"] if name.startswith("metadata.") else record
                    target[name.removeprefix("metadata.")] = text

            def prepare(folder: Path, change: Callable[[dict[str, Any]], None] = change) -> list:
                copy = Path(shutil.copytree(results, folder / "results"))
                _with_log(copy, change)
                return [("check", [str(copy)]), ("summarize", [str(copy)]), ("check", [str(log_of(copy, 2))])]

            yield Canary("log", f"{key} {name}", text, prepare)


def _of_registry(results: Path, settings: Callable[[Path], list[str]]) -> Iterator[Canary]:
    """Every field of ``runs.jsonl``, in one line and in all."""
    fields = dict.fromkeys(
        (entry["event"], name) for entry in entries_of(results) for name in entry if name != "overrides"
    )
    for number, (kind, name) in enumerate(fields):
        for text in _forms(1000 + number):
            for every in (False, True):

                def prepare(
                    folder: Path, kind: str = kind, name: str = name, text: str = text, every: bool = every
                ) -> list:
                    copy = Path(shutil.copytree(results, folder / "results"))
                    entries = entries_of(copy)
                    for entry in entries if every else entries[:2]:
                        if name in entry and (every or entry["event"] == kind):
                            entry[name] = text
                    write_entries(copy, entries)
                    return [("check", [str(copy)]), ("summarize", [str(copy)]), ("package", settings(folder))]

                yield Canary("runs.jsonl", name, text, prepare)


def _of_settings(results: Path, content: dict[str, Any], arguments: Callable[[Path], list[str]]) -> Iterator[Canary]:
    """Every value of a submission's YAML."""
    for number, (where, _) in enumerate(leaves(content)):
        for text in _forms(2000 + number):

            def prepare(folder: Path, where: Where = where, text: str = text) -> list:
                shutil.copytree(results, folder / "results")
                command = arguments(folder)
                write_submission(folder / "acme.yaml", replaced(content, where, text))
                return [("package", command)]

            yield Canary("submission.yaml", ".".join(map(str, where)), text, prepare)


def _of_json(file: str, path: Path, prepare: Callable[[Path, Any], list], start: int) -> Iterator[Canary]:
    """Every value of a JSON file; ``prepare`` writes the changed content into a copy."""
    content = json.loads(path.read_text())
    for number, (where, _) in enumerate(leaves(content)):
        for text in _forms(start + number):
            yield Canary(
                file, ".".join(map(str, where)), text,
                lambda folder, w=where, t=text: prepare(folder, replaced(content, w, t)),
            )  # fmt: skip


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory, clone: Clone) -> Path:
    """A series that `package` accepts."""
    return write_series(tmp_path_factory.mktemp("valid") / "results", "resnet", clone.commit)


@pytest.fixture(scope="module")
def canaries(results: Path, accepted_tree: Path, clone: Clone) -> list[Canary]:
    """One for each value of each file, in each of its forms."""
    content = submission({"system": SYSTEM, "results": "results", "implementation": "mlperf_suite", "series": SERIES})
    content |= {"submission_org": "acme"}

    def arguments(folder: Path) -> list[str]:
        return package_arguments(write_submission(folder / "acme.yaml", content), folder / "out", clone)

    def doctor(folder: Path, changed: Any) -> list:
        copy = Path(shutil.copytree(results, folder / "results"))
        (copy / f"{SERIES}_doctor.json").write_text(json.dumps(changed))
        return [("package", arguments(folder))]

    def description(folder: Path, changed: Any) -> list:
        copy = Path(shutil.copytree(accepted_tree, folder / "acme"))
        (copy / "systems" / f"{SYSTEM}.json").write_text(json.dumps(changed))
        return [("check", [str(copy), "--ruleset", "4.0.0"])]

    def implementation(folder: Path, changed: Any) -> list:
        copy = Path(shutil.copytree(accepted_tree, folder / "acme"))
        name = f"benchmarks/resnet/implementations/{SYSTEM}/{SYSTEM}_mlperf_suite.json"
        (copy / name).write_text(json.dumps(changed))
        return [("check", [str(copy), "--ruleset", "4.0.0"])]

    own = accepted_tree / f"benchmarks/resnet/implementations/{SYSTEM}/{SYSTEM}_mlperf_suite.json"
    return [
        *_of_logs(results),
        *_of_registry(results, arguments),
        *_of_settings(results, content, arguments),
        *_of_json("doctor.json", results / f"{SERIES}_doctor.json", doctor, 3000),
        *_of_json("system.json", accepted_tree / "systems" / f"{SYSTEM}.json", description, 4000),
        *_of_json("implementation.json", own, implementation, 5000),
    ]


RECORDER = """\
#!{python} -IB
import json, os, sys
sys.path.insert(0, {folder!r})
from audited import MARK, texts
sys.path.pop(0)
out = os.open({out!r}, os.O_WRONLY | os.O_CREAT | os.O_APPEND)

def write(*record):
    os.write(out, (json.dumps(record) + "\\n").encode())

def hook(event, arguments):
    for text in texts(arguments):
        if MARK in text:
            write(event, text[:300])

options = sys.argv[1:]
while options[0] in ("-I", "-B", "-E", "-s"):
    options.pop(0)
sys.addaudithook(hook)
write("started", "")
if options[0] == "-c":
    sys.argv = ["-c", *options[2:]]
    exec(compile(options[1], "<command>", "exec"), {{"__name__": "__main__"}})
else:
    import runpy
    assert options[0] == "-m", options
    sys.argv = options[1:]
    runpy.run_module(options[1], run_name="__main__", alter_sys=True)
"""
"""An interpreter that records audit events with canaries and otherwise runs its command."""


def audited(jobs: Sequence[tuple[str, list[str]]], folder: Path) -> tuple[list[dict[str, Any]], list[tuple[str, str]]]:
    """Run commands under the hook; return a record of each, and the events with canaries in their child processes."""
    python, children = folder / "python", folder / "children.jsonl"
    python.write_text(RECORDER.format(python=sys.executable, folder=str(AUDITED.parent), out=str(children)))
    python.chmod(0o755)
    (folder / "jobs.json").write_text(json.dumps([{"command": c, "arguments": a} for c, a in jobs]))
    command = [sys.executable, str(AUDITED), str(folder / "jobs.json"), str(folder / "found.json"), str(python)]
    (folder / "stand").mkdir()
    done = subprocess.run(
        command, cwd=folder / "stand", env={"PYTHONPATH": str(ROOT), "PATH": os.environ["PATH"]},
        capture_output=True, text=True, timeout=3000, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    lines = children.read_text().splitlines() if children.exists() else []
    events = [(event, text) for event, text in map(json.loads, lines)]
    found = json.loads((folder / "found.json").read_text())
    pythons = sum(str(python) in start for each in found for start in each["starts"])
    assert events.count(("started", "")) == pythons, "a process was started that was not recorded"
    return found, [each for each in events if each[0] != "started"]


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "count" in metafunc.fixturenames:
        if wants_every_case(metafunc.config):
            cases = [pytest.param(10**6, id="all", marks=[pytest.mark.slow, pytest.mark.timeout(7200)])]
        else:
            cases = [pytest.param(SAMPLE, id="sample")]
        metafunc.parametrize("count", cases)


def test_a_canary_in_the_name_of_an_opened_file_is_recorded(tmp_path):
    (tmp_path / f"{MARK}1.log").write_text(closed_log("resnet", 1))
    found, in_children = audited([("check", [str(tmp_path / f"{MARK}1.log")])], tmp_path)
    assert {event for event, _ in found[0]["seen"]} >= {"open"}
    assert found[0]["starts"]
    assert in_children == []


def test_canaries_appear_in_no_audit_event(count, canaries, tmp_path):
    some = drawn(canaries, count, SEED, lambda canary: canary.file)
    jobs, owners = [], []
    for number, canary in enumerate(some):
        folder = tmp_path / str(number)
        folder.mkdir()
        for job in canary.prepare(folder):
            jobs.append(job)
            owners.append(canary)
    found, in_children = audited(jobs, tmp_path)
    wrong = [
        f"{owner.name}: {job[0]}: {event} has {text!r}"
        for each, owner, job in zip(found, owners, jobs, strict=True)
        for event, text in each["seen"]
        if not owner.may_appear
    ]
    allowed = {canary.text.rpartition("/")[2] for canary in some if canary.may_appear}
    wrong += [
        f"in a process that was started: {event} has {text!r}"
        for event, text in in_children
        if not set(re.findall(rf"{MARK}\d+", text)) <= allowed
    ]
    assert not wrong, "\n".join(dict.fromkeys(wrong))


@pytest.mark.slow
def test_free_texts_of_an_accepted_submission_appear_in_no_audit_event(results, clone, tmp_path):
    """All values that may be any text are canaries at once, in a submission that `package` accepts."""
    copy = Path(shutil.copytree(results, tmp_path / "results"))
    numbers = iter(range(9000, 9999))

    def text() -> str:
        return f"{MARK}{next(numbers)}"

    entries = entries_of(copy)
    for entry in entries:
        if entry["event"] == "begin":
            entry["overrides"] = ["benchmark=resnet", f"data_dir={text()}", text()]
    write_entries(copy, entries)
    doctor = json.loads((copy / f"{SERIES}_doctor.json").read_text())
    facts = {name: text() for name in doctor["nodes"]["node1"]["facts"] if name != "other_software_stack"}
    facts["other_software_stack"] = {text(): text()}
    doctor["nodes"] = {text(): {"facts": facts, "measurements": {}} for _ in range(2)}
    (copy / f"{SERIES}_doctor.json").write_text(json.dumps(doctor))
    for number in range(1, 6):
        path, where = log_of(copy, number), text()
        path.write_text(path.read_text().replace('"train.py"', f'"{where}.py"'))
    content = submission({"system": SYSTEM, "results": "results"}, cooling=text(), host_networking_topology=text())
    content["systems"][SYSTEM]["system_name"] = text()
    settings = write_submission(tmp_path / "acme.yaml", content)
    jobs = [
        ("package", package_arguments(settings, tmp_path / "out", clone)),
        ("check", [str(tmp_path / "out" / "acme"), "--ruleset", "4.0.0"]),
    ]
    found, in_children = audited(jobs, tmp_path)
    assert [each["code"] for each in found] == [0, 0], [each["printed"] for each in found]
    assert [each["seen"] for each in found] == [[], []]
    assert in_children == []


def _named_rule_files() -> list[tuple[str, str, str, str, str]]:
    """Return usage, ruleset, benchmark ("" for all), key and pattern of each rule that names a file by a value."""
    folder = Path(mlp_compliance.__file__).parent
    found: dict[tuple[str, str, str, str, str], None] = {}
    for path in sorted(folder.glob("*_*.*.*/*.yaml")):
        usage, _, ruleset = path.parent.name.partition("_")
        if ruleset not in RULESETS.get(usage, ()):
            continue
        benchmark = path.stem.removeprefix("closed_").removeprefix("open_")
        benchmark = "" if benchmark.endswith("common") else benchmark
        for block in yaml.load(path.read_text(), Loader=yaml.BaseLoader) or []:
            code = str(block.get("KEY", {}).get("POST", ""))
            for pattern in re.findall(r"enqueue_config\('([^']*\{\}[^']*)'", code):
                found[usage, ruleset, benchmark, block["KEY"]["NAME"], pattern] = None
    return list(found)


NAMED = _named_rule_files()


def test_rules_that_name_files_are_found():
    keys = {key for _, _, _, key, _ in NAMED}
    assert {"submission_division", "submission_benchmark", "opt_name"} <= keys
    assert len({(usage, ruleset) for usage, ruleset, *_ in NAMED}) == sum(map(len, RULESETS.values()))


@pytest.mark.parametrize(
    ("usage", "ruleset", "benchmark", "key", "pattern"), NAMED, ids=lambda value: value.replace("/", " ")
)
def test_no_rule_file_but_the_checkers_own_is_used(usage, ruleset, benchmark, key, pattern, tmp_path, capsys):
    before, after = pattern.split("{}")
    start = Path(mlp_compliance.__file__).parent / before
    folder = start if before.endswith("/") else start.parent
    value = os.path.relpath(tmp_path / "own", folder)
    if folder != start:
        value = f"/../{value}"
    mark = tmp_path / "mark"
    (tmp_path / f"own{after}").write_text(json.dumps([{"BEGIN": {"CODE": f"open({str(mark)!r}, 'w')"}}]))
    log, name = tmp_path / "node.log", "cosmoflow" if usage == "hpc" else "resnet"
    found = rf'("key": "{key}", "value": )[^,]+(, "metadata")'
    text = re.sub(found, rf"\g<1>{json.dumps(value)}\2", closed_log(name, 1))
    text = text.replace(f'"{name}"', json.dumps(benchmark or name))
    if f'"{key}"' not in text:
        first, _, rest = text.partition("\n")
        text = f"{first}\n{event(1_700_000_000_000, POINT, key, value)}\n{rest}"
    log.write_text(text)
    try:
        code, message = check.main([str(log), "--ruleset", ruleset]), ""
    except SuiteError as error:
        code, message = error.exit_code, str(error)
    assert not mark.exists()
    assert code != 0
    assert log.name in message + capsys.readouterr().out
