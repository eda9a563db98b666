"""Submission trees that MLCommons' own checkers accept."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from closed_logs import closed_log, drawn_convergence
from launched import (
    FACTS,
    SERIES,
    SYSTEM,
    Clone,
    begin_and_end,
    commit_all,
    entries_of,
    first_line_ms,
    log_of,
    package_arguments,
    seed_of,
    submission,
    write_doctor,
    write_entries,
    write_series,
    write_submission,
)
from offline_logs import offline_log

from common.errors import ConfigError, DataError
from common.submission.package import ROOT, main
from common.submission.settings import read_settings

Series = Callable[[str], Path]


def run_package(settings: Path, ruleset: str, output: Path, clone: Clone, *more: str) -> int:
    return main([*package_arguments(settings, output, clone, ruleset), *more])


def printed_by(module: str, *arguments: str) -> str:
    """Standard error of one of MLCommons' commands."""
    command = [sys.executable, "-m", f"mlperf_logging.{module}", *arguments, "--log_output", "/dev/null"]
    return subprocess.run(command, capture_output=True, text=True, check=False).stderr


def assert_accepted(tree: Path, benchmark: str, ruleset: str) -> None:
    """Assert that all four of MLCommons' commands accept ``tree``."""
    assert "FOUND NO ERRORS, SUCCESS" in printed_by("package_checker", str(tree), "training", ruleset)
    assert "ALL CHECKS PASSED" in printed_by("repo_checker", str(tree), "training", ruleset)
    description = tree / "systems" / f"{SYSTEM}.json"
    assert "checker passed" in printed_by("system_desc_checker", str(description), "training", ruleset)
    folder = tree / "results" / SYSTEM / benchmark
    assert "RCP test PASSED" in printed_by("rcp_checker", str(folder), "--rcp_version", ruleset)


def test_tree_has_every_file_except_hidden_ones(accepted_tree, series_of):
    names = {str(path.relative_to(accepted_tree)) for path in accepted_tree.rglob("*") if path.is_file()}
    implementations = "benchmarks/resnet/implementations"
    assert names - {f"results/{SYSTEM}/resnet/scaling.json"} == {
        "LICENSE.md",
        "README.md",
        f"systems/{SYSTEM}.json",
        f"{implementations}/mlperf_suite/train.py",
        f"{implementations}/mlperf_suite/common/model.py",
        f"{implementations}/mlperf_suite/scripts/run_and_time.sh",
        f"{implementations}/mlperf_suite/constraints.txt",
        f"{implementations}/{SYSTEM}/README-{SYSTEM}.md",
        f"{implementations}/{SYSTEM}/{SYSTEM}_mlperf_suite.json",
        f"{implementations}/{SYSTEM}/setup.sh",
        f"{implementations}/{SYSTEM}/init_datasets.sh",
        *(f"results/{SYSTEM}/resnet/result_{i}.txt" for i in range(5)),
    }
    for index in range(5):
        copied = accepted_tree / "results" / SYSTEM / "resnet" / f"result_{index}.txt"
        assert copied.read_bytes() == log_of(series_of("resnet"), index + 1).read_bytes()


def test_resnet_is_accepted_by_every_checker(accepted_tree):
    assert_accepted(accepted_tree, "resnet", "4.0.0")


def test_system_description_has_the_facts_of_nodes_and_submitter(accepted_tree):
    fields = json.loads((accepted_tree / "systems" / f"{SYSTEM}.json").read_text())
    assert {name: fields[name] for name in FACTS} == FACTS
    assert fields["number_of_nodes"] == "2"
    assert fields["cooling"] == "air"
    assert (fields["submitter"], fields["division"]) == ("acme", "closed")


