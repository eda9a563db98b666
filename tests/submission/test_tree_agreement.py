"""A submission with contradictions or forbidden files is not accepted."""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from closed_logs import POINT, event
from launched import SYSTEM, Clone, first_line_ms, package_arguments, submission, write_series, write_submission

from common.submission.checkers import judge_tree
from common.submission.mlcommons_checkers import CheckerReport, format_report
from common.submission.package import main as package
from common.submission.tree_agreement import same_organisation

Change = Callable[[Path], object]
RESULTS = f"results/{SYSTEM}/resnet"
SYSTEM_FILE = f"systems/{SYSTEM}.json"
IMPLEMENTATIONS = "benchmarks/resnet/implementations"
IMPLEMENTATION_FILE = f"{IMPLEMENTATIONS}/{SYSTEM}/{SYSTEM}_mlperf_suite.json"


def in_json(name: str, **values: object) -> Change:
    """Other values in a JSON file."""

    def apply(tree: Path) -> None:
        content = json.loads((tree / name).read_text())
        for path, value in values.items():
            *outer, last = path.split(".")
            target = content
            for key in outer:
                target = target[key]
            target[last] = value
        (tree / name).write_text(json.dumps(content))

    return apply


def in_first_log(key: str, value: object) -> Change:
    """One more event at the beginning of the first log."""

    def apply(tree: Path) -> None:
        log = tree / RESULTS / "result_0.txt"
        log.write_text(event(first_line_ms(1), POINT, key, value) + "\n" + log.read_text())

    return apply


def content_of(name: str, content: bytes) -> Change:
    """Other content of a file."""
    return lambda tree: (tree / name).write_bytes(content)


def two_systems(tree: Path) -> None:
    shutil.copytree(tree / RESULTS, tree / "results/other/resnet")
    shutil.copy(tree / SYSTEM_FILE, tree / "systems/other.json")


def deep(tree: Path) -> None:
    (tree / "benchmarks" / "/".join(["d"] * 40)).mkdir(parents=True)


def folder_for_description(tree: Path) -> None:
    (tree / SYSTEM_FILE).unlink()
    (tree / SYSTEM_FILE).mkdir()


def without_readme(tree: Path) -> None:
    for path in (tree / "benchmarks").rglob("README*"):
        path.unlink()


def in_one_log(key: str, old: str, new: str) -> Change:
    """Another value in the last log."""

    def apply(tree: Path) -> None:
        log = tree / RESULTS / "result_4.txt"
        before = log.read_text()
        log.write_text(before.replace(f'"{key}", "value": "{old}"', f'"{key}", "value": "{new}"'))
        assert log.read_text() != before

    return apply


def renamed(old: str, new: str) -> Change:
    return lambda tree: (tree / old).rename(tree / new)


def readme_elsewhere(tree: Path) -> None:
    without_readme(tree)
    (tree / "benchmarks" / "README.md").touch()


def code_of_another_benchmark(tree: Path) -> None:
    """Results of two benchmarks, and code of the second alone."""
    (tree / f"results/{SYSTEM}/bert").mkdir()
    (tree / "benchmarks/resnet").rename(tree / "benchmarks/bert")


