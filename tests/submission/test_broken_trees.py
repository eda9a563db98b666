"""`check` finds faults in a submission that was changed after `package` accepted it, and names the file."""

from __future__ import annotations

import contextlib
import io
import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from closed_logs import POINT, event
from launched import SYSTEM

from common.errors import ConfigError
from common.submission import check
from common.submission.checkers import judge_tree
from common.submission.mlcommons_checkers import (
    check_convergence,
    check_names_and_sizes,
    check_package,
    check_system,
    format_report,
)
from common.submission.run_sets import find_run_sets

Break = Callable[[Path], object]
RESULTS = f"results/{SYSTEM}/resnet"
RESULT = f"{RESULTS}/result_2.txt"
SYSTEM_FILE = f"systems/{SYSTEM}.json"


def in_file(name: str, old: str, new: str) -> Break:
    def apply(tree: Path) -> None:
        text = (tree / name).read_text()
        assert old in text
        (tree / name).write_text(text.replace(old, new))

    return apply


def large(tree: Path) -> None:
    with (tree / "benchmarks" / "weights.bin").open("wb") as file:
        file.truncate(50 * 2**20 + 1)


def one_more_run(tree: Path) -> None:
    text = (tree / RESULT).read_text()
    (tree / RESULTS / "result_5.txt").write_text(re.sub(r'("seed", "value": )\d+', r"\g<1>123", text))


def same_seed(tree: Path) -> None:
    shutil.copyfile(tree / RESULTS / "result_0.txt", tree / RESULT)


def mixed_within_a_line(tree: Path) -> None:
    lost = event(1_700_000_000_000, POINT, "tracked_stats", {})
    in_file(RESULT, '"key": "lars_opt_momentum"', f'"key": "lars{lost}\n')(tree)


def judged(tree: Path) -> str:
    """The verdicts of `check` on the runs."""
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        assert not check.check_run_sets(find_run_sets([tree / "results"]), "4.0.0")
    return out.getvalue()


def names_and_sizes(tree: Path) -> str:
    return format_report(check_names_and_sizes(tree, "training", "4.0.0"))


def system(tree: Path) -> str:
    return format_report(check_system(tree, tree / SYSTEM_FILE, "training", "4.0.0"))


def whole(tree: Path) -> str:
    """The reports of all checkers."""
    return "\n".join(map(format_report, judge_tree(tree, "training", "4.0.0", finished=True).reports))


def convergence(tree: Path) -> str:
    return format_report(check_convergence(tree, tree / RESULTS, "training", "4.0.0"))


def package(tree: Path) -> str:
    return format_report(check_package(tree, "training", "4.0.0"))


