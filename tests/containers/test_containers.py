"""An image of the suite that is built here, and runs of the launcher in its containers."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from common import cli
from common.launch.series import read_runs
from common.mlperf.parsed_log import read_log
from tests.conftest import ROOT
from tests.containers.engine import SECONDS, Built, Engine
from tests.slurm.cluster import Cluster, missing_programs

pytestmark = [pytest.mark.container, pytest.mark.timeout(4000)]  # the first test builds the image

DEMO = "dlrm_dcnv2"
NO_GPU = {"MLPERF_GPUS": "none", "DROPCACHE_CMD": "true", "OMP_NUM_THREADS": "1"}
"""Environment of the launcher; tests do not drop the machine's caches."""

ENDLESS = [
    "benchmark=resnet", "scale=test", "device=cpu", "benchmark.schedule.last_epoch=100000",
    "benchmark.targets.accuracy.value=2", "launch.doctor=false",
]  # fmt: skip


def prepared(benchmark: str, scale: str, folder: Path) -> Path:
    raw, data = ["--raw-dir", str(folder / "raw")], ["--data-dir", str(folder / "data")]
    assert cli.run(["generate", f"benchmark={benchmark}", f"scale={scale}", *raw]) == 0
    assert cli.run(["prepare", f"benchmark={benchmark}", *raw, *data]) == 0
    return folder / "data"


@contextlib.contextmanager
def launched(engine: Engine, image: Built, folder: Path, *overrides: str) -> Iterator[subprocess.Popen[str]]:
    """Start a series with scripts/run_with_docker.sh, and kill it and its containers at the end."""
    settings = [f"launch.image={image.name}", f"launch.results={folder}/results", *overrides]
    driver = subprocess.Popen(
        ["bash", "scripts/run_with_docker.sh", *settings],
        cwd=ROOT, env=engine.variables(NO_GPU), stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT, text=True, start_new_session=True,
    )  # fmt: skip
    try:
        yield driver
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(driver.pid, signal.SIGKILL)
        driver.wait()
        engine.docker("rm", "--all", "--force", "--time", "0")


def await_evaluation(folder: Path, driver: subprocess.Popen[str]) -> Path:
    """Wait until a run has logged an evaluation; return its log."""
    deadline = time.monotonic() + SECONDS
    while time.monotonic() < deadline:
        for log in (folder / "results").glob("*_1.log"):
            if "eval_accuracy" in log.read_text(errors="replace"):
                return log
        assert driver.poll() is None, driver.communicate()[0]
        time.sleep(0.2)
    raise AssertionError("no evaluation")


def test_the_build_keeps_every_instruction(engine: Engine, image: Built) -> None:
    """Podman's own format of images has neither SHELL nor HEALTHCHECK."""
    facts = engine.inspect(image.name)
    commit = subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=True)
    assert "not supported" not in image.log
    assert facts["Healthcheck"]["Test"] == ["CMD", "mlperf-suite", "list"]
    assert int(facts["User"]) > 0
    assert facts["Labels"]["org.opencontainers.image.revision"] == commit.stdout.strip()
    assert f"MLPERF_SUITE_COMMIT={commit.stdout.strip()}" in facts["Config"]["Env"]
    assert "packages have the right versions" in image.log


def test_the_suite_runs_as_any_user_without_network_on_a_read_only_root(containers: Engine, image: Built) -> None:
    alone = ["--read-only", "--tmpfs", "/tmp", "--network", "none", "--user", "4321:4321", "--env", "HOME=/tmp"]
    done = containers.run(image.name, ["mlperf-suite", "list"], alone)
    assert done.returncode == 0, done.stderr
    assert DEMO in done.stdout
    denied = containers.run(image.name, ["touch", "/opt/mine"], alone)
    assert "Read-only file system" in denied.stderr


def test_without_a_user_nothing_but_results_and_home_is_writable(containers: Engine, image: Built) -> None:
    program = "id -u; touch /results/a ~/a && ! touch /opt/a /usr/a /workspace/a"
    done = containers.run(image.name, ["bash", "-c", program])
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["10000"]
    assert done.stderr.count("Permission denied") == 3


