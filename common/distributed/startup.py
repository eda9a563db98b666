"""Start and exit of a rank: its position, device and process groups from the launcher's environment.

The variables of torchrun have precedence, then those of a Slurm job step; without either the process runs alone.
"""

from __future__ import annotations

import atexit
import contextlib
import faulthandler
import os
import re
import shutil
import signal
import subprocess
import sys
import traceback
from collections.abc import Callable, Mapping
from datetime import timedelta
from pathlib import Path
from typing import NoReturn

import torch
import torch.distributed as dist
from torch.distributed.rendezvous import rendezvous

from common.distributed import job_store
from common.distributed.environment import check_interfaces, host, integer, node_name, port
from common.distributed.launcher import follow_parent
from common.distributed.rank_info import RankInfo, Role
from common.errors import NOT_CONVERGED, ConfigError, DeviceError, RankFailure

TORCHRUN_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK")
# Step ids from 0xfffffff0 on are Slurm's internal steps: batch script, interactive shell, extern.
FIRST_RESERVED_STEP = 0xFFFFFFF0
NO_ADDRESS = "Unable to find address"
"""Gloo's error message for an interface that is down; Gloo has no exception class for this error."""
SLURM_PORTS = range(20000, 32768)
"""Ports of rank 0 in Slurm steps; Linux gives ports from 32768 on to any program that asks for none in particular."""
MOST_NODES = 2**20
"""Maximum number of entries that the short forms in Slurm's variables expand to."""
THREADS_BESIDE_A_GPU = 8
"""Most CPU threads of an operation beside a GPU: the CPU only prepares batches and copies weights.

With a thread for each of 32 cores, one of which was busy, filling a tensor of 0.5 MB took 8 ms instead of 0.02."""


def find_rank_info(environment: Mapping[str, str]) -> RankInfo:
    """Return the position of this process, from the variables that torchrun or a Slurm job step sets.

    Raises:
        ConfigError: variables are missing, are not integers, or contradict each other.
    """
    given = [name for name in TORCHRUN_VARIABLES if name in environment]
    if given:
        missing = [name for name in TORCHRUN_VARIABLES if name not in environment]
        if missing:
            raise ConfigError(
                f"the environment has {', '.join(given)} but not {', '.join(missing)}: start with torchrun, "
                f"which sets all of them, or unset {', '.join(given)}"
            )
        return _torchrun_position(environment)
    if "SLURM_STEP_ID" in environment and _slurm_number(environment, "SLURM_STEP_ID") < FIRST_RESERVED_STEP:
        return _slurm_position(environment)
    return RankInfo(rank=0, world_size=1, local_rank=0, local_world_size=1, node=0, launcher="single")


def pick_device(requested: str, local_rank: int) -> torch.device:
    """Return the device of a rank.

    Args:
        requested: ``"cpu"``, ``"cuda"``, or ``"auto"``: CUDA if a GPU is visible, else the CPU.
        local_rank: index among the visible GPUs. A Slurm task that sees a single GPU, as with ``--gpus-per-task=1``,
            uses this GPU instead.

    Raises:
        ConfigError: ``requested`` is not one of the three values.
        DeviceError: a GPU is requested, or visible with ``"auto"``, and PyTorch cannot use it.
    """
    if requested not in ("auto", "cpu", "cuda"):
        raise ConfigError(f"device={requested}: choose auto, cpu or cuda")
    if requested == "cpu":
        return torch.device("cpu")
    if torch.cuda.is_available():
        return _cuda_device(0 if _has_gpu_of_its_own(find_rank_info(os.environ)) else local_rank)
    if requested == "auto" and not gpu_visible():
        return torch.device("cpu")
    raise DeviceError(_unusable_message(os.environ.get("CUDA_VISIBLE_DEVICES") in ("", "-1")))


def gpu_visible() -> bool:
    """Return whether this machine has an NVIDIA GPU that is not hidden, without initialising CUDA."""
    return os.environ.get("CUDA_VISIBLE_DEVICES") not in ("", "-1") and _gpu_present()


