"""Evaluation of a pre-training on rows in memory."""

from __future__ import annotations

import contextlib
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.gpt3.workload import GptPretraining
from benchmarks.llama31_8b.workload import LlamaPretraining
from common.contract.evaluation import Weights
from common.data.batches import HostBatch

Pretraining = GptPretraining | LlamaPretraining


class _InMemory(list[HostBatch]):
    """An evaluation set in memory."""

    eval_samples = 0

    def close(self) -> None:
        """Do nothing."""


class Evaluated:
    """A workload's evaluation after its warm-up; on a GPU it has its own stream, as CUDA graphs require.

    Args:
        workload: the workload to evaluate.
        rows: int32 (rows, tokens); their number is a multiple of the batch.
    """

    def __init__(self, workload: Pretraining, rows: Tensor) -> None:
        self.workload = workload
        device = workload.layout.device
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._evaluation = workload.evaluation(workload.layout)
        with self._on_stream():
            self._evaluation.warm_up()
        batches = _InMemory(
            HostBatch(
                {"tokens": part.to(device), "present": torch.ones(len(part), dtype=torch.bool, device=device)}, 2, 0
            )
            for part in rows.split(workload.own.reader.eval_rows)
        )
        batches.eval_samples = len(rows)
        evaluation: Any = self._evaluation
        evaluation._open_source = lambda root: batches
        evaluation.open_data(Path())

    def score(self, weights: Weights | None = None) -> float:
        """Return the log perplexity of ``weights``, default the workload's; raises an error for an incomplete set."""
        with self._on_stream():
            predictions = self._evaluation.predict(weights or self.workload.weights())
        if self._stream is not None:
            torch.cuda.synchronize(self.workload.layout.device)
        assert predictions is not None
        return self._evaluation.scorer.score(predictions)["log_perplexity"]

    def close(self) -> None:
        """Free the graph."""
        self._evaluation.close()

    def _on_stream(self) -> AbstractContextManager[Any]:
        return contextlib.nullcontext() if self._stream is None else torch.cuda.stream(self._stream)
