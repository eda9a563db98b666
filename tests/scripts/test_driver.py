"""The driver of a series: the commands that it composes, and series on one machine without Slurm."""

from __future__ import annotations

import contextlib
import functools
import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from omegaconf import OmegaConf

from common.config.override import override
from common.launch.series import read_runs
from common.mlperf.parsed_log import read_log
from tests.conftest import ROOT, SECONDS, Finished
from tests.scripts.driver import RESNET, RESNET_KEEPING_CACHES, SCRIPTS, bind_mounts, fake_docker, planned, script

pytestmark = pytest.mark.timeout(1200)  # a series is a dozen processes, one after the other


@contextlib.contextmanager
def one_core() -> Iterator[None]:
    """Bind child processes to one core, because other tests run at the same time."""
    cores = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(cores)})
    try:
        yield
    finally:
        os.sched_setaffinity(0, cores)


def the_training(commands: list[list[str]]) -> list[str]:
    (found,) = [words for words in commands if "train" in words]
    return found


TWO_NODES = ("benchmark=resnet", "scale=8xH100", "scale.nodes=2", "micro_batch=200", "data_dir=/data/imagenet")
ONE_NODE = ("benchmark=resnet", "scale=8xH100", "data_dir=/data/imagenet")


def test_pyxis_gets_image_mounts_and_folder_as_flags_of_srun(tmp_path: Path) -> None:
    words = the_training(
        planned(
            tmp_path, *TWO_NODES, "launch.container=pyxis", "launch.image=registry#suite:vision",
            "launch.mounts=['/lustre:/lustre:ro']", "launch.run_minutes=30",
        )
    )  # fmt: skip
    assert words[0] == "srun"
    assert {"--ntasks=16", "--ntasks-per-node=8", "--time=30", "--mpi=none"} <= set(words)
    assert "--container-image=registry#suite:vision" in words
    assert f"--container-workdir={tmp_path}" in words
    assert "--no-container-mount-home" in words
    (mounts,) = [word.partition("=")[2] for word in words if word.startswith("--container-mounts=")]
    assert mounts.split(",") == [
        f"{ROOT}:{ROOT}:ro",
        f"{tmp_path}:{tmp_path}:ro",
        "/data/imagenet:/data/imagenet:ro",
        f"{tmp_path}/results/resnet:{tmp_path}/results/resnet",
        "/lustre:/lustre:ro",
    ]


@pytest.fixture(scope="module")
def one_node(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple[list[str], Path]]:
    """A function that returns, for docker or apptainer, the planned training on one node and its folder."""
    folder = tmp_path_factory.mktemp("one_node")

    @functools.cache
    def plan(container: str) -> tuple[list[str], Path]:
        name, *settings = {
            "docker": ("run_with_docker.sh", "launch.image=suite:vision"),
            "apptainer": ("run.sub", "launch.container=apptainer", "launch.image=suite.sif"),
        }[container]
        environment = {"NCCL_DEBUG": "WARN", "PYTHONPATH": "/of/the/host"}
        return the_training(planned(folder, *ONE_NODE, *settings, script_name=name, **environment)), folder

    return plan


def test_a_dry_run_outside_of_a_job_prints_the_commands_of_the_driver(tmp_path: Path) -> None:
    on_one = planned(tmp_path, *ONE_NODE, script_name="run_and_time.sh")
    assert the_training(on_one)[1:4] == [f"{SCRIPTS}/run_and_time.sh", "train", "benchmark=resnet"]
    on_two = planned(tmp_path, *TWO_NODES, script_name="run_and_time.sh")
    assert the_training(on_two)[:2] == ["srun", "--ntasks=16"]