def initialise(
    rank_info: RankInfo,
    device: torch.device,
    timeout_seconds: float,
    sharers: int | None = None,
    others: Mapping[str, int] | None = None,
    backend: str | None = None,
) -> None:
    """Create the process group of this rank's role and set the number of CPU threads.

    The ranks of each role form a separate world, whose default process group has no rank in common with the others. A
    role of one rank gets no process group. A second call does not join again.

    Args:
        timeout_seconds: longest wait for the other ranks.
        sharers: number of ranks that share this process's cores; None for all ranks of this machine.
        others: number of ranks of each role but ``train`` (:meth:`common.distributed.rank_info.Role.of`); None: all
            ranks train.
        backend: backend of the process group; None for NCCL on CUDA and Gloo on a CPU.

    Raises:
        ConfigError: the environment lacks the address of rank 0, or names an unknown host or network interface.
        RankFailure: the ranks did not connect within ``timeout_seconds``.
    """
    follow_parent()
    torch.set_num_threads(_threads(rank_info, sharers or rank_info.local_world_size, device))
    if device.type == "cuda":
        torch.cuda.set_device(device)
    if rank_info.world_size == 1 or job_store.joined() or dist.is_initialized():
        return
    if rank_info.launcher == "slurm":
        os.environ.update(_slurm_rendezvous(os.environ))
    address = f"{host(os.environ, 'MASTER_ADDR')}:{port(os.environ, 'MASTER_PORT')}"
    check_interfaces(os.environ, "GLOO_SOCKET_IFNAME")
    try:
        _join(rank_info, device, timedelta(seconds=timeout_seconds), others or {}, backend)
    except RuntimeError as error:
        if not isinstance(error, dist.DistError) and NO_ADDRESS not in str(error):
            raise
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise RankFailure(_not_met(rank_info, address, timeout_seconds, reason)) from error


def _not_met(rank_info: RankInfo, address: str, timeout_seconds: float, reason: str) -> str:
    """Return the message for a rank that could not connect to the other ranks at ``address``."""
    by_slurm = rank_info.launcher == "slurm" and os.environ["MASTER_PORT"] == str(_slurm_port(os.environ))
    taken = "another program may have this port" + (", which follows from the Slurm job's number" if by_slurm else "")
    remedy = "set MASTER_PORT to a free port of that machine, the same on all ranks"
    if "failed to listen" in reason:
        return f"rank 0 cannot listen on {address}, on {node_name(os.environ)}: {reason}. If {taken}: {remedy}"
    return (
        f"rank {rank_info.rank} of {rank_info.world_size} could not join the others at {address} within "
        f"{timeout_seconds:.0f} s: {reason}. Check that every rank started, that MASTER_ADDR is the machine of rank 0, "
        f"and that this port is open between the machines; {taken}: then {remedy}"
    )


def _join(
    rank_info: RankInfo, device: torch.device, timeout: timedelta, others: Mapping[str, int], backend: str | None
) -> None:
    store, _, _ = next(rendezvous("env://", rank_info.rank, rank_info.world_size, timeout=timeout))
    store.set_timeout(timeout)
    job_store.join(store, rank_info)
    role = Role.of(rank_info, others)
    if role.world_size == 1:
        return
    backend = backend or ("nccl" if device.type == "cuda" else "gloo")
    dist.init_process_group(
        backend,
        store=dist.PrefixStore(role.name, store),
        rank=role.rank,
        world_size=role.world_size,
        timeout=timeout,
        device_id=device if backend == "nccl" else None,
    )


def shutdown() -> None:
    """Leave the job: destroy the process group, if there is one, and clear the job's store."""
    if dist.is_initialized():
        dist.destroy_process_group()
    job_store.leave()


def expand_nodelist(nodelist: str) -> list[str]:
    """Return the host names in a Slurm node list such as ``"gpu[01-03,7]-ib,login"``.

    Raises:
        ConfigError: the brackets do not match or a range is invalid.
    """
    hosts: list[str] = []
    for part in _split_outside_brackets(nodelist):
        hosts.extend(_expand_part(part, nodelist))
    return hosts