def test_readme_says_how_to_launch_and_which_runs_are_the_result(accepted_tree, clone):
    text = (accepted_tree / f"benchmarks/resnet/implementations/{SYSTEM}/README-{SYSTEM}.md").read_text()
    arguments = "benchmark=resnet scale=2x8xH200 'data_dir=/data/my set'"
    assert f"sbatch -N2 --ntasks-per-node=8 scripts/run_and_time.sh {arguments}\n" in text
    assert f"scripts/run.sub {arguments}\n" in text
    assert clone.commit in text
    assert f"{SERIES} was declared with 5 experiments" in text
    assert "all 5 runs, 1 to 5" in text


def test_scripts_of_the_tree_are_executable_and_valid_shell(accepted_tree):
    for path in (accepted_tree / f"benchmarks/resnet/implementations/{SYSTEM}").glob("*.sh"):
        assert path.stat().st_mode & 0o111
        assert subprocess.run(["bash", "-n", str(path)], check=False).returncode == 0


@pytest.mark.slow
def test_two_benchmarks_one_with_four_failed_runs_and_one_with_a_window_are_accepted(tmp_path, clone, capsys):
    unet3d = [*drawn_convergence("unet3d")]
    for failed in (3, 11, 12, 30):
        unet3d[failed] = None
    write_series(tmp_path / "all" / "unet3d", "unet3d", clone.commit, unet3d)
    # the windows of 5 score 8, 10 and 11 minutes: the second is the median
    times = [8.0, 8.0, 8.0, 8.0, 14.0, 14.0, 11.0]
    resnet = write_series(tmp_path / "all" / "resnet", "resnet", clone.commit, [35.0] * 7, times.__getitem__)
    settings = write_submission(tmp_path / "acme.yaml", submission())
    assert run_package(settings, "4.0.0", tmp_path / "out", clone, str(tmp_path / "all")) == 0
    out = capsys.readouterr().out
    tree = tmp_path / "out" / "acme"
    assert_accepted(tree, "unet3d", "4.0.0")
    for index in range(5):
        copied = (tree / f"results/{SYSTEM}/resnet/result_{index}.txt").read_bytes()
        assert copied == log_of(resnet, index + 2).read_bytes()
    text = (tree / f"benchmarks/resnet/implementations/{SYSTEM}/README-{SYSTEM}.md").read_text()
    assert "runs 2 to 6 of 7: of the 3 windows of 5 consecutive runs" in text
    assert text.count("not part of the result") == 2
    assert "resnet can no longer be submitted: its last round was v4.0" in out


def test_tree_has_the_scaling_factor_of_the_package_checker(tmp_path, clone):
    results = write_series(tmp_path / "results", "resnet", clone.commit, [35.0, 35.0, 35.0, 31.0, 39.0])
    settings = write_submission(tmp_path / "acme.yaml", submission())
    assert run_package(settings, "4.0.0", tmp_path, clone, str(results)) == 0
    scaling = json.loads((tmp_path / f"acme/results/{SYSTEM}/resnet/scaling.json").read_text())
    assert scaling["scaling_factor"] == pytest.approx(35.15384615 / 35)


def foreign(tmp_path: Path) -> dict[str, object]:
    """Write ten BERT logs of another implementation, one of them not converged, and its code; return the result."""
    logs = []
    for index, reached in enumerate(drawn_convergence("bert")):
        path = tmp_path / f"run_{'abcdefghij'[index]}.log"
        path.write_text(closed_log("bert", 900 + index, reached, status="aborted" if index == 4 else "success"))
        logs.append(path.name)
    (tmp_path / "code" / ".git").mkdir(parents=True)
    for name in ("code/run.py", "code/.git/config", "README.md", "setup.sh", "init_datasets.sh"):
        (tmp_path / name).write_text("# own\n")
    return {
        "system": SYSTEM, "logs": logs, "implementation": "theirs", "code": "code", "readme": "README.md",
        "setup": "setup.sh", "init_datasets": "init_datasets.sh",
    }  # fmt: skip


