"""Scorers that do what a test wants, in a module that a scorer's process can import."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import numpy as np
import torch

from common.contract.evaluation import Predictions, Scorer
from common.errors import DataError


class AsPredicted(Scorer):
    """The predictions are the scores, and a deed comes with them.

    Args:
        deed: ``score``: none; ``await PATH``: each score waits for the file; the second score ends in an error
            (``raise``, ``bug``), the death of the process (``die``, ``exit 3``) or not at all (``hang``); ``broken
            data``: the ground truth cannot be read.
    """

    def __init__(self, deed: str = "score") -> None:
        self.deed = deed
        self.done = 0

    def open_data(self, root: Path) -> None:
        """There are none."""
        if self.deed == "broken data":
            raise DataError("the ground truth is broken")

    def score(self, predictions: Predictions) -> dict[str, float]:
        """The error."""
        self.done += 1
        if self.deed.startswith("await "):
            while not Path(self.deed.removeprefix("await ")).exists():
                time.sleep(0.01)
        elif self.done == 2:
            self._fail()
        return dict(predictions.values)

    def _fail(self) -> None:
        if self.deed == "raise":
            raise DataError("the second evaluation cannot be scored")
        if self.deed == "bug":
            raise ZeroDivisionError("0 divided by 0")
        if self.deed == "die":
            os.kill(os.getpid(), signal.SIGKILL)
        if self.deed.startswith("exit "):
            os._exit(int(self.deed.removeprefix("exit ")))
        while self.deed == "hang":
            time.sleep(60)


class Witness(Scorer):
    """Scores are what the process sees of itself, of its data and of its predictions.

    Args:
        signals: that the process sends itself before every score.
    """

    def __init__(self, *signals: int) -> None:
        self.signals = signals
        self.warmed_up = 0
        self.opened = 0
        self.truth = np.zeros(0)

    def warm_up(self) -> None:
        """Counts."""
        self.warmed_up += 1

    def open_data(self, root: Path) -> None:
        """Read numbers from a file."""
        self.opened += 1
        self.truth = np.loadtxt(root / "truth.txt")

    def score(self, predictions: Predictions) -> dict[str, float]:
        """What is there."""
        for signum in self.signals:
            os.kill(os.getpid(), signum)
        found = predictions.values["found"]
        agreeing = float((found == self.truth).sum())
        found += 1  # a scorer may work where the predictions lie
        return {
            "agreeing": agreeing,
            "warmed up": self.warmed_up,
            "opened": self.opened,
            "process": os.getpid(),
            "session": os.getsid(0),
            "threads": torch.get_num_threads(),
            "cpus": len(os.sched_getaffinity(0)),
            "gpus": torch.cuda.device_count(),
            "passive": float(os.environ["OMP_WAIT_POLICY"] == "passive"),
        }
