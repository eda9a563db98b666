"""Evaluation interfaces of the contract: predict, score, and schedule evaluations."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from torch import Tensor


@dataclass(frozen=True)
class Weights:
    """Weights to evaluate: parameters, averaged batch-norm statistics or EMA. Maps a name to a device tensor."""

    tensors: dict[str, Tensor]


@dataclass(frozen=True)
class Predictions:
    """Result of ``predict``, which a Scorer receives: picklable CPU values. NumPy arrays transfer fastest."""

    values: dict[str, Any]


@dataclass(frozen=True)
class Point:
    """An evaluation point that training has reached. All updates of the evaluated weights are known to be finished.

    Attributes:
        number: index of the point, from 1.
        at: position that the log reports: epochs, or real training samples.
        step: finished optimizer steps.
        samples: finished nominal training samples over all ranks. Identifies the point.
        counted: finished real training samples.
        time_ms: time of the last weight update, in milliseconds since the epoch; None means about now.
    """

    number: int
    at: int
    step: int
    samples: int
    counted: int
    time_ms: int | None = None


@dataclass(frozen=True)
class Score:
    """The result of one evaluation.

    Attributes:
        samples: nominal training samples over all ranks before these weights.
        time_ms: the time that counts for ``run_stop``, in milliseconds since the epoch.
        seconds: duration of the evaluation: transfer of the weights, prediction and scoring.
        waited_seconds: part of ``seconds`` during which training waited.
        point: evaluation point of the weights. Set only by offline scoring.
        scored_ms: start and end of offline scoring, whose time does not count, in milliseconds since the epoch. None:
            the evaluation starts when the training before it ends, and ends at ``time_ms``.
    """

    samples: int
    values: dict[str, float]
    time_ms: int
    seconds: float = 0.0
    waited_seconds: float = 0.0
    point: Point | None = None
    scored_ms: tuple[int, int] | None = None

    @property
    def hidden_seconds(self) -> float:
        """Seconds of the evaluation that overlapped with training."""
        return max(0.0, self.seconds - self.waited_seconds)


class Scorer(ABC):
    """Computes the metrics of predictions, on one rank or in a separate process.

    It must be picklable before :meth:`open_data`, and needs no process group.
    """

    def warm_up(self) -> None:
        """Run once on synthetic data before ``run_start``, so that kernels are loaded. Default: do nothing."""

    def open_data(self, root: Path) -> None:
        """Load the ground truth under ``root``. Called once, after ``run_start``. Default: do nothing."""

    @abstractmethod
    def score(self, predictions: Predictions) -> dict[str, float]:
        """Return the metrics of ``predictions`` by name."""

    def close(self) -> None:
        """Release resources, when the evaluation is closed. Default: do nothing."""


class Evaluation(ABC):
    """Predicts over the evaluation set with given weights. A separate Scorer scores the predictions.

    Attributes:
        scorer: created by the constructor on every rank. Only rank 0 of the evaluation's layout, or a process that
            rank 0 starts, opens its data and scores.
    """

    scorer: Scorer

    def warm_up(self) -> None:
        """Run once on synthetic data before ``run_start``: plans, graphs, memory. Default: do nothing."""

    @abstractmethod
    def open_data(self, root: Path) -> None:
        """Open the evaluation data under ``root``, after ``run_start``. Nothing may read the data earlier."""

    @abstractmethod
    def predict(self, weights: Weights) -> Predictions | None:
        """Predict over the whole evaluation set. Collective over the evaluation's layout.

        Only the return value of rank 0 of the layout is scored; the other ranks may return None.
        """

    def close(self) -> None:
        """Stop readers and close files. Default: do nothing."""


def never() -> bool:
    """Return False: no signal was received."""
    return False


class Evaluations(Protocol):
    """Runs an Evaluation at the evaluation points, on the training ranks or on separate evaluation ranks."""

    later: bool
    """Whether scores arrive after ``submit``, and only on rank 0."""
    elsewhere: bool
    """Whether other ranks evaluate, or these ranks after training, so that training does not wait for evaluations."""
    offline: bool
    """Whether checkpoints are scored offline: maybe not all, and not in order. The run's time ends at one of them."""
    interrupted: bool
    """Whether a signal asked the evaluation ranks to stop, which stops the run too."""

    def prepare(self, weights: Callable[[], Weights]) -> None:
        """Do everything that can be done before ``run_start``. Collective.

        Args:
            weights: returns the weights at an evaluation point. Collective over the training ranks.
        """
        ...

    def open_data(self, root: Path) -> None:
        """Open the evaluation data after ``run_start``, if the training ranks need them."""
        ...

    def submit(self, weights: Weights, samples: int) -> None:
        """Submit weights for evaluation, trained on ``samples`` samples. Collective."""
        ...

    def trained(self, point: Point) -> None:
        """Note that the training before an evaluation is finished. Called in the order of submission."""
        ...

    def poll(self) -> list[Score]:
        """Return the scores that have arrived since the last poll, oldest first, without waiting."""
        ...

    def finish(self, stopping: Callable[[], bool] = never) -> Iterator[Score]:
        """Yield the remaining scores as they arrive, until none is pending. Called when training has ended.

        ``stopping`` returns whether a signal asks to stop; offline scoring then raises Interrupted.
        """
        ...

    def dismiss(self, stopped_at: int) -> None:
        """Send the end of the run to the evaluation ranks.

        Args:
            stopped_at: step at which a signal stopped the run; 0 for a run that ended by itself.
        """
        ...

    def close(self) -> None:
        """Release all resources; also called after a failure."""
        ...
