"""Logs of closed-division runs in the form of another program, from the tables of the rules.

Sources: compliance rules of mlperf-logging (closed_<benchmark>.yaml) for hyperparameters and their keys; the table of
evaluation frequency in the training rules for evaluation points. Convergence is random around the reference's mean at
the batch size, rounded up to the next evaluation point.
"""

from __future__ import annotations

import json
import math
import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

POINT, START, END = "POINT_IN_TIME", "INTERVAL_START", "INTERVAL_END"


@dataclass(frozen=True)
class Recipe:
    """One benchmark at one batch.

    Attributes:
        ruleset: newest version that accepts it.
        runs: number of runs of a result.
        reference, spread: mean and standard deviation of the reference's convergence at the batch size.
        first, interval: first evaluation point and distance of the others, in steps of ``unit``.
        unit: length of an evaluation step in the unit of ``progress``.
        batch: evaluation points are rounded up to a multiple of this.
        below, target: values of the metric before convergence and at convergence.
        quality, progress: keys of the metric and of the progress; blocks count epochs unless it is ``samples_count``.
    """

    name: str
    ruleset: str
    runs: int
    reference: float
    spread: float
    first: int
    interval: int
    unit: int
    batch: int
    below: float
    target: float
    train_samples: int
    eval_samples: int
    hyperparameters: dict[str, Any]
    quality: str = "eval_accuracy"
    progress: str = "epoch_num"


RECIPES = {
    # every 4 epochs with offset 3; RCP at 3,264: 35.154 epochs
    "resnet": Recipe(
        "resnet", "4.0.0", 5, 35.154, 0.6, 3, 4, 1, 1, 0.71, 0.7592, 1281167, 50000,
        {
            "global_batch_size": 3264,
            "opt_name": "lars",
            "lars_opt_base_learning_rate": 10.5,
            "lars_opt_end_learning_rate": 0.0001,
            "lars_opt_learning_rate_decay_poly_power": 2,
            "lars_opt_learning_rate_decay_steps": 14112,
            "lars_epsilon": 0.0,
            "lars_opt_learning_rate_warmup_epochs": 2,
            "lars_opt_momentum": 0.9,
            "lars_opt_weight_decay": 5e-05,
        },
    ),
    # 0.05 * (230.23 * 3,072 + 3,000,000) samples, down to a multiple of 25,000: 175,000; RCP at 3,072: 2.7645e6
    "bert": Recipe(
        "bert", "5.0.0", 10, 2.7645e6, 1e5, 175_000, 175_000, 1, 3072, 0.65, 0.7212, 156725653, 10000,
        {
            "global_batch_size": 3072,
            "opt_base_learning_rate": 0.002,
            "opt_lamb_epsilon": 1e-06,
            "opt_learning_rate_training_steps": 1140,
            "opt_learning_rate_warmup_steps": 100,
            "num_warmup_steps": 100,
            "start_warmup_step": -100,
            "opt_lamb_beta_1": 0.66,
            "opt_lamb_beta_2": 0.998,
            "opt_lamb_weight_decay_rate": 0.01,
        },
    ),
    # S = 168: after 1,000 epochs, then every 20, logged in samples; RCP at 56: 3.574e5
    "unet3d": Recipe(
        "unet3d", "4.0.0", 40, 3.574e5, 4e4, 168_000, 3360, 1, 1, 0.9, 0.9085, 168, 42,
        {
            "global_batch_size": 56,
            "opt_name": "sgd",
            "opt_base_learning_rate": 2.0,
            "opt_learning_rate_warmup_epochs": 1000,
            "opt_learning_rate_decay_boundary_epochs": [],
            "opt_learning_rate_decay_factor": 1.0,
            "opt_weight_decay": 0.0,
            "opt_momentum": 0.9,
            "oversampling": 0.4,
            "training_input_shape": [128, 128, 128],
            "validation_input_shape": [128, 128, 128],
            "validation_overlap": 0.5,
        },
    ),
    # every epoch; RCP at 512: 22.9 epochs
    "cosmoflow": Recipe(
        "cosmoflow", "3.0.0", 10, 22.9, 1.0, 1, 1, 1, 1, 0.2, 0.12, 524288, 65536,
        {
            "global_batch_size": 512,
            "opt_name": "sgd",
            "opt_base_learning_rate": 0.001,
            "opt_learning_rate_warmup_epochs": 4,
            "opt_learning_rate_warmup_factor": 1,
            "opt_learning_rate_decay_boundary_epochs": [16, 32],
            "opt_learning_rate_decay_factor": [0.25, 0.125],
            "number_of_nodes": 2,
            "accelerators_per_node": 8,
        },
        "eval_error",
    ),
}  # fmt: skip


