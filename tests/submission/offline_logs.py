"""Logs of Stable Diffusion in the form of another program, whose checkpoints are scored after training.

The metrics are those of the reference's convergence at the checkpoints of a batch of 256.
"""

from __future__ import annotations

import random

from closed_logs import END, POINT, START, event

EVERY = 512_000
SCORES = {1: (240.0, 0.055), 2: (160.0, 0.10), 3: (99.0, 0.15), 4: (84.0, 0.165), 5: (75.0, 0.177)}
"""FID and CLIP by the number of the checkpoint."""
HYPERPARAMETERS = {
    "global_batch_size": 256, "gradient_accumulation_steps": 1, "opt_name": "adamw", "opt_adamw_beta_1": 0.9,
    "opt_adamw_beta_2": 0.999, "opt_adamw_epsilon": 1e-08, "opt_adamw_weight_decay": 0.01,
    "opt_base_learning_rate": 7.17e-05, "opt_learning_rate_warmup_steps": 1000,
}  # fmt: skip


def offline_log(seed: int, scored: tuple[int, ...], start: int, minutes: float) -> str:
    """The text of a run's log, whose fourth checkpoint is the first that passes.

    Args:
        seed: seed of the run, which also determines the milliseconds of its blocks.
        scored: numbers of the checkpoints in the order of scoring, which takes five seconds each.
        start: time of the first line, in milliseconds since the epoch.
        minutes: from run_start to the end of the fourth block.
    """
    draw, began = random.Random(seed), start + 11_000
    ends = [began, *(began + round(15_000 * minutes * number) - draw.randint(0, 500) for number in (1, 2, 3))]
    ends += [began + round(60_000 * minutes), began + round(60_000 * minutes) + 20_000]
    lines = [
        event(start, POINT, "cache_clear", True),
        event(start, POINT, "submission_benchmark", "stable_diffusion"),
        event(start, POINT, "submission_org", "acme"),
        event(start, POINT, "submission_division", "closed"),
        event(start, POINT, "submission_status", "onprem"),
        event(start, POINT, "submission_platform", "2xH200x8"),
        event(start, START, "init_start"),
        event(start, POINT, "seed", seed),
        *(event(start, POINT, key, value) for key, value in HYPERPARAMETERS.items()),
        event(start + 10_000, END, "init_stop"),
        event(began, START, "run_start"),
        event(began + 50, POINT, "train_samples", 6_513_144),
        event(began + 60, POINT, "eval_samples", 30_000),
    ]
    for number in range(1, 6):
        before, after = EVERY * (number - 1), EVERY * number
        lines.append(
            event(max(ends[number - 1], began + 70), START, "block_start", "training_step", samples_count=before)
        )
        lines.append(event(ends[number], END, "block_stop", "training_step", samples_count=after))
    for turn, number in enumerate(scored):
        now, at = ends[5] + 5_000 * turn, EVERY * number
        lines.append(event(now, START, "eval_start", samples_count=at))
        for metric, value in zip(("FID", "CLIP"), SCORES[number], strict=True):
            lines.append(event(now + 4_000, POINT, "eval_accuracy", value, metric=metric, samples_count=at))
        lines.append(event(now + 4_000, END, "eval_stop", samples_count=at))
    lines.append(event(ends[4], END, "run_stop", None, status="success", samples_count=4 * EVERY))
    return "".join(f"{line}\n" for line in lines)
