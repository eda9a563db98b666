"""A Slurm cluster on this machine: one controller and three nodes, with all files below one temporary folder.

The nodes are three slurmd on one host. Each claims four processors, whatever the machine has, so that a job of three
nodes with two tasks each always fits. The daemons run as the current user, root or not, authenticate with their own
munged, and end with the process that started them.
"""

from __future__ import annotations

import contextlib
import getpass
import os
import random
import re
import secrets
import shutil
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil

from tests.conftest import ROOT

PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "scancel", "scontrol", "sinfo", "srun", "setpriv")
"""Required programs. Debian and Ubuntu have them in slurm-wlm, munge and util-linux."""

NODES = ("n1", "n2", "n3")
PROCESSORS = 4  # that each node claims
ENDED = frozenset(
    {"BOOT_FAIL", "CANCELLED", "COMPLETED", "DEADLINE", "FAILED", "NODE_FAIL", "OUT_OF_MEMORY", "PREEMPTED", "TIMEOUT"}
)
"""Final states of a job."""

START_SECONDS = 200.0
COMMAND_SECONDS = 200.0  # limit for all attempts to get an answer
STOP_SECONDS = 200.0
POLL_SECONDS = 0.1
ANSWER_SECONDS = 30  # Slurm's timeout for a message; its default of 10 is too short on a busy machine
NO_ANSWER = re.compile("timed out|Unable to contact|Connection|Zero Bytes")
"""Error messages of Slurm's commands if the controller does not answer."""

KILL_WAIT_SECONDS = 20  # from a job's SIGTERM to its SIGKILL
CREDENTIAL_SECONDS = 10  # lifetime of credentials; a requeued job waits one second longer
PORTS = range(10000, 32000)
JOBS = range(1, 10**6)
draw = random.SystemRandom().sample
STARTS = 5  # attempts, each with other ports
PORT_TAKEN = re.compile("address already in use", re.IGNORECASE)

CHECK_SECONDS = 30  # interval at which slurmctld checks time limits; compiled in

# An ordinary user's PATH does not have the folders of the daemons.
PATH = os.pathsep.join([os.environ.get("PATH", os.defpath), "/usr/sbin", "/sbin"])


def missing_programs() -> list[str]:
    """Return those of :data:`PROGRAMS` that are not installed."""
    return [program for program in PROGRAMS if shutil.which(program, path=PATH) is None]


@dataclass(frozen=True)
class JobProcess:
    """A process that belongs to a job.

    Attributes:
        step: number of the job step; None for the batch script and its children, such as srun.
        rank: SLURM_PROCID; 0 in the batch script.
        node: SLURMD_NODENAME.
    """

    process: psutil.Process
    step: int | None
    rank: int
    node: str