def test_only_the_results_are_writable_in_docker_and_nobody_is_root(one_node) -> None:
    words, folder = one_node("docker")
    writable = [mount for mount in bind_mounts(words) if "readonly" not in mount]
    assert writable == [["type=bind", f"source={folder}/results/resnet", f"target={folder}/results/resnet"]]
    assert "--read-only" in words
    user = f"{os.getuid()}:{os.getgid()}" if os.getuid() else "10000:10000"
    assert words[words.index("--user") + 1] == user
    assert words[words.index("--cap-add") + 1] == "SYS_NICE"
    assert words[words.index("--ipc") + 1] == "host"
    assert words[words.index("--gpus") + 1] == "all"
    assert words[words.index("--tmpfs") + 1].startswith("/tmp:")
    assert words[:2] == ["bash", f"{SCRIPTS}/docker_run.sh"]
    passed = {words[i + 1] for i, word in enumerate(words) if word == "--env"}
    assert {"NCCL_DEBUG", "CUDA_VISIBLE_DEVICES", "SLURM_PROCID"} <= passed
    assert {"NEXP", "LOGDIR", "CLEAR_CACHES", "DROPCACHE_CMD"} <= passed, "what the configuration reads"
    assert not {"PATH", "HOME", "SSH_AUTH_SOCK"} & passed
    assert "-t" not in words, "there may be no terminal"


def test_a_stopped_docker_container_has_minutes_to_write_a_checkpoint(one_node) -> None:
    words, _ = one_node("docker")
    assert words[words.index("--stop-timeout") + 1] == "300"


def test_an_init_process_is_started_only_where_the_program_is_process_1(tmp_path: Path, one_node) -> None:
    """Podman refuses an init beside the host's process ids."""
    words, _ = one_node("docker")
    assert "--init" in words
    assert "--pid" not in words
    settings = "launch.container=docker", "launch.image=suite:vision"
    in_job = the_training(planned(tmp_path, *ONE_NODE, *settings, SLURM_JOB_ID="7"))
    assert in_job[in_job.index("--pid") + 1] == "host"
    assert "--init" not in in_job


@pytest.mark.parametrize("below", [".", "docs"])
def test_the_repository_is_mounted_also_when_it_is_the_current_folder(below: str) -> None:
    settings = "--dry-run", "launch.image=suite:vision", *ONE_NODE
    done = script("run_with_docker.sh", *settings, cwd=ROOT / below)
    assert done.code == 0, done.errors
    commands = [shlex.split(line) for line in done.output.splitlines()]
    sources = [field for mount in bind_mounts(the_training(commands)) for field in mount if field.startswith("source=")]
    assert sources.count(f"source={ROOT}") == 1


def test_apptainer_binds_the_same_folders(one_node) -> None:
    words, _ = one_node("apptainer")
    assert words[:3] == ["apptainer", "exec", "--nv"]
    binds = [words[i + 1] for i, word in enumerate(words) if word == "--bind"]
    assert f"{ROOT}:{ROOT}:ro" in binds
    assert words[words.index("suite.sif") + 1] == "env"
    assert f"PYTHONPATH={ROOT}" in words


@pytest.mark.parametrize(("container", "image"), [("apptainer", "suite.sif"), ("docker", "suite:vision")])
def test_the_container_has_its_own_home_and_import_path(one_node, container, image) -> None:
    words, _ = one_node(container)
    after = words[words.index(image) + 1 :]
    inside = after[: after.index("bash")]
    assert f"PYTHONPATH={ROOT}" in inside
    assert [word for word in inside if word.startswith("HOME=/tmp/")]
    assert not [word for word in words if "/of/the/host" in word]


def test_caches_are_dropped_with_sudo_only_where_the_user_is_not_root(open_folder: Path) -> None:
    (open_folder / "sudo").write_text(f'#!/bin/bash\necho "$*" >{open_folder}/kernel\n')
    (open_folder / "sudo").chmod(0o755)
    (open_folder / "kernel").touch()
    (open_folder / "kernel").chmod(0o666)
    command = OmegaConf.load(ROOT / "configs" / "train.yaml").launch.drop_caches
    assert "/proc/sys/vm/drop_caches" in command
    command = command.replace("/proc/sys/vm/drop_caches", f"{open_folder}/kernel")
    for user in (os.getuid(), 65534) if not os.getuid() else (os.getuid(),):
        as_user = [] if user == os.getuid() else ["setpriv", f"--reuid={user}", "--clear-groups"]
        environment = {"PATH": f"{open_folder}:{os.environ['PATH']}"}
        subprocess.run([*as_user, "bash", "-c", command], env=environment, check=True, timeout=SECONDS)
        written = (open_folder / "kernel").read_text()
        assert written == ("-n /sbin/sysctl -q vm.drop_caches=3\n" if user else "3\n")