@pytest.mark.slow
def test_foreign_logs_with_one_failed_run_are_accepted(tmp_path, clone):
    settings = write_submission(tmp_path / "acme.yaml", submission(foreign(tmp_path), number_of_nodes="4"))
    assert run_package(settings, "5.0.0", tmp_path / "out", clone) == 0
    tree = tmp_path / "out" / "acme"
    assert_accepted(tree, "bert", "5.0.0")
    code = tree / "benchmarks/bert/implementations"
    assert [path.name for path in (code / "theirs").iterdir()] == ["run.py"]
    assert (code / SYSTEM / f"README-{SYSTEM}.md").read_text().startswith("# own\n")
    assert json.loads((tree / f"systems/{SYSTEM}.json").read_text())["number_of_nodes"] == "4"


@pytest.mark.slow_cases("first3-5.0.0")
@pytest.mark.parametrize(
    ("first", "ruleset"),
    [
        pytest.param((1, 2, 3, 4), "5.0.0", marks=pytest.mark.slow),
        pytest.param((1, 2, 3, 4), "4.1.0", marks=pytest.mark.slow),
        ((4, 3), "4.1.0"),
        ((4, 3), "5.0.0"),
    ],
)
def test_results_that_were_scored_offline_are_accepted(first, ruleset, tmp_path, clone, capsys):
    """From v4.0 on, no run has to report all checkpoints: no published result that we know has one that does."""
    results = tmp_path / "results"
    results.mkdir()
    entries = []
    for number in range(1, 11):
        scored, minutes, seed = first if number == 1 else (4, 3), 20.0 + number / 8, seed_of(number)
        log_of(results, number).write_text(offline_log(seed, scored, first_line_ms(number), minutes))
        entries += begin_and_end("stable_diffusion", ruleset, number, 10, seed, clone.commit, "success", minutes)
    write_entries(results, entries)
    write_doctor(results)
    settings = write_submission(tmp_path / "acme.yaml", submission())
    assert run_package(settings, ruleset, tmp_path / "out", clone, str(results)) == 0
    assert_accepted(tmp_path / "out" / "acme", "stable_diffusion", ruleset)
    capsys.readouterr()


@pytest.mark.slow
def test_hpc_results_are_in_the_folder_strong(tmp_path, clone):
    results = write_series(tmp_path / "results", "cosmoflow", clone.commit)
    settings = write_submission(tmp_path / "acme.yaml", submission())
    assert run_package(settings, "3.0.0", tmp_path, clone, str(results)) == 0
    folder = tmp_path / "acme" / "results" / SYSTEM / "strong" / "cosmoflow"
    assert sorted(path.name for path in folder.glob("result_*")) == [f"result_{i}.txt" for i in range(10)]
    assert "FOUND NO ERRORS, SUCCESS" in printed_by("package_checker", str(tmp_path / "acme"), "hpc", "3.0.0")


def test_open_division_is_accepted_without_the_closed_ones_rules(tmp_path, clone):
    results = write_series(tmp_path / "results", "resnet", clone.commit, [27.0] * 5)
    for path in results.glob("*.log"):
        path.write_text(path.read_text().replace('"closed"', '"open"').replace("lars_epsilon", "own_epsilon"))
    content = submission()
    content["systems"][SYSTEM]["division"] = "open"
    settings = write_submission(tmp_path / "acme.yaml", content)
    assert run_package(settings, "4.0.0", tmp_path, clone, str(results)) == 0
    assert json.loads((tmp_path / "acme" / "systems" / f"{SYSTEM}.json").read_text())["division"] == "open"


def test_status_that_the_logs_do_not_state_and_an_empty_name_are_noted(tmp_path, clone, series_of, capsys):
    content = submission()
    content["systems"][SYSTEM] |= {"status": "Available cloud", "system_name": ""}
    settings = write_submission(tmp_path / "acme.yaml", content)
    assert run_package(settings, "4.0.0", tmp_path, clone, str(series_of("resnet"))) == 0
    out = capsys.readouterr().out
    assert f"note: submission_status is 'onprem' in 5 of 5 logs, the status in systems/{SYSTEM}.json is 'Ava" in out
    assert f"note: systems/{SYSTEM}.json: system_name is empty; fill in systems.{SYSTEM}.system_name" in out