def points(recipe: Recipe, last: float) -> list[int]:
    """Return evaluation points, in the unit of the log, up to the first at or after ``last``."""
    found: list[int] = []
    position = recipe.first
    while not found or found[-1] < last:
        found.append(math.ceil(position / recipe.batch) * recipe.batch * recipe.unit)
        position += recipe.interval
    return found


def drawn_convergence(name: str) -> list[float]:
    """Return the convergence of a result's runs: random around the reference's mean, the same in every session."""
    recipe, draw = RECIPES[name], random.Random(name)
    return [recipe.reference + draw.gauss(0.25, 1.0) * recipe.spread for _ in range(recipe.runs)]


def closed_log(
    name: str,
    seed: int,
    convergence: float | None = None,
    *,
    minutes: float = 10.0,
    init_seconds: float = 60.0,
    status: str = "success",
    org: str = "acme",
    start: int = 1_700_000_000_000,
) -> str:
    """Return the text of one run's log.

    Args:
        seed: seed of the run, which also determines its metric below the target and the milliseconds of its steps.
        convergence: approximate convergence; default: the reference's mean.
        minutes: time from run_start to run_stop.
        init_seconds: time from init_start to init_stop.
        status: with ``aborted`` the last evaluation stays below the target.
        start: time of the first line, in milliseconds since 1970.
    """
    recipe, draw = RECIPES[name], random.Random(f"{name} {seed}")
    began = start + round(1000 * init_seconds) + draw.randint(900, 1100)
    stop = began + round(60_000 * minutes)
    where = points(recipe, recipe.reference if convergence is None else convergence)
    lines = [
        event(start, POINT, "cache_clear", True),
        event(start, POINT, "submission_benchmark", name),
        event(start, POINT, "submission_org", org),
        event(start, POINT, "submission_division", "closed"),
        event(start, POINT, "submission_status", "onprem"),
        event(start, POINT, "submission_platform", "2xH200x8"),
        event(start, START, "init_start"),
        event(start, POINT, "seed", seed),
        event(start, POINT, "gradient_accumulation_steps", 1),
        *(event(start, POINT, key, value) for key, value in recipe.hyperparameters.items()),
        event(start + round(1000 * init_seconds), END, "init_stop"),
        event(began, START, "run_start"),
        event(began + draw.randint(1, 90), POINT, "train_samples", recipe.train_samples),
        event(began + draw.randint(90, 180), POINT, "eval_samples", recipe.eval_samples),
    ]
    before, now = 0, began + 180
    for index, point in enumerate(where):
        last = index == len(where) - 1
        begun, now = now, stop if last else began + (stop - began) * (index + 1) // len(where) - draw.randint(0, 900)
        evaluated = now - draw.randint(300, 900)
        below = round(recipe.below * (1 - 0.02 * draw.random()), 6)
        value = recipe.target if last and status == "success" else below
        at = {recipe.progress: point}
        first = {"first_epoch_num": before + 1, "epoch_count": point - before}
        last_of = {"first_epoch_num": before + 1}
        if recipe.progress == "samples_count":
            first, last_of = {"samples_count": before}, at
        lines += [
            event(begun, START, "block_start", None, **first),
            event(evaluated, END, "block_stop", None, **last_of),
            event(evaluated, START, "eval_start", None, **at),
            event(now, POINT, recipe.quality, value, **at),
            event(now, END, "eval_stop", None, **at),
        ]
        before = point
    lines.append(event(stop, END, "run_stop", None, status=status))
    return "".join(f"{line}\n" for line in _with_noise(lines))


def event(time_ms: int, kind: str, key: str, value: object = None, **metadata: object) -> str:
    """Return one MLLOG line without a line feed."""
    record = {
        "namespace": "", "time_ms": time_ms, "event_type": kind, "key": key, "value": value,
        "metadata": {"file": "train.py", "lineno": 7, **metadata},
    }  # fmt: skip
    return ":::MLLOG " + json.dumps(record)


def _with_noise(lines: list[str]) -> Iterator[str]:
    """Yield the events among other output of a launcher, with the prefixes of ``srun --label``."""
    yield "+ srun --label --ntasks=16 train"
    for index, line in enumerate(lines):
        yield f"{index % 3}: {line}" if index % 2 else line
        if index % 7 == 0:
            yield f"1: loss {1.0 / (1 + index):.3f}"
    yield "result written"
