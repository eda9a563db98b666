"""What is said of a run once it has ended: verdict, summary, picture."""

from __future__ import annotations

import contextlib
from datetime import timedelta

import torch
import torch.distributed as dist

from common.distributed import job_store
from common.errors import NOT_CONVERGED
from common.mlperf.verdict import format_verdict, judge
from common.observe.summary import Summary, write_summary
from common.trainer import Trainer

CONCLUDED = "suite/concluded"
CONCLUDING = timedelta(minutes=10)


def conclude(trainer: Trainer) -> int:
    """Judge the run's log and print its summary, on rank 0, whose exit code tells whether the target was reached.

    The other ranks stay until it is done: a scheduler ends those that are left some time after the first has gone.
    """
    if trainer.place.rank != 0:
        await_conclusion()
        return 0
    try:
        return _conclude(trainer)
    finally:
        store = job_store.current()
        if store is not None:
            store.set(CONCLUDED, "1")


def await_conclusion() -> None:
    """Stay until rank 0 has concluded, or is gone: then there is nothing to stay for."""
    store = job_store.current()
    if store is not None:
        with contextlib.suppress(dist.DistError, RuntimeError):
            store.wait([CONCLUDED], CONCLUDING)


def _conclude(trainer: Trainer) -> int:
    run, folder = trainer.run, trainer.session.output_dir
    verdict = judge(trainer.log_path, trainer.ruleset)
    print(format_verdict(verdict), flush=True)
    if trainer.overflows:
        print(f"{trainer.overflows} of {trainer.progress.step} steps changed nothing: their gradients were not finite")
    minutes = (trainer.run_stop_ms - trainer.run_start_ms) / 60_000
    history = list(trainer.progress.history)
    best = max if run.benchmark.direction == "higher" else min
    write_summary(
        Summary(
            benchmark=run.benchmark.description,
            metric=run.benchmark.metric,
            target=run.benchmark.target,
            direction=run.benchmark.direction,
            status=trainer.status,
            reached=best(value for _, value in history) if history else None,
            history=history,
            losses=trainer.losses,
            minutes=minutes,
            throughput=(trainer.counted_samples - trainer.resumed_samples) / (60 * minutes),
            seed=trainer.seed,
            stand_in=run.benchmark.stand_in,
            resumed=trainer.resumed is not None,
            verdict=verdict.kind,
            hardware=hardware(trainer.device, run.world_size),
            energy_joules=trainer.meter.energy_joules(),
            evaluations=len(trainer.points.scores),
            evaluation_seconds=sum(score.seconds for score in trainer.points.scores),
            hidden_seconds=sum(score.hidden_seconds for score in trainer.points.scores),
            evaluation_ranks=run.evaluation.ranks,
            paths={
                "log": trainer.log_path,
                "metrics": folder / "metrics_rank0.jsonl",
                **({"checkpoints": folder / "checkpoints"} if (folder / "checkpoints").is_dir() else {}),
            },
        ),
        folder,
    )
    return 0 if trainer.status == "success" else NOT_CONVERGED


def hardware(device: torch.device, ranks: int) -> str:
    """The devices of a run in words."""
    if device.type == "cuda":
        return f"{ranks} x {torch.cuda.get_device_name(device)}"
    return f"CPU, {ranks} rank{'s' if ranks > 1 else ''} of {torch.get_num_threads()} threads"