class Cluster:
    """A running Slurm: nodes n1 to n3, one partition, no accounting, no GPUs.

    Timing, as observed with Slurm 22.05:

    - A job starts one or two seconds after ``sbatch``.
    - Time limits are checked every 30 seconds, which no setting changes. A check sends the signal of
      ``--signal=TERM@S`` if the job has at most S + 30 seconds left, and ends a job after its limit. So a limit that
      passes between two checks ends the job without a warning.
    - A limit counts in whole minutes from the start of the job, so that a job that has run for a minute gets no
      warning. :meth:`bring_limit_forward` sets the end itself: the signal comes with the next check, and the end
      usually with the one after it.
    - The signal is followed by SIGCONT. It reaches every process of every step, also children in their own sessions,
      but neither the batch script nor srun; with ``--signal=B:`` it reaches only the batch script. The step and its
      srun continue, although the log says CANCELLED.
    - scancel and a requeue send SIGCONT and SIGTERM to all of the job, also to the batch script, and 20 seconds later
      SIGKILL. The end of the limit does the same, and tasks get SIGTERM twice.
    - A requeued job stays PENDING for 11 seconds after it has ended, until the old credentials have expired. Its
      output file is emptied unless ``--open-mode=append``.

    A job has one base state and any number of flags, and Slurm's commands print a flag if there is one
    (``job_state_string`` in ``src/common/slurm_protocol_defs.c``). So a state of :data:`ENDED` is only printed after
    all processes of the job have ended; before that it is COMPLETING. A requeue replaces the base state by PENDING at
    the same moment, so that a requeued job never has a state of ENDED. SIGNALING is printed from SIGCONT until a node
    has answered.

    Attributes:
        folder: folder of all files of the daemons; removed at the end.
        environment: variables with which Slurm's commands use this cluster.

    Raises:
        AssertionError: a daemon does not start; the message has the logs.
    """

    def __init__(self) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="mlperf-slurm-"))
        self.environment = {"SLURM_CONF": str(self.folder / "slurm.conf")}
        self._daemons: dict[str, subprocess.Popen[bytes]] = {}
        try:
            self._start()
        except BaseException:
            self.stop()
            raise

    def sbatch(self, *arguments: str, cwd: Path = ROOT, **environment: str) -> int:
        """Submit a job in the folder ``cwd``, with further environment variables; return its number.

        Raises:
            AssertionError: sbatch refuses; the message has its output.
        """
        output = self._command("sbatch", "--parsable", *arguments, cwd=cwd, **environment)
        return int(output.partition(";")[0])

    def state(self, job: int) -> str:
        """Return PENDING, RUNNING, COMPLETING, COMPLETED, FAILED, TIMEOUT, CANCELLED or another state of Slurm."""
        return self.field(job, "JobState")

    def field(self, job: int, name: str) -> str:
        """Return a field of ``scontrol show job``, such as ``ExitCode``, ``Reason``, ``Restarts`` or ``NodeList``."""
        shown = self._show(job)
        match = re.search(rf"(?:^|\s){re.escape(name)}=(.*?)(?=\s+[\w/:]+=|\n|$)", shown)
        assert match, f"job {job} has no field {name}:\n{shown}"
        return match[1]

    def output(self, job: int) -> str:
        """Return the current content of the job's output file."""
        path = Path(self.field(job, "StdOut"))
        return path.read_text(errors="replace") if path.exists() else ""

    def wait(self, job: int, states: Collection[str], seconds: float) -> str:
        """Wait until the job is in one of ``states``, and return it. Raises as :meth:`wait_until`."""
        return self.wait_until(job, lambda state: state in states, f"no state of {sorted(states)}", seconds)

    def wait_for_output(self, job: int, text: str, seconds: float) -> str:
        """Wait until the job has written ``text``, and return its state. Raises as :meth:`wait_until`."""
        return self.wait_until(job, lambda _: text in self.output(job), f"no output {text!r}", seconds)

    def wait_until(self, job: int, reached: Callable[[str], bool], complaint: str, seconds: float) -> str:
        """Wait until ``reached`` returns True for the job's state, and return the state.

        Args:
            complaint: start of the message if that does not happen.

        Raises:
            AssertionError: the job ends, or ``seconds`` pass; the message describes the job.
        """
        deadline = time.monotonic() + seconds
        while True:
            state = self.state(job)
            if reached(state):
                return state
            assert state not in ENDED, f"{complaint}: job {job} is {state}\n{self._account(job)}"
            assert time.monotonic() < deadline, f"{complaint} after {seconds:g} s\n{self._account(job)}"
            time.sleep(POLL_SECONDS)

    def requeue(self, job: int) -> None:
        """End a running job and put it back into the queue, as after a failure of a node."""
        self._command("scontrol", "requeue", str(job))

    def bring_limit_forward(self, job: int, warned_seconds: int = 5) -> None:
        """Move the time limit of a running job to ``CHECK_SECONDS + warned_seconds`` from now.

        The ``--signal`` comes within 30 seconds, if it is for ``warned_seconds`` or more before the end, and the job
        has at least this time after it.
        """
        self._command("scontrol", "update", f"JobId={job}", f"EndTime=now+{CHECK_SECONDS + warned_seconds}")

    def cancel(self, job: int) -> None:
        """Cancel a pending or running job."""
        self._command("scancel", str(job))

    def clear(self) -> None:
        """Cancel all jobs, and wait until the nodes are idle."""
        self._command("scancel", "--user", getpass.getuser())
        self._await_daemons(self._is_idle, "the nodes are not idle", time.monotonic() + STOP_SECONDS)

    def processes(self, job: int) -> list[JobProcess]:
        """Return the living processes of a job on all nodes: batch script, srun, tasks and their children."""
        found = []
        for process, variables in _environments():
            if self._is_ours(variables) and variables.get("SLURM_JOB_ID") == str(job):
                step = variables.get("SLURM_STEP_ID")
                found.append(
                    JobProcess(
                        process,
                        None if step is None else int(step),
                        int(variables.get("SLURM_PROCID", "0")),
                        variables.get("SLURMD_NODENAME", ""),
                    )
                )
        return found

    def stop(self) -> None:
        """Kill the daemons and all processes of jobs, and remove the folder. A second call does nothing.

        Raises:
            AssertionError: a process survives SIGKILL, because it is in an uninterruptible wait.
        """
        for daemon in self._daemons.values():
            daemon.kill()
            daemon.wait()
        self._daemons.clear()
        deadline = time.monotonic() + STOP_SECONDS
        while left := self._left():
            assert time.monotonic() < deadline, f"these processes survived SIGKILL: {left}"
            for process in left:
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.kill()
            psutil.wait_procs(left, timeout=1)
        shutil.rmtree(self.folder, ignore_errors=True)

    def logs(self) -> str:
        """Return the output of the daemons."""
        paths = sorted(path for path in self.folder.glob("*.log") if path.stat().st_size)
        return "\n".join(f"== {path.name}\n{path.read_text(errors='replace')}" for path in paths)

    def _start(self) -> None:
        key, munge_socket = self.folder / "munge.key", self.folder / "munge.socket"
        key.write_bytes(secrets.token_bytes(128))
        key.chmod(0o600)
        for name in ("state", *NODES):
            (self.folder / name).mkdir()
        (self.folder / "cgroup.conf").write_text(f"CgroupPlugin={self._cgroup_plugin()}\n")
        # Without --force munged refuses a folder that other users cannot enter.
        self._launch(
            "munged", "munged", "--foreground", "--force", f"--key-file={key}", f"--socket={munge_socket}",
            f"--pid-file={self.folder}/munged.pid", f"--seed-file={self.folder}/munge.seed",
        )  # fmt: skip
        deadline = time.monotonic() + START_SECONDS
        self._await_daemons(munge_socket.is_socket, "munged has no socket", deadline)
        for _ in range(STARTS - 1):
            try:
                return self._start_slurm(munge_socket, deadline)
            except AssertionError:
                if not PORT_TAKEN.search(self.logs()):
                    raise
                self._stop_slurm()
        return self._start_slurm(munge_socket, deadline)

    def _start_slurm(self, munge_socket: Path, deadline: float) -> None:
        """Start Slurm's daemons with other ports than before.

        Raises:
            AssertionError: a daemon has ended, for example because its port is taken, or is not ready in time.
        """
        (self.folder / "slurm.conf").write_text(_configuration(self.folder, munge_socket))
        self._launch("slurmctld", "slurmctld", "-D")
        for node in NODES:
            self._launch(f"slurmd on {node}", "slurmd", "-D", "-N", node)
        self._await_daemons(self._is_idle, "the nodes are not idle", deadline)

    def _stop_slurm(self) -> None:
        """Kill Slurm's daemons, and remove their files."""
        for name in [name for name in self._daemons if name.startswith("slurm")]:
            daemon = self._daemons.pop(name)
            daemon.kill()
            daemon.wait()
        for path in self.folder.glob("slurm*.*"):
            path.unlink()
        for name in ("state", *NODES):
            shutil.rmtree(self.folder / name)
            (self.folder / name).mkdir()

    def _cgroup_plugin(self) -> str:
        """Return the setting with which slurmd creates no control groups, for which version 2 would need systemd.

        Slurm can disable them since 23.02. Before, the plugin for version 1 creates none unless another plugin asks.
        """
        version = self._command("slurmd", "-V", PATH=PATH)
        match = re.search(r"(\d+)\.(\d+)", version)
        assert match, f"slurmd -V gives no version: {version}"
        return "disabled" if (int(match[1]), int(match[2])) >= (23, 2) else "cgroup/v1"

    def _launch(self, name: str, *command: str) -> None:
        # If the test session is killed, the kernel ends its daemons.
        with open(self.folder / f"{name}.log", "wb") as output:
            self._daemons[name] = subprocess.Popen(
                ["setpriv", "--pdeathsig", "KILL", *command], cwd=self.folder, env=self._variables({"PATH": PATH}),
                stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT, start_new_session=True,
            )  # fmt: skip

    def _await_daemons(self, ready: Callable[[], bool], complaint: str, deadline: float) -> None:
        while not ready():
            for name, daemon in self._daemons.items():
                assert daemon.poll() is None, f"{name} ended with exit code {daemon.returncode}\n{self.logs()}"
            assert time.monotonic() < deadline, f"{complaint}\n{self.logs()}"
            time.sleep(POLL_SECONDS)

    def _is_idle(self) -> bool:
        done = self._run("sinfo", "--noheader", "--Node", "--format=%N %t")
        return done.returncode == 0 and sorted(done.stdout.splitlines()) == [f"{node} idle" for node in NODES]

    def _account(self, job: int) -> str:
        """Return a description of a job, for a message."""
        return f"{self._show(job)}\n== its output\n{self.output(job)}"

    def _show(self, job: int) -> str:
        """Return the output of ``scontrol show job``; repeat while the controller does not answer."""
        deadline = time.monotonic() + COMMAND_SECONDS
        while True:
            with contextlib.suppress(subprocess.TimeoutExpired):
                done = self._run("scontrol", "show", "job", str(job))
                if done.returncode == 0:
                    return done.stdout.strip()
                assert NO_ANSWER.search(done.stderr), f"scontrol show job {job}: {done.stderr.strip()}"
            assert time.monotonic() < deadline, f"the controller does not answer\n{self.logs()}"

    def _command(self, *command: str, cwd: Path = ROOT, **environment: str) -> str:
        """Return the output of a command, which must succeed."""
        done = self._run(*command, cwd=cwd, **environment)
        assert done.returncode == 0, f"{' '.join(command)}: {done.stderr.strip()}"
        return done.stdout.strip()

    def _run(self, *command: str, cwd: Path = ROOT, **environment: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            command, cwd=cwd, env=self._variables(environment),
            capture_output=True, text=True, timeout=2 * ANSWER_SECONDS, check=False,
        )  # fmt: skip

    def _variables(self, further: dict[str, str]) -> dict[str, str]:
        """Return the environment of a command, without the variables of a Slurm in which these tests may run."""
        own = {name: value for name, value in os.environ.items() if not name.startswith(("SLURM", "SBATCH_", "SRUN_"))}
        return {**own, **further, **self.environment}

    def _left(self) -> list[psutil.Process]:
        """Return living processes with this cluster's configuration in their environment, and its slurmstepds.

        A slurmstepd overwrites its environment with its title; it is found by its current folder.
        """
        own = {process for process, variables in _environments() if self._is_ours(variables)}
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.NoSuchProcess, psutil.AccessDenied):
                if Path(process.cwd()).is_relative_to(self.folder):
                    own.add(process)
        return [process for process in own if process.pid != os.getpid()]

    def _is_ours(self, variables: dict[str, str]) -> bool:
        return variables.get("SLURM_CONF") == self.environment["SLURM_CONF"]


