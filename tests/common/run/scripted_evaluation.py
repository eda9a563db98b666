"""``mlperf-suite`` with a scripted evaluation of the toy: argument 1 is the script.

The error depends on the number of the evaluation, and within its range on every bit of the weights. So two runs have
equal scores only if their evaluations had the same weights, and errors fall from evaluation to evaluation on every CPU.
"""

from __future__ import annotations

import hashlib
import os
import sys
import time
from pathlib import Path

from benchmarks import WORKLOADS
from common import cli
from common.contract.evaluation import Evaluation, Predictions, Weights
from common.distributed.layout import Layout
from common.errors import DataError
from common.run import trainer
from common.step.train_step import DeviceResult, StepsInFlight
from tests import toy
from tests.common.evaluation.scripted_scorers import AsPredicted
from tests.toy.workload import Toy


def largest_error(number: int) -> float:
    """Upper limit of the error of this evaluation, from 1, below all earlier errors: 1/2, 1/4, 1/8, ..."""
    return 2.0**-number


class Scripted(Evaluation):
    """Scores by the number of the evaluation and the bits of the weights.

    A script ``scorer DEED`` is passed to the scorer (:class:`tests.common.evaluation.scripted_scorers.AsPredicted`).
    """

    script = "score"

    def __init__(self) -> None:
        self.scorer = AsPredicted(self.script.removeprefix("scorer ") if self.script.startswith("scorer ") else "score")
        self.done = 0

    def open_data(self, root: Path) -> None:
        if self.script == "broken data":
            raise DataError("the evaluation data are broken")

    def predict(self, weights: Weights) -> Predictions:
        """The error of evaluation n: at most ``largest_error(n)`` and more than ``largest_error(n + 1)``."""
        self.done += 1
        if self.script == "raise" and self.done == 2:
            raise DataError("the second evaluation fails")
        if self.script.startswith("await "):
            while not Path(self.script.removeprefix("await ")).exists():
                time.sleep(0.01)
        made = hashlib.sha256()
        for name in sorted(weights.tensors):
            made.update(weights.tensors[name].detach().contiguous().numpy().tobytes())
        hashed = int.from_bytes(made.digest()[:4], "big") / 2**32
        largest, next_largest = largest_error(self.done), largest_error(self.done + 1)
        return Predictions({"mean_absolute_error": largest - hashed * (largest - next_largest)})


class CountedSteps(StepsInFlight):
    """Steps in flight whose number the workload can read."""

    current: CountedSteps | None = None

    def push(self, step: int, samples: int, result: DeviceResult, data_wait_ms: float) -> None:
        type(self).current = self
        super().push(step, samples, result, data_wait_ms)


class ScriptedToy(Toy):
    """The toy with another evaluation."""

    def weights(self) -> Weights:
        """Return its weights; with the script ``count``, also write the number of steps in flight to the file."""
        if Scripted.script.startswith("count ") and CountedSteps.current is not None:
            with Path(Scripted.script.removeprefix("count ")).open("a") as file:
                file.write(f"{len(CountedSteps.current)}\n")
        return super().weights()

    def evaluation(self, layout: Layout) -> Scripted:  # type: ignore[override]
        role = "train" if int(os.environ["RANK"]) < self.cfg.training_ranks else "evaluate"
        if {layout.role, self.layout.role} != {role}:
            raise AssertionError(f"a layout of role {self.layout.role} where ranks {role}")
        if role == "train" and self.cfg.evaluation.ranks:
            raise AssertionError("a training rank builds an evaluation although others evaluate")
        return Scripted()


if __name__ == "__main__":
    Scripted.script = sys.argv.pop(1)
    trainer.StepsInFlight = CountedSteps  # type: ignore[misc]
    # the module that workers import again has this class under its own name
    sys.modules["tests.common.run.scripted_evaluation"] = sys.modules["__main__"]
    toy.register()
    WORKLOADS[toy.NAME] = "tests.common.run.scripted_evaluation:ScriptedToy"
    cli.main()
