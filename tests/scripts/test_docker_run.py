"""The script that runs a container: limits, GPUs and users that it gives to docker and podman."""

from __future__ import annotations

import ctypes
import os
import resource
import subprocess
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest

from tests.conftest import SECONDS
from tests.scripts.driver import SCRIPTS


def without_raising(limits: Mapping[int, int]) -> Callable[[], None]:
    """Return a function for a new process that lowers limits and gives up root's right to raise them again."""
    drop_capability, sys_resource = 24, 24  # PR_CAPBSET_DROP and CAP_SYS_RESOURCE, linux/prctl.h and capability.h
    libc = ctypes.CDLL(None)

    def lower() -> None:
        libc.prctl(drop_capability, sys_resource, 0, 0, 0)
        for kind, limit in limits.items():
            resource.setrlimit(kind, (limit, limit))

    return lower


RUNTIMES = {
    "docker": ("Docker version 28.2.2, build e6534b4", "[name=seccomp name=cgroupns]"),
    "rootless docker": ("Docker version 28.2.2, build e6534b4", "[name=seccomp name=rootless]"),
    "podman": ("podman version 4.3.1", "false"),
    "rootless podman": ("podman version 4.3.1", "true"),
}
"""What ``docker --version`` and ``docker info`` print, by runtime."""


def docker_run(
    folder: Path, runtime: str, *arguments: str, preexec_fn: Callable[[], None] | None = None
) -> subprocess.CompletedProcess[str]:
    """Run docker_run.sh with a docker that prints its arguments; return the finished process."""
    fake = folder / "docker"
    version, info = RUNTIMES[runtime]
    fake.write_text(
        f'#!/bin/bash\ncase $1 in\n--version) echo "{version}" ;;\ninfo) echo "{info}" ;;\n'
        '*) printf "%s\\n" "$@" ;;\nesac\n'
    )
    fake.chmod(0o755)
    return subprocess.run(
        ["bash", SCRIPTS / "docker_run.sh", *arguments], env={**os.environ, "PATH": f"{folder}:{os.environ['PATH']}"},
        capture_output=True, text=True, check=False, timeout=SECONDS, preexec_fn=preexec_fn,
    )  # fmt: skip


def values(words: list[str], option: str) -> list[str]:
    return [words[i + 1] for i, word in enumerate(words) if word == option]


LOW = ["memlock=65536", "stack=8388608", "nofile=4096:4096"]


@pytest.mark.parametrize(
    ("runtime", "expected"),
    [
        ("docker", ["memlock=-1", "stack=67108864", "nofile=1048576:1048576"]),
        ("rootless docker", []),  # its limits are those of its daemon
        ("podman", [*LOW, "nproc=2000"]),
        ("rootless podman", [*LOW, "nproc=2000"]),
    ],
)
def test_limits_are_those_that_the_caller_may_set_unless_a_daemon_sets_them(
    tmp_path: Path, runtime: str, expected: list[str]
) -> None:
    limits = {
        resource.RLIMIT_MEMLOCK: 65536,
        resource.RLIMIT_STACK: 8388608,
        resource.RLIMIT_NOFILE: 4096,
        resource.RLIMIT_NPROC: 2000,
    }
    done = docker_run(tmp_path, runtime, "--rm", "the image", preexec_fn=without_raising(limits))
    words = done.stdout.splitlines()
    assert values(words, "--ulimit") == expected
    assert words[-2:] == ["--rm", "the image"]


def test_a_limit_below_the_callers_is_the_wanted_one(tmp_path: Path) -> None:
    """Also where the caller's soft limit, which may not be above the hard one, is higher."""
    limits = {resource.RLIMIT_NPROC: 1 << 30, resource.RLIMIT_STACK: 1 << 40}

    def set_both() -> None:
        for kind, limit in limits.items():
            _, hard = resource.getrlimit(kind)
            most = limit if hard == resource.RLIM_INFINITY else min(limit, hard)
            resource.setrlimit(kind, (most, most))

    found = values(docker_run(tmp_path, "podman", "image", preexec_fn=set_both).stdout.splitlines(), "--ulimit")
    pids = int(Path("/proc/sys/kernel/pid_max").read_text())
    for kind, name, wanted in ((resource.RLIMIT_STACK, "stack", 67108864), (resource.RLIMIT_NPROC, "nproc", pids)):
        _, hard = resource.getrlimit(kind)
        least = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
        assert f"{name}={least}" in found


@pytest.mark.parametrize(
    ("gpus", "devices", "for_docker"),
    [
        ("all", ["nvidia.com/gpu=all"], "all"),
        ("2", ["nvidia.com/gpu=0", "nvidia.com/gpu=1"], "2"),
        ("0", [], "0"),
        ("08", [f"nvidia.com/gpu={number}" for number in range(8)], "08"),
        ("device=0,3", ["nvidia.com/gpu=0", "nvidia.com/gpu=3"], '"device=0,3"'),
        ('"device=0,3"', ["nvidia.com/gpu=0", "nvidia.com/gpu=3"], '"device=0,3"'),
    ],
)
def test_podman_gets_gpus_as_devices_and_docker_as_gpus(
    tmp_path: Path, gpus: str, devices: list[str], for_docker: str
) -> None:
    words = docker_run(tmp_path, "podman", "--gpus", gpus, "--rm", "image").stdout.splitlines()
    assert values(words, "--device") == devices
    assert "--gpus" not in words
    assert "" not in words
    words = docker_run(tmp_path, "docker", "--gpus", gpus, "--rm", "image").stdout.splitlines()
    assert values(words, "--gpus") == [for_docker]


@pytest.mark.parametrize("gpus", ["capabilities=utility", "device=", "-1"])
def test_other_names_of_gpus_end_the_launch(tmp_path: Path, gpus: str) -> None:
    done = docker_run(tmp_path, "podman", "--gpus", gpus, "image")
    assert done.returncode == 2
    assert done.stderr == f"docker_run.sh: GPUs {gpus}: give all, a number, or device=0,1 (MLPERF_GPUS)\n"


@pytest.mark.parametrize(
    ("runtime", "user", "namespace"),
    [
        ("docker", "1000:1000", []),
        ("podman", "1000:1000", []),
        ("rootless podman", "1000:1000", ["keep-id"]),
        ("rootless docker", "0:0", []),  # root inside is the caller outside
    ],
)
def test_the_results_belong_to_the_caller_with_every_runtime(
    tmp_path: Path, runtime: str, user: str, namespace: list[str]
) -> None:
    words = docker_run(tmp_path, runtime, "--gpus", "0", "--user", "1000:1000", "--rm", "image").stdout.splitlines()
    assert values(words, "--user") == [user]
    assert values(words, "--userns") == namespace
