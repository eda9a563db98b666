"""``mlperf-suite`` whose toy is evaluated as a test wants: argument 1 says what happens in the evaluations.

The error says which evaluation this is and, within that, follows from every bit of the weights: two runs score alike
only if their evaluations saw the same weights, and yet each evaluation has a smaller error than the one before,
whatever bits the instruction set and the number of threads give the weights.
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
from tests.toy.workload import CosmoFlow


def largest_error(number: int) -> float:
    """What the evaluation of this number, from 1, has at most, and no earlier one reaches: 1/2, 1/4, 1/8 and on."""
    return 2.0**-number


class Scripted(Evaluation):
    """Scores by the number of the evaluation and the bits of the weights.

    A script ``scorer DEED`` is for what scores (:class:`tests.common.evaluation.scripted_scorers.AsPredicted`).
    """

    script = "score"

    def __init__(self) -> None:
        self.scorer = AsPredicted(self.script.removeprefix("scorer ") if self.script.startswith("scorer ") else "score")
        self.done = 0

    def open_data(self, root: Path) -> None:
        """There are no data."""
        if self.script == "broken data":
            raise DataError("the evaluation data are broken")

    def predict(self, weights: Weights) -> Predictions:
        """The error: of the n-th evaluation at most :func:`largest_error` of n and more than that of n + 1."""
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
    """Steps in flight, of which a workload can ask how many there are."""

    current: CountedSteps | None = None

    def push(self, step: int, samples: int, result: DeviceResult, data_wait_ms: float) -> None:
        """As in any run."""
        type(self).current = self
        super().push(step, samples, result, data_wait_ms)


class ScriptedToy(CosmoFlow):
    """The toy with another evaluation."""

    def weights(self) -> Weights:
        """Its own; where the script is ``count``, notes how many steps are in flight when they are taken."""
        if Scripted.script.startswith("count ") and CountedSteps.current is not None:
            with Path(Scripted.script.removeprefix("count ")).open("a") as file:
                file.write(f"{len(CountedSteps.current)}\n")
        return super().weights()

    def evaluation(self, layout: Layout) -> Scripted:  # type: ignore[override]
        """The scripted one."""
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
