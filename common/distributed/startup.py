"""From the launcher's environment to a place among the ranks, a device and process groups.

torchrun's variables come first, then those of a Slurm job step; without either the process is alone.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Mapping
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.rendezvous import rendezvous

from common.distributed import job_store
from common.distributed.launcher import follow_parent
from common.distributed.rank_info import RankInfo
from common.distributed.roles import Role
from common.errors import ConfigError, DeviceError, RankFailure

TORCHRUN_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK")
# Step ids from 0xfffffff0 on are Slurm's own steps: the batch script, an interactive shell, extern.
FIRST_RESERVED_STEP = 0xFFFFFFF0
SLURM_PORTS = range(20000, 40000)


def find_rank_info(environment: Mapping[str, str]) -> RankInfo:
    """This process's place from the variables that torchrun or a Slurm job step set.

    Raises:
        ConfigError: variables are missing, are no integers, or contradict each other.
    """
    given = [name for name in TORCHRUN_VARIABLES if name in environment]
    if given:
        missing = [name for name in TORCHRUN_VARIABLES if name not in environment]
        if missing:
            raise ConfigError(
                f"the environment has {', '.join(given)} but not {', '.join(missing)}: start with torchrun, "
                f"which sets all of them, or unset {', '.join(given)}"
            )
        return _torchrun_place(environment)
    if "SLURM_STEP_ID" in environment and _integer(environment, "SLURM_STEP_ID") < FIRST_RESERVED_STEP:
        return _slurm_place(environment)
    return RankInfo(rank=0, world_size=1, local_rank=0, local_world_size=1, node=0, launcher="single")


def pick_device(requested: str, local_rank: int) -> torch.device:
    """The device of a rank.

    Args:
        requested: ``"cpu"``, ``"cuda"``, or ``"auto"``: CUDA where a GPU is visible, the CPU where there is none.
        local_rank: index among the visible GPUs. A Slurm task that sees a single GPU, as with ``--gpus-per-task=1``,
            takes that one instead.

    Raises:
        ConfigError: ``requested`` is none of the three.
        DeviceError: a GPU is asked for, or present and not hidden, and PyTorch cannot use it.
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
    """Whether this machine has an NVIDIA GPU that is not hidden; touches neither CUDA nor the GPU."""
    return os.environ.get("CUDA_VISIBLE_DEVICES") not in ("", "-1") and _gpu_present()


def initialise(
    rank_info: RankInfo,
    device: torch.device,
    timeout_seconds: float,
    sharers: int | None = None,
    evaluation_ranks: int = 0,
    backend: str | None = None,
) -> None:
    """Join the process group of this rank's role and set the number of CPU threads.

    The last ``evaluation_ranks`` ranks of the job are a world of their own: theirs and the others' default process
    groups have no rank in common. A role of one rank gets no process group. A second call changes nothing.

    Args:
        rank_info, device: of this rank.
        timeout_seconds: longest wait for the other ranks.
        sharers: ranks that share this process's cores; None for all of this machine.
        evaluation_ranks: ranks that only evaluate (:mod:`common.distributed.roles`).
        backend: of the process group; None for NCCL on CUDA and Gloo on a CPU.

    Raises:
        ConfigError: the environment does not say where rank 0 is.
        RankFailure: the ranks did not meet within ``timeout_seconds``.
    """
    follow_parent()
    torch.set_num_threads(_threads(rank_info, sharers or rank_info.local_world_size, device))
    if device.type == "cuda":
        torch.cuda.set_device(device)
    if rank_info.world_size == 1 or job_store.joined() or dist.is_initialized():
        return
    if rank_info.launcher == "slurm":
        os.environ.update(_slurm_rendezvous(os.environ))
    for name in ("MASTER_ADDR", "MASTER_PORT"):
        if not os.environ.get(name):
            state = "empty" if name in os.environ else "not set"
            raise ConfigError(
                f"{name} is {state}, so rank {rank_info.rank} cannot find rank 0: start with torchrun or srun"
            )
    if not 0 < (port := _integer(os.environ, "MASTER_PORT")) < 2**16:
        raise ConfigError(f"MASTER_PORT={port} is no port: expected 1 to 65535")
    try:
        _join(rank_info, device, timedelta(seconds=timeout_seconds), evaluation_ranks, backend)
    except dist.DistError as error:
        meeting_point = f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise RankFailure(
            f"rank {rank_info.rank} of {rank_info.world_size} could not join the others at {meeting_point} within "
            f"{timeout_seconds:.0f} s: {reason}. Check that every rank started and that this port is open between "
            "the machines"
        ) from error


def _join(
    rank_info: RankInfo, device: torch.device, timeout: timedelta, evaluation_ranks: int, backend: str | None
) -> None:
    store, _, _ = next(rendezvous("env://", rank_info.rank, rank_info.world_size, timeout=timeout))
    store.set_timeout(timeout)
    job_store.join(store, rank_info)
    role = Role.of(rank_info, evaluation_ranks)
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
    """Leave the job: its process group, if there is one, and its store."""
    if dist.is_initialized():
        dist.destroy_process_group()
    job_store.leave()