def test_example_is_a_valid_submission():
    settings = read_settings(ROOT / "configs" / "submission" / "example.yaml")
    assert settings.submitter == "acme"
    assert settings.results[0].results == ROOT / "configs" / "submission" / "results" / "resnet"


def test_experiment_that_never_started_is_no_run_and_is_noted(tmp_path, clone):
    results = write_series(tmp_path / "results", "resnet", clone.commit)
    late = begin_and_end("resnet", "4.0.0", 6, 5, seed_of(6), clone.commit, "not started")
    log_of(results, 6).write_text("srun: error: node2 is down\n")
    write_entries(results, [*entries_of(results), *late])
    settings = write_submission(tmp_path / "acme.yaml", submission())
    assert run_package(settings, "4.0.0", tmp_path, clone, str(results)) == 0
    text = (tmp_path / f"acme/benchmarks/resnet/implementations/{SYSTEM}/README-{SYSTEM}.md").read_text()
    assert "experiment 6 ended before run_start" in text


def test_tree_that_exists_is_not_touched(tree, clone, series_of):
    settings = write_submission(tree.parent / "acme.yaml", submission())
    with pytest.raises(ConfigError, match="acme exists"):
        run_package(settings, "4.0.0", tree.parent, clone, str(series_of("resnet")))


@pytest.mark.slow
def test_rejected_tree_is_kept_only_on_request(tmp_path, clone, capsys):
    results = write_series(tmp_path / "results", "resnet", clone.commit)
    (tmp_path / "license").touch()
    with (tmp_path / "license").open("ab") as file:
        file.truncate(51 * 2**20)
    settings = write_submission(tmp_path / "acme.yaml", submission() | {"license": "license"})
    assert run_package(settings, "4.0.0", tmp_path / "out", clone, str(results)) == 1
    assert list((tmp_path / "out").iterdir()) == []
    assert run_package(settings, "4.0.0", tmp_path / "out", clone, str(results), "--keep-rejected") == 1
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["acme.rejected"]
    assert "acme/LICENSE.md: is larger than 50 MB" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("has space.py", b"x", "'has space.py' has a space in its name"),
        ("weights.bin", b"\0" * (50 * 2**20 + 1), "weights.bin has 50.0 MiB"),
    ],
    ids=["space", "size"],
)
def test_code_that_the_repository_checker_rejects_is_refused_before(tmp_path, name, content, message):
    repository = tmp_path / "clone"
    repository.mkdir()
    (repository / name).write_bytes(content)
    own = Clone(repository, commit_all(repository))
    results = write_series(tmp_path / "results", "resnet", own.commit)
    settings = write_submission(tmp_path / "acme.yaml", submission())
    with pytest.raises(ConfigError, match=message):
        run_package(settings, "4.0.0", tmp_path / "out", own, str(results))
    assert list((tmp_path / "out").iterdir()) == []


@pytest.mark.parametrize(
    ("commit", "words"),
    [
        ("0123456789" * 4, "0123456789.* cannot be exported"),
        ("--output=x", r"commit is '--output=x', expected 7 to 64"),
    ],
)
def test_commit_that_the_clone_does_not_have_is_an_error(tmp_path, clone, commit, words):
    results = write_series(tmp_path / "results", "resnet", commit)
    settings = write_submission(tmp_path / "acme.yaml", submission())
    with pytest.raises((ConfigError, DataError), match=words):
        run_package(settings, "4.0.0", tmp_path, clone, str(results))


def test_two_results_of_one_benchmark_on_one_system_are_refused(tmp_path, clone, series_of):
    twice = [Path(shutil.copytree(series_of("resnet"), tmp_path / name)) for name in ("one", "two")]
    settings = write_submission(tmp_path / "acme.yaml", submission())
    with pytest.raises(DataError, match="are both resnet on 2xH200_torch"):
        run_package(settings, "4.0.0", tmp_path / "out", clone, *map(str, twice))
