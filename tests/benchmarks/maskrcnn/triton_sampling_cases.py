"""Triton's samples against the reference, whose every index they have; run by tests/test_interpreted_kernels.py.
Fresh memory holds the largest integers here."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from benchmarks.maskrcnn.ops import sampling
from benchmarks.maskrcnn.ops.sampling import triton as sampling_triton
from benchmarks.maskrcnn.ops.sampling.reference import sample_reference
from common.ops.operation import AUTO, OperationRequest

pytestmark = pytest.mark.usefixtures("poisoned_memory")


@pytest.fixture(autouse=True)
def several_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small tiles, so that programs meet in atomics."""
    for key, rows in (("count", 128), ("collect", 128), ("order", 16)):
        monkeypatch.setitem(sampling_triton.TILES, key, sampling_triton.TILES[key]._replace(rows=rows))


def labels(candidates: int) -> Tensor:
    """Of all kinds, without negatives, without positives, and with none of both."""
    label = torch.randint(-1, 2, (4, candidates), generator=torch.Generator().manual_seed(candidates)).to(torch.int8)
    label[1] = label[1].abs() * 2 - 1
    label[2] = -label[2].abs()
    label[3] = -1
    return label


@pytest.mark.parametrize(
    ("candidates", "count", "most_positive"),
    [(700, 64, 16), (301, 40, 40), (30, 50, 5), (9, 4, 0), (1, 3, 3), (0, 4, 2)],
)
@pytest.mark.parametrize("seed", [0, -0x123456789ABCDEF])
def test_samples_are_the_references(candidates: int, count: int, most_positive: int, seed: int) -> None:
    arguments = labels(candidates), torch.tensor([seed]), 1, count, most_positive
    for found, expected in zip(sampling_triton.sample(*arguments), sample_reference(*arguments), strict=True):
        assert found.dtype == torch.int64
        assert torch.equal(found, expected)


def test_labels_that_are_not_contiguous_are_refused() -> None:
    with pytest.raises(ValueError, match="label_BN must be contiguous"):
        sampling_triton.sample(labels(6).T, torch.tensor([1]), 1, 3, 1)


def test_kernels_are_chosen_where_triton_runs() -> None:
    request = OperationRequest(torch.device("cpu"), torch.float32)
    assert sampling.SAMPLING.select(AUTO, request).name == "triton"
