"""Evaluation by counters on the device, summed over the ranks that share the evaluation set."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn

from common.contract.evaluation import Evaluation, Predictions, Scorer, Weights
from common.data.batches import EvalSource
from common.distributed.layout import Layout
from common.evaluation.forward import ForwardPass


class Counts:
    """Accumulators in one float64 tensor, which is exact for integers up to 2**53.

    Args:
        counted: names of the integer totals.
        added: names of the other totals.
        axes: axes of ``layout`` to sum over, whose ranks have different samples or parts of samples. Along other
            axes, all ranks must add the same values.
    """

    def __init__(
        self, layout: Layout, counted: Sequence[str], added: Sequence[str] = (), axes: Sequence[str] = ("dp",)
    ) -> None:
        self._counted, self._added = tuple(counted), tuple(added)
        self._sums = torch.zeros(len(counted) + len(added), dtype=torch.float64, device=layout.device)
        self._group = layout.group(*axes)

    def warm_up(self) -> None:
        """Sum over the ranks once, then reset. Collective."""
        self._sum_over_ranks()
        self.clear()

    def clear(self) -> None:
        """Reset all totals, at the start of an evaluation."""
        self._sums.zero_()

    def add(self, *values: Tensor) -> None:
        """Add one 0-d tensor per name, in the order of the names. Can be captured in a CUDA graph."""
        self._sums += torch.stack(values)

    def totals(self) -> dict[str, int | float]:
        """Return the totals over all ranks; call once per evaluation. Collective; waits for the device."""
        self._sum_over_ranks()
        sums = self._sums.tolist()
        whole = len(self._counted)
        return {
            **{name: round(value) for name, value in zip(self._counted, sums[:whole], strict=True)},
            **dict(zip(self._added, sums[whole:], strict=True)),
        }

    def _sum_over_ranks(self) -> None:
        if self._group is not None:
            dist.all_reduce(self._sums, group=self._group)


def check_whole_set(evaluated: int, expected: int, samples: str) -> None:
    """Check that each sample of the set was evaluated exactly once.

    Args:
        samples: name of the samples in the message.

    Raises:
        RuntimeError: the numbers differ.
    """
    if evaluated != expected:
        raise RuntimeError(f"{evaluated} of {expected} {samples} were evaluated")


@dataclass(frozen=True)
class MeanScorer(Scorer):
    """Scorer that divides a total of :class:`Counts` by a count.

    Attributes:
        metric: name of the metric.
        total: name of the total.
        samples: name of the number of evaluated samples.
        counted: name of the count that the total is divided by; empty: ``samples``.
        each: number of values that the total has for each of ``counted``.
    """

    metric: str
    total: str
    samples: str
    counted: str = ""
    each: int = 1

    def score(self, predictions: Predictions) -> dict[str, float]:
        """Return the metric, and ``eval_samples``.

        Raises:
            RuntimeError: not every sample was evaluated exactly once.
        """
        values, samples = predictions.values, predictions.values[self.samples]
        check_whole_set(samples, values["expected"], self.samples)
        mean = values[self.total] / (values[self.counted or self.samples] * self.each)
        return {self.metric: mean, "eval_samples": samples}


class CountedEvaluation(Evaluation):
    """Evaluation by counts: predicts totals over the ranks, and ``expected``, the size of the evaluation set.

    Args:
        scorer: computes the metrics from the totals.
        count: adds the counts of a batch's tensors to ``counts``; must allow CUDA graph capture.
        counts: counters over the ranks that share the evaluation set.
        example: batch on the device, for warm-up.
        open_source: returns this replica's batches from the data folder.
        within: context around each evaluation and the warm-up; its operations are not part of the graph.
    """

    def __init__(
        self,
        scorer: Scorer,
        model: nn.Module,
        count: Callable[[dict[str, Tensor]], None],
        counts: Counts,
        example: dict[str, Tensor],
        open_source: Callable[[Path], EvalSource],
        capture: bool,
        within: Callable[[], AbstractContextManager[None]] = nullcontext,
    ) -> None:
        self.scorer = scorer
        self._counts, self._open_source, self._within = counts, open_source, within
        self._forward = ForwardPass(model, count, example, capture)
        self._source: EvalSource | None = None

    def warm_up(self) -> None:
        """Run and capture the pass on the example batch, and sum over the ranks once. Collective."""
        with self._within():
            self._forward.warm_up()
        self._counts.warm_up()

    def open_data(self, root: Path) -> None:
        """Open this replica's batches."""
        self._source = self._open_source(root)

    def predict(self, weights: Weights) -> Predictions:
        """Count over the evaluation set; return the totals over the ranks, on every rank. Collective; waits."""
        assert self._source is not None, "open_data comes first"
        with self._forward.evaluating(weights), self._within():
            self._counts.clear()
            for batch in self._source:
                self._forward(batch.tensors)
        return Predictions({**self._counts.totals(), "expected": self._source.eval_samples})

    def close(self) -> None:
        """Release the graph and close the source."""
        self._forward.close()
        if self._source is not None:
            self._source.close()
        self._source = None
