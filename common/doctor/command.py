"""``mlperf-suite doctor``: check whether this machine, or every node of a job, is fit to train."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
import torch.distributed as dist

from common.config.output_files import require_writable, write_file
from common.config.system import SystemConfig
from common.distributed.environment import node_name
from common.distributed.launcher import relaunch
from common.distributed.rank_info import RankInfo
from common.distributed.startup import find_rank_info, initialise, pick_device, shutdown
from common.doctor import collectives
from common.doctor.examine import CHECKS, FULL, QUICK, CheckRequest, Report, examine
from common.doctor.findings_table import format_report
from common.doctor.judge import (
    Rank,
    Results,
    Together,
    document,
    findings_of,
    ranks_by_node,
    units_of,
    why_alone,
    with_own_names,
)
from common.doctor.limits import Limits, load_system
from common.doctor.meeting import Meeting
from common.doctor.reading import first_line
from common.doctor.storage import output_marked
from common.doctor.system_file import write_system
from common.errors import UNFIT, ConfigError, DeviceError, Interrupted, SuiteError
from common.launch.binding import bind_rank
from common.launch.nccl_settings import variables

LEAVE_SECONDS = 10.0

DESCRIPTION = """Test whether this machine, or every node of a job, is fit for training. No data are needed.

Without a launcher, the command starts one process per GPU. Under srun or torchrun, start one rank per GPU, or one rank
per node without GPUs. The command changes no settings of the machine. It creates temporary files in the folders of
--storage and --output-dir."""

EPILOG = """exit code: 0 fit; 11 unfit: a value is outside its limits, an outlier among at least three, or different
between nodes, or a check failed, or a rank does not answer; 2 wrong arguments; 7 the ranks could not connect.
Checks that cannot run here, because hardware or a permission is missing, are listed as not made."""


@dataclass(frozen=True)
class Session:
    """State of one run of the command on one rank.

    Attributes:
        unusable: reason why the GPU of this rank cannot be used; empty if it can, or if there is none.
    """

    rank_info: RankInfo
    node: str
    device: torch.device
    unusable: str
    request: CheckRequest
    limits: Limits
    system: str
    meeting: Meeting
    timeout_seconds: float
    json_path: Path | None
    system_path: Path | None


def main(argv: Sequence[str]) -> int:
    """Run ``mlperf-suite doctor``; see ``--help``.

    Returns:
        0 if all machines are fit, else ``UNFIT``; the same on every rank.

    Raises:
        ConfigError: an argument or a limit is wrong.
        RankFailure: the ranks could not connect, or rank 0 ended.
        Interrupted: the user stopped the command from the keyboard.
    """
    arguments = _parse(argv)
    system, limits = load_system(arguments.system)
    for option, path in (("--json", arguments.json), ("--write-system", arguments.write_system)):
        require_writable(option, path)
    rank_info = find_rank_info(os.environ)
    if rank_info.launcher == "single" and (gpus := torch.cuda.device_count()) > 1:
        return relaunch(gpus, ["doctor", *argv])
    request = CheckRequest(
        frozenset(arguments.only),
        QUICK if arguments.quick else FULL,
        tuple(arguments.storage),
        frozenset(os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else range(os.cpu_count() or 1)),
        arguments.data_dir,
    )
    device, unusable = _prepare_rank(rank_info, system, arguments.timeout)
    session = Session(
        rank_info=rank_info,
        node=node_name(os.environ),
        device=device,
        unusable=unusable,
        request=request,
        limits=limits,
        system=arguments.system,
        meeting=Meeting(rank_info),
        timeout_seconds=arguments.timeout,
        json_path=arguments.json,
        system_path=arguments.write_system,
    )
    try:
        with _output_marked(session, arguments.output_dir) as marked_session:
            code, hangs = _run(marked_session)
    except KeyboardInterrupt:
        stopped = Interrupted("doctor was stopped before its end")
        stopped.came_by(signal.SIGINT)
        if rank_info.rank:
            return stopped.exit_code  # rank 0 prints the message
        raise stopped from None
    sys.stdout.flush()
    if hangs:  # A thread still hangs in a collective, and destroying the process group would wait for it.
        os._exit(code)
    shutdown()
    return code


def _parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="mlperf-suite doctor", description=DESCRIPTION, epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    parser.add_argument("--system", default="auto", metavar="NAME",
                        help="limits to apply: a name in configs/system, or a path (default: auto)")  # fmt: skip
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all measured values and findings to FILE")
    parser.add_argument("--write-system", type=Path, metavar="FILE",
                        help="write rates and links of this machine to FILE, for `mlperf-suite estimate`")  # fmt: skip
    parser.add_argument("--storage", type=Path, nargs="+", action="extend", default=[], metavar="PATH",
                        help="measure the reading speed of this folder or file on every node")  # fmt: skip
    parser.add_argument("--output-dir", type=Path, metavar="DIR",
                        help="check that all nodes see files of rank 0 there, as checkpoints need")  # fmt: skip
    parser.add_argument("--data-dir", type=Path, metavar="DIR",
                        help="check that every node has the same prepared data there")  # fmt: skip
    parser.add_argument(
        "--quick",
        action="store_true",
        help="measure for a few seconds only: no sustained load, and no collectives of 1 GB",
    )
    parser.add_argument("--only", nargs="+", action="extend", choices=CHECKS, metavar="CHECK",
                        help=f"run only these checks: {', '.join(CHECKS)}")  # fmt: skip
    parser.add_argument("--timeout", type=float, default=120.0, metavar="SECONDS",
                        help="time limit for a rank to answer and for a collective (default: 120)")  # fmt: skip
    arguments = parser.parse_args(list(argv))
    if not 0 < arguments.timeout < 86400:
        raise ConfigError(f"--timeout {arguments.timeout:g}: expected seconds, more than 0 and less than a day")
    arguments.only = arguments.only or list(CHECKS)
    return arguments


def _prepare_rank(rank_info: RankInfo, system: SystemConfig, timeout_seconds: float) -> tuple[torch.device, str]:
    """Initialize this rank as training does, but with Gloo only, because NCCL may be broken.

    Returns:
        the device, and the reason why the GPU of this rank cannot be used (empty if none).
    """
    for name, value in system.environment.items():
        os.environ.setdefault(name, value)
    for name, value in variables(system.network, os.environ).items():
        os.environ.setdefault(name, value)
    unusable = ""
    sharers = None
    try:
        if torch.cuda.is_available():
            sharers = bind_rank(rank_info, system.binding)
        device = pick_device("auto", rank_info.local_rank)
    except DeviceError as error:
        device, unusable = torch.device("cpu"), str(error)
    initialise(rank_info, device, timeout_seconds, sharers, backend="gloo")
    return device, unusable


@contextlib.contextmanager
def _output_marked(session: Session, output_dir: Path | None) -> Iterator[Session]:
    """Create a file of rank 0 in ``output_dir`` during the block; yield a session whose request names this file.

    The file is removed even if the block fails.
    """
    meeting, request = session.meeting, session.request
    if output_dir is None or "storage" not in request.checks:
        yield session
        return
    with contextlib.ExitStack() as stack:
        if session.rank_info.rank == 0:
            answer = {"marker": "", "unmarked": ""}
            try:
                answer["marker"] = str(stack.enter_context(output_marked(output_dir)))
            except OSError as error:
                answer["unmarked"] = f"rank 0, on {session.node}, cannot write into {output_dir}: {error.strerror}"
            meeting.announce("output_dir", answer)
        answer = meeting.receive("output_dir", session.timeout_seconds)
        marker = Path(answer["marker"]) if answer["marker"] else None
        yield replace(session, request=replace(request, marker=marker, unmarked=answer["unmarked"]))


def _run(session: Session) -> tuple[int, bool]:
    """Run all checks; return the exit code, and whether a thread of this rank hangs."""
    rank_info, meeting, timeout = session.rank_info, session.meeting, session.timeout_seconds
    meeting.post(
        "rank", vars(Rank(rank_info.rank, rank_info.local_rank, rank_info.node, session.node, session.device.type))
    )
    report = examine(
        rank_info, session.device, session.unusable, session.request,
        lambda what: _arrive(session, what),
    )  # fmt: skip
    meeting.post("report", report.to_json())
    results = Results([], [], [], [], "", timeout)
    if rank_info.rank == 0:
        ranks = with_own_names([Rank(**entry) if entry else None for entry in meeting.collect("rank", timeout)])
        reports = [Report.from_json(entry) if entry else None for entry in meeting.collect("report", timeout)]
        results = replace(results, ranks=ranks, reports=reports, why_alone=why_alone(ranks, reports))
        meeting.announce("plan", {"alone": bool(results.why_alone), "nodes": ranks_by_node(ranks)})
    plan = meeting.receive("plan", 4 * timeout)
    together, offsets, hangs = Together(), list[float](), False
    if not plan["alone"]:
        together, offsets, hangs = _measure_together(session, plan["nodes"])
    meeting.post("together", together.to_json())
    if rank_info.rank == 0:
        answers = [Together.from_json(entry) if entry else None for entry in meeting.collect("together", 2 * timeout)]
        _conclude(session, replace(results, together=answers, offsets=offsets))
    code = int(meeting.receive("code", 20 * timeout))
    meeting.leave(min(timeout, LEAVE_SECONDS))
    return code, hangs


def _arrive(session: Session, what: str) -> None:
    session.meeting.everyone_arrives(what, session.timeout_seconds)
    if session.rank_info.rank == 0 and sys.stderr.isatty():
        print(f"doctor: {what} …", file=sys.stderr, flush=True)


def _measure_together(session: Session, nodes: Sequence[Sequence[int]]) -> tuple[Together, list[float], bool]:
    """Run the checks that need several ranks; return the results, clock offsets (on rank 0), and whether one hangs."""
    offsets: list[float] = []
    if "clock" in session.request.checks:
        try:
            offsets = measure_offsets(session.rank_info.rank, [ranks[0] for ranks in nodes[1:]])
        except RuntimeError as error:
            return Together(failed=f"clock offsets: {first_line(error)}"), [], False
    if "collectives" not in session.request.checks:
        return Together(), offsets, False
    effort = session.request.effort
    plan = collectives.CollectiveOptions(
        session.rank_info, nodes, session.device, effort.collective_seconds, effort is FULL, session.timeout_seconds
    )
    progress = collectives.run(plan)
    return Together(progress.node, progress.job, progress.failed), offsets, bool(progress.stage)


def _conclude(session: Session, results: Results) -> None:
    """Judge, print and write the results on rank 0, and send the exit code to all ranks."""
    units = units_of(results)
    findings = findings_of(results, units, session.limits, session.request.checks)
    counts = [(len(ranks_by_node(results.ranks)), "node"), (sum(unit.scope == "gpu" for unit in units), "GPU")]
    summary = ", ".join(f"{count} {word}{'' if count == 1 else 's'}" for count, word in counts)
    print(format_report(units, findings, f"mlperf-suite doctor: {summary}, limits of {session.system}"), flush=True)
    code = UNFIT if any(finding.unfit for finding in findings) else 0
    try:
        if session.json_path is not None:
            content = document(results, units, findings, session.system)
            write_file(session.json_path, json.dumps(content, indent=1, allow_nan=False) + "\n")
        if session.system_path is not None:
            write_system(session.system_path, units)
    except SuiteError as error:
        code = error.exit_code
        raise
    finally:
        session.meeting.announce("code", code)


ROUNDS = 50


def offset_from_exchanges(exchanges: Sequence[tuple[float, float, float]]) -> float:
    """Return by how many seconds the other clock is ahead of the local one.

    The exchange with the shortest round trip is used. The error is at most half of that round trip (Cristian,
    "Probabilistic clock synchronization", 1989).

    Args:
        exchanges: ``(sent, other, received)`` in seconds; ``other`` by the other clock, the rest by the local clock.
    """
    sent, other, received = min(exchanges, key=lambda exchange: exchange[2] - exchange[0])
    return other - (sent + received) / 2


def measure_offsets(rank: int, others: Sequence[int]) -> list[float]:
    """Return on rank 0 by how many seconds the clock of each rank in ``others`` is ahead of rank 0's clock.

    The default process group must use Gloo. Rank 0 and ``others`` (one rank of each other node) must call this; on
    ranks other than 0 the result is empty.
    """
    offsets = []
    for other in others:
        if rank == 0:
            exchanges = []
            for _ in range(ROUNDS):
                answer = torch.zeros(1, dtype=torch.float64)
                sent = time.time()
                dist.send(torch.zeros(1), other)
                dist.recv(answer, other)
                exchanges.append((sent, float(answer.item()), time.time()))
            offsets.append(offset_from_exchanges(exchanges))
        elif rank == other:
            for _ in range(ROUNDS):
                dist.recv(torch.zeros(1), 0)
                dist.send(torch.tensor([time.time()], dtype=torch.float64), 0)
    return offsets
