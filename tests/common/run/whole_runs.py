"""Runs of the toy on one rank, to compare runs with split layers or stages with."""

from __future__ import annotations

from pathlib import Path

from tests import toy
from tests.command_line import logged, training
from tests.toy.workload import CosmoFlow

EPOCHS, STEPS_OF_AN_EPOCH = 3, 16
TOLERANCE = 1e-9  # of float64 sums in another order
FIXED = ("precision=fp64", f"benchmark.schedule.last_epoch={EPOCHS}", "benchmark.targets.mean_absolute_error.value=0")


def errors(log: Path) -> list[float]:
    """The values of the evaluations."""
    return [event["value"] for event in logged(log, "eval_error")]


def on_one_rank(data: Path, output: Path, *overrides: str) -> list[float]:
    """The values of the evaluations of a run in this process alone."""
    with toy.known():
        _, *arguments = training(data, output, *FIXED, *overrides)
        return errors(toy.trainer(arguments, CosmoFlow).train().log)
