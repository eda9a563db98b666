"""Pre-training of a decoder on rows of a Megatron corpus, and its metric."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor

from common.contract.evaluation import Predictions, Scorer
from common.data.batches import Batch, DataSource, EvalSource
from common.distributed.layout import Layout
from common.evaluation.counts import CountedEvaluation, Counts, check_whole_set
from common.language.rows import CorpusRows, RowFacts
from common.language.workload import LanguageModel
from common.optim.groups import shard_ranks
from common.optim.precision import gradient_dtype
from common.step.train_step import Losses


class TokenMean(Scorer):
    """Log perplexity: the mean cross-entropy of all scored tokens, in nats. Rows with more of them have more weight.

    Args:
        samples: the count that the rules call samples: ``rows`` or ``tokens``.
    """

    def __init__(self, samples: str) -> None:
        self._samples = samples

    def score(self, predictions: Predictions) -> dict[str, float]:
        """Return the sum of losses divided by the number of tokens, and the number of samples."""
        values = predictions.values
        check_whole_set(values["rows"], values["expected"], "rows")
        return {"log_perplexity": values["loss"] / values["tokens"], "eval_samples": values[self._samples]}


class Pretraining(LanguageModel):
    """Pre-training on rows of tokens that are ``tokens`` (B, S + 1) of a batch, with -1 for padding."""

    rows: ClassVar[CorpusRows]
    """Rows of the prepared data."""

    @property
    @abstractmethod
    def row_facts(self) -> RowFacts:
        """Constants of the data that the reader needs."""

    @property
    def labels_per_row(self) -> int:
        """Labels of every training row."""
        return self.own.facts.row_length - (0 if self.rows.extra_token else 1)

    @property
    def rows_per_evaluation(self) -> int:
        """Evaluation rows that pass through the stages of pp together."""
        reader = self.own.reader
        return reader.eval_rows * getattr(reader, "eval_micro_batches", 1)

    def trained_sizes(self) -> dict[str, Any]:
        """Return the arguments of every :class:`common.language.memory.TrainedWorkspace`."""
        optimizer, layout, half = self.cfg.optimizer, self.layout, self.dtype.itemsize == 2
        remainders = optimizer.masters == "remainder" and self.dtype == torch.bfloat16
        shards = shard_ranks(optimizer.shard, layout, self.cfg.scale.gpus_per_node) if layout.role == "train" else 1
        return {
            **self.sizes(),
            "master_bytes": (2 if remainders else 4) if half else 0,
            "shards": shards,
            "gradient_bytes": gradient_dtype(self.dtype, optimizer.gradients).itemsize,
            "chunk_graphs": self.cfg.chunk_graphs,
        }

    def tokens(self, tensors: dict[str, Tensor]) -> Tensor:
        """Return the input tokens (B, L) of this rank."""
        return self.split.deal(tensors["tokens"][:, :-1]).clamp(min=0)

    def labels(self, tensors: dict[str, Tensor]) -> Tensor:
        """Return the next token of each input token (T,), which may be a token of another rank; -1 where not scored."""
        return self.split.deal(tensors["tokens"][:, 1:]).reshape(-1)

    def loss_of(self, hidden_sE: Tensor, tensors: dict[str, Tensor]) -> Losses:
        """Return this rank's part of the mean loss over all labels; the sum of the parts over cp is the mean."""
        assert self.head is not None
        factor = 1.0 / (len(tensors["tokens"]) * self.labels_per_row)
        part = self.head.summed_loss(hidden_sE, self.labels(tensors), factor)
        # the log shows the mean over ranks, so the metric is multiplied by the number of parts
        return Losses(part, {"loss": part.detach() * self.layout.size("cp")})

    def example_batches(self) -> Iterable[Batch]:
        """Yield one synthetic micro-batch, because all training micro-batches have the same shape."""
        yield Batch(self.to_device(self._example(self.cfg.micro_batch)), self.nominal_samples)

    def _example(self, rows: int) -> dict[str, Tensor]:
        return {"tokens": self.rows.example(rows, self.row_facts)["tokens"]}

    def open_data(self, root: Path) -> DataSource:
        """Open the training rows; all ranks that share rows read them completely."""
        cfg = self.cfg
        return self.rows.open_train(root, self.row_facts, self.layout, cfg.micro_batch, cfg.grad_accumulation_steps)

    def evaluation(self, layout: Layout) -> CountedEvaluation:
        """Return the evaluation of log perplexity on the ranks of ``layout``, with sums in float64."""
        rows = self.rows_per_evaluation
        inputs = self.to_device({**self._example(rows), "present": torch.ones(rows, dtype=torch.bool)})
        axes = tuple(axis for axis in ("pp", "dp", "cp") if axis in self.axes)
        counts = Counts(layout, ("rows", "tokens"), ("loss",), axes=axes)
        # All stages and all ranks of cp read every row, so only one of them counts rows.
        counts_rows = self._pipeline.last and layout.coordinate("cp") == 0

        def count(batch: dict[str, Tensor]) -> None:
            present = batch["present"].sum() * counts_rows
            tokens, loss = torch.zeros_like(present), torch.zeros((), dtype=torch.float64, device=present.device)
            for losses_T, scored_T in self._scored_parts(batch):
                tokens, loss = tokens + scored_T.sum(), loss + losses_T.double().sum()
            counts.add(present, tokens, loss)

        def open_rows(root: Path) -> EvalSource:
            return self.rows.open_evaluation(root, self.row_facts, layout, rows)

        unit = "rows" if self.row_facts.eval_tokens is None else "tokens"
        capture, scorer = self.cfg.cuda_graphs, TokenMean(unit)
        return CountedEvaluation(scorer, self.model, count, counts, inputs, open_rows, capture, self.evaluating)

    def _scored_parts(self, batch: Mapping[str, Tensor]) -> list[tuple[Tensor, Tensor]]:
        """Return losses (T,) and a mask of scored tokens of each micro-batch; on the last stage only. Collective."""
        parts = batch["tokens"].split(self.own.reader.eval_rows)
        return self._pipeline.forward(self._scoring, [Batch({"tokens": part}, len(part)) for part in parts])
