"""The life of a series as the driver asks for it: open, begin, end."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from common import cli
from common.config.composition import compose
from common.config.override import override
from common.doctor.limits import parse_limits
from common.errors import FULL_DISK, ConfigError, DataError
from common.launch import experiment
from common.launch.experiment import assignments, begin, configuration_hash, end, find_source, open_series, series_name
from common.launch.launch_config import LaunchConfig
from common.launch.series import append, launch_command, read_runs
from tests import toy
from tests.conftest import ROOT

RUN_START = {"event_type": "INTERVAL_START", "key": "run_start", "value": None, "metadata": {"file": "a", "lineno": 1}}


@pytest.fixture(autouse=True)
def asked_for_data(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """The folders that were looked at; all hold the data that they should."""
    asked: list[Path] = []
    monkeypatch.setattr(experiment, "require_prepared", lambda run, session: asked.append(session.data_dir))
    return asked


def arguments(results: Path, *more: str) -> list[str]:
    return ["benchmark=resnet", "scale=test", f"launch.results={results}", "launch.experiments=2", *more]


def next_ones(
    results: Path, name: str = "s", *more: str, job: str | None = None
) -> list[dict[str, str | int | Sequence[str]]]:
    overrides = arguments(results, *more)
    tree = compose(overrides)
    environment = {"SLURM_JOB_ID": job} if job else {}
    return begin(tree, LaunchConfig.load(tree), name, overrides, environment, cli.admitted)


def next_one(
    results: Path, name: str = "s", *more: str, job: str | None = None
) -> dict[str, str | int | Sequence[str]]:
    (only,) = next_ones(results, name, *more, job=job)
    return only


def finish(results: Path, number: int, code: int = 0, name: str = "s", errors: Path | None = None) -> None:
    end(LaunchConfig.load(compose(arguments(results))), name, number, code, errors)


def start_the_clock(results: Path, number: int) -> Path:
    log = results / f"s_{number}.log"
    log.write_text(":::MLLOG " + json.dumps({"namespace": "", "time_ms": 1_700_000_000_000, **RUN_START}) + "\n")
    return log


def test_seeds_follow_the_first_which_is_drawn(tmp_path):
    first = next_one(tmp_path)
    start_the_clock(tmp_path, 1)
    finish(tmp_path, 1)
    second = next_one(tmp_path)
    assert isinstance(first["seed"], int)
    assert second["seed"] == first["seed"] + 1
    assert next_one(tmp_path / "other")["seed"] not in (first["seed"], second["seed"])


def test_a_series_may_begin_with_the_seed_0(tmp_path):
    assert next_one(tmp_path, "s", "seed=0")["seed"] == 0
    start_the_clock(tmp_path, 1)
    finish(tmp_path, 1)
    assert next_one(tmp_path, "s", "seed=0")["seed"] == 1
    assert [run.begin.seed for run in read_runs(tmp_path)[0].experiments] == [0, 1]


def test_a_complete_series_has_no_next_experiment_and_needs_no_data(tmp_path, asked_for_data):
    for number in (1, 2):
        next_one(tmp_path)
        start_the_clock(tmp_path, number)
        finish(tmp_path, number)
    assert asked_for_data == [Path("data/resnet")] * 2
    assert next_ones(tmp_path) == []
    assert len(asked_for_data) == 2


def test_an_experiment_without_run_start_is_replaced(tmp_path):
    next_one(tmp_path)
    finish(tmp_path, 1, code=2)
    for number in (2, 3):
        assert next_one(tmp_path)["experiment"] == number
        start_the_clock(tmp_path, number)
        finish(tmp_path, number)
    assert next_ones(tmp_path) == []


def test_a_run_that_was_cut_off_is_closed_as_aborted(tmp_path):
    next_one(tmp_path)
    log = start_the_clock(tmp_path, 1)
    finish(tmp_path, 1, code=137)
    last = json.loads(log.read_text().splitlines()[-1].removeprefix(":::MLLOG "))
    assert (last["key"], last["metadata"]["status"]) == ("run_stop", "aborted")
    ended = read_runs(tmp_path)[0].experiments[0].end
    assert (ended.status, ended.exit_code) == ("aborted", 137)
    assert ended.minutes is not None


def test_an_experiment_without_an_end_is_closed_before_the_next(tmp_path):
    next_one(tmp_path)
    log = start_the_clock(tmp_path, 1)
    assert next_one(tmp_path)["experiment"] == 2
    assert '"status": "aborted"' in log.read_text()
    ended = read_runs(tmp_path)[0].experiments[0].end
    assert (ended.status, ended.exit_code) == ("aborted", None)


def test_a_log_is_never_overwritten(tmp_path):
    (tmp_path / "s_1.log").write_text("precious")
    with pytest.raises(ConfigError, match="never overwrites"):
        next_one(tmp_path)
    assert (tmp_path / "s_1.log").read_text() == "precious"
    assert read_runs(tmp_path) == []


def test_a_series_has_one_configuration(tmp_path):
    next_one(tmp_path)
    with pytest.raises(ConfigError, match="a series has one configuration"):
        next_one(tmp_path, "s", "hparams.base_learning_rate=0.5")


@pytest.mark.parametrize(
    ("change", "same"),
    [
        ("seed=5", True), ("data_dir=/elsewhere", True), ("launch.experiments=9", True), ("tensorboard=true", True),
        ("hparams.momentum=0.8", False), ("precision=bf16", False), ("micro_batch=16", False), ("ruleset=3.1.0", False),
        ("submission.org=acme", False), ("system.network.sharp=true", False), ("staging_dir=/local", False),
    ],
)  # fmt: skip
def test_the_hash_covers_all_configuration_that_influences_training(tmp_path, change, same):
    before = configuration_hash(compose(arguments(tmp_path)))
    assert (configuration_hash(compose(arguments(tmp_path, change))) == before) is same


def test_two_staging_folders_are_one_configuration(tmp_path):
    first, second = (configuration_hash(compose(arguments(tmp_path, f"staging_dir=/disk{i}"))) for i in (1, 2))
    assert first == second


def test_a_requeued_job_continues_its_series(tmp_path):
    next_one(tmp_path, "mine", job="12")
    next_one(tmp_path, "another", job="13")
    settings = LaunchConfig.load(compose(arguments(tmp_path)))
    assert series_name(settings, {"SLURM_JOB_ID": "12", "SLURM_RESTART_COUNT": "1"}) == "mine"
    assert series_name(settings, {"SLURM_JOB_ID": "12"}) not in ("mine", "another")


def test_a_series_is_gone_on_with_by_name(tmp_path):
    next_one(tmp_path, "mine")
    settings = LaunchConfig.load(compose(arguments(tmp_path, "launch.series=mine")))
    assert series_name(settings, {}) == "mine"
    with pytest.raises(ConfigError, match="no such series"):
        series_name(replace(settings, series="other"), {})


def examined(tmp_path: Path, *overrides: str) -> Mapping[str, Any]:
    """The limits by which the nodes of a series are examined."""
    tree = compose([f"launch.results={tmp_path}", *overrides])
    limits: Mapping[str, Any] = json.loads(str(open_series(tree, LaunchConfig.load(tree), {}, cli.admitted)["system"]))
    return limits["limits"]


def test_a_series_of_a_scale_of_gpus_has_the_doctor_demand_them(tmp_path):
    of_gpus = ("benchmark=resnet", "scale=8xH200")
    found = examined(tmp_path, *of_gpus)
    assert parse_limits(found)["node.gpus"].min == 8
    plain = compose(of_gpus)["system"]["limits"]
    assert found == {**plain, "node": {**plain["node"], "gpus": {"min": 8}}}
    assert examined(tmp_path, *of_gpus, "+system.limits.node.gpus.min=9")["node"]["gpus"] == {"min": 9}
    assert "gpus" not in examined(tmp_path, *of_gpus, "device=cpu")["node"]
    assert "gpus" not in examined(tmp_path, "benchmark=resnet", "scale=demo")["node"]


def test_a_job_of_another_size_is_refused_before_anything_runs(tmp_path):
    tree = compose(arguments(tmp_path))
    with pytest.raises(ConfigError, match="the job has 2: sbatch -N1"):
        open_series(tree, LaunchConfig.load(tree), {"SLURM_JOB_NODELIST": "n[1-2]"}, cli.admitted)


def test_a_configuration_that_the_closed_division_forbids_is_refused_before_anything_runs(tmp_path):
    tree = compose(
        ["benchmark=resnet", "scale=8xH200", "benchmark.targets.accuracy.value=0.7", f"launch.results={tmp_path}"]
    )
    with pytest.raises(ConfigError, match=r"the rules fix 0\.759"):
        open_series(tree, LaunchConfig.load(tree), {}, cli.admitted)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("override", "complaint"),
    [
        ("launch.experiments=0", "at least one"),
        ("launch.container=pyxis", "needs launch.image"),
        ("launch.container=podman", "expected one of none, pyxis, apptainer, docker"),
        ("launch.mounts=[/data]", "HOST:CONTAINER"),
        ("launch.mounts=['/data:/data:rw']", "HOST:CONTAINER:ro"),
        ("launch.mounts=['data:/data']", "with absolute paths"),
        ("launch.mounts=['/data:data:ro']", "with absolute paths"),
        ("launch.run_minutes=0", "at least 1"),
    ],
)
def test_a_wrong_launch_setting_is_named(tmp_path, override, complaint):
    with pytest.raises(ConfigError, match=complaint):
        LaunchConfig.load(compose(arguments(tmp_path, override)))


@pytest.mark.parametrize("command", ["series open --", "train", "bench"])
@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("NEXP", ""), ("NEXP", "abc"), ("NEXP", "0"), ("NEXP", "2.5"), ("NEXP", "["), ("CLEAR_CACHES", ""),
        ("CLEAR_CACHES", "yes"), ("CONTAINER", ""), ("LOGDIR", ""), ("DROPCACHE_CMD", " "), ("MLPERF_DATA_DIR", ""),
        ("MLPERF_CACHE_CLEARED", "maybe"),
    ],
)  # fmt: skip
def test_a_wrong_environment_variable_is_named(command, name, value, monkeypatch, capsys):
    monkeypatch.setenv(name, value)
    assert cli.run([*command.split(), "benchmark=resnet"]) == ConfigError.exit_code
    (line,) = capsys.readouterr().err.splitlines()
    assert f"{name}={value}: the environment variable {name} is " in line
    assert "unset it, or give " in line


def test_a_command_for_data_names_the_empty_variable_of_their_folder(monkeypatch, capsys):
    monkeypatch.setenv("MLPERF_DATA_DIR", "")
    monkeypatch.setenv("NEXP", "")  # is no setting of this command
    assert cli.run(["prepare", "benchmark=resnet"]) == ConfigError.exit_code
    assert "the environment variable MLPERF_DATA_DIR is empty" in capsys.readouterr().err


def test_an_override_replaces_a_wrong_environment_variable(tmp_path, monkeypatch):
    monkeypatch.setenv("NEXP", "")
    monkeypatch.setenv("LOGDIR", "")
    assert LaunchConfig.load(compose(arguments(tmp_path))).experiments == 2


@pytest.mark.parametrize("given", [("seed=5",), ("launch.experiments=1",)], ids=["several-runs", "no-seed"])
def test_a_series_that_resumes_needs_the_seed_of_the_checkpoint(tmp_path, given):
    tree = compose(arguments(tmp_path, "resume=/a/step_00000001", *given))
    with pytest.raises(ConfigError, match=r"give seed=… .* and launch\.experiments=1"):
        open_series(tree, LaunchConfig.load(tree), {}, cli.admitted)


def test_a_linked_folder_that_git_ignores_leaves_the_source_clean(tmp_path):
    elsewhere, checkout = tmp_path / "elsewhere", tmp_path / "checkout"
    elsewhere.mkdir()
    checkout.mkdir()
    shutil.copy(ROOT / ".gitignore", checkout)
    author = ["-c", "user.name=a", "-c", "user.email=a@b"]
    for command in (["init", "-q"], ["add", ".gitignore"], [*author, "commit", "-qm", "first"]):
        subprocess.run(["git", *command], cwd=checkout, check=True)
    for name in (".venv", "build", "data", "dist", "outputs", "results", "runs", "wheelhouse"):
        (checkout / name).symlink_to(elsewhere)
    assert find_source(checkout, {}).dirty is False
    (checkout / "common").mkdir()
    (checkout / "common" / "data").symlink_to(elsewhere)  # is no folder at the top
    assert find_source(checkout, {}).dirty is True


def test_end_returns_the_number_of_remaining_experiments(tmp_path, capsys):
    for number, left in ((1, 1), (2, 0)):
        next_one(tmp_path)
        start_the_clock(tmp_path, number)
        command = ["end", "--series", "s", "--experiment", str(number), "--exit-code", "143", "--"]
        assert cli.run(["series", *command, *arguments(tmp_path)]) == 0
        assert capsys.readouterr().out.splitlines()[-1] == f"left={left}"


@pytest.mark.parametrize("code", FULL_DISK)
def test_a_full_disk_is_the_reason(tmp_path, code):
    next_one(tmp_path)
    log = start_the_clock(tmp_path, 1)
    with log.open("a") as file:
        file.write(f"mlperf-suite: SuiteError: {os.strerror(code)} (/disk/metrics_rank0.jsonl)\nENDING\n")
    finish(tmp_path, 1, 1)
    ended = read_runs(tmp_path)[0].experiments[0].end
    assert ended.reason == f"full disk: SuiteError: {os.strerror(code)} (/disk/metrics_rank0.jsonl)"


def test_the_launch_command_of_a_series_is_complete(tmp_path):
    results = tmp_path / "my results"
    given = ["benchmark=resnet", "scale=test", override("launch.results", results), "launch.experiments=2"]
    tree = compose(given)
    begin(tree, LaunchConfig.load(tree), "s", given, {"SLURM_JOB_ID": "7"}, cli.admitted)
    words = shlex.split(launch_command(read_runs(results)[0]))
    assert words[:4] == ["sbatch", "-N1", "--ntasks-per-node=1", "scripts/run_and_time.sh"]
    settings = LaunchConfig.load(compose(words[4:]))
    assert (settings.results, settings.series, settings.experiments) == (results, "s", 2)


def test_a_rank_that_srun_names_is_the_reason(tmp_path, capsys):
    next_one(tmp_path)
    start_the_clock(tmp_path, 1)
    errors = tmp_path / "errors"
    errors.write_text("srun: error: n2: task 3: Killed\n")
    finish(tmp_path, 1, 137, errors=errors)
    assert "error: rank 3 on n2 was ended by a signal" in capsys.readouterr().err
    ended = read_runs(tmp_path)[0].experiments[0].end
    assert ended.reason.startswith("rank 3 on n2")


def test_the_reason_of_the_driver_precedes_that_of_srun(tmp_path):
    next_one(tmp_path)
    start_the_clock(tmp_path, 1)
    errors = tmp_path / "errors"
    errors.write_text("srun: error: n2: task 3: Killed\n")
    end(LaunchConfig.load(compose(arguments(tmp_path))), "s", 1, 137, errors, "it took too long")
    ended = read_runs(tmp_path)[0].experiments[0].end
    assert ended.reason == "it took too long"


def test_a_step_that_srun_cannot_start_is_the_reason(tmp_path, capsys):
    next_one(tmp_path)
    errors = tmp_path / "errors"
    errors.write_text("srun: error: Unable to create step for job 7: More processors requested than permitted\n")
    finish(tmp_path, 1, 1, errors=errors)
    assert "error: srun: Unable to create step for job 7" in capsys.readouterr().err


@pytest.mark.parametrize(("text", "dropped"), [("0", False), ("1", True), ("false", False)])
def test_dropping_caches_is_switched_as_dgx_users_write_it(tmp_path, monkeypatch, text, dropped):
    monkeypatch.setenv("CLEAR_CACHES", text)
    assert LaunchConfig.load(compose(arguments(tmp_path))).clear_caches is dropped


def test_assignments_survive_a_shell():
    text = assignments({"a": "x y", "b": 3, "c": ("one $HOME", "it's")})
    assert [shlex.split(line) for line in text.splitlines()] == [["a=x y"], ["b=3"], ["c=(one $HOME", "it's)"]]


def test_a_mistake_is_one_message_and_an_exit_code(capsys):
    assert cli.run(["series", "open", "--", "benchmark=resnet", "launch.experimens=2"]) == ConfigError.exit_code
    printed = capsys.readouterr()
    assert printed.out == ""
    assert len(printed.err.splitlines()) == 1
    assert "launch.experimens" in printed.err


def test_the_end_of_an_unknown_experiment_is_refused(tmp_path):
    next_one(tmp_path)
    append(tmp_path, replace(read_runs(tmp_path)[0].experiments[0].begin, series="t"))
    with pytest.raises(Exception, match="has no experiment 4"):
        finish(tmp_path, 4)


def test_reasons_against_a_submission_are_printed_before_the_runs(tmp_path, capsys):
    environment = {"MLPERF_SUITE_COMMIT": "abc", "MLPERF_SUITE_DIRTY": "true"}
    real = ["benchmark=resnet", "scale=1xH200", f"launch.results={tmp_path}"]
    tree = compose([*real, "submission.org=acme"])
    open_series(tree, LaunchConfig.load(tree), environment, cli.admitted)
    printed = capsys.readouterr().err.splitlines()
    assert [line.partition("submitted: ")[2] for line in printed] == [
        "submission.platform is not set",
        "the source differs from its commit; commit it",
    ]
    synthetic = compose(arguments(tmp_path))
    open_series(synthetic, LaunchConfig.load(synthetic), environment, cli.admitted)
    assert capsys.readouterr().err == ""


def test_an_unfinished_experiment_of_a_live_job_is_not_closed(tmp_path):
    next_one(tmp_path, "s", job="12")
    log = start_the_clock(tmp_path, 1)
    tree = compose(arguments(tmp_path))
    with pytest.raises(ConfigError, match="job 12 is still there, with experiment 1"):
        begin(tree, LaunchConfig.load(tree), "s", [], {"SLURM_JOB_ID": "13", "MLPERF_LIVE_JOBS": "12,13"}, cli.admitted)
    assert "aborted" not in log.read_text()
    assert read_runs(tmp_path)[0].experiments[0].end is None
    environment = {"SLURM_JOB_ID": "13", "MLPERF_LIVE_JOBS": "13"}
    (begun,) = begin(tree, LaunchConfig.load(tree), "s", [], environment, cli.admitted)
    assert begun["experiment"] == 2


@pytest.mark.parametrize("live", [None, "", "unknown", "11"], ids=["not asked", "nothing", "unknown", "another job"])
def test_an_experiment_is_not_closed_if_squeue_does_not_list_this_job(tmp_path, live):
    next_one(tmp_path, "s", job="12")
    tree = compose(arguments(tmp_path))
    environment = {"SLURM_JOB_ID": "13"} | ({} if live is None else {"MLPERF_LIVE_JOBS": live})
    with pytest.raises(ConfigError, match=r"job 12 may still be there, with experiment 1.*squeue --jobs 12"):
        begin(tree, LaunchConfig.load(tree), "s", [], environment, cli.admitted)
    assert read_runs(tmp_path)[0].experiments[0].end is None


def test_a_second_end_is_refused(tmp_path):
    next_one(tmp_path)
    start_the_clock(tmp_path, 1)
    finish(tmp_path, 1)
    with pytest.raises(DataError, match=r"experiment 1 of series s ended already, at .*; nothing was written"):
        finish(tmp_path, 1, code=1)
    ended = read_runs(tmp_path)[0].experiments[0].end
    assert ended.exit_code == 0


def test_a_damaged_series_is_refused_and_another_one_continues(tmp_path):
    next_one(tmp_path, "s")
    next_one(tmp_path, "t")
    finish(tmp_path, 1, name="s")
    append(tmp_path, replace(read_runs(tmp_path)[0].experiments[0].end, exit_code=1))
    with pytest.raises(DataError, match="ends twice"):
        next_one(tmp_path, "s")
    settings = LaunchConfig.load(compose(arguments(tmp_path)))
    with pytest.raises(DataError, match="ends twice"):
        series_name(replace(settings, series="s"), {})
    assert series_name(replace(settings, series="t"), {}) == "t"
    assert next_one(tmp_path, "t")["experiment"] == 2


def offline_one(results: Path, *more: str) -> dict[str, str | int | Sequence[str]]:
    """The next experiment of a series whose checkpoints are scored."""
    with toy.known():
        overrides = [f"benchmark={toy.PICTURES}", "scale=test", f"launch.results={results}", *more]
        tree = compose([*overrides, "launch.experiments=2"])
        (only,) = begin(tree, LaunchConfig.load(tree), "s", overrides, {}, cli.admitted)
        return only


def test_the_first_run_of_a_series_has_all_its_checkpoints_scored(tmp_path):
    assert "evaluation.all=true" in offline_one(tmp_path)["own"]
    start_the_clock(tmp_path, 1)
    finish(tmp_path, 1)
    assert "evaluation.all=true" not in offline_one(tmp_path)["own"]
    assert "evaluation.all=true" not in next_one(tmp_path / "counted")["own"]


def test_a_series_leaves_no_run_to_the_command_that_scores(tmp_path):
    with pytest.raises(
        ConfigError, match=r"evaluation\.by_command=true: the runs of a series are judged when they end"
    ):
        offline_one(tmp_path, "evaluation.by_command=true")
