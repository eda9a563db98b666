"""The end of a run: verdict on its log, summary and picture."""

from __future__ import annotations

import contextlib
import shlex
from datetime import timedelta

import torch
import torch.distributed as dist

from common.distributed import job_store
from common.errors import NOT_CONVERGED
from common.mlperf.verdict import format_verdict, judge
from common.observe.summary import Outcome, Summary, write_summary
from common.run.start import Start
from common.run.timed_run import UNSCORED

CONCLUDED = "suite/concluded"
CONCLUDING = timedelta(minutes=10)


def conclude(outcome: Outcome, start: Start) -> int:
    """Judge the run's log and print its summary on rank 0; its exit code tells whether the target was reached.

    The other ranks wait until rank 0 is done, because a scheduler kills the remaining ranks some time after the first
    one has exited.
    """
    if start.rank_info.rank != 0:
        await_conclusion()
        return 0
    try:
        return _conclude(outcome, start)
    finally:
        store = job_store.current()
        if store is not None:
            store.set(CONCLUDED, "1")


def await_conclusion() -> None:
    """Wait until rank 0 has concluded or its store is gone."""
    store = job_store.current()
    if store is not None:
        with contextlib.suppress(dist.DistError, RuntimeError):
            store.wait([CONCLUDED], CONCLUDING)


def _conclude(outcome: Outcome, start: Start) -> int:
    run, folder = start.run, outcome.output_dir
    if outcome.status == UNSCORED:
        print(
            f"training is over; its checkpoints wait to be scored: mlperf-suite score {shlex.quote(str(folder))}",
            flush=True,
        )
        return 0
    verdict = judge(outcome.log, outcome.ruleset)
    print(format_verdict(verdict), flush=True)
    if outcome.overflows:
        print(f"{outcome.overflows} of {outcome.steps} steps changed nothing: their gradients were not finite")
    checkpoints = folder / "checkpoints"
    summary = Summary(
        outcome=outcome,
        benchmark=run.benchmark,
        verdict=verdict.kind,
        hardware=hardware(start.device, run.world_size),
        evaluation_ranks=run.evaluation.ranks,
        offline=run.evaluation.offline,
        paths={
            "log": outcome.log,
            "metrics": folder / "metrics_rank0.jsonl",
            **({"checkpoints": checkpoints} if checkpoints.is_dir() else {}),
        },
    )
    write_summary(summary, folder)
    return 0 if outcome.status == "success" else NOT_CONVERGED


def hardware(device: torch.device, ranks: int) -> str:
    """Return a description of the run's devices."""
    if device.type == "cuda":
        return f"{ranks} x {torch.cuda.get_device_name(device)}"
    return f"CPU, {ranks} rank{'s' if ranks > 1 else ''} of {torch.get_num_threads()} threads"
