"""The cluster of these tests places tasks, reports exit codes, requeues jobs, warns and ends them."""

from __future__ import annotations

import random
import re
import signal
import socket
from pathlib import Path

import psutil
import pytest

from tests.slurm import cluster
from tests.slurm.cluster import CHECK_SECONDS, CREDENTIAL_SECONDS, PROGRAMS, Cluster, JobProcess

pytestmark = [pytest.mark.slurm, pytest.mark.timeout(900)]

TWO_BY_TWO = ("--nodes=2", "--ntasks-per-node=2")
SECONDS = 200  # limit for a job to start or to end, which usually takes two


def submit(slurm: Cluster, folder: Path, script: str, *arguments: str) -> int:
    """Submit a batch script with these lines, whose output goes to a file in ``folder``."""
    path = folder / "job.sh"
    path.write_text(f"#!/bin/bash\n{script}\n")
    return slurm.sbatch(f"--output={folder}/job.out", *arguments, str(path), cwd=folder)


def asleep(slurm: Cluster, job: int) -> list[JobProcess]:
    """Return the processes of a job that run ``sleep``."""
    return [one for one in slurm.processes(job) if is_alive(one.process) and one.process.name() == "sleep"]


def await_four_asleep(slurm: Cluster, job: int) -> list[JobProcess]:
    """Wait until four processes of a job run ``sleep``."""
    slurm.wait_until(job, lambda _: len(asleep(slurm, job)) == 4, "no four processes that sleep", SECONDS)
    return asleep(slurm, job)


def is_alive(process: psutil.Process) -> bool:
    """Return whether a process runs or is stopped, and is not a zombie."""
    try:
        return process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def test_programs_that_are_not_installed_are_named(tmp_path, monkeypatch):
    for program in (tmp_path / name for name in PROGRAMS if name not in ("slurmd", "srun")):
        program.touch(mode=0o755)
    monkeypatch.setattr(cluster, "PATH", str(tmp_path))
    assert cluster.missing_programs() == ["slurmd", "srun"]


@pytest.mark.parametrize("taken", [0, 1, 3], ids=["the controller's", "the first node's", "the last node's"])
def test_daemons_whose_port_is_taken_start_again_with_others(taken, slurm, monkeypatch):
    draws = [[10_001, 10_002, 10_003, 10_004]]
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        draws[0][taken] = other.getsockname()[1]
        chosen = random.SystemRandom()
        monkeypatch.setattr(cluster, "draw", lambda *args: draws.pop() if draws else chosen.sample(*args))
        started = Cluster()
        started.stop()
    assert not draws


def test_four_tasks_run_on_two_nodes(slurm, tmp_path):
    script = """srun bash -c 'echo "rank $SLURM_PROCID on $SLURMD_NODENAME"'"""
    job = submit(slurm, tmp_path, script, *TWO_BY_TWO)
    slurm.wait(job, {"COMPLETED"}, SECONDS)
    assert sorted(slurm.output(job).splitlines()) == [
        "rank 0 on n1",
        "rank 1 on n1",
        "rank 2 on n2",
        "rank 3 on n2",
    ]


def test_a_variable_given_to_sbatch_reaches_the_tasks(slurm, tmp_path):
    path = tmp_path / "job.sh"
    path.write_text("#!/bin/bash\nsrun printenv A_SETTING\n")
    job = slurm.sbatch(f"--output={tmp_path}/job.out", str(path), A_SETTING="its value")
    slurm.wait(job, {"COMPLETED"}, SECONDS)
    assert slurm.output(job) == "its value\n"


def test_the_exit_code_of_a_job_is_seen(slurm, tmp_path):
    job = submit(slurm, tmp_path, "exit 7")
    slurm.wait(job, {"FAILED"}, SECONDS)
    assert slurm.field(job, "ExitCode") == "7:0"


def test_a_refusal_of_sbatch_is_an_assertion_with_its_message(slurm, tmp_path):
    with pytest.raises(AssertionError, match="Node count specification invalid"):
        submit(slurm, tmp_path, "true", "--nodes=0")