def _torchrun_position(environment: Mapping[str, str]) -> RankInfo:
    rank, world_size, local_rank = (integer(environment, name) for name in TORCHRUN_VARIABLES)
    local_world_size = integer(environment, "LOCAL_WORLD_SIZE", world_size)
    node = integer(environment, "GROUP_RANK", rank // max(local_world_size, 1))
    return _checked(RankInfo(rank, world_size, local_rank, local_world_size, node, "torchrun"), "RANK")


def _slurm_position(environment: Mapping[str, str]) -> RankInfo:
    rank = integer(environment, "SLURM_PROCID")
    tasks_name = "SLURM_STEP_NUM_TASKS" if "SLURM_STEP_NUM_TASKS" in environment else "SLURM_NTASKS"
    world_size = integer(environment, tasks_name)
    local_rank = integer(environment, "SLURM_LOCALID")
    node = integer(environment, "SLURM_NODEID", 0)
    tasks_text = environment.get("SLURM_STEP_TASKS_PER_NODE")
    if tasks_text is None:
        nodes = integer(environment, "SLURM_NNODES", 1, least=1, most=MOST_NODES)
        tasks_per_node = [-(-world_size // nodes)] * nodes
    else:
        tasks_per_node = _expand_tasks(tasks_text)
        if sum(tasks_per_node) != world_size:
            raise ConfigError(
                f"SLURM_STEP_TASKS_PER_NODE={tasks_text} is {sum(tasks_per_node)} tasks but {tasks_name}={world_size}"
            )
    if not 0 <= node < len(tasks_per_node):
        raise ConfigError(f"SLURM_NODEID={node} lies outside the step's {len(tasks_per_node)} nodes")
    rank_info = RankInfo(rank, world_size, local_rank, tasks_per_node[node], node, "slurm")
    return _checked(rank_info, "SLURM_PROCID")


def _checked(rank_info: RankInfo, rank_name: str) -> RankInfo:
    if not 0 <= rank_info.rank < rank_info.world_size:
        raise ConfigError(f"{rank_name}={rank_info.rank} lies outside a job of {rank_info.world_size} ranks")
    if not 0 <= rank_info.local_rank < rank_info.local_world_size:
        raise ConfigError(
            f"local rank {rank_info.local_rank} of rank {rank_info.rank} lies outside its machine's "
            f"{rank_info.local_world_size} ranks"
        )
    if rank_info.local_world_size > rank_info.world_size:
        raise ConfigError(
            f"{rank_info.local_world_size} ranks on one machine are more than the job's {rank_info.world_size}"
        )
    if rank_info.node < 0:
        raise ConfigError(f"machine index {rank_info.node} of rank {rank_info.rank} is negative")
    return rank_info


def _expand_tasks(text: str) -> list[int]:
    """Return the number of tasks per node from Slurm's short form: ``"2(x3),1"`` is ``[2, 2, 2, 1]``."""
    counts: list[int] = []
    for part in text.split(","):
        match = re.fullmatch(r"([0-9]{1,7})(?:\(x([0-9]{1,7})\))?", part)
        if match is None or len(counts) + int(match[2] or 1) > MOST_NODES:
            raise ConfigError(f"SLURM_STEP_TASKS_PER_NODE={text!r}: cannot read {part!r}")
        counts.extend([int(match[1])] * int(match[2] or 1))
    return counts


def _split_outside_brackets(nodelist: str) -> list[str]:
    parts, depth, start = [], 0, 0
    for index, character in enumerate(nodelist):
        depth += {"[": 1, "]": -1}.get(character, 0)
        if depth not in (0, 1):
            raise ConfigError(f"Slurm node list {nodelist!r}: the brackets do not match")
        if character == "," and depth == 0:
            parts.append(nodelist[start:index])
            start = index + 1
    if depth:
        raise ConfigError(f"Slurm node list {nodelist!r}: the brackets do not match")
    return [part for part in [*parts, nodelist[start:]] if part]


def _expand_part(part: str, nodelist: str) -> list[str]:
    match = re.match(r"([^\[\]]*)\[([^\[\]]*)\]", part)
    if match is None:
        return [part]
    tails = _expand_part(part[match.end() :], nodelist) if match.end() < len(part) else [""]
    hosts: list[str] = []
    for item in match[2].split(","):
        bounds = re.fullmatch(r"([0-9]{1,18})(?:-([0-9]{1,18}))?", item)
        if bounds is None or not 0 <= int(bounds[2] or bounds[1]) - int(bounds[1]) < MOST_NODES:
            raise ConfigError(f"Slurm node list {nodelist!r}: cannot read the range {item!r}")
        width = len(bounds[1])
        for number in range(int(bounds[1]), int(bounds[2] or bounds[1]) + 1):
            hosts.extend(f"{match[1]}{number:0{width}d}{tail}" for tail in tails)
    return hosts


def _slurm_rendezvous(environment: Mapping[str, str]) -> dict[str, str]:
    """Return address and port of rank 0: the step's first host, and a port that differs between jobs and steps."""
    nodelist = environment.get("SLURM_STEP_NODELIST") or environment.get("SLURM_JOB_NODELIST", "")
    hosts = expand_nodelist(nodelist)
    if not hosts:
        raise ConfigError("neither SLURM_STEP_NODELIST nor SLURM_JOB_NODELIST is set: start the ranks with srun")
    return {
        "MASTER_ADDR": environment.get("MASTER_ADDR", hosts[0]),
        "MASTER_PORT": environment.get("MASTER_PORT", str(_slurm_port(environment))),
    }


def _slurm_port(environment: Mapping[str, str]) -> int:
    job, step = (_slurm_number(environment, name, 0) for name in ("SLURM_JOB_ID", "SLURM_STEP_ID"))
    return SLURM_PORTS[(job * 31 + step) % len(SLURM_PORTS)]


def _slurm_number(environment: Mapping[str, str], name: str, default: int | None = None) -> int:
    """Return the number of a Slurm job or step, an unsigned 32-bit integer."""
    return integer(environment, name, default, most=2**32 - 1)


def _threads(rank_info: RankInfo, sharers: int, device: torch.device) -> int:
    """Return the number of CPU threads of one operation of this rank.

    A rank that computes on the CPU has its share of the cores that this process may use, or ``OMP_NUM_THREADS`` if that
    is set. Beside a GPU it is at most half of the share. The threads of an operation wait for each other: if the reader
    or the thread that launches kernels uses one of their cores, the whole operation waits for that core.
    """
    # As in OpenMP, later numbers apply to nested parallel regions, and an invalid value is ignored.
    asked = re.match(r"\s*0*([1-9][0-9]{0,6})\s*(?:,|$)", os.environ.get("OMP_NUM_THREADS", ""))
    if device.type == "cpu" and asked is not None:
        return int(asked[1])
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    # The affinity of a bound Slurm task is already its share; SLURM_CPUS_PER_TASK is the requested share.
    if rank_info.launcher == "slurm" and (per_task := integer(os.environ, "SLURM_CPUS_PER_TASK", 0)):
        share = min(allowed, per_task)
    else:
        share = max(1, allowed // sharers)
    return share if device.type == "cpu" else max(1, min(THREADS_BESIDE_A_GPU, share // 2))


def _has_gpu_of_its_own(rank_info: RankInfo) -> bool:
    """Return whether this is one of several Slurm tasks on a machine that each see a single, different GPU.

    Slurm's binding gives the GPU of every task the number 0, so only the step's number of GPUs distinguishes this
    case from one GPU for all tasks. If Slurm does not provide this number, the function assumes different GPUs; NCCL
    then rejects a shared GPU.
    """
    if rank_info.launcher != "slurm" or rank_info.local_world_size == 1 or torch.cuda.device_count() != 1:
        return False
    gpus = integer(os.environ, "SLURM_GPUS_ON_NODE", rank_info.local_world_size)
    return gpus >= rank_info.local_world_size


def _cuda_device(index: int) -> torch.device:
    count = torch.cuda.device_count()
    if index >= count:
        raise DeviceError(
            f"local rank {index} has no GPU: PyTorch sees {count} (CUDA_VISIBLE_DEVICES="
            f"{os.environ.get('CUDA_VISIBLE_DEVICES', 'not set')}). Start at most {count} ranks on this machine"
        )
    device = torch.device("cuda", index)
    try:
        torch.ones(1, device=device).add_(1).item()
    except RuntimeError as error:
        name = torch.cuda.get_device_name(device)
        raise DeviceError(
            f"{name} (cuda:{index}) is present but PyTorch {torch.__version__} cannot run on it: "
            f"{str(error).splitlines()[0]}. The build has kernels for {', '.join(torch.cuda.get_arch_list())}. "
            "Install a build for this GPU; device=cpu runs beside it"
        ) from error
    return device


def _gpu_present() -> bool:
    """Return whether this machine has an NVIDIA GPU, even if PyTorch cannot use it."""
    if any(re.fullmatch(r"nvidia\d+", path.name) for path in Path("/dev").glob("nvidia*")):
        return True
    if any(Path("/proc/driver/nvidia/gpus").glob("*")):
        return True
    return "GPU " in _nvidia_smi("-L")


def _driver_version() -> str:
    version = Path("/sys/module/nvidia/version")
    if version.is_file():
        return version.read_text().strip()
    lines = _nvidia_smi("--query-gpu=driver_version", "--format=csv,noheader").splitlines()
    return lines[0].strip() if lines else "unknown"


def _nvidia_smi(*arguments: str) -> str:
    command = shutil.which("nvidia-smi")
    if command is None:
        return ""
    try:
        answer = subprocess.run([command, *arguments], capture_output=True, text=True, timeout=20, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return answer.stdout if answer.returncode == 0 else ""


def _unusable_message(hidden: bool) -> str:
    if hidden:
        return (
            f"CUDA_VISIBLE_DEVICES={os.environ['CUDA_VISIBLE_DEVICES']!r} hides every GPU: unset it, or use device=cpu"
        )
    if not _gpu_present():
        return "device=cuda, but this machine has no NVIDIA GPU: use device=cpu"
    build = torch.version.cuda
    if build is None:
        why = f"PyTorch {torch.__version__} is a build without CUDA"
        remedy = "install a CUDA build of PyTorch"
    else:
        why = f"PyTorch {torch.__version__} is built for CUDA {build}"
        remedy = f"install a driver that supports CUDA {build}, or a PyTorch build for the CUDA of this driver"
    return (
        f"an NVIDIA GPU is present (driver {_driver_version()}) but PyTorch cannot use it: {why}. "
        f"To fix it {remedy}; device=cpu runs beside it"
    )


def set_determinism(deterministic: bool) -> None:
    """Select deterministic kernels in this process; with False, the fastest ones."""
    torch.use_deterministic_algorithms(deterministic)
    torch.backends.cudnn.benchmark = not deterministic
    torch.backends.cudnn.deterministic = deterministic


def leave(work: Callable[[], int]) -> NoReturn:
    """Run ``work`` and end the process with the exit code that it returns.

    After an exception, the message and the exit code are those of the interpreter: the code of SystemExit, 130 for
    Ctrl-C, else 1.

    A crash in native code prints its location. A process that was in a job of several ranks runs its exit handlers and
    then exits at once. Normal interpreter shutdown could abort it, because threads may still return from a wait for a
    peer; Gloo's threads live as long as any object, such as a gradient hook, refers to a process group.
    """
    faulthandler.enable()
    try:
        code = work()
    except BaseException as error:  # includes SystemExit, which Hydra raises, and Ctrl-C
        if not job_store.has_joined():
            raise
        code = _code_of(error)
    if not job_store.has_joined():
        sys.exit(code)
    if code in (0, NOT_CONVERGED) and torch.cuda.is_initialized():
        torch.cuda.cudart().cudaProfilerStop()  # an attached profiler flushes its data
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError):  # the reader of the pipe is gone
            stream.flush()
    os._exit(code)


def _code_of(error: BaseException) -> int:
    """Return the exit code that the interpreter would use for ``error``, after printing the same message."""
    if isinstance(error, SystemExit) and (error.code is None or isinstance(error.code, int)):
        return error.code or 0
    if isinstance(error, SystemExit):
        print(error.code, file=sys.stderr)
        return 1
    traceback.print_exception(error)
    return 128 + signal.SIGINT if isinstance(error, KeyboardInterrupt) else 1