def _environments() -> Iterator[tuple[psutil.Process, dict[str, str]]]:
    """Yield all processes whose initial environment can be read, with this environment."""
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.NoSuchProcess, psutil.AccessDenied):
            if variables := process.environ():
                yield process, variables


def _configuration(folder: Path, munge_socket: Path) -> str:
    """Return slurm.conf, without task plugin and control groups, so that jobs are ordinary processes.

    Slurm's daemons cannot listen on port 0. So random ports are used, below those of outgoing connections.
    """
    host, user = socket.gethostname().partition(".")[0], getpass.getuser()
    memory = psutil.virtual_memory().total // 2**20
    controller_port, *node_ports = draw(PORTS, 1 + len(NODES))
    lines = [
        "ClusterName=tests",
        # The ports of ranks follow from the job's number, and another cluster may run on this machine.
        f"FirstJobId={random.SystemRandom().choice(JOBS)}",
        f"SlurmctldHost={host}(127.0.0.1)",
        f"SlurmctldPort={controller_port}",
        f"SlurmUser={user}",
        f"SlurmdUser={user}",
        "AuthType=auth/munge",
        f"AuthInfo=socket={munge_socket},cred_expire={CREDENTIAL_SECONDS}",
        f"StateSaveLocation={folder}/state",
        f"SlurmdSpoolDir={folder}/%n",
        f"SlurmctldPidFile={folder}/slurmctld.pid",
        f"SlurmdPidFile={folder}/slurmd.%n.pid",
        f"SlurmctldLogFile={folder}/slurmctld.full",
        f"SlurmdLogFile={folder}/slurmd.%n.full",
        "ProctrackType=proctrack/linuxproc",
        "TaskPlugin=task/none",
        "MpiDefault=none",
        "SelectType=select/cons_tres",
        "SelectTypeParameters=CR_CPU",
        "SlurmdParameters=config_overrides",
        "SchedulerType=sched/builtin",
        "SchedulerParameters=batch_sched_delay=0,sched_interval=1,sched_min_interval=0",
        "ReturnToService=2",
        "JobRequeue=1",
        f"KillWait={KILL_WAIT_SECONDS}",
        "InactiveLimit=0",
        f"MessageTimeout={ANSWER_SECONDS}",
        "BatchStartTimeout=100",  # and a batch script to start
        "OverTimeLimit=0",
        "MinJobAge=86400",  # a job stays visible when it is over
    ]
    lines += [
        f"NodeName={node} NodeHostname={host} NodeAddr=127.0.0.1 Port={port} CPUs={PROCESSORS} RealMemory={memory}"
        for node, port in zip(NODES, node_ports, strict=True)
    ]
    lines.append(f"PartitionName=tests Nodes={','.join(NODES)} Default=YES MaxTime=INFINITE State=UP")
    return "\n".join(lines) + "\n"
