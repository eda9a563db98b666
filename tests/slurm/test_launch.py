"""Jobs of scripts/run_and_time.sh under a real Slurm, on two nodes with two ranks each."""

from __future__ import annotations

import contextlib
import json
import re
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

import psutil
import pytest

from common import cli
from common.errors import UNFIT
from common.launch.series import Series, read_runs
from common.mlperf.compliance import check_lines
from common.mlperf.parsed_log import read_log
from tests.conftest import ROOT
from tests.slurm.cluster import Cluster

pytestmark = [pytest.mark.slurm, pytest.mark.timeout(3000)]

ENTRY = str(ROOT / "scripts" / "run_and_time.sh")
SECONDS = 600  # limit for four ranks to start on two cores, to train or to end


@pytest.fixture(scope="module")
def digits(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The prepared data of the demo."""
    root = tmp_path_factory.mktemp("digits")
    raw, data = ["--raw-dir", str(root / "raw")], ["--data-dir", str(root / "data")]
    assert cli.run(["generate", "benchmark=resnet", "scale=demo", *raw]) == 0
    assert cli.run(["prepare", "benchmark=resnet", *raw, *data]) == 0
    return root / "data"


def submit(
    slurm: Cluster,
    folder: Path,
    overrides: Sequence[str],
    experiments: int = 1,
    options: Sequence[str] = (),
    python: Path = Path(sys.executable),
) -> int:
    """Submit a job of ``experiments`` runs on two nodes with two ranks each; results go to ``folder/results``."""
    return slurm.sbatch(
        "--nodes=2", "--ntasks-per-node=2", f"--output={folder}/job.out", *options, ENTRY,
        "benchmark=resnet", "scale.nodes=2", "scale.gpus_per_node=2", "device=cpu", *overrides,
        f"launch.results={folder}/results", f"launch.experiments={experiments}",
        MLPERF_SUITE_PYTHON=str(python), OMP_NUM_THREADS="1", CUDA_VISIBLE_DEVICES="",
        DROPCACHE_CMD="true",  # tests do not drop the machine's caches
    )  # fmt: skip


def endless(data: Path, *more: str) -> list[str]:
    """Arguments of a run that does not end before the test."""
    unreachable = ["benchmark.schedule.last_epoch=100000", "benchmark.targets.accuracy.value=2"]
    return ["scale=test", f"data_dir={data}", *unreachable, *more]


def the_series(folder: Path) -> Series:
    (series,) = read_runs(folder / "results")
    return series


def await_evaluation(slurm: Cluster, job: int, folder: Path, experiment: int) -> None:
    """Wait until the log of an experiment has an evaluation."""

    def has_evaluated(_: str) -> bool:
        return any("eval_accuracy" in log.read_text() for log in (folder / "results").glob(f"*_{experiment}.log"))

    slurm.wait_until(job, has_evaluated, f"no evaluation in experiment {experiment}", SECONDS)


def rank_process(slurm: Cluster, job: int, rank: int) -> psutil.Process:
    """The process that trains as a rank."""
    found = {}
    for one in slurm.processes(job):
        with contextlib.suppress(psutil.NoSuchProcess):
            if one.step is not None and one.rank == rank and "common.cli task" in " ".join(one.process.cmdline()):
                found[one.process.pid] = one.process.ppid(), one.process
    # A forked process has the command line of its parent until it executes another program.
    (process,) = [process for parent, process in found.values() if parent not in found]
    return process


def test_two_experiments_of_the_demo_end_in_two_accepted_logs(slurm: Cluster, tmp_path: Path, digits: Path) -> None:
    job = submit(slurm, tmp_path, ["scale=demo", "micro_batch=16", f"data_dir={digits}", "launch.doctor=false"], 2)
    slurm.wait(job, {"COMPLETED"}, 2 * SECONDS)
    series = the_series(tmp_path)
    assert [run.end.status for run in series.experiments if run.end] == ["success", "success"]
    seeds = [run.begin.seed for run in series.experiments]
    assert seeds[1] == seeds[0] + 1
    for run in series.experiments:
        log = read_log(run.log)
        assert check_lines([event.text for event in log.events], "training", "4.0.0") == []
        assert log.value("seed") == run.begin.seed
        assert log.value("cache_clear") is True
        text = run.log.read_text()
        assert re.search(rf"^RESULT,RESNET,{run.begin.seed},\d+,\w+,", text, re.MULTILINE)
        assert text.count("STARTING TIMING RUN AT") == 1
        assert run.begin.job == str(job)
    assert "no score" in slurm.output(job)


def test_a_time_limit_aborts_the_run_and_the_requeued_job_starts_the_next(
    slurm: Cluster, tmp_path: Path, data_of
) -> None:
    # The first experiment ends after an epoch, the second never, so that it runs when the time limit passes.
    python = tmp_path / "python"
    python.write_text(
        "#!/bin/bash\n"
        "[[ ${EXPERIMENT:-} != 1 || $* != *'common.cli task'* ]] ||"
        ' set -- "$@" benchmark.schedule.last_epoch=1\n'
        f'exec {sys.executable} "$@"\n'
    )
    python.chmod(0o755)
    overrides = endless(data_of("resnet"), "launch.doctor=false", "micro_batch=4")
    job = submit(slurm, tmp_path, overrides, 3, ["--time=60", "--signal=TERM@120"], python)
    await_evaluation(slurm, job, tmp_path, 2)
    slurm.bring_limit_forward(job, warned_seconds=120)  # time to close the run and to queue the job again
    await_evaluation(slurm, job, tmp_path, 3)
    slurm.cancel(job)
    slurm.wait(job, {"CANCELLED"}, SECONDS)
    series = the_series(tmp_path)
    first, second, third = series.experiments
    assert first.end is not None
    assert second.end is not None
    assert first.end.exit_code == 10
    assert (second.end.status, second.end.exit_code) == ("aborted", 143)
    closed = read_log(second.log)
    assert len(closed.all("run_stop")) == 1
    assert closed.status == "aborted"
    assert list((second.folder / second.begin.output_dir / "checkpoints").glob("step_*"))
    assert third.begin.seed == first.begin.seed + 2
    assert slurm.field(job, "Restarts") == "1"
    assert series.declared == 3


@pytest.mark.parametrize(
    ("signum", "more", "words"),
    [
        (signal.SIGKILL, [], "error: rank 3 on n2 was ended by a signal (Killed)"),
        (signal.SIGSTOP, ["timeout_seconds=30"], "error: rank 3 gives no sign of life"),
    ],
)
def test_a_lost_rank_ends_the_job_with_one_message(
    slurm: Cluster, tmp_path: Path, data_of, signum: signal.Signals, more: list[str], words: str
) -> None:
    job = submit(slurm, tmp_path, endless(data_of("resnet"), "launch.doctor=false", "micro_batch=4", *more), 2)
    await_evaluation(slurm, job, tmp_path, 1)
    rank_process(slurm, job, 3).send_signal(signum)
    slurm.wait(job, {"FAILED"}, SECONDS)
    errors = [line for line in slurm.output(job).splitlines() if "error:" in line]
    assert len(errors) == 1, errors
    assert words in errors[0]
    (only,) = the_series(tmp_path).experiments
    assert only.end is not None
    assert only.end.status == "aborted"
    assert read_log(only.log).status == "aborted"


def test_a_cancelled_job_closes_its_run_and_stays_cancelled(slurm: Cluster, tmp_path: Path, data_of) -> None:
    job = submit(slurm, tmp_path, endless(data_of("resnet"), "launch.doctor=false", "micro_batch=4"), 2)
    await_evaluation(slurm, job, tmp_path, 1)
    slurm.cancel(job)
    slurm.wait(job, {"CANCELLED"}, SECONDS)
    assert slurm.processes(job) == []
    assert slurm.field(job, "Restarts") == "0"
    (only,) = the_series(tmp_path).experiments
    assert only.end is not None
    assert (only.end.status, only.end.exit_code) == ("aborted", 143)
    assert read_log(only.log).status == "aborted"


def test_a_configuration_that_is_wrong_fails_the_job_before_anything_runs(
    slurm: Cluster, tmp_path: Path, data_of
) -> None:
    job = submit(slurm, tmp_path, endless(data_of("resnet"), "micro_batch=5"))
    slurm.wait(job, {"FAILED"}, SECONDS)
    assert slurm.field(job, "ExitCode") == "2:0"
    assert "choose a micro_batch that divides" in slurm.output(job)
    assert not (tmp_path / "results").exists()


def test_a_node_that_the_doctor_fails_is_named_and_nothing_runs(slurm: Cluster, tmp_path: Path, data_of) -> None:
    python = tmp_path / "python"
    python.write_text(
        f'#!/bin/bash\n[[ $SLURMD_NODENAME != n2 || -z $SLURM_STEP_ID ]] || ulimit -n 300\nexec {sys.executable} "$@"\n'
    )
    python.chmod(0o755)
    limit = "system.limits.node.open_files.min=400"
    job = submit(slurm, tmp_path, endless(data_of("resnet"), "micro_batch=4", limit), python=python)
    slurm.wait(job, {"FAILED"}, SECONDS)
    output = slurm.output(job)
    assert slurm.field(job, "ExitCode") == f"{UNFIT}:0", output
    assert re.search(r"n2.*files that may be open.* 300", output), output
    assert not re.search(r"n1.*files that may be open", output), output
    assert "nothing was run" in output
    (found,) = (tmp_path / "results").glob("*_doctor.json")
    assert json.loads(found.read_text())["nodes"].keys() == {"n1", "n2"}
    assert read_runs(tmp_path / "results") == []
