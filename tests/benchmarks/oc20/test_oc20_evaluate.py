"""The metric of OpenCatalyst against a loop over atoms, over several padded batches."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn

from benchmarks.oc20.evaluate import evaluation_of
from common.contract.evaluation import Weights
from common.data.batches import HostBatch
from common.distributed.layout import Layout


class Positions(nn.Module):
    """A network whose forces are the positions."""

    def forward(self, tensors: dict[str, Tensor]) -> Tensor:
        return tensors["position"]


class Batches:
    """An evaluation set of three structures in two batches, and a batch without structures."""

    eval_samples = 3

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(1)
        self.batches = []
        for samples, real in ((2, 5), (1, 2), (0, 0)):
            free = (torch.arange(7) < real).float() * (torch.arange(7) % 2 == 0)
            tensors = {name: torch.randn(7, 3, generator=generator) for name in ("position", "force")}
            self.batches.append({**tensors, "free": free, "samples": torch.tensor(float(samples))})

    def __len__(self) -> int:
        return len(self.batches)

    def __iter__(self) -> Iterator[HostBatch]:
        for number, tensors in enumerate(self.batches):
            yield HostBatch(tensors, 2, number)

    def close(self) -> None:
        pass


def test_the_metric_is_the_mean_over_components_of_free_atoms_in_electronvolts_per_angstrom() -> None:
    source, std = Batches(), 1.7
    example = {name: torch.ones_like(tensor) for name, tensor in source.batches[0].items()}
    evaluation = evaluation_of(Positions(), std, example, lambda _: source, Layout({"dp": 1}), False)  # type: ignore[arg-type]
    evaluation.warm_up()
    evaluation.open_data(None)  # type: ignore[arg-type]
    scores = evaluation.scorer.score(evaluation.predict(Weights({})))
    errors = []
    for batch in source.batches:
        for position, force, free in zip(
            *(batch[name].tolist() for name in ("position", "force", "free")), strict=True
        ):
            if free:
                errors += [abs(std * one - other) for one, other in zip(position, force, strict=True)]
    assert len(errors) == 3 * 4
    assert scores == {"force_mae": pytest.approx(sum(errors) / len(errors), rel=1e-6), "eval_samples": 3}