BREAKS: dict[str, tuple[Change, str]] = {
    "division": (in_json(SYSTEM_FILE, division="open"), "is of the 'closed' division, systems/.* of the 'open' one"),
    "nodes of the log": (in_first_log("number_of_nodes", 3), r"result_0\.txt: number_of_nodes is 3, systems/.* has 2"),
    "nodes of a description": (in_json(SYSTEM_FILE, number_of_nodes="4"),
                               "scale is '2x8', number_of_nodes in systems/.* is 4"),
    "accelerators of the log": (in_first_log("accelerators_per_node", 4), "accelerators_per_node is 4, systems/"),
    "benchmark of the folder": (lambda t: (t / RESULTS).rename(t / f"results/{SYSTEM}/bert"),
                                "is of the benchmark 'resnet', but lies in a folder of bert"),
    "runs under two systems": (two_systems, f"{RESULTS}/result_0.txt and .*other.*/result_0.txt are one run|"
                               "other/resnet/result_0.txt and .* are one run"),
    "no code": (lambda t: shutil.rmtree(t / "benchmarks/resnet"), "its code is missing: there are no files in bench"),
    "no README": (without_readme, "benchmarks/resnet has no README"),
    "link to a file": (lambda t: (t / "benchmarks/link").symlink_to(t / "README.md"), "benchmarks/link: is a link"),
    "link to a folder": (lambda t: (t / "benchmarks/link").symlink_to("/etc"), "benchmarks/link: is a link"),
    "link to nothing": (lambda t: (t / f"{RESULTS}/link").symlink_to("nowhere"), "/link: is a link"),
    "pipe": (lambda t: os.mkfifo(t / "benchmarks/pipe"), "acme/benchmarks/pipe: is a pipe"),
    "pipe as a log": (lambda t: os.mkfifo(t / RESULTS / "result_5.txt"), "result_5.txt: is a pipe"),
    "name that cannot be printed": (lambda t: (t / "benchmarks/a\x1b[2Jb").touch(), r"has 'a\\x1b\[2Jb', a name that"),
    "name that is no text": (lambda t: os.mkdir(os.fsencode(t / "benchmarks") + b"/\xff"), r"has '\\udcff', a name"),
    "name for a pattern": (lambda t: (t / RESULTS).rename(t / f"results/{SYSTEM}/[r]esnet"), "does not accept a bench"),
    "nested": (deep, "lies more than 32 folders deep"),
    "scaling that is not given": (content_of(f"{RESULTS}/scaling.json", b'{"scaling_factor": 1.01}'),
                                  "has the factor 1.01, but the runs' convergence is not scaled"),
    "scaling that is no JSON": (content_of(f"{RESULTS}/scaling.json", b"\xff"), "scaling.json: line 1 is not UTF-8"),
    "scaling of another kind": (content_of(f"{RESULTS}/scaling.json", b'{"scaling_factor": true}'), "is not {.scaling"),
    "description with a key twice": (content_of(SYSTEM_FILE, b'{"division": "open", "division": "closed"}'), "twice"),
    "description of digits": (content_of(SYSTEM_FILE, b'{"number_of_nodes": ' + b"9" * 5000 + b"}"), "5000 digits"),
    "description that is nested": (content_of(SYSTEM_FILE, b'{"a": ' + b"[" * 10**5), "is no readable JSON"),
    "description that is empty": (content_of(SYSTEM_FILE, b""), "is no readable JSON"),
    "description that is a folder": (folder_for_description, f"{SYSTEM_FILE} is missing"),
    "log that is empty": (content_of(f"{RESULTS}/result_1.txt", b""), "was not run: .*result_1.txt: is empty"),
    "log that names a file of rules": (in_first_log("opt_name", "../../x"), "was not run: .*result_0.txt, line 1: opt"),
    "nodes in words": (in_json(SYSTEM_FILE, number_of_nodes="two"), 'number_of_nodes is "two": write a plain decimal'),
    "nodes with an exponent": (in_json(SYSTEM_FILE, number_of_nodes="1e3"), 'number_of_nodes is "1e3"'),
    "nodes in full-width digits": (in_json(SYSTEM_FILE, number_of_nodes="\uff18"), r'number_of_nodes is "\\uff18"'),
    "nodes with spaces": (in_json(SYSTEM_FILE, number_of_nodes=" 8 "), 'number_of_nodes is " 8 "'),
    "negative nodes": (in_json(SYSTEM_FILE, number_of_nodes="-1"), 'number_of_nodes is "-1"'),
    "no nodes": (in_json(SYSTEM_FILE, number_of_nodes="0"), 'number_of_nodes is "0"'),
    "half a node": (in_json(SYSTEM_FILE, number_of_nodes=0.5), "number_of_nodes is 0.5"),
    "nodes that are true": (in_json(SYSTEM_FILE, number_of_nodes=True), "number_of_nodes is true"),
    "negative accelerators": (in_json(SYSTEM_FILE, accelerators_per_node="-8"), 'accelerators_per_node is "-8": write'),
    "negative accelerators with a space": (in_json(SYSTEM_FILE, accelerators_per_node=" - 8"), 'per_node is " - 8"'),
    "negative processors": (in_json(SYSTEM_FILE, host_processors_per_node="-2"), 'host_processors_per_node is "-2"'),
    "division of nobody": (in_json(SYSTEM_FILE, division="half-open"), "division is 'half-open', not closed or open"),
    "system name that is a number": (in_json(SYSTEM_FILE, system_name=8), "system_name is 8: write text"),
    "code of another benchmark only": (code_of_another_benchmark, "its code is missing: there are no files in bench"),
}  # fmt: skip