def test_caches_are_dropped_on_every_node_before_a_run(tmp_path: Path) -> None:
    commands = planned(tmp_path, *TWO_NODES, "launch.doctor=false", DROPCACHE_CMD="drop them")
    assert commands[0][:3] == ["srun", "--ntasks=2", "--ntasks-per-node=1"]
    assert commands[0][-1] == "sync && { drop them; }"


def test_the_doctor_and_the_hooks_come_in_their_order(tmp_path: Path) -> None:
    hooks = [f"launch.hooks.{name}=['echo {name}']" for name in ("pre_job", "pre_run", "post_run", "post_job")]
    commands = planned(tmp_path, *ONE_NODE, "launch.clear_caches=false", *hooks)
    kinds = ["doctor" if "doctor" in words else "train" if "train" in words else words[-1] for words in commands]
    assert kinds == ["echo pre_job", "doctor", "echo pre_run", "train", "echo post_run", "echo post_job"]


def test_a_folder_that_is_not_there_is_never_mounted(tmp_path: Path) -> None:
    """docker would create it with root as its owner. A program that runs what follows the image replaces docker."""
    done = script(
        "run_with_docker.sh", *ONE_NODE, "launch.image=the-image", f"data_dir={tmp_path}/nowhere", cwd=tmp_path,
        DOCKER_CALLS=f"{tmp_path}/calls", PATH=f"{fake_docker(tmp_path).parent}:{os.environ['PATH']}",
    )  # fmt: skip
    assert done.code == 2
    assert f"{tmp_path}/nowhere is not on" in done.errors


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (("launch.container=pyxis",), "needs launch.image"),
        (("launch.container=pyxis", "launch.image=x"), "works in a Slurm job only"),
        (("launch.container=podman", "launch.image=x"), "choose none, pyxis, apptainer or docker"),
        (("launch.container=",), "CONTAINER (or launch.container) is empty"),
        (TWO_NODES, "2 nodes need a Slurm job"),
        (("benchmark=nothing",), "unknown"),
    ],
)
def test_a_mistake_is_named_before_anything_runs(tmp_path: Path, arguments: tuple[str, ...], complaint: str) -> None:
    done = script("run.sub", *arguments, cwd=tmp_path)
    assert done.code == 2, done.output
    assert complaint in done.errors
    assert list(tmp_path.iterdir()) == []


@pytest.fixture(scope="module")
def series(forking: Path, tmp_path_factory: pytest.TempPathFactory, data_of) -> tuple[Finished, Path]:
    """A series of two runs on one machine, with a Python that prints invalid UTF-8, and its folder of results."""
    folder = tmp_path_factory.mktemp("series")
    python = folder / "python"
    python.write_text(
        '#!/bin/bash\n[[ $* != *"common.cli task"* ]] || printf "a\\0b\\xff\\nsrun: a remark\\n"\n'
        f'exec {forking} "$@"\n'
    )
    python.chmod(0o755)
    done = script(
        "run.sub", *RESNET, f"data_dir={data_of('resnet')}", "benchmark.schedule.last_epoch=1",
        "launch.experiments=2", "launch.hooks.pre_run=['echo hook $EXPERIMENT']",
        cwd=folder, LOGDIR=f"{folder}/logs", DROPCACHE_CMD="false", MLPERF_SUITE_PYTHON=str(python),
    )  # fmt: skip
    assert done.code == 0, done.errors
    return done, folder / "logs"


@pytest.mark.slow
def test_the_end_of_a_killed_run_says_whether_memory_was_full(tmp_path: Path, data_of) -> None:
    """A driver that believes in a kernel that has counted one kill more."""
    python = tmp_path / "python"
    python.write_text(
        f'#!/bin/bash\n[[ $* != *"common.cli task"* ]] || {{ touch {tmp_path}/killed; exit 137; }}\n'
        f'exec {sys.executable} "$@"\n'
    )
    counter = tmp_path / "bin" / "sed"
    counter.parent.mkdir()
    counter.write_text(
        f"#!/bin/bash\n[[ $* != *oom_kill* ]] || {{ [[ -e {tmp_path}/killed ]] && echo 1 || echo 0; exit; }}\n"
        f'exec {shutil.which("sed")} "$@"\n'
    )
    for program in (python, counter):
        program.chmod(0o755)
    done = script(
        "run.sub", *RESNET_KEEPING_CACHES, f"data_dir={data_of('resnet')}", cwd=tmp_path, LOGDIR=f"{tmp_path}/logs",
        MLPERF_SUITE_PYTHON=str(python), PATH=f"{counter.parent}:{os.environ['PATH']}",
    )  # fmt: skip
    assert done.code == 137
    reason = "because memory was full: oom_kill in /proc/vmstat"
    assert reason in done.errors
    (run,) = read_runs(tmp_path / "logs")[0].experiments
    assert run.end is not None
    assert reason in run.end.reason


