"""Scores of HPC rounds are MLCommons' scores, and doctored throughput results are refused with one clear message.

Starts, times and sizes of the generated instances give the expected score, and so does MLCommons' result summarizer.
"""

from __future__ import annotations

import csv
import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml
from closed_logs import closed_log, drawn_convergence
from launched import FACTS, SYSTEM, Clone, package_arguments, submission, write_series, write_submission

from common.errors import DataError
from common.mlperf.rules import RULESETS
from common.submission import check, package, summarize

LARGE = "24xH200_torch"
"""System of the instances: 24 nodes of 8 accelerators, 2 nodes for each instance."""
NODES, INSTANCE_NODES, ACCELERATORS = 24, 2, 8
INSTANCES, PRUNED, SLOWEST = 12, 4, 11
"""Number of instances, number of the pruned one, and of the one that ends last."""
START_MS, APART_MS = 1_700_000_000_000, 2000
"""Time of the first line of the first instance's log, and between those of two instances."""
RULESET = "3.0.0"


def minutes_of(instance: int) -> float:
    return 10.0 + instance / 4


def write_instance(path: Path, instance: int, seed: int | None = None, status: str = "success") -> None:
    """Write the log of an instance, numbered from 0."""
    path.parent.mkdir(parents=True, exist_ok=True)
    text = closed_log(
        "cosmoflow",
        7000 + instance if seed is None else seed,
        drawn_convergence("cosmoflow")[instance % 10],
        minutes=minutes_of(instance),
        start=START_MS + APART_MS * instance,
        status=status,
    )
    path.write_text(text)


def write_instances(folder: Path) -> Path:
    """Write the logs of all instances into ``folder/weak/cosmoflow``, the pruned one below it; return that folder."""
    weak = folder / "weak" / "cosmoflow"
    for instance in range(INSTANCES):
        place = weak / "pruned_results" if instance == PRUNED else weak
        write_instance(place / f"result_{instance}.txt", instance)
    return weak


def settings_of(folder: Path, strong: Path, weak: Path) -> Path:
    """Write the file of a submission of a time to solution and a throughput, and the code of the latter."""
    for name in ("README.md", "setup.sh", "init_datasets.sh", "code/train.py"):
        (folder / "other" / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / "other" / name).write_text("# launch\n")
    other = {
        "implementation": "other", "code": "other/code", "readme": "other/README.md", "setup": "other/setup.sh",
        "init_datasets": "other/init_datasets.sh",
    }  # fmt: skip
    content = submission({"system": SYSTEM, "results": str(strong)}, {"system": LARGE, "results": str(weak), **other})
    described = content["systems"][SYSTEM]
    fields = described["fields"] | FACTS | {"number_of_nodes": str(NODES)}
    content["systems"][LARGE] = described | {"system_name": "Acme server, 24 nodes of 8x H200", "fields": fields}
    return write_submission(folder / "acme.yaml", content)


def without_strong(tree: Path) -> None:
    shutil.rmtree(tree / "results" / SYSTEM / "strong")


def without_weak_in_the_path(tree: Path) -> None:
    (tree / "results" / LARGE / "weak" / "cosmoflow").rename(tree / "results" / LARGE / "cosmoflow")


def with_two_pruned_instances_more(tree: Path) -> None:
    weak = tree / "results" / LARGE / "weak" / "cosmoflow"
    for instance in (6, 7):
        (weak / f"result_{instance}.txt").rename(weak / "pruned_results" / f"result_{instance}.txt")


LAYOUTS: dict[Callable[[Path], None], str] = {
    without_strong: "there is no time to solution of cosmoflow: results/<system>/strong/cosmoflow",
    without_weak_in_the_path: f"is not in results/{LARGE}/strong or weak, where the package checker looks for it",
    with_two_pruned_instances_more: "9 instances of cosmoflow count, and a result needs 10",
}
"""What is wrong with the folders, and the message about it."""


def run_package(settings: Path, clone: Clone) -> int:
    return package.main(package_arguments(settings, settings.parent / "out", clone, RULESET))


@pytest.fixture(scope="module")
def strong(tmp_path_factory: pytest.TempPathFactory, clone: Clone) -> Path:
    """A series of a time to solution."""
    return write_series(tmp_path_factory.mktemp("strong") / "results", "cosmoflow", clone.commit)


@pytest.fixture(scope="module")
def accepted(tmp_path_factory: pytest.TempPathFactory, clone: Clone, strong: Path) -> Path:
    """A submitter's folder that `package` made."""
    folder = tmp_path_factory.mktemp("throughput")
    assert run_package(settings_of(folder, strong, write_instances(folder)), clone) == 0
    return folder / "out" / "acme"