NOTES: dict[str, tuple[Change, str]] = {
    "status": (in_json(SYSTEM_FILE, status="Available cloud"),
               "submission_status is 'onprem' in 5 of 5 logs, the status in systems/.* is 'Available cloud'"),
    "submitter": (in_json(SYSTEM_FILE, submitter="Other Inc."),
                  "submission_org is 'acme' in 5 of 5 logs, the submitter in systems/.* is 'Other Inc.'"),
    "status of one log": (in_one_log("submission_status", "onprem", "cloud"), "submission_status is 'cloud' in 1 of 5"),
    "submitter of one log": (in_one_log("submission_org", "acme", "other"), "submission_org is 'other' in 1 of 5 logs"),
    "hyperparameter": (in_json(IMPLEMENTATION_FILE, **{"hyperparameters.lars_opt_base_learning_rate": 9.0}),
                       "'lars_opt_base_learning_rate' is 9.0, result_0.txt has 10.5"),
    "system of the implementation": (in_json(IMPLEMENTATION_FILE, system="x"), f"system is 'x', expected '{SYSTEM}'"),
    "benchmark of the implementation": (in_json(IMPLEMENTATION_FILE, benchmark="x"), "benchmark is 'x', expected"),
    "submitter of the implementation": (in_json(IMPLEMENTATION_FILE, submitter="x"), "submitter is 'x', systems/"),
    "implementation that is no JSON": (content_of(IMPLEMENTATION_FILE, b"{"), "suite.json: is no readable JSON"),
    "implementation without its code": (lambda t: shutil.rmtree(t / IMPLEMENTATIONS / "mlperf_suite"),
                                        "there is no code in .*/mlperf_suite"),
    "logs in a subfolder": (lambda t: shutil.copytree(t / RESULTS, t / f"{RESULTS}/more"),
                            "/resnet/more/result_0.txt: is not judged and belongs to no result"),
    "log beside its benchmark": (lambda t: shutil.copy(t / RESULTS / "result_0.txt", t / f"results/{SYSTEM}"),
                                 f"results/{SYSTEM}/result_0.txt: is not judged"),
    "log beside the systems": (lambda t: shutil.copy(t / RESULTS / "result_0.txt", t / "results"),
                               "acme/results/result_0.txt: is not judged"),
    "code under another spelling": (renamed("benchmarks/resnet", "benchmarks/ResNet-50"),
                                    "no code is in benchmarks/resnet/implementations/<implementation>/"),
    "code without implementations": (renamed(IMPLEMENTATIONS, "benchmarks/resnet/code"), "no code is in benchmarks/"),
    "README beside the benchmarks": (readme_elsewhere, "benchmarks/resnet has no README"),
    "system without a name": (in_json(SYSTEM_FILE, system_name=""), "system_name left empty: the submission rules ask"),
    "cooling left empty": (in_json(SYSTEM_FILE, cooling=""), "cooling left empty"),
    "nodes left empty": (in_json(SYSTEM_FILE, number_of_nodes=""), "number_of_nodes left empty"),
    "nodes as a number": (in_json(SYSTEM_FILE, number_of_nodes=2), "number_of_nodes is 2, which is no text"),
    "accelerators in words": (in_json(SYSTEM_FILE, accelerators_per_node="8 (4 cards)"),
                              'accelerators_per_node is "8 .4 cards.", no plain number'),
    "division in capitals": (in_json(SYSTEM_FILE, division="Closed"), 'division is "Closed"; the package checker was'),
    "notes that are a list": (in_json(SYSTEM_FILE, hw_notes=["a"]), 'hw_notes is ."a"., which is no text'),
}  # fmt: skip
"""A change that no rule forbids and no checker refuses, and the words of its note."""


def judged(tree: Path) -> tuple[CheckerReport, ...]:
    return judge_tree(tree, "training", "4.0.0", finished=True).reports


def refusals(tree: Path) -> str:
    return "\n".join(format_report(report) for report in judged(tree) if not report.accepted)


