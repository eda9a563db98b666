"""The evaluation side of the contract, as the rules of a benchmark define its metric."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from torch import Tensor


@dataclass(frozen=True)
class Weights:
    """What an evaluation uses: parameters, averaged batch-norm statistics, EMA. Name to tensor on the device."""

    tensors: dict[str, Tensor]


@dataclass(frozen=True)
class Predictions:
    """What ``predict`` hands to a Scorer: CPU values that pickle, of which NumPy arrays travel fastest."""

    values: dict[str, Any]


@dataclass(frozen=True)
class Point:
    """An evaluation point that training has reached: the weights that are evaluated are known to be done.

    Attributes:
        number: of the point, from 1.
        at: what the log calls it: epochs, or real training samples.
        step: optimizer steps done.
        samples: nominal training samples done, over all ranks, by which points are told apart.
        counted: real ones.
        time_ms: when the last of the weights was updated, milliseconds since the epoch; None for about now.
    """

    number: int
    at: int
    step: int
    samples: int
    counted: int
    time_ms: int | None = None


@dataclass(frozen=True)
class Score:
    """A judged evaluation.

    Attributes:
        samples: nominal training samples, over all ranks, that the weights had seen.
        values: metric name to value.
        time_ms: the time that counts for ``run_stop``, milliseconds since the epoch.
        seconds: that the evaluation took: bringing the weights to where it runs, predicting and scoring.
        waited_seconds: of these, that training stood still for it.
        point: where the weights are from, if whoever scores them knows it: offline.
        scored_ms: beginning and end of an evaluation that does not count, milliseconds since the epoch; else None: it
            begins with the end of the training before it, and ends at ``time_ms``.
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
        """What of the evaluation training went on behind."""
        return max(0.0, self.seconds - self.waited_seconds)


class Scorer(ABC):
    """Makes the metrics of predictions, on one rank or in a process of its own.

    It pickles before :meth:`open_data`, and needs no process group.
    """

    def warm_up(self) -> None:
        """Run once on made-up data before ``run_start``, so that kernels are loaded. Default: nothing."""

    def open_data(self, root: Path) -> None:
        """Load the ground truth under ``root``, once, after ``run_start``. Default: nothing."""

    @abstractmethod
    def score(self, predictions: Predictions) -> dict[str, float]:
        """The metrics of ``predictions``, by name."""

    def close(self) -> None:
        """End what it started; whoever closes the evaluation closes it. Default: nothing."""


class Evaluation(ABC):
    """Predict with given weights over the evaluation set; what scores the predictions is an object of its own.

    Attributes:
        scorer: of the predictions. Only on rank 0 of the evaluation's layout, or in a process of that rank's, does it
            open data and score; the constructor makes it.
    """

    scorer: Scorer

    def warm_up(self) -> None:
        """Run once on synthetic data before ``run_start``: plans, graphs, memory. Default: nothing."""

    @abstractmethod
    def open_data(self, root: Path) -> None:
        """Open the evaluation data under ``root``; the first touch of them. After ``run_start``."""

    @abstractmethod
    def predict(self, weights: Weights) -> Predictions | None:
        """Predict over the whole evaluation set; collective over the evaluation's layout.

        Only what rank 0 of the layout returns is scored; the other ranks may return None.
        """

    def close(self) -> None:
        """Stop readers and close files. Default: nothing."""


def never() -> bool:
    """No signal."""
    return False


class Evaluations(Protocol):
    """A way to run an Evaluation at the evaluation points: on the training ranks themselves, or on ranks of its own."""

    later: bool
    """Whether scores come later, and to rank 0 alone."""
    elsewhere: bool
    """Whether others evaluate, or these ranks later, so that training needs not stand still for it."""
    offline: bool
    """Whether checkpoints are scored, not all and in an order of their own, and the time of one ends the run."""
    interrupted: bool
    """Whether those ranks were asked by a signal to stop, and so the run is."""

    def prepare(self, weights: Callable[[], Weights]) -> None:
        """Do all that can be done before ``run_start``. Collective.

        Args:
            weights: what gives the weights at an evaluation point; collective over the training ranks.
        """
        ...

    def open_data(self, root: Path) -> None:
        """Open the evaluation data, if the training ranks need them; after ``run_start``."""
        ...

    def submit(self, weights: Weights, samples: int) -> None:
        """Have the weights evaluated that have seen ``samples`` training samples. Collective."""
        ...

    def trained(self, point: Point) -> None:
        """Note that the training before an evaluation, submitted or to be, is done; in the order of submission."""
        ...

    def poll(self) -> list[Score]:
        """The scores that have become known since the last poll, oldest first; waits for nothing."""
        ...

    def finish(self, stopping: Callable[[], bool] = never) -> Iterator[Score]:
        """Yield the scores that no poll has returned, each as soon as it is known, until none is outstanding.

        Training has ended. ``stopping`` says whether a signal asks to stop: offline that raises Interrupted.
        """
        ...

    def dismiss(self, stopped_at: int) -> None:
        """Tell whoever evaluates that nothing more comes: the run has ended by itself, or at the step of a signal."""
        ...

    def close(self) -> None:
        """Release what is held; after a failure too."""
        ...
