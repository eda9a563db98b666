"""Runs written by hand, as the trainer and its launcher would have left them: logs, metrics and series."""

from __future__ import annotations

import datetime
import json
import math
from pathlib import Path
from typing import Any

from tests.common.mlperf.handwritten_logs import LARS

Line = tuple[str, str, Any, dict[str, Any], float]  # event type, key, value, metadata, seconds since run_start

POINT, START, END = "POINT_IN_TIME", "INTERVAL_START", "INTERVAL_END"
RUN_START = 1_700_000_000.0
TRAIN_SAMPLES = 1_281_167


def before_the_clock(seed: int = 1, org: str = "acme", division: str = "closed", **changes: Any) -> list[Line]:
    """A log up to run_start, 58 seconds of initialisation included; ``changes`` by key."""
    values: dict[str, Any] = {
        "cache_clear": True,
        "submission_benchmark": "resnet",
        "submission_org": org,
        "submission_division": division,
        "submission_status": "onprem",
        "submission_platform": "8xH200",
        **changes,
    }
    lines: list[Line] = [(POINT, key, value, {}, -60) for key, value in values.items()]
    lines += [(START, "init_start", None, {}, -59), (POINT, "seed", seed, {}, -58)]
    lines += [(POINT, key, value, {}, -57) for key, value in LARS.items()]
    return [*lines, (END, "init_stop", None, {}, -1), (START, "run_start", None, {}, 0)]


def resnet_run(
    seed: int = 1, epochs: int = 35, block_seconds: float = 70.0, evaluation_seconds: float = 2.0, **before: Any
) -> list[Line]:
    """A run of ResNet-50 that converges after ``epochs``: blocks of four epochs, each with its evaluation.

    The first block begins a second after run_start, which ends with the last evaluation.
    """
    lines = before_the_clock(seed, **before)
    lines += [(POINT, "train_samples", TRAIN_SAMPLES, {}, 1), (POINT, "eval_samples", 50_000, {}, 1)]
    at, first = 1.0, (epochs - 1) % 4 + 1
    for last in range(first, epochs + 1, 4):
        begin = 1 if last == first else last - 3
        accuracy = 0.7601 if last == epochs else 0.75 * (1 - math.exp(-last / 12)) + 1e-6 * seed
        lines.append((START, "block_start", None, {"first_epoch_num": begin, "epoch_count": last - begin + 1}, at))
        at += block_seconds
        lines.append((END, "block_stop", None, {"first_epoch_num": begin}, at))
        lines.append((START, "eval_start", None, {"epoch_num": last}, at))
        at += evaluation_seconds
        lines.append((POINT, "eval_accuracy", accuracy, {"epoch_num": last}, at))
        lines.append((END, "eval_stop", None, {"epoch_num": last}, at))
    return [*lines, (END, "run_stop", None, {"status": "success", "epoch_num": epochs}, at)]


def write_log(path: Path, lines: list[Line], launched: float = 0.0) -> Path:
    """The lines as a log, of a run that began ``launched`` seconds later."""
    records = [
        {
            "namespace": "",
            "time_ms": round(1000 * (RUN_START + launched + seconds)),
            "event_type": kind,
            "key": key,
            "value": value,
            "metadata": {"file": "train.py", "lineno": number, **metadata},
        }
        for number, (kind, key, value, metadata, seconds) in enumerate(lines)
    ]
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(f":::MLLOG {json.dumps(record)}\n" for record in records))
    return path


def write_metrics(
    folder: Path, rank: int, steps: int, seconds: float, slower: float = 0.0, launched: float = 0.0, **constant: float
) -> Path:
    """Steps of a rank, evenly over ``seconds`` from the second one on, of which ``slower`` is the share of one rank.

    Args:
        folder: output_dir.
        rank: its number.
        steps: how many.
        seconds: that they take together.
        slower: by what share its own work takes longer; it waits that much less for the others.
        launched: seconds by which the run began later.
        constant: further figures, the same in every line.
    """
    step_ms = 1000 * seconds / steps
    samples = 35 * TRAIN_SAMPLES / steps
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"metrics_rank{rank}.jsonl"
    with path.open("w") as file:
        for step in range(1, steps + 1):
            wave = 0.04 * math.sin(step * 0.7 + rank) + 0.02 * math.cos(step * 2.9)
            record = {
                "step": step,
                "samples": round(step * samples),
                "loss": 6.9 * math.exp(-3 * step / steps) + 0.9 + 4 * wave,
                "step_ms": round(step_ms * (1 + wave), 4) if step > 1 else 0.0,
                "data_wait_ms": round(0.03 * step_ms, 4),
                "comm_wait_ms": round((0.12 - slower) * step_ms, 4),
                "time": round(RUN_START + launched + 1 + step * seconds / steps, 3),
                **constant,
            }
            if step % 10 == 0:
                record |= {"power_w": 640 + 60 * math.sin(step / 90), "sm_clock_mhz": 1830 - 90 * (step % 40 == 0)}
            file.write(json.dumps(record) + "\n")
    return path


def write_series(folder: Path, epochs: list[int], block_seconds: list[float], name: str = "20260101-000000") -> Path:
    """A series of experiments with their logs, as the launcher leaves it."""
    folder.mkdir(parents=True, exist_ok=True)
    entries = []
    for number, (last, seconds) in enumerate(zip(epochs, block_seconds, strict=True), start=1):
        lines = resnet_run(seed=1000 + number, epochs=last, block_seconds=seconds)
        launched = 3600.0 * (number - 1)
        log = write_log(folder / f"{name}_{number}.log", lines, launched)
        write_metrics(folder / f"{name}_{number}", 0, 400, lines[-1][4] - 1, launched=launched)
        about = {"series": name, "experiment": number}
        entries.append(
            {
                "event": "begin", **about, "time": _iso(launched - 80), "declared": len(epochs),
                "seed": 1000 + number, "commit": "0" * 40,
                "dirty": False, "configuration": "f" * 64, "benchmark": "resnet", "scale": "1x8",
                "ruleset": "4.0.0", "log": log.name, "output_dir": f"{name}_{number}", "job": None, "overrides": [],
            }
        )  # fmt: skip
        entries.append(
            {
                "event": "end", **about, "time": _iso(launched + lines[-1][4] + 10), "exit_code": 0,
                "status": "success", "minutes": lines[-1][4] / 60,
                "verdict": "valid run", "reason": "",
            }
        )  # fmt: skip
    (folder / "runs.jsonl").write_text("".join(json.dumps(entry) + "\n" for entry in entries))
    return folder


def _iso(seconds: float) -> str:
    """The time that many seconds after the first run_start."""
    return datetime.datetime.fromtimestamp(RUN_START + seconds, datetime.UTC).isoformat()
