"""Starts the ranks of a composed configuration, sets each one up, and ends with at most one error message."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from common.config import loading
from common.config.override import override
from common.config.schema import RunConfig, SessionConfig
from common.contract.workload import Workload
from common.distributed import job_store
from common.distributed.faults import lost_peer
from common.distributed.groups import of_all_ranks
from common.distributed.launcher import LOST_PEER_EXIT_CODE, await_turn, has_launcher, relaunch
from common.distributed.rank_info import RankInfo, Role
from common.distributed.startup import find_rank_info, gpu_visible, initialise, pick_device, shutdown
from common.distributed.symmetric_memory import MACHINE_VARIABLE
from common.errors import ConfigError, DeviceError, SuiteError, disk_error, print_error
from common.evaluation.scorer_process import ScorerProcess
from common.launch.binding import bind_rank, spare_cpus
from common.launch.nccl_settings import check_windows, variables

FINDING_OUT = timedelta(minutes=30)
"""Time limit for the other ranks to wait until rank 0 has picked the micro-batch."""


@dataclass(frozen=True)
class Start:
    """Inputs for the work of one rank.

    Attributes:
        imported, turn: end of the imports, and end of the wait for permission to use the device, by
            ``time.perf_counter``.
        began_ms: start of the rank's setup, in milliseconds since the epoch.
        scorer: scorer process; on rank 0 with background scoring, otherwise None.
    """

    workload_type: type[Workload]
    run: RunConfig
    session: SessionConfig
    rank_info: RankInfo
    device: torch.device
    imported: float
    turn: float
    began_ms: int
    scorer: ScorerProcess | None
    tree: dict[str, Any]


def on_ranks(
    command: str,
    argv: list[str],
    tree: dict[str, Any],
    workload_type: Callable[[str], type[Workload]],
    work: Callable[[Start], int],
    check: Callable[[RunConfig, SessionConfig], None] = lambda run, session: None,
) -> int:
    """Run ``work`` on every rank of the composed configuration ``tree``; return this process's exit code.

    If a launcher has not started this process as a rank, it starts the ranks of this node itself, with ``argv``.

    Args:
        work: returns the exit code of one rank.
        check: raises an error for configurations that must not run. Called before ranks are started, and on every rank
            before anything is built.

    Raises:
        SuiteError: the configuration is wrong, the number of ranks differs from it, or the device is unusable.
    """
    rank_info = find_rank_info(os.environ)
    run, session = loading.load(tree, workload_type)
    if run.scale.gpu and session.device == "auto" and not gpu_visible():
        raise DeviceError(
            f"the scale is one of GPUs, and {_machine()} shows none: device=cpu runs its {run.scale.gpus_per_node} "
            f"rank{'s' if run.scale.gpus_per_node > 1 else ''} a node on the CPU"
        )
    if rank_info.launcher == "single" and run.world_size > 1:
        check(run, session)
        return _start_ranks(command, run, session, argv)
    if rank_info.world_size != run.world_size:
        raise ConfigError(
            f"scale: {run.scale.nodes} nodes x {run.scale.gpus_per_node} = {run.world_size} ranks, "
            f"but {rank_info.world_size} were started by {rank_info.launcher}; {_remedy(run, rank_info)}"
        )
    imported = time.perf_counter()
    await_turn()
    turn = time.perf_counter()
    _set_environment(run, rank_info)
    with _scorer(run, session, rank_info) as scorer:
        sharers = _bind(run, session, rank_info, scorer)
        device = pick_device(session.device, rank_info.local_rank)
        if device.type == "cpu":
            # CPUs compute about a hundred times slower with denormal numbers, such as gradients of very unlikely
            # classes. Threads that are started later inherit the setting.
            torch.set_flush_denormal(True)

        def start() -> int:
            began_ms = time.time_ns() // 1_000_000
            initialise(rank_info, device, session.timeout_seconds, sharers, run.other_ranks)
            if device.type == "cuda" and run.world_size > 1:
                check_windows(os.environ, torch.cuda.nccl.version())
            check(run, session)
            cls = workload_type(run.benchmark.name)
            sized = _sized(tree, cls, rank_info, device)
            return work(Start(cls, *sized, rank_info, device, imported, turn, began_ms, scorer, tree))

        return _as_rank(start, rank_info.rank)


def _scorer(
    run: RunConfig, session: SessionConfig, rank_info: RankInfo
) -> contextlib.AbstractContextManager[ScorerProcess | None]:
    """Return the background scorer process on rank 0. Start it before anything touches a GPU or the other ranks.

    It must also start before this rank is bound, so that its memory is next to the cores that it gets.
    """
    if rank_info.rank != 0 or run.evaluation.scoring != "background":
        return contextlib.nullcontext()
    return ScorerProcess(run.evaluation.scorer_threads, session.timeout_seconds)


def _bind(run: RunConfig, session: SessionConfig, rank_info: RankInfo, scorer: ScorerProcess | None) -> int | None:
    """Bind this rank, and the scorer to spare cores or else to the same ones. Return how many ranks share the cores."""
    sharers, spare = None, frozenset[int]()
    if session.device != "cpu":
        spare = spare_cpus(rank_info, run.system.binding) if scorer is not None else spare
        sharers = bind_rank(rank_info, run.system.binding)
    if scorer is not None:
        scorer.keep_to(spare if len(spare) >= run.evaluation.scorer_threads else os.sched_getaffinity(0))
    return sharers


def _start_ranks(command: str, run: RunConfig, session: SessionConfig, argv: list[str]) -> int:
    if run.scale.nodes > 1:
        raise ConfigError(
            f"scale: {run.scale.nodes} nodes need a launcher that starts {run.world_size} ranks, "
            "torchrun or srun; this process was started alone"
        )
    given = any(argument.startswith("output_dir=") for argument in argv)
    folder = [] if given else [override("output_dir", session.output_dir)]
    return relaunch(run.scale.gpus_per_node, [command, *argv, *folder])


def _set_environment(run: RunConfig, rank_info: RankInfo) -> None:
    """Set variables that CUDA and NCCL read at their start, before anything uses the GPU. The user's values stay.

    With ``layout.machines``, each node has its own identity, which NCCL and symmetric memory ask for.
    """
    if run.machines > 1:
        os.environ[MACHINE_VARIABLE] = f"node {rank_info.rank // run.ranks_per_node}"
    for name, value in run.system.environment.items():
        os.environ.setdefault(name, value)
    for name, value in variables(run.system.network, os.environ).items():
        os.environ.setdefault(name, value)
    if run.deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")


def _remedy(run: RunConfig, rank_info: RankInfo) -> str:
    """Return how to start as many ranks as the scale has."""
    ranks = run.scale.gpus_per_node
    if rank_info.launcher == "torchrun":
        return f"give torchrun --nnodes={run.scale.nodes} --nproc-per-node={ranks}, or choose another scale"
    alone = ", or env -u SLURM_STEP_ID in an interactive shell of srun, where this command then starts them"
    return (
        f"give srun --nodes={run.scale.nodes} --ntasks-per-node={ranks}"
        f"{alone if run.scale.nodes == 1 and rank_info.world_size == 1 else ''}, or choose another scale"
    )


def _machine() -> str:
    hidden = os.environ.get("CUDA_VISIBLE_DEVICES")
    return f"CUDA_VISIBLE_DEVICES={hidden!r}" if hidden in ("", "-1") else "this machine"


def _sized(
    tree: dict[str, Any], cls: type[Workload], rank_info: RankInfo, device: torch.device
) -> tuple[RunConfig, SessionConfig]:
    """Return the configuration; replace ``micro_batch: auto`` by a size that fits the device of every training rank."""

    def load(size: int | None) -> tuple[RunConfig, SessionConfig]:
        return loading.load(tree, lambda _: cls, size)

    if tree.get("micro_batch") != "auto":
        return load(None)
    from common.run.micro_batch import pick

    run, _ = load(None)
    size = 0
    if Role.of(rank_info, run.other_ranks).name == "train":
        size = min(of_all_ranks(pick(cls, lambda size: load(size)[0], device)))
    chosen = job_store.from_rank_0("micro_batch", str(size), FINDING_OUT)
    return load(int(chosen))


def _as_rank(work: Callable[[], int], rank: int) -> int:
    """Run one rank's work. If several ranks fail, only the first one to fail prints its message.

    An error that is only a consequence of a lost rank is replaced by an error about that rank.
    """
    try:
        return work()
    except SuiteError as error:
        if _is_first_to_fail():
            print_error(error)
        return error.exit_code
    except OSError as error:
        if (message := disk_error(error, "log, metrics or checkpoint")) is None:
            raise
        if _is_first_to_fail():
            print_error(message)
        return message.exit_code
    except RuntimeError as error:
        failure = lost_peer(error, rank)
        if failure is None:
            raise
        if has_launcher():  # the launcher knows how the lost rank ended, and prints the one message
            return LOST_PEER_EXIT_CODE
        raise failure from error
    finally:
        shutdown()


def _is_first_to_fail() -> bool:
    store = job_store.current()
    if store is None:
        return True
    try:
        return store.add("suite/failures", 1) == 1
    except dist.DistError:
        return True
