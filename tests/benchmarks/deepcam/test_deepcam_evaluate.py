"""The metric of DeepCAM against a loop over pixels, and its sum over padded batches."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn

from benchmarks.deepcam.evaluate import evaluation_of, sample_iou
from common.contract.evaluation import Weights
from common.data.batches import HostBatch
from common.distributed.layout import Layout

MASKS = [
    # (found, label, mean IoU of the three classes by hand)
    ([[0, 0], [0, 0]], [[0, 0], [0, 0]], 1.0),  # classes 1 and 2 are in neither
    ([[1, 0], [0, 0]], [[0, 0], [0, 0]], (3 / 4 + 0 + 1) / 3),
    ([[0, 1], [2, 2]], [[0, 1], [1, 2]], (1 + 1 / 2 + 1 / 2) / 3),
    ([[2, 2], [2, 2]], [[1, 1], [1, 1]], (1 + 0 + 0) / 3),
]


def looped_iou(found: list[list[int]], label: list[list[int]]) -> float:
    pairs = [(f, y) for f_row, y_row in zip(found, label, strict=True) for f, y in zip(f_row, y_row, strict=True)]
    total = 0.0
    for number in range(3):
        union = sum(number in pair for pair in pairs)
        total += pairs.count((number, number)) / union if union else 1.0
    return total / 3


def test_a_class_that_is_in_neither_mask_counts_as_one() -> None:
    found, label, expected = (torch.tensor(each) for each in zip(*MASKS, strict=True))
    assert sample_iou(found, label).tolist() == pytest.approx(expected.tolist(), abs=1e-7)


def test_the_iou_of_random_masks_is_that_of_a_loop() -> None:
    generator = torch.Generator().manual_seed(1)
    found = torch.randint(3, (9, 5, 7), generator=generator)
    label = torch.randint(3, (9, 5, 7), generator=generator, dtype=torch.uint8)
    found[0], label[1] = 2, 1
    expected = [looped_iou(one.tolist(), other.tolist()) for one, other in zip(found, label, strict=True)]
    assert sample_iou(found, label).tolist() == pytest.approx(expected, rel=1e-12)


class Thresholds(nn.Module):
    """A network whose logits are the first three channels of its input."""

    def forward(self, x_NCHW: Tensor) -> Tensor:
        return x_NCHW[:, :3]


class Batches:
    """An evaluation set in batches of four, the last one padded."""

    def __init__(self, batches: list[dict[str, Tensor]], eval_samples: int) -> None:
        self._batches, self.eval_samples = batches, eval_samples

    def __len__(self) -> int:
        return len(self._batches)

    def __iter__(self) -> Iterator[HostBatch]:
        for number, tensors in enumerate(self._batches):
            yield HostBatch(tensors, 4, number)

    def close(self) -> None:
        pass


def test_the_metric_is_the_mean_over_samples_without_padding() -> None:
    generator = torch.Generator().manual_seed(2)
    x, shift = torch.randn(8, 4, 6, 16, generator=generator), torch.randn(16, generator=generator)
    scale = 3 * torch.rand(16, generator=generator) + 0.1
    y = torch.randint(3, (8, 4, 6), generator=generator, dtype=torch.uint8)
    real = torch.tensor([1.0] * 6 + [0.0] * 2)
    batches = [
        {"x": x[part], "y": y[part], "shift": shift, "scale": scale, "weight": real[part]}
        for part in (slice(4), slice(4, 8))
    ]
    example = {name: torch.zeros_like(tensor) for name, tensor in batches[0].items()}
    evaluation = evaluation_of(
        Thresholds(), torch.float32, example, lambda _: Batches(batches, 6), Layout({"dp": 1}), False
    )  # type: ignore[arg-type]
    evaluation.warm_up()
    evaluation.open_data(None)  # type: ignore[arg-type]
    scores = evaluation.scorer.score(evaluation.predict(Weights({})))
    found = (scale * (x - shift))[..., :3].argmax(-1)
    expected = [looped_iou(one.tolist(), other.tolist()) for one, other in zip(found[:6], y[:6], strict=True)]
    assert scores == {"mean_iou": pytest.approx(sum(expected) / 6, rel=1e-12), "eval_samples": 6}