# name: (damage, what finds it, file, words)
BREAKS: dict[str, tuple[Break, Callable[[Path], str], str, str]] = {
    "result missing": (lambda t: (t / RESULT).unlink(), judged, RESULT, "is missing"),
    "last result missing": (lambda t: (t / RESULTS / "result_4.txt").unlink(), package, RESULTS, "found 4, expected 5"),
    "one result too many": (one_more_run, package, RESULTS, "found 6, expected 5"),
    "quality below the target": (in_file(RESULT, "0.7592", "0.7589"), judged, "result_2.txt", "claims success"),
    "same seed twice": (same_seed, package, "result_2.txt", "already logs the same seed"),
    "same seed twice in our words": (same_seed, judged, RESULTS, "result_0.txt and result_2.txt have the same seed"),
    "events mixed within a line": (mixed_within_a_line, judged, "result_2.txt", "begins within another"),
    "hyperparameter of all runs": (
        lambda t: [in_file(f"{RESULTS}/result_{i}.txt", '"value": 0.0001', '"value": 0.001')(t) for i in range(5)],
        package, "result_2.txt", "CHECK for 'lars_opt_end_learning_rate' failed",
    ),
    "convergence faster than chance": (
        lambda t: [in_file(f"{RESULTS}/result_{i}.txt", '"epoch_num": 3', '"epoch_num": 2')(t) for i in range(5)],
        convergence, RESULTS, "RCP test FAILED",
    ),
    "system missing": (lambda t: (t / SYSTEM_FILE).unlink(), whole, RESULTS, f"{SYSTEM_FILE} is missing"),
    "system description damaged": (lambda t: (t / SYSTEM_FILE).write_text("{"), whole, SYSTEM_FILE,
                                   "no readable JSON"),
    "wrong status": (in_file(SYSTEM_FILE, "Available on-premise", "onprem"), system, SYSTEM_FILE,
                     "Field status contains a non valid value: onprem"),
    "number in the description": (in_file(SYSTEM_FILE, '"accelerators_per_node": "8"', '"accelerators_per_node": 8'),
                                  whole, SYSTEM_FILE, 'accelerators_per_node is 8: write text, "8"'),
    "field of the description missing": (in_file(SYSTEM_FILE, '"cooling"', '"cooled"'), system, SYSTEM_FILE,
                                         "Missing field cooling"),
    "division that nobody knows": (in_file(SYSTEM_FILE, '"closed"', '"half"'), whole, SYSTEM_FILE,
                                   "division is 'half', not closed or open"),
    "one seed twice in a division in capitals": (
        lambda t: (same_seed(t), in_file(SYSTEM_FILE, '"closed"', '"Closed"')(t)), whole, RESULTS,
        "Seed checker failed"),
    "name with a space": (lambda t: (t / "benchmarks" / "a file.py").touch(), names_and_sizes, "benchmarks/a file.py",
                          "has a space or begins with a dot"),
    "name with a dot": (lambda t: (t / "benchmarks" / ".hidden").touch(), names_and_sizes, "benchmarks/.hidden",
                        "has a space or begins with a dot"),
    "file above 50 MB": (large, names_and_sizes, "benchmarks/weights.bin", "is larger than 50 MB"),
    "benchmark that the ruleset does not have": (
        lambda t: (t / RESULTS).rename(t / f"results/{SYSTEM}/alexnet"), whole, f"results/{SYSTEM}/alexnet",
        "ruleset 4.0.0 does not accept a benchmark named alexnet",
    ),
}  # fmt: skip


def lines_about(text: str, file: str) -> str:
    """Return the lines of ``text`` that name ``file``, or are below a headline that does."""
    found, headline = [], ""
    for line in text.splitlines():
        headline = headline if line.startswith("  ") else line
        if file in line or file in headline:
            found.append(line)
    return "\n".join(found)


@pytest.mark.parametrize("name", BREAKS)
def test_broken_tree_is_found_and_named(tree, name):
    damage, finder, file, words = BREAKS[name]
    damage(tree)
    assert words in lines_about(finder(tree), file)


def test_broken_tree_is_refused_by_the_command(tree, capsys):
    large(tree)
    assert check.main([str(tree), "--ruleset", "4.0.0"]) == 1
    assert "is larger than 50 MB" in lines_about(capsys.readouterr().out, "acme/benchmarks/weights.bin")


def test_undamaged_tree_is_accepted(tree, capsys):
    assert check.main([str(tree), "--ruleset", "4.0.0"]) == 0
    out = capsys.readouterr().out
    assert "NOT ACCEPTED" not in out
    assert "SUBMITTABLE (resnet, ruleset 4.0.0)" in out


def test_tree_under_another_ruleset_is_not_accepted(tree, capsys):
    assert check.main([str(tree), "--ruleset", "5.0.0"]) == 1
    assert "ruleset 5.0.0 does not accept a benchmark named resnet" in capsys.readouterr().out


def test_submission_without_a_ruleset_is_an_error(tree):
    with pytest.raises(ConfigError, match="name the one version"):
        check.main([str(tree)])


def test_paths_in_complaints_are_those_of_the_submission(tree):
    (tree / "a b").touch()
    complaints = check_names_and_sizes(tree, "training", "4.0.0").complaints
    assert complaints == ("acme/a b: the name has a space or begins with a dot",)


def test_crash_of_the_package_checker_is_a_complaint(tree):
    path = tree / SYSTEM_FILE
    path.write_text(json.dumps(json.loads(path.read_text()) | {"submitter": 7}))
    assert check_package(tree, "training", "4.0.0").complaints[0].startswith("the checker crashed: TypeError")