def test_a_series_runs_on_one_machine_without_slurm(series) -> None:
    done, logs = series
    (found,) = read_runs(logs)
    assert [run.end.exit_code for run in found.experiments if run.end] == [10, 10]
    assert [line for line in done.output.splitlines() if line.startswith("hook")] == ["hook 1", "hook 2"]
    first = read_log(found.experiments[0].log)
    assert first.value("cache_clear") is False
    assert "the page cache could not be dropped" in done.errors
    text = found.experiments[0].log.read_text(errors="replace")
    for word in ("EXPERIMENT_START", "RUNANDTIME_START", "STARTING TIMING RUN AT", "RESULT,RESNET,", ":::GITCOMMITID"):
        assert text.count(word) == 1, word


def test_invalid_utf8_in_the_output_does_not_damage_a_log(series) -> None:
    (found,) = read_runs(series[1])
    for run in found.experiments:
        assert len(read_log(run.log).all("run_stop")) == 1
        assert "srun: a remark" not in run.log.read_text(errors="replace")
        assert (run.folder / f"{run.begin.output_dir}.srun").read_text() == "srun: a remark\n"


def test_a_machine_without_the_gpus_of_the_scale_is_unfit(tmp_path: Path, data_of) -> None:
    done = script(
        "run.sub", "benchmark=resnet", "scale=1xGPU", f"data_dir={data_of('resnet')}", "launch.clear_caches=false",
        "micro_batch=1", cwd=tmp_path,
    )  # fmt: skip
    assert done.code == 11
    assert "GPUs in use 0, below the limit of 1" in done.output + done.errors
    assert "doctor found the machines unfit; nothing was run" in done.errors
    assert not (tmp_path / "results" / "resnet" / "runs.jsonl").exists()


def test_a_run_that_fails_ends_the_series_with_its_exit_code(tmp_path: Path, data_of) -> None:
    data = shutil.copytree(data_of("resnet"), tmp_path / "data")
    (data / "train.rec").unlink()
    done = script(
        "run.sub", *RESNET_KEEPING_CACHES, f"data_dir={data}", "launch.experiments=2", cwd=tmp_path
    )  # fmt: skip
    assert done.code == 3
    (series,) = read_runs(tmp_path / "results" / "resnet")
    (only,) = series.experiments
    assert only.end is not None
    assert (only.end.exit_code, only.end.status) == (3, "aborted")


def test_a_failing_hook_before_the_job_ends_the_series(tmp_path: Path) -> None:
    done = script("run.sub", *RESNET, "launch.hooks.pre_job=['exit 4']", cwd=tmp_path)
    assert done.code == 2
    assert "a pre_job hook failed" in done.errors
    assert not (tmp_path / "results" / "resnet" / "runs.jsonl").exists()


def test_a_failing_hook_before_a_run_records_its_end(tmp_path: Path, data_of) -> None:
    data = f"data_dir={data_of('resnet')}"
    done = script("run.sub", *RESNET, data, "launch.hooks.pre_run=['exit 4']", cwd=tmp_path)
    assert done.code == 1
    ((run,),) = [series.experiments for series in read_runs(tmp_path / "results" / "resnet")]
    assert run.end is not None
    assert run.end.status == "not started"


@pytest.mark.parametrize(("name", "then", "code"), [("TERM", "", 143), ("INT", "", 130), ("INT", "; exit 1", 130)])
def test_after_a_signal_no_other_experiment_begins(tmp_path: Path, data_of, name: str, then: str, code: int) -> None:
    """The hook sends the signal to the driver as `kill` does, and continues, or ends too, as at Ctrl-C."""
    hook, data = f"launch.hooks.pre_run=['kill -{name} $PPID{then}']", f"data_dir={data_of('resnet')}"
    done = script("run.sub", *RESNET_KEEPING_CACHES, "launch.experiments=2", hook, data, cwd=tmp_path)
    assert done.code == code
    assert "no other begins" in done.errors
    ((run,),) = [series.experiments for series in read_runs(tmp_path / "results" / "resnet")]
    assert run.end is not None
    assert (run.end.status, run.end.exit_code) == ("not started", code)


