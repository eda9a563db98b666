"""From a composed configuration to work on every rank: start the ranks, set them up, and end with one message."""

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
from common.distributed.launcher import LOST_PEER_EXIT_CODE, await_turn, has_launcher, relaunch
from common.distributed.rank_info import RankInfo
from common.distributed.roles import Role
from common.distributed.startup import find_rank_info, gpu_visible, initialise, pick_device, shutdown
from common.errors import FULL_DISK, ConfigError, DeviceError, SuiteError, print_error
from common.evaluation.scorer_process import ScorerProcess
from common.launch.binding import bind_rank, spare_cpus
from common.launch.nccl_settings import variables

FINDING_OUT = timedelta(minutes=30)
"""For the other ranks to wait until the micro-batch is picked."""


@dataclass(frozen=True)
class Start:
    """What one rank's work starts from.

    Attributes:
        imported, turn: when everything was imported, and when this process was allowed to use its device, by
            ``time.perf_counter``.
        began_ms: when it began to build anything, milliseconds since the epoch.
        scorer: the process that scores, on rank 0 where the configuration has one.
        tree: the composed configuration.
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


def unchecked(run: RunConfig, session: SessionConfig) -> None:
    """Accept every configuration."""


def on_ranks(
    command: str,
    argv: list[str],
    tree: dict[str, Any],
    workload_type: Callable[[str], type[Workload]],
    work: Callable[[Start], int],
    check: Callable[[RunConfig, SessionConfig], None] = unchecked,
) -> int:
    """Run ``work`` on every rank of the composed configuration ``tree``; returns this process's exit code.

    A process that nobody started as a rank starts the ranks of this node itself, with ``argv``.

    Args:
        command: of the command line.
        argv: its arguments.
        tree: the composed configuration.
        workload_type: turns the name of a benchmark into the class of its workload.
        work: what a rank does.
        check: refuses a configuration before ranks are started, and on every rank before anything is built.

    Raises:
        SuiteError: the configuration is wrong, the ranks are not as many as it says, or the device is unusable.
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
            f"but {rank_info.world_size} were started by {rank_info.launcher}"
        )
    imported = time.perf_counter()
    await_turn()
    turn = time.perf_counter()
    _set_environment(run)
    with _scorer(run, session, rank_info) as scorer:
        sharers = _bind(run, session, rank_info, scorer)
        device = pick_device(session.device, rank_info.local_rank)
        if device.type == "cpu":
            # Processors take a hundred times as long for numbers below the smallest normal one, such as gradients of
            # what is nearly impossible; threads that are started later do as this one.
            torch.set_flush_denormal(True)

        def start() -> int:
            began_ms = time.time_ns() // 1_000_000
            initialise(rank_info, device, session.timeout_seconds, sharers, run.evaluation.ranks)
            check(run, session)
            cls = workload_type(run.benchmark.name)
            sized = _sized(tree, cls, rank_info, device)
            return work(Start(cls, *sized, rank_info, device, imported, turn, began_ms, scorer, tree))

        return _as_rank(start, rank_info.rank)


def _scorer(
    run: RunConfig, session: SessionConfig, rank_info: RankInfo
) -> contextlib.AbstractContextManager[ScorerProcess | None]:
    """The process that scores in the background, on rank 0: started before anything touches a GPU or the other ranks.

    It is started before this rank is bound, too, so that its memory is next to the cores that it gets.
    """
    if rank_info.rank != 0 or run.evaluation.scoring != "background":
        return contextlib.nullcontext()
    return ScorerProcess(run.evaluation.scorer_threads, session.timeout_seconds)


def _bind(run: RunConfig, session: SessionConfig, rank_info: RankInfo, scorer: ScorerProcess | None) -> int | None:
    """Bind this rank, and the scorer to the same cores, or to some that no rank has; how many ranks share them."""
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


def _set_environment(run: RunConfig) -> None:
    """What CUDA and NCCL read when they start, before anything touches the GPU; the user's own values stay."""
    for name, value in run.system.environment.items():
        os.environ.setdefault(name, value)
    for name, value in variables(run.system.network, os.environ).items():
        os.environ.setdefault(name, value)
    if run.deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")


def _machine() -> str:
    hidden = os.environ.get("CUDA_VISIBLE_DEVICES")
    return f"CUDA_VISIBLE_DEVICES={hidden!r}" if hidden in ("", "-1") else "this machine"


def _sized(
    tree: dict[str, Any], cls: type[Workload], rank_info: RankInfo, device: torch.device
) -> tuple[RunConfig, SessionConfig]:
    """The configuration, with ``micro_batch: auto`` replaced by what fits the device of every training rank."""

    def load(size: int | None) -> tuple[RunConfig, SessionConfig]:
        return loading.load(tree, lambda _: cls, size)

    if tree.get("micro_batch") != "auto":
        return load(None)
    from common.run.micro_batch import pick

    run, _ = load(None)
    size = 0
    if Role.of(rank_info, run.evaluation.ranks).name == "train":
        size = pick(cls, lambda size: load(size)[0], device)
        if dist.is_initialized():
            sizes: list[Any] = [None] * dist.get_world_size()
            dist.all_gather_object(sizes, size)
            size = min(sizes)
    chosen = job_store.from_rank_0("micro_batch", str(size), FINDING_OUT)
    return load(int(chosen))


def _as_rank(work: Callable[[], int], rank: int) -> int:
    """Run one rank's work; of an error that several ranks raise, the first to do so prints the message.

    An error that only says that a peer is gone becomes the one about the peer.
    """
    try:
        return work()
    except SuiteError as error:
        if _is_first_to_fail():
            print_error(error)
        return error.exit_code
    except OSError as error:
        if error.errno not in FULL_DISK:
            raise
        if _is_first_to_fail():
            print_error(SuiteError(f"{error.strerror} ({error.filename or 'while writing the log or the metrics'})"))
        return SuiteError.exit_code
    except RuntimeError as error:
        failure = lost_peer(error, rank)
        if failure is None:
            raise
        if has_launcher():  # which knows the peer's own end, and prints the one message
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
