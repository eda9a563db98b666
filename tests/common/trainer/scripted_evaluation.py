"""``mlperf-suite`` whose ResNet is evaluated as a test wants: argument 1 says what happens in the evaluations.

The accuracy is a number that follows from every bit of the weights, so that two runs score alike only if the evaluation
saw the same weights.
"""

from __future__ import annotations

import hashlib
import os
import sys
import time
from pathlib import Path

from benchmarks import WORKLOADS
from benchmarks.resnet.workload import ResNet
from common import cli
from common.distributed.layout import Layout
from common.errors import DataError
from common.evaluation.base import Evaluation, Predictions, Weights


class Scripted(Evaluation):
    """Scores by the bits of the weights."""

    script = "score"

    def __init__(self) -> None:
        self.done = 0

    def open_data(self, root: Path) -> None:
        """There are no data."""
        if self.script == "broken data":
            raise DataError("the evaluation data are broken")

    def predict(self, weights: Weights) -> Predictions:
        """The accuracy, from 0 to 1."""
        self.done += 1
        if self.script == "raise" and self.done == 2:
            raise DataError("the second evaluation fails")
        if self.script.startswith("await "):
            while not Path(self.script.removeprefix("await ")).exists():
                time.sleep(0.01)
        made = hashlib.sha256()
        for name in sorted(weights.tensors):
            made.update(weights.tensors[name].detach().contiguous().numpy().tobytes())
        return Predictions({"accuracy": 1 - int.from_bytes(made.digest()[:4], "big") / 2**32})

    @staticmethod
    def score(predictions: Predictions) -> dict[str, float]:
        """The accuracy."""
        return dict(predictions.values)


class ScriptedResNet(ResNet):
    """ResNet with another evaluation."""

    def evaluation(self, layout: Layout) -> Scripted:  # type: ignore[override]
        """The scripted one."""
        if int(os.environ["RANK"]) < self.cfg.training_ranks and self.cfg.evaluation.ranks:
            raise AssertionError("a training rank builds an evaluation although others evaluate")
        return Scripted()


if __name__ == "__main__":
    Scripted.script = sys.argv.pop(1)
    # the module that workers import again has this class under its own name
    sys.modules["tests.common.trainer.scripted_evaluation"] = sys.modules["__main__"]
    WORKLOADS["resnet"] = "tests.common.trainer.scripted_evaluation:ScriptedResNet"
    cli.main()