@pytest.fixture
def tree(accepted: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(accepted, tmp_path / "acme"))


def printed_by(module: str, *arguments: str | Path, folder: Path) -> str:
    """Output of one of MLCommons' commands, run in a folder."""
    command = [sys.executable, "-m", f"mlperf_logging.{module}", *map(str, arguments)]
    return "".join(
        subprocess.run(
            command, cwd=folder, check=False, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        ).stdout
    )


def summarized(tree: Path, column: str) -> dict[str, str]:
    """Return the first row of the table with a column, of those that MLCommons' result summarizer writes."""
    printed_by("result_summarizer", tree, "hpc", RULESET, "--csv", "theirs.csv", folder=tree.parent)
    lines = (tree.parent / "theirs.csv").read_text().splitlines()
    head = next(index for index, line in enumerate(lines) if column in line.split(","))
    return next(csv.DictReader(lines[head:]))


def test_time_to_solution_and_its_scaling_are_those_of_the_result_summarizer(tmp_path, clone, capsys):
    results = write_series(tmp_path / "results", "cosmoflow", clone.commit, [22.0] * 3 + [23.0] * 7)
    settings = write_submission(tmp_path / "acme.yaml", submission({"system": SYSTEM, "results": str(results)}))
    assert run_package(settings, clone) == 0
    capsys.readouterr()
    assert summarize.main([str(results), "--json", str(tmp_path / "own.json")]) == 0
    (own,) = json.loads((tmp_path / "own.json").read_text())
    assert own["factor"] == pytest.approx(own["reference"]["mean"] / 22.75)  # of 22, 22 and six times 23
    theirs = summarized(tmp_path / "out" / "acme", "cosmoflow")
    assert own["score_minutes"] == pytest.approx(float(theirs["cosmoflow"]))


def test_mlcommons_checkers_accept_the_packaged_instances(tree):
    assert "FOUND NO ERRORS, SUCCESS" in printed_by("package_checker", tree, "hpc", RULESET, folder=tree.parent)
    assert "ALL CHECKS PASSED" in printed_by("repo_checker", tree, "hpc", RULESET, folder=tree.parent)


def test_kept_and_pruned_instances_keep_their_numbers_in_the_tree(accepted):
    weak = accepted / "results" / LARGE / "weak" / "cosmoflow"
    kept = {path.name for path in weak.glob("result_*.txt")}
    assert kept == {f"result_{instance}.txt" for instance in range(INSTANCES) if instance != PRUNED}
    assert [path.name for path in (weak / "pruned_results").iterdir()] == [f"result_{PRUNED}.txt"]


@pytest.mark.slow
def test_our_check_accepts_the_packaged_instances(accepted, capsys):
    assert check.main([str(accepted), "--ruleset", RULESET]) == 0
    assert "(T, S, M', TTTa) = (192, 16, 11, 13.1" in capsys.readouterr().out


def test_summarize_gives_the_score_of_the_result_summarizer(tree):
    weak = tree / "results" / LARGE / "weak"
    assert summarize.main([str(weak), "--ruleset", RULESET, "--json", str(tree.parent / "own.json")]) == 0
    (own,) = json.loads((tree.parent / "own.json").read_text())
    theirs = summarized(tree, "cosmoflow:time_to_train_all")
    found = own["throughput"]
    assert found["minutes"] == pytest.approx(float(theirs["cosmoflow:time_to_train_all"]))
    assert found["instances"] == float(theirs["cosmoflow:number_of_models"])
    assert found["instance_accelerators"] == float(theirs["cosmoflow:instance_scale"])


@pytest.mark.parametrize("ruleset", RULESETS["hpc"])
def test_time_to_train_all_is_from_the_first_start_to_the_last_stop(tmp_path, ruleset, capsys):
    weak = write_instances(tmp_path)
    (weak / "result_11.txt").rename(weak / "pruned_results" / "result_11.txt")
    assert summarize.main([str(weak), "--ruleset", ruleset, "--json", str(tmp_path / "own.json")]) == 0
    found = json.loads((tmp_path / "own.json").read_text())[0]["throughput"]
    last = minutes_of(SLOWEST - 1) + (SLOWEST - 1) * APART_MS / 60_000
    assert found.pop("minutes") == pytest.approx(last, abs=0.2 / 60)  # a run starts within 0.2 s of its place
    each = INSTANCE_NODES * ACCELERATORS
    sizes = {"accelerators": 12 * each, "instance_accelerators": each, "instances": 10, "launched": 12}
    assert found == sizes
    assert "2 of 12 instances pruned" in capsys.readouterr().out


