"""Validation losses of whole runs: the same after an interruption, and on ranks that only evaluate."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.conftest import suite


def losses(folder: Path, data: Path, *overrides: str) -> dict[int, float]:
    """Train the test recipe with three evaluations; return samples to validation loss."""
    done = suite(
        "train", "benchmark=flux1", "scale=test", "device=cpu", "seed=5", f"data_dir={data}", f"output_dir={folder}",
        "benchmark.schedule.last_samples=48", "checkpoint_every=5", *overrides,
    )  # fmt: skip
    assert done.code in (0, 10), done.errors
    lines = (folder / "evaluations.jsonl").read_text().splitlines()
    return {found["samples"]: found["eval_loss"] for found in map(json.loads, lines)}


@pytest.fixture(scope="module")
def whole(data_of, tmp_path_factory) -> Path:
    """Return the folder of an uninterrupted run."""
    folder = tmp_path_factory.mktemp("whole") / "run"
    (folder.parent / "losses.json").write_text(json.dumps(losses(folder, data_of("flux1"))))
    return folder


def losses_of(whole: Path) -> dict[int, float]:
    return {int(samples): loss for samples, loss in json.loads((whole.parent / "losses.json").read_text()).items()}


def test_a_resumed_run_has_the_losses_of_an_uninterrupted_one(whole, data_of, tmp_path):
    """The checkpoint after 5 of 12 steps lies between the first two evaluations, after 4 and 8 steps."""
    saved = whole / "checkpoints" / "step_00000005"
    resumed = losses(tmp_path / "resumed", data_of("flux1"), f"resume={saved}")
    expected = losses_of(whole)
    assert list(expected) == [16, 32, 48]
    assert len(set(expected.values())) == 3
    assert resumed == {samples: expected[samples] for samples in (32, 48)}


def test_ranks_that_only_evaluate_find_the_same_losses(whole, data_of, tmp_path):
    apart = losses(tmp_path / "apart", data_of("flux1"), "scale.gpus_per_node=2", "evaluation.ranks=1")
    assert apart == pytest.approx(losses_of(whole), rel=1e-6)
