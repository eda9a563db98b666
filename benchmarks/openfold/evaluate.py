"""Evaluation of OpenFold: the mean over the chains of the lDDT of their CA atoms (Mariani et al., 2013), with all
recycling iterations."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from benchmarks.openfold.losses import alpha_atoms, lddt_sums
from benchmarks.openfold.model import AlphaFold
from benchmarks.openfold.residues import CA
from common.contract.evaluation import Evaluation, Predictions, Scorer, Weights
from common.data.batches import EvalSource
from common.distributed.layout import Layout
from common.evaluation.counts import Counts, check_whole_set
from common.evaluation.forward import evaluating

_EPSILON = 1e-8


class MeanLddt(Scorer):
    """Scorer that divides the sum of the chains' scores by their number."""

    def score(self, predictions: Predictions) -> dict[str, float]:
        """Return ``lddt_ca``, between 0 and 1, and ``eval_samples``.

        Raises:
            RuntimeError: not every chain was evaluated exactly once.
        """
        values, samples = predictions.values, predictions.values["samples"]
        check_whole_set(samples, values["expected"], "chains")
        return {"lddt_ca": values["lddt"] / samples, "eval_samples": samples}


def chain_lddt(alpha_BN3: Tensor, tensors: dict[str, Tensor]) -> Tensor:
    """Return the lDDT (B,) of predicted CA atoms, a mean over all counted distances of a chain."""
    true_BN3 = tensors["all_atom_positions"][..., CA, :].to(alpha_BN3.dtype)
    mask_BN = tensors["all_atom_mask"][..., CA].to(alpha_BN3.dtype)
    kept_BN, counted_BN = lddt_sums(alpha_BN3, true_BN3, mask_BN)
    return (kept_BN.sum(1) + _EPSILON) / (counted_BN.sum(1) + _EPSILON)


class ChainEvaluation(Evaluation):
    """Predicts whole chains, whose lengths differ, so no pass is captured.

    Args:
        example: a batch on the device, for warm-up.
        open_source: returns this replica's batches from the data folder.
        layout: the ranks that share the evaluation set.
    """

    def __init__(
        self,
        model: AlphaFold,
        example: dict[str, Tensor],
        open_source: Callable[[Path], EvalSource],
        layout: Layout,
    ) -> None:
        self.scorer = MeanLddt()
        self._model, self._example, self._open_source, self._layout = model, example, open_source, layout
        self._counts = Counts(layout, ("samples",), ("lddt",))
        self._source: EvalSource | None = None

    def warm_up(self) -> None:
        """Predict the example, and sum over the ranks once. Collective."""
        with evaluating(self._model):
            self._count(self._example)
        self._counts.warm_up()

    def open_data(self, root: Path) -> None:
        """Open this replica's chains."""
        self._source = self._open_source(root)

    def predict(self, weights: Weights) -> Predictions:
        """Predict all chains; return the totals over the ranks, on every rank. Collective; waits for the device."""
        assert self._source is not None, "open_data comes first"
        device = self._layout.device
        with evaluating(self._model, weights):
            self._counts.clear()
            for batch in self._source:
                self._count({name: value.to(device, non_blocking=True) for name, value in batch.tensors.items()})
        return Predictions({**self._counts.totals(), "expected": self._source.eval_samples})

    def _count(self, tensors: dict[str, Tensor]) -> None:
        alpha_BN3 = alpha_atoms(self._model(tensors).structure)
        samples_B = tensors["samples"].double()
        self._counts.add(samples_B.sum(), torch.dot(chain_lddt(alpha_BN3, tensors).double(), samples_B))

    def close(self) -> None:
        """Close the source."""
        if self._source is not None:
            self._source.close()
        self._source = None