def a_seed_twice(weak: Path) -> None:
    write_instance(weak / "result_3.txt", 3, seed=7005)


def a_run_that_did_not_converge(weak: Path) -> None:
    write_instance(weak / "result_3.txt", 3, status="aborted")


def an_instance_missing(weak: Path) -> None:
    (weak / "result_3.txt").unlink()


def the_last_instance_missing(weak: Path) -> None:
    (weak / "result_11.txt").unlink()


def nodes_of_the_job(weak: Path) -> None:
    for path in weak.rglob("result_*.txt"):
        text = path.read_text()
        path.write_text(text.replace('"number_of_nodes", "value": 2', '"number_of_nodes", "value": 24'))


def a_log_both_kept_and_pruned(weak: Path) -> None:
    shutil.copyfile(weak / "result_3.txt", weak / "pruned_results" / "result_3.txt")


def two_instances_in_one_log(weak: Path) -> None:
    first, second = weak / "result_3.txt", weak / "result_11.txt"
    first.write_text(first.read_text() + second.read_text())
    second.unlink()


FAULTS: dict[Callable[[Path], None], str] = {
    an_instance_missing: "result_3.txt is missing, and pruned_results does not have it",
    the_last_instance_missing: "11 instances use 176 of the 192 accelerators in",
    a_seed_twice: "result_3.txt and result_5.txt have the same seed 7005",
    nodes_of_the_job: "instances that run at the same time use 2304 accelerators, and",
    a_run_that_did_not_converge: "result_3.txt: did not converge; an instance that counts has to",
    a_log_both_kept_and_pruned: "result_3.txt are one run: their evaluations or times agree to the millisecond",
    two_instances_in_one_log: "result_3.txt is refused: run_start occurs 2 times: each run has its own log",
}
"""What is wrong with the instances, and the message about it."""


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__)
def test_a_doctored_result_is_not_packaged(tmp_path, clone, strong, fault):
    weak = write_instances(tmp_path)
    fault(weak)
    with pytest.raises(DataError) as refused:
        run_package(settings_of(tmp_path, strong, weak), clone)
    (_, *messages) = str(refused.value).splitlines()
    assert len(messages) == 1
    assert FAULTS[fault] in messages[0]
    assert not (tmp_path / "out" / "acme").exists()


@pytest.mark.slow_cases(
    "the_last_instance_missing",
    "nodes_of_the_job",
    "a_run_that_did_not_converge",
    "a_log_both_kept_and_pruned",
    "two_instances_in_one_log",
)
@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__)
def test_a_doctored_tree_is_refused_by_check(tree, fault, capsys):
    fault(tree / "results" / LARGE / "weak" / "cosmoflow")
    assert check.main([str(tree), "--ruleset", RULESET]) == 1
    assert FAULTS[fault] in capsys.readouterr().out


@pytest.mark.parametrize("change", LAYOUTS, ids=lambda change: change.__name__)
def test_results_in_wrong_folders_are_refused(tree, change, capsys):
    change(tree)
    assert check.main([str(tree), "--ruleset", RULESET]) == 1
    assert LAYOUTS[change] in capsys.readouterr().out


def test_a_throughput_alone_is_not_packaged(tmp_path, clone, strong):
    settings = settings_of(tmp_path, strong, write_instances(tmp_path))
    content = yaml.safe_load(settings.read_text())
    alone = {"systems": {LARGE: content["systems"][LARGE]}, "results": content["results"][1:]}
    settings.write_text(yaml.safe_dump(content | alone))
    with pytest.raises(DataError, match="the submission has no time to solution of cosmoflow"):
        run_package(settings, clone)


def test_open_instances_of_different_sizes_are_refused(tmp_path, capsys):
    weak = write_instances(tmp_path)
    for path in weak.rglob("result_*.txt"):
        path.write_text(path.read_text().replace('"closed"', '"open"'))
    assert summarize.main([str(weak), "--ruleset", RULESET]) == 0
    path = weak / "result_5.txt"
    path.write_text(path.read_text().replace('"number_of_nodes", "value": 2', '"number_of_nodes", "value": 4'))
    assert summarize.main([str(weak), "--ruleset", RULESET]) == 1
    assert "different numbers of accelerators: 16 in result_0.txt, 32 in result_5.txt" in capsys.readouterr().out
