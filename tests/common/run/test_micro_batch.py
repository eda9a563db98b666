"""Choice of the largest micro-batch that fits, from the memory of two others."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from common.config.schema import Declaration
from common.run import micro_batch
from common.run.micro_batch import largest_fitting, pick

CHOICES = [1, 2, 4, 7, 8, 14, 28, 56]


@pytest.mark.parametrize(
    ("capacity", "expected"),
    [(200, 28), (57, 7), (58, 8), (11, 1), (8, None), (1000, 56)],  # 2 bytes, and 7 a sample
)
def test_memory_is_extrapolated_linearly(capacity, expected):
    assert largest_fitting(CHOICES, lambda size: 2 + 7 * size, capacity) == expected


@pytest.mark.parametrize(("limit", "capacity", "expected"), [(2, 100, 2), (3, 100, 2), (1, 100, 1), (4, 100, 4)])
def test_a_size_that_runs_out_of_memory_does_not_fit(limit, capacity, expected):
    assert largest_fitting(CHOICES, lambda size: 7 * size if size <= limit else None, capacity) == expected


def test_nothing_fits_if_the_smallest_runs_out_of_memory():
    assert largest_fitting(CHOICES, lambda size: None, 1e9) is None


class TooLarge:
    """A workload that fits no device. Its probe needs 10 bytes per sample, and ``unprobed_bytes`` is 60."""

    used = 0.0

    def __init__(self, run: Any, layout: Any) -> None:
        raise AssertionError("the whole workload was built")

    @classmethod
    def probe(cls, run: Any, layout: Any) -> Any:
        batch = SimpleNamespace(tensors={"x": torch.zeros(run.micro_batch, dtype=torch.int8)})
        return SimpleNamespace(cfg=run, example_batches=lambda: [batch])

    @classmethod
    def unprobed_bytes(cls, run: Any) -> float:
        return 60.0

    @classmethod
    def load(cls, size: int) -> Any:
        return SimpleNamespace(
            micro_batch=size, grad_accumulation_steps=32, declaration=Declaration(largest_micro_batch=16)
        )


@pytest.mark.slow_cases("220-2", "300-8")
@pytest.mark.parametrize(("free", "expected"), [(220, 2), (300, 8), (1000, 16)])
def test_a_workload_that_fits_no_device_is_measured_by_its_probe(monkeypatch, free, expected):
    def train_once(workload: Any) -> None:
        TooLarge.used = 10.0 * workload.cfg.micro_batch

    monkeypatch.setattr(micro_batch, "_train_once", train_once)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (free, free))
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device: TooLarge.used)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: 0)
    for name in ("reset_peak_memory_stats", "empty_cache"):
        monkeypatch.setattr(torch.cuda, name, lambda *device: None)
    # 0.8 of the free bytes, less three times 32 bytes of batches, less the rest.
    assert pick(TooLarge, TooLarge.load, torch.device("cuda")) == expected  # type: ignore[arg-type]