def test_missing_docker_is_an_error(tmp_path: Path) -> None:
    bare = tmp_path / "bin"
    bare.mkdir()
    for tool in ("bash", "dirname"):
        (bare / tool).symlink_to(subprocess.check_output(["which", tool], text=True).strip())
    done = script("run_with_docker.sh", "benchmark=resnet", cwd=tmp_path, PATH=str(bare))
    assert done.code == 2
    assert "docker is not installed" in done.errors


def test_a_container_that_a_killed_driver_left_is_named_with_the_command_that_removes_it(
    tmp_path: Path, data_of
) -> None:
    fake, calls, data = fake_docker(tmp_path), tmp_path / "calls", data_of("resnet")
    text = fake.read_text().replace("|| exit 0", "|| { echo 4f2a; echo 77bc; exit 0; }")
    fake.write_text(text)
    done = script(
        "run_with_docker.sh", "launch.image=the-image", "benchmark=resnet", "scale=test", "device=cpu",
        override("data_dir", data), "launch.doctor=false", "launch.clear_caches=false", cwd=tmp_path,
        DOCKER_CALLS=str(calls), PATH=f"{fake.parent}:{os.environ['PATH']}",
    )  # fmt: skip
    assert done.code == 2
    assert "docker rm --force 4f2a 77bc" in done.errors
    assert not list(tmp_path.rglob("*.log")), "nothing has begun"


@pytest.mark.slow
def test_a_requeued_job_removes_its_own_containers_before_it_looks_for_others(tmp_path: Path, data_of) -> None:
    """Preemption may leave a container of the job, which the same job then meets again."""
    fake, left = fake_docker(tmp_path), tmp_path / "left"
    left.touch()
    fake.write_text(
        f"#!/bin/bash\n[[ $1 != rm ]] || rm {left}\n[[ $1 != ps || ! -e {left} ]] || echo 4f2a\n"
        "[[ $1 == run ]] || exit 0\n"
        'while [[ $1 != the-image ]]; do shift; done\nshift\nexec "$@"\n'
    )
    settings = [*RESNET_KEEPING_CACHES, override("data_dir", data_of("resnet")), "benchmark.schedule.last_epoch=1"]
    arguments = ["run_with_docker.sh", *settings, "launch.image=the-image"]
    path = f"{fake.parent}:{os.environ['PATH']}"
    first = script(*arguments, cwd=tmp_path, PATH=path)
    assert first.code == 2
    assert "docker rm --force 4f2a" in first.errors
    assert left.exists()
    requeued = script(*arguments, cwd=tmp_path, PATH=path, SLURM_RESTART_COUNT="1")
    assert requeued.code == 0, requeued.errors
    assert not left.exists()


def test_a_docker_series_runs_ranks_and_registry_commands_in_the_container(tmp_path: Path, data_of) -> None:
    """A program that runs what follows the image replaces docker."""
    fake, calls, data = fake_docker(tmp_path), tmp_path / "calls", data_of("resnet")
    with one_core():
        done = script(
            "run_with_docker.sh", "launch.image=the-image", *RESNET_KEEPING_CACHES, f"data_dir={data}",
            "benchmark.schedule.last_epoch=1", cwd=tmp_path, LOGDIR=f"{tmp_path}/logs", DOCKER_CALLS=str(calls),
            PATH=f"{fake.parent}:{os.environ['PATH']}",
        )  # fmt: skip
    assert done.code == 0, done.errors
    (series,) = read_runs(tmp_path / "logs")
    assert [run.end.exit_code for run in series.experiments if run.end] == [10]
    assert set(calls.read_text().split()) == {"--version", "info", "run", "ps"}
    label = f"mlperf.series={tmp_path}/logs/{series.name}"
    assert {label, f"label={label}"} <= set(Path(f"{calls}.labels").read_text().splitlines())