def test_a_demo_reaches_its_target_inside(engine: Engine, image: Built, open_folder: Path, say) -> None:
    data = prepared(DEMO, "demo", open_folder)
    settings = [f"benchmark={DEMO}", "scale=demo", "device=cpu", "seed=1", f"data_dir={data}"]
    if engine.isolation:
        program = ["env", "OMP_NUM_THREADS=1", "mlperf-suite", "train", *settings, "output_dir=/results/demo"]
        done = engine.run(image.name, program, ["--volume", f"{data}:{data}:ro"])
        output, code = done.stdout + done.stderr, done.returncode
    else:
        with launched(engine, image, open_folder, *settings) as driver:
            output, code = driver.communicate(timeout=SECONDS)[0], driver.returncode
        (series,) = read_runs(open_folder / "results")
        (run,) = series.experiments
        assert run.end is not None
        assert run.end.status == "success"
        assert read_log(run.log).status == "success"
    assert code == 0, output
    (status,) = re.findall(r"^status .*", output, re.MULTILINE)
    (verdict,) = re.findall(r"^verdict .*", output, re.MULTILINE)
    say(f"{DEMO}'s demo in the image: {' '.join(status.split())}, {' '.join(verdict.split())}")
    assert "target reached" in status


def test_docker_stop_leaves_a_checkpoint_and_a_closed_log(containers: Engine, image: Built, open_folder: Path) -> None:
    data = prepared("resnet", "test", open_folder)
    with launched(containers, image, open_folder, *ENDLESS, f"data_dir={data}") as driver:
        log = await_evaluation(open_folder, driver)
        (running,) = containers.docker("ps", "--quiet", "--filter", "label=mlperf.job").split()
        containers.docker("stop", running)
        output = driver.communicate(timeout=SECONDS)[0]
    assert driver.returncode == 143, output
    assert read_log(log).status == "aborted"
    (run,) = read_runs(open_folder / "results")[0].experiments
    assert list((run.folder / run.begin.output_dir / "checkpoints").glob("step_*"))


@pytest.mark.slow_cases("driver and its children")
@pytest.mark.parametrize("kill", [os.kill, os.killpg], ids=["driver", "driver and its children"])
def test_a_container_whose_driver_was_killed_blocks_the_next(
    containers: Engine, image: Built, open_folder: Path, kill: Callable[[int, int], None]
) -> None:
    data = prepared("resnet", "test", open_folder)
    with launched(containers, image, open_folder, *ENDLESS, f"data_dir={data}") as driver:
        await_evaluation(open_folder, driver)
        (series,) = read_runs(open_folder / "results")
        kill(driver.pid, signal.SIGKILL)
        (running,) = containers.docker("ps", "--quiet", "--filter", "label=mlperf.job").split()
        with launched(
            containers, image, open_folder, *ENDLESS, f"data_dir={data}", f"launch.series={series.name}"
        ) as second:
            output = second.communicate(timeout=SECONDS)[0]
    assert second.returncode == 2, output
    assert f"docker rm --force {running}" in output


def test_a_rank_that_the_kernel_kills_for_its_memory_is_named_with_the_limit(containers: Engine, image: Built) -> None:
    program = (
        "from common.distributed.launcher import relaunch\n"
        "import sys\n"
        "code = 'x = bytearray(1 << 30); x[:] = bytes([1]) * (1 << 30)'\n"
        "sys.exit(relaunch(1, ['-c', code], command=[sys.executable]))\n"
    )
    done = containers.run(image.name, ["python3", "-c", program], ["--memory", "900m", "--memory-swap", "900m"])
    assert done.returncode == 137, done.stderr
    assert re.search(
        r"rank 0 was killed by SIGKILL; the kernel killed a process because memory was full: oom_kill in "
        r"/sys/fs/cgroup/\S+; /sys/fs/cgroup/\S* may use 0\.9 GB",
        done.stderr,
    )


def test_two_containers_train_together_under_slurm(containers: Engine, image: Built, open_folder: Path) -> None:
    if missing := missing_programs():
        (pytest.fail if os.environ.get("CI") else pytest.skip)(f"not installed: {', '.join(missing)}")
    data = prepared("resnet", "test", open_folder)
    cluster = Cluster()
    try:
        job = cluster.sbatch(
            "--nodes=2", "--ntasks-per-node=1", f"--output={open_folder}/job.out", f"{ROOT}/scripts/run_and_time.sh",
            "benchmark=resnet", "scale=test", "scale.nodes=2", "scale.gpus_per_node=1", "device=cpu", "micro_batch=8",
            "benchmark.schedule.last_epoch=2", f"data_dir={data}", f"launch.results={open_folder}/results",
            "launch.container=docker", f"launch.image={image.name}", "launch.doctor=false",
            **containers.environment, **NO_GPU,
        )  # fmt: skip
        cluster.wait(job, {"COMPLETED", "FAILED"}, SECONDS)
        output = cluster.output(job)
    finally:
        cluster.stop()
        containers.docker("rm", "--all", "--force", "--time", "0")
    series = read_runs(open_folder / "results")
    assert series, output
    (run,) = series[0].experiments
    assert run.end is not None
    assert run.end.exit_code in (0, 10), output
    assert run.begin.scale == "2x1"
    assert len(read_log(run.log).all("eval_stop")) > 0
