"""Results of whole runs of the decoders' workloads, and comparison of runs on several ranks with a run on one."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from common.mlperf.parsed_log import read_log
from tests.conftest import Finished, flatten

STEPS, TOLERANCE = 3, 1e-10
"""Steps of a run in float64, and relative tolerance of its weights and moments."""

SHARED_BY_FOUR = ["scale.gpus_per_node=4", "layout.cp=2", "optimizer.shard=all", "optimizer.bucket_mb=0.01"]
"""Two replicas of two ranks that split rows; all four share the optimizer's state."""

Run = Callable[..., Finished]
"""``run(data, output, *overrides)`` trains ``STEPS`` steps, each with a checkpoint."""


def state_of(output: Path, step: int = STEPS) -> dict[str, Tensor]:
    """Return weights and moments of all stages after a step."""
    found: dict[str, Tensor] = {}
    for path in sorted((output / "checkpoints" / f"step_{step:08d}").glob("rank_*.pt")):
        content = torch.load(path, weights_only=True)
        if "model" in content:
            found |= flatten({"model": content["model"], "updaters": content["updaters"]})
    return found


def largest_difference(found: dict[str, Tensor], expected: dict[str, Tensor]) -> float:
    """Return the largest difference of tensors relative to their norms."""
    assert expected
    assert found.keys() == expected.keys()
    return max(
        float((found[name] - tensor).double().norm() / tensor.double().norm().clamp(min=1e-12))
        for name, tensor in expected.items()
    )


def evaluated(output: Path) -> list[float]:
    """Return all scores."""
    return [event.value for event in read_log(output / "mlperf.log").all("eval_accuracy")]


def run_on_one(run: Run, data: Path, folder: Path) -> Path:
    """Train on one rank with PyTorch's operations and autograd; return the output in ``folder``."""
    output = folder / "one"
    done = run(data, output, "model.blocks=autograd")
    assert done.code == 10, done.errors
    return output


def check_that_a_layout_ends_with_the_weights_of_one(
    run: Run, layout: list[str], data: Path, whole: Path, output: Path
) -> None:
    """Check weights, moments and scores of a run with the overrides ``layout`` against the output ``whole`` of one."""
    done = run(data, output, *layout)
    assert done.code == 10, done.errors
    assert largest_difference(state_of(output), state_of(whole)) < TOLERANCE
    assert evaluated(output) == pytest.approx(evaluated(whole), rel=TOLERANCE)


def check_that_shards_go_on_from_one_rank_and_one_rank_from_them(
    run: Run, data: Path, whole: Path, folder: Path
) -> None:
    """Check that four ranks can resume the run of one, and one rank theirs, and that both get the same result.

    Args:
        run, data: function and data of the workload.
        whole: output of the run on one rank.
        folder: receives the outputs.
    """
    saved = whole / "checkpoints" / "step_00000001"
    for name, sharing in (("four", SHARED_BY_FOUR), ("one", [])):
        done = run(data, folder / name, *sharing, f"resume={saved}")
        assert done.code == 10, done.errors
        assert largest_difference(state_of(folder / name), state_of(whole)) < TOLERANCE
        saved = folder / name / "checkpoints" / "step_00000002"
