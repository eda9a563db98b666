"""The example under the rules of a benchmark that is scored offline: two metrics of the same error, and AdamW."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

import torch
from torch import Tensor

from common.config.ranges import NotNegative
from common.contract.evaluation import Predictions, Scorer
from common.distributed.layout import Layout
from common.optim.hparams import AdamWHparams
from common.step.train_step import TrainStep
from tests.toy.config import Facts, ModelConfig, ReaderConfig
from tests.toy.evaluate import MeanAbsoluteError, MeanError
from tests.toy.workload import Toy


@dataclass(frozen=True)
class Hparams(AdamWHparams):
    """The hyperparameters in the rules."""

    optimizer: Literal["adamw"]
    warmup_steps: Annotated[int, NotNegative]


@dataclass(frozen=True)
class PicturesConfig:
    """The workload's part of the configuration."""

    facts: Facts
    hparams: Hparams
    model: ModelConfig
    reader: ReaderConfig


class TwoMetrics(Scorer):
    """Scorer of one metric that falls and one that rises with training."""

    def __init__(self) -> None:
        self._error = MeanError()

    def score(self, predictions: Predictions) -> dict[str, float]:
        """Return FID, 400 times the error, so that training can reach the target of 90, and CLIP, 1 minus the error."""
        error = self._error.score(predictions)["mean_absolute_error"]
        return {"FID": 400 * error, "CLIP": 1 - error}


class Pictures(Toy):
    """Estimation of parameters from volumes, scored offline."""

    config_type: ClassVar[type] = PicturesConfig
    title = "Toy Stable Diffusion"
    own: PicturesConfig  # type: ignore[assignment]

    def build_step(self) -> TrainStep:
        """Return the step: accumulated micro-batches, then AdamW."""
        hparams = self.own.hparams

        def schedule(step: Tensor) -> Tensor:
            warmed = ((step + 1).double() / (hparams.warmup_steps + 1)).clamp(max=1.0)
            return (hparams.base_learning_rate * warmed).to(torch.float32)

        return self.step_with(hparams.adamw(), schedule)

    def evaluation(self, layout: Layout) -> MeanAbsoluteError:
        """Return the evaluation of both metrics on the ranks of ``layout``."""
        made = super().evaluation(layout)
        made.scorer = TwoMetrics()
        return made