def test_waiting_for_a_state_that_cannot_come_fails_at_once(slurm, tmp_path):
    job = submit(slurm, tmp_path, "echo its last words; exit 1")
    with pytest.raises(AssertionError, match=r"(?s)is FAILED.*its last words"):
        slurm.wait(job, {"COMPLETED"}, SECONDS)


def test_a_cancelled_job_ends(slurm, tmp_path):
    job = submit(slurm, tmp_path, "srun sleep 1000")
    slurm.wait(job, {"RUNNING"}, SECONDS)
    slurm.cancel(job)
    assert slurm.wait(job, {"CANCELLED"}, SECONDS) == "CANCELLED"


def test_the_processes_of_a_job_are_found_with_rank_and_node(slurm, tmp_path):
    job = submit(slurm, tmp_path, "srun sleep 1000\ntrue", *TWO_BY_TWO)
    sleeping = sorted((one.rank, one.node, one.step) for one in await_four_asleep(slurm, job))
    launchers = {(one.node, one.step) for one in slurm.processes(job) if one.process.name() == "srun"}
    slurm.cancel(job)
    slurm.wait(job, {"CANCELLED"}, SECONDS)
    assert sleeping == [(0, "n1", 0), (1, "n1", 0), (2, "n2", 0), (3, "n2", 0)]
    assert launchers == {("n1", None)}
    assert slurm.processes(job) == []


def test_a_requeued_job_runs_again(slurm, tmp_path):
    script = 'echo "restart ${SLURM_RESTART_COUNT:-0}"\n[ -n "$SLURM_RESTART_COUNT" ] || sleep 1000'
    job = submit(slurm, tmp_path, script, "--open-mode=append")
    slurm.wait_for_output(job, "restart 0", SECONDS)
    slurm.requeue(job)
    slurm.wait(job, {"COMPLETED"}, SECONDS + CREDENTIAL_SECONDS)
    assert re.findall("restart .*", slurm.output(job)) == ["restart 0", "restart 1"]


def test_a_job_near_its_limit_is_warned_and_then_ended(slurm, tmp_path):
    # A task that outlives the warning counts the signals that it gets.
    task = tmp_path / "task.py"
    task.write_text(
        "import os, signal\n"
        "rank = os.environ['SLURM_PROCID']\n"
        "signal.signal(signal.SIGTERM, lambda *_: print(f'rank {rank} was warned', flush=True))\n"
        "print(f'rank {rank} runs', flush=True)\n"
        "while True:\n"
        "    signal.pause()\n"
    )
    job = submit(slurm, tmp_path, f"srun python3 {task}", *TWO_BY_TWO, "--time=60", "--signal=TERM@10")
    for rank in range(4):
        slurm.wait_for_output(job, f"rank {rank} runs", SECONDS)
    slurm.bring_limit_forward(job)
    for rank in range(4):
        slurm.wait_for_output(job, f"rank {rank} was warned", CHECK_SECONDS + SECONDS)
    assert slurm.state(job) in ("RUNNING", "SIGNALING"), "the warning came with the end"
    assert slurm.wait(job, {"TIMEOUT"}, 2 * CHECK_SECONDS + SECONDS) == "TIMEOUT"


def test_nothing_outlives_the_cluster(slurm, tmp_path):
    other = Cluster()
    try:
        job = submit(other, tmp_path, "srun sleep 1000\ntrue", *TWO_BY_TWO)
        sleeping = [one.process for one in await_four_asleep(other, job)]
        of_job = [one.process for one in other.processes(job)]
        sleeping[0].send_signal(signal.SIGSTOP)
        # A slurmstepd is the parent of what its node runs for the job.
        stepds = [parent for process in of_job if (parent := process.parent()) and "slurmstepd" in parent.name()]
    finally:
        other.stop()
    assert len(sleeping) == 4
    assert stepds
    assert [process for process in (*of_job, *stepds) if is_alive(process)] == []
    assert not other.folder.exists()
