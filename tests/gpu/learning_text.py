"""Losses of a language model that learns to read, for comparing precisions: the same rows, in one order, once each."""

from __future__ import annotations

import sysconfig
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch

from common.contract.workload import Workload
from common.data.batches import Batch
from common.step.graphs import StepRunner

STEPS, MEAN_OF, ROWS = 200, 20, 16
"""Updates, how many of them a mean is of, and rows of each."""

CLOSE = 0.01
"""How far the mean losses of two precisions may be apart, relative, beyond what two runs in bf16 are."""

VOCABULARY = 256
"""Tokens are bytes."""


def text() -> np.ndarray:
    """Bytes of Python's standard library: far more than are read, so that nothing is learnt by heart."""
    files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    return np.concatenate([np.frombuffer(file.read_bytes(), np.uint8) for file in files]).astype(np.int32)


def mean_losses(workload: Workload, device: torch.device, length: int, *, last_is_scored: bool) -> list[float]:
    """Train on ``ROWS`` rows of ``length + 1`` tokens a step.

    Args:
        workload: whose steps take such rows as ``tokens``.
        device: a GPU; the iteration is captured.
        length: of a row.
        last_is_scored: False hides the last token of a row.

    Returns:
        Means of ``MEAN_OF`` losses.
    """
    ids = text()
    step = workload.build_step()
    runner = StepRunner(step, workload.model, workload.cfg.grad_accumulation_steps)
    runner.warm_up(workload.example_batches())
    starts = (
        np.random.default_rng(1).permutation((len(ids) - 1) // length)[: STEPS * ROWS].reshape(STEPS, ROWS) * length
    )
    results = []
    for row_starts in starts:
        tokens = torch.from_numpy(np.stack([ids[start : start + length + 1] for start in row_starts])).to(device)
        if not last_is_scored:
            tokens[:, -1] = -1
        with runner.on_stream():
            result = runner([Batch({"tokens": tokens}, ROWS)])
            results.append((result.names, result.values.clone()))
    torch.cuda.synchronize(device)
    assert not runner.uncaptured
    runner.close()
    losses = [step.read(names, values.tolist()).metrics["loss"] for names, values in results]
    return np.array(losses).reshape(-1, MEAN_OF).mean(1).tolist()


def check_that_fp8_learns_as_bf16_does(read: Callable[[str], list[float]]) -> None:
    """Compare what FP8 learns with two runs in bf16 from one start, which sums in any order drive apart.

    Args:
        read: mean losses with ``model.linear`` being ``torch`` or ``fp8``.
    """
    curves = [read(linear) for linear in ("torch", "torch", "fp8")]
    for losses in curves:
        print(" ".join(f"{loss:.4f}" for loss in losses))
    assert curves[0][-1] < 0.7 * curves[0][0]
    for one, other, fp8 in zip(*curves, strict=True):
        middle = (one + other) / 2
        assert abs(fp8 - middle) < CLOSE * middle + abs(one - other)