def expand_nodelist(nodelist: str) -> list[str]:
    """Host names of a Slurm node list such as ``"gpu[01-03,7]-ib,login"``.

    Raises:
        ConfigError: the brackets do not close or a range is no range.
    """
    hosts: list[str] = []
    for part in _split_outside_brackets(nodelist):
        hosts.extend(_expand_part(part, nodelist))
    return hosts


def _torchrun_place(environment: Mapping[str, str]) -> RankInfo:
    rank, world_size, local_rank = (_integer(environment, name) for name in TORCHRUN_VARIABLES)
    local_world_size = _integer(environment, "LOCAL_WORLD_SIZE", world_size)
    node = _integer(environment, "GROUP_RANK", rank // max(local_world_size, 1))
    return _checked(RankInfo(rank, world_size, local_rank, local_world_size, node, "torchrun"), "RANK")


def _slurm_place(environment: Mapping[str, str]) -> RankInfo:
    rank = _integer(environment, "SLURM_PROCID")
    tasks_name = "SLURM_STEP_NUM_TASKS" if "SLURM_STEP_NUM_TASKS" in environment else "SLURM_NTASKS"
    world_size = _integer(environment, tasks_name)
    local_rank = _integer(environment, "SLURM_LOCALID")
    node = _integer(environment, "SLURM_NODEID", 0)
    tasks_text = environment.get("SLURM_STEP_TASKS_PER_NODE")
    if tasks_text is None:
        nodes = _integer(environment, "SLURM_NNODES", 1)
        tasks_per_node = [-(-world_size // max(nodes, 1))] * nodes
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


def _integer(environment: Mapping[str, str], name: str, default: int | None = None) -> int:
    text = environment.get(name)
    if text is None:
        if default is None:
            raise ConfigError(f"{name} is not set although the launcher's other variables are")
        return default
    try:
        return int(text)
    except ValueError:
        raise ConfigError(f"{name}={text!r} is no integer") from None


def _expand_tasks(text: str) -> list[int]:
    """Tasks of each node from Slurm's short form: ``"2(x3),1"`` is ``[2, 2, 2, 1]``."""
    counts: list[int] = []
    for part in text.split(","):
        match = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", part.strip())
        if match is None:
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
        bounds = re.fullmatch(r"(\d+)(?:-(\d+))?", item)
        if bounds is None or int(bounds[2] or bounds[1]) < int(bounds[1]):
            raise ConfigError(f"Slurm node list {nodelist!r}: cannot read the range {item!r}")
        width = len(bounds[1])
        for number in range(int(bounds[1]), int(bounds[2] or bounds[1]) + 1):
            hosts.extend(f"{match[1]}{number:0{width}d}{tail}" for tail in tails)
    return hosts


def _slurm_rendezvous(environment: Mapping[str, str]) -> dict[str, str]:
    """Address and port of rank 0: the step's first host, and a port that differs between jobs and steps."""
    nodelist = environment.get("SLURM_STEP_NODELIST") or environment.get("SLURM_JOB_NODELIST", "")
    hosts = expand_nodelist(nodelist)
    if not hosts:
        raise ConfigError("neither SLURM_STEP_NODELIST nor SLURM_JOB_NODELIST is set: start the ranks with srun")
    job, step = _integer(environment, "SLURM_JOB_ID", 0), _integer(environment, "SLURM_STEP_ID", 0)
    port = SLURM_PORTS[(job * 31 + step) % len(SLURM_PORTS)]
    return {
        "MASTER_ADDR": environment.get("MASTER_ADDR", hosts[0]),
        "MASTER_PORT": environment.get("MASTER_PORT", str(port)),
    }


def _threads(rank_info: RankInfo, sharers: int, device: torch.device) -> int:
    """CPU threads for this rank: its share of the cores that this process may run on.

    A rank that computes on the CPU has as many as ``OMP_NUM_THREADS`` says, where that is set.
    """
    asked = os.environ.get("OMP_NUM_THREADS", "").partition(",")[0]  # the others are of nested parallel regions
    if device.type == "cpu" and asked.isdigit() and int(asked) > 0:
        return int(asked)
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    if rank_info.launcher == "slurm":
        per_task = os.environ.get("SLURM_CPUS_PER_TASK", "")
        # The affinity of a bound task is already its share; SLURM_CPUS_PER_TASK is what it asked for.
        if per_task.isdigit() and int(per_task) > 0:
            return min(allowed, int(per_task))
    return max(1, allowed // sharers)


def _has_gpu_of_its_own(rank_info: RankInfo) -> bool:
    """Whether this process is one of a machine's Slurm tasks that each see one GPU, another one each.

    Slurm's binding numbers the GPU of every task 0, so that only the step's number of GPUs tells it from one GPU that
    all tasks would have to share. Where Slurm does not say that number, NCCL refuses the shared GPU.
    """
    if rank_info.launcher != "slurm" or rank_info.local_world_size == 1 or torch.cuda.device_count() != 1:
        return False
    gpus = _integer(os.environ, "SLURM_GPUS_ON_NODE", rank_info.local_world_size)
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
    """Whether this machine has an NVIDIA GPU, whatever PyTorch can do with it."""
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
