"""Logs in the form of another program, built from tuples."""

from __future__ import annotations

import json
from typing import Any

Line = tuple[str, str, Any, dict[str, Any], int]  # event type, key, value, metadata, seconds after the first line

POINT, START, END = "POINT_IN_TIME", "INTERVAL_START", "INTERVAL_END"

LARS = {
    "global_batch_size": 3264,
    "opt_name": "lars",
    "gradient_accumulation_steps": 1,
    "lars_opt_base_learning_rate": 10.5,
    "lars_opt_end_learning_rate": 0.0001,
    "lars_opt_learning_rate_decay_poly_power": 2,
    "lars_opt_learning_rate_decay_steps": 37,
    "lars_epsilon": 0.0,
    "lars_opt_learning_rate_warmup_epochs": 2,
    "lars_opt_momentum": 0.9,
    "lars_opt_weight_decay": 5e-05,
}


def resnet_lines(
    seed: int = 1, accuracies: tuple[float, ...] = (0.3, 0.7595), last_epoch: int = 35, minutes: float = 10.0
) -> list[Line]:
    """Return a ResNet run that evaluates every 4 epochs: the last times with ``accuracies``, before with 0.1.

    Args:
        last_epoch: epoch of the last evaluation; the first one follows epoch 1, 2, 3 or 4.
        minutes: time from run_start to run_stop.
    """
    lines: list[Line] = [
        (POINT, "cache_clear", True, {}, 0),
        (POINT, "submission_benchmark", "resnet", {}, 0),
        (POINT, "submission_org", "acme", {}, 0),
        (POINT, "submission_division", "closed", {}, 0),
        (POINT, "submission_status", "onprem", {}, 0),
        (POINT, "submission_platform", "1xH200x8", {}, 0),
        (START, "init_start", None, {}, 1),
        (POINT, "seed", seed, {}, 2),
        *((POINT, key, value, {}, 3) for key, value in LARS.items()),
        (END, "init_stop", None, {}, 60),
        (START, "run_start", None, {}, 61),
        (POINT, "train_samples", 1281167, {}, 62),
        (POINT, "eval_samples", 50000, {}, 62),
    ]
    first = (last_epoch - 1) % 4 + 1
    evaluations = (last_epoch - first) // 4 + 1
    for index, accuracy in enumerate((0.1,) * (evaluations - len(accuracies)) + accuracies):
        epoch = first + 4 * index
        begin = 1 if index == 0 else epoch - 3
        lines += [
            (START, "block_start", None, {"first_epoch_num": begin, "epoch_count": epoch - begin + 1}, 63 + index),
            (END, "block_stop", None, {"first_epoch_num": begin}, 63 + index),
            (START, "eval_start", None, {"epoch_num": epoch}, 63 + index),
            (POINT, "eval_accuracy", accuracy, {"epoch_num": epoch}, 63 + index),
            (END, "eval_stop", None, {"epoch_num": epoch}, 63 + index),
        ]
    status = "success" if accuracies[-1] >= 0.759 else "aborted"
    lines.append((END, "run_stop", None, {"status": status}, 61 + round(60 * minutes)))
    return lines


def encode(line: Line, number: int) -> str:
    event_type, key, value, metadata, seconds = line
    record = {
        "namespace": "",
        "time_ms": 1_700_000_000_000 + 1000 * seconds,
        "event_type": event_type,
        "key": key,
        "value": value,
        "metadata": {"file": "train.py", "lineno": number, **metadata},
    }
    return ":::MLLOG " + json.dumps(record) + "\n"


def replaced(lines: list[Line], key: str, value: Any) -> list[Line]:
    """Return ``lines`` with another value at ``key``."""
    return [(kind, k, value if k == key else v, m, t) for kind, k, v, m, t in lines]


def without(lines: list[Line], key: str) -> list[Line]:
    """Return ``lines`` without those of ``key``."""
    return [line for line in lines if line[1] != key]


LORA = {
    "global_batch_size": 8,
    "gradient_accumulation_steps": 1,
    "opt_base_learning_rate": 4e-4,
    "opt_learning_rate_training_steps": 1024,
    "opt_gradient_clip_norm": 0.3,
    "opt_adamw_weight_decay": 1e-4,
    "lora_rank": 16,
    "lora_alpha": 32,
}
TO_JULY_2025 = 52_000_000
"""Seconds from the first line of a hand-written log, in November 2023."""


def lora_lines(later: int) -> list[Line]:
    """A log without the keys that v6.1 requires, ``later`` seconds after November 2023."""
    head = [
        *without(resnet_lines()[:8], "submission_benchmark"),
        (POINT, "submission_benchmark", "llama2_70b_lora", {}, 0),
        *((POINT, key, value, {}, 3) for key, value in LORA.items()),
        (END, "init_stop", None, {}, 60),
        (START, "run_start", None, {}, 61),
        (POINT, "train_samples", 3901, {}, 62),
        (POINT, "eval_samples", 173, {}, 62),
        (START, "block_start", None, {"samples_count": 0}, 62),
        (END, "block_stop", None, {"samples_count": 1536}, 100),
        (POINT, "eval_accuracy", 0.92, {"samples_count": 1536}, 101),
        (END, "run_stop", None, {"status": "success"}, 102),
    ]
    return [(*line[:4], line[4] + later) for line in head]