@pytest.mark.parametrize("name", BREAKS)
def test_a_tree_that_contradicts_itself_is_not_accepted(tree, content_checkers, name):
    change, words = BREAKS[name]
    change(tree)
    text = refusals(tree)
    assert re.search(words, text), text


@pytest.mark.parametrize("name", NOTES)
def test_a_change_that_no_rule_and_no_checker_forbids_is_noted(tree, content_checkers, name):
    change, words = NOTES[name]
    change(tree)
    reports = judged(tree)
    assert [report for report in reports if not report.accepted] == []
    notes = [format_report(report) for report in reports if report.notes]
    assert [text for text in notes if re.search(f"note: .*{words}", text)], notes


def test_content_checkers_do_not_run_on_a_log_that_names_a_file_of_rules(tree, content_checkers):
    in_first_log("opt_name", "../../x")(tree)
    judged(tree)
    assert content_checkers == ["repo_checker"]


@pytest.mark.parametrize(
    "change",
    [
        in_json(SYSTEM_FILE, status="onprem"),
        in_json(SYSTEM_FILE, status="Preview"),
        in_json(SYSTEM_FILE, submitter="ACME"),
        in_json(SYSTEM_FILE, submitter="Acme, Inc."),
        in_json(SYSTEM_FILE, number_of_nodes=""),
        in_first_log("accelerators_per_node", 0),
        in_first_log("submission_platform", "something else"),
        lambda tree: (tree / IMPLEMENTATION_FILE).unlink(),
    ],
    ids=["old word", "not for sale yet", "case", "full name", "no number", "no accelerators", "platform", "no JSON"],
)
def test_another_spelling_and_a_missing_value_are_no_contradiction(tree, content_checkers, change):
    change(tree)
    assert refusals(tree) == ""


@pytest.mark.parametrize(
    ("name", "words"),
    [
        (f"{RESULTS}/package_checker_params", "was left out: no check is bypassed here"),
        (f"{RESULTS}/notes.txt", "is neither a log nor scaling.json"),
    ],
)
def test_a_file_that_is_not_judged_is_noted(tree, content_checkers, name, words):
    (tree / name).write_text("rcp-bypass")
    reports = judged(tree)
    assert all(report.accepted for report in reports)
    assert [note for report in reports for note in report.notes] == [
        f"acme/{name}: {words}" + (": nothing looks at it" if "neither" in words else "")
    ]


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [
        ("NVIDIA", "nvidia", True),
        ("Hewlett Packard Enterprise", "HPE", True),
        ("Dell", "Dell Technologies", True),
        ("Azure+NVIDIA", "Azure", True),
        ("SUBMISSION_ORG_PLACEHOLDER", "Dell", True),
        ("Dell", "Lenovo", False),
        ("A", "Acme", False),
    ],
)
def test_organisations_are_compared_by_their_letters(one, other, same):
    assert same_organisation(one, other) is same


def faster_tree(tmp_path: Path, clone: Clone) -> Path:
    """A tree whose runs converged faster than the reference, within chance."""
    results = write_series(tmp_path / "results", "resnet", clone.commit, [35.0, 35.0, 35.0, 31.0, 39.0])
    settings = write_submission(tmp_path / "acme.yaml", submission())
    assert package([str(results), *package_arguments(settings, tmp_path, clone)]) == 0
    return tmp_path / "acme"


@pytest.mark.slow
def test_a_wrong_scaling_factor_is_refused_and_checking_writes_nothing(tmp_path, clone):
    tree = faster_tree(tmp_path, clone)
    before = {path: (path.stat().st_mtime_ns, path.stat().st_ino) for path in [tree, *tree.rglob("*")]}
    assert refusals(tree) == ""
    assert {path: (path.stat().st_mtime_ns, path.stat().st_ino) for path in [tree, *tree.rglob("*")]} == before
    scaling = tree / RESULTS / "scaling.json"
    scaling.write_text('{"scaling_factor": 1.0001}')
    assert "has the factor 1.0001, the RCP check gives 1.0043956" in refusals(tree)  # 35.15384615 / 35
    scaling.unlink()
    assert refusals(tree) == ""
    notes = [note for report in judged(tree) for note in report.notes]
    assert notes == ["is missing; the package checker writes it, with the factor 1.004396, which the score has"]
