"""Folder names with special characters of Hydra, the shell and make, in the programs that launch runs."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from common.config.override import override, parsed
from common.launch.series import read_runs
from tests.conftest import ROOT, SECONDS
from tests.scripts.driver import RESNET_KEEPING_CACHES, bind_mounts, planned, script

pytestmark = pytest.mark.timeout(1200)

NAME = "jürgen's (runs), #1 = a"
DOCKER = ("launch.container=docker", "launch.image=the-image")
PYXIS = ("launch.container=pyxis", "launch.image=the-image")
APPTAINER = ("launch.container=apptainer", "launch.image=the-image")


@pytest.mark.slow
def test_a_series_runs_in_a_folder_of_any_name(tmp_path: Path, data_of) -> None:
    folder = tmp_path / NAME
    data = shutil.copytree(data_of("resnet"), folder / "data $HOME")
    arguments = (*RESNET_KEEPING_CACHES, override("data_dir", data), "benchmark.schedule.last_epoch=1")
    done = script("run.sub", *arguments, cwd=folder)
    assert done.code == 0, done.errors
    assert list(tmp_path.iterdir()) == [folder]
    (series,) = read_runs(folder / "results" / "resnet")
    (run,) = series.experiments
    assert run.end is not None
    assert run.end.exit_code == 10, "the run ended properly, below its target"
    assert (run.folder / run.begin.output_dir / "mlperf.log").is_file()


@pytest.mark.parametrize("typed", [f"data_dir=/users/{NAME}", "assets_dir=/users/jürgen", "launch.results=/a,b"])
def test_the_message_about_a_value_without_quotes_has_the_quoted_form(tmp_path: Path, typed: str) -> None:
    done = script("run.sub", *RESNET_KEEPING_CACHES, typed, cwd=tmp_path)
    assert done.code == 2
    words = subprocess.run(
        ["bash", "-c", f"printf %s {done.errors.strip().rpartition('in bash: ')[2]}"],
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert parsed(words.stdout) == tuple(typed.split("=", 1))


def test_a_docker_container_gets_folders_of_any_name(tmp_path: Path, data_of) -> None:
    folder = tmp_path / f' {NAME}, "b:c" '
    data = shutil.copytree(data_of("resnet"), folder / "data")
    commands = script("run.sub", "--dry-run", *RESNET_KEEPING_CACHES, *DOCKER, override("data_dir", data), cwd=folder)
    assert commands.code == 0, commands.errors
    (training,) = [line for line in commands.output.splitlines() if " train " in line]
    words = subprocess.run(
        ["bash", "-c", f"printf '%s\\n' {training}"], capture_output=True, text=True, check=True
    ).stdout.splitlines()
    results = folder / "results" / "resnet"
    assert bind_mounts(words) == [
        *(["type=bind", f"source={path}", f"target={path}", "readonly"] for path in (ROOT, folder, data)),
        ["type=bind", f"source={results}", f"target={results}"],
    ]


def test_the_staging_folder_is_made_on_every_node_and_writable_in_the_container(tmp_path: Path) -> None:
    folder = Path("/local") / NAME
    nodes = ("scale.nodes=2", "micro_batch=1", override("data_dir", tmp_path / "data"))
    commands = planned(tmp_path, *RESNET_KEEPING_CACHES, *DOCKER, *nodes, override("staging_dir", folder))
    assert commands[0][:3] == ["srun", "--ntasks=2", "--ntasks-per-node=1"]
    shell = commands[0][-1].replace("mkdir", "printf '%s\\n'").replace("chown", "printf '%s\\n'")
    words = subprocess.run(["bash", "-c", shell], capture_output=True, text=True, check=True).stdout.splitlines()
    staged = folder / "mlperf-staged"
    assert words == ["-p", str(staged), *([] if os.getuid() else ["10000:10000", str(staged)])]
    (training,) = [command for command in commands if "train" in command]
    assert ["type=bind", f"source={staged}", f"target={staged}"] in bind_mounts(training)


@pytest.mark.parametrize(
    ("container", "name"),
    [(DOCKER, "a\tb"), (DOCKER, "a\nb"), (PYXIS, "a,b"), (PYXIS, "a:b"), (APPTAINER, "a,b"), (APPTAINER, "a\nb")],
)
def test_a_folder_that_a_container_cannot_mount_is_named(tmp_path: Path, container: tuple[str, ...], name: str) -> None:
    data = override("data_dir", tmp_path / name)
    done = script("run.sub", "--dry-run", *RESNET_KEEPING_CACHES, *container, data, cwd=tmp_path)
    assert done.code == 2
    assert f"{tmp_path / name} cannot be mounted" in done.errors


def test_a_mount_of_the_user_that_a_container_cannot_express_is_named(tmp_path: Path) -> None:
    data = override("data_dir", tmp_path / "data")
    mounts = "launch.mounts=['/fine:/fine:ro','/a,b:/c']"
    done = script("run.sub", "--dry-run", *RESNET_KEEPING_CACHES, *PYXIS, data, mounts, cwd=tmp_path)
    assert done.code == 2
    assert "/a,b cannot be mounted" in done.errors
    assert script("run.sub", "--dry-run", *RESNET_KEEPING_CACHES, *DOCKER, data, mounts, cwd=tmp_path).code == 0


def test_a_repository_with_a_colon_in_its_path_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a:b").symlink_to(ROOT)
    done = script("run.sub", *RESNET_KEEPING_CACHES, cwd=tmp_path, MLPERF_SUITE_ROOT=str(tmp_path / "a:b"))
    assert done.code == 2
    assert "a:b: the path of the repository has a colon" in done.errors


@pytest.mark.parametrize("image", ["suite#1", '"suite#1"', "'suite#1'"])
def test_an_image_is_the_same_with_and_without_quotes(tmp_path: Path, image: str) -> None:
    arguments = ("launch.container=apptainer", f"launch.image={image}")
    done = script("run.sub", "--dry-run", *RESNET_KEEPING_CACHES, *arguments, cwd=tmp_path)
    assert done.code == 0, done.errors
    assert " suite#1 env " in done.output


@pytest.mark.slow_cases("environment")
@pytest.mark.parametrize("given", ["argument", "environment"])
def test_make_train_takes_a_data_folder_of_any_name(tmp_path: Path, forking: Path, given: str) -> None:
    for name in ("Makefile", "pyproject.toml", "constraints.txt"):
        (tmp_path / name).symlink_to(ROOT / name)
    programs = tmp_path / ".venv" / "bin"
    programs.mkdir(parents=True)
    (programs / "python").symlink_to(forking)
    (programs / "mlperf-suite").write_text(f'#!/bin/bash\nexec {forking} -m common.cli "$@"\n')
    (programs / "mlperf-suite").chmod(0o755)
    (tmp_path / ".venv" / ".installed").touch()
    folder = tmp_path / f"{NAME} $HOME $(x)"
    setting = {"DATA": str(folder)}
    words = [f"{name}={value}" for name, value in setting.items()] if given == "argument" else []
    done = subprocess.run(
        ["make", "train", "BENCHMARK=dlrm", "SCALE=test", *words], cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1", **setting},
        capture_output=True, text=True, timeout=SECONDS, check=False,
    )  # fmt: skip
    assert "Error 10" in done.stderr, done.stderr  # the run ended properly, below its target
    assert sorted(path.name for path in folder.iterdir()) == ["dlrm-test", "dlrm-test-raw"]
    assert len(list((tmp_path / "runs" / "dlrm").glob("*/mlperf.log"))) == 1
