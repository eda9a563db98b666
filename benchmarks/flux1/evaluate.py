"""Validation loss of the rules: the flow's squared error at fixed times, as the mean of the means by timestep.

Every validation sample has a stored timestep b of B, and is noised to the time b / B. The noise of a sample is a
function of the run's seed, of the updates before the evaluation and of the sample's row in the set. So the loss does
not depend on batches, ranks or interruptions of the run.

Legend: N samples of a batch, B timesteps.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from common.contract.evaluation import Predictions, Scorer, Weights
from common.data.batches import EvalSource
from common.distributed.layout import Layout
from common.evaluation.counts import CountedEvaluation, Counts, check_whole_set
from common.ops.random_bits.reference import words

UPDATES = "updates"
"""Name of the number of finished updates among the weights to evaluate. No parameter of the network has this name."""
VALIDATION_SITE = 0xF1
"""Site of the hash that makes the seed of an evaluation."""

Errors = Callable[[dict[str, Tensor], Tensor, Tensor], Tensor]
"""Function from the tensors of a batch, a seed (0-d int64) and times (N,) to the squared error of each sample (N,)."""


def with_updates(weights: Weights, updates: Tensor) -> Weights:
    """Return ``weights`` and the number of finished updates (0-d int64), which determines an evaluation's noise."""
    return Weights({**weights.tensors, UPDATES: updates})


def evaluation_seed(seed: Tensor, updates: Tensor) -> Tensor:
    """Return the seed of the noise in an evaluation after ``updates`` updates; all are 0-d int64 on one device."""
    low, high = words(2 * updates + torch.arange(2, device=updates.device), seed, VALIDATION_SITE).long().unbind()
    return (high << 32) | (low & 0xFFFFFFFF)


@dataclass(frozen=True)
class MeanOfTimesteps(Scorer):
    """Scorer that computes the mean over the timesteps of the mean error at each. Every timestep has samples.

    Attributes:
        timesteps: B.
    """

    timesteps: int

    def score(self, predictions: Predictions) -> dict[str, float]:
        """Return ``eval_loss``, and ``eval_samples``, the number of validation samples.

        Raises:
            RuntimeError: not every sample was evaluated exactly once.
        """
        values = predictions.values
        samples_B = [values[f"samples_{step}"] for step in range(self.timesteps)]
        check_whole_set(sum(samples_B), values["expected"], "validation samples")
        means_B = [values[f"error_{step}"] / samples for step, samples in enumerate(samples_B)]
        return {"eval_loss": math.fsum(means_B) / self.timesteps, "eval_samples": sum(samples_B)}


class ValidationLoss(CountedEvaluation):
    """Evaluation of the validation loss with weights from :func:`with_updates`.

    Args:
        model: the network.
        errors: computes the errors of samples in fp32, or in fp64 for an fp64 network; must allow graph capture.
        example: a batch on the device, for warm-up: what ``errors`` needs, ``timesteps`` (N,) int64 and ``present``
            (N,) bool, which is False for padding.
        layout: ranks that share the validation set; its seed determines the noise.
        open_source: opens the batches of this rank, given the data folder.
        capture: replay the pass as a CUDA graph.
        timesteps: B.
    """

    def __init__(
        self,
        model: nn.Module,
        errors: Errors,
        example: dict[str, Tensor],
        layout: Layout,
        open_source: Callable[[Path], EvalSource],
        capture: bool,
        timesteps: int,
    ) -> None:
        names = [f"{kind}_{step}" for kind in ("samples", "error") for step in range(timesteps)]
        counts = Counts(layout, names[:timesteps], names[timesteps:])
        # A captured graph reads the seed from these tensors, so every evaluation has other noise.
        seed = torch.tensor(layout.seed, dtype=torch.int64, device=layout.device)
        self._updates = torch.zeros_like(seed)
        bins_B = torch.arange(timesteps, device=layout.device)

        def count(batch: dict[str, Tensor]) -> None:
            times_N = batch["timesteps"] / timesteps
            errors_N = errors(batch, evaluation_seed(seed, self._updates), times_N).double()
            in_bin_BN = (batch["timesteps"] == bins_B.unsqueeze(1)) & batch["present"]
            errors_B = errors_N.where(in_bin_BN, 0.0).sum(1)
            counts.add(*in_bin_BN.sum(1).unbind(), *errors_B.unbind())

        super().__init__(MeanOfTimesteps(timesteps), model, count, counts, example, open_source, capture)

    def predict(self, weights: Weights) -> Predictions:
        """Return counts and summed errors of each timestep over all ranks, on every rank. Collective; waits."""
        tensors = dict(weights.tensors)
        self._updates.copy_(tensors.pop(UPDATES))
        return super().predict(Weights(tensors))
