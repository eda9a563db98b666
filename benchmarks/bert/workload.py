"""Workload of BERT pretraining: connects model, data, optimizer and evaluation."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import ClassVar

from benchmarks.bert.collate import example, example_lengths, training_shape
from benchmarks.bert.config import BertConfig
from benchmarks.bert.data import BertDataSettings, open_train
from benchmarks.bert.evaluate import MaskedLmAccuracy
from benchmarks.bert.model import Bert, pretraining_loss
from benchmarks.bert.prepare import FORMAT
from benchmarks.bert.tf_checkpoint import find_checkpoint, initial_weight_names, load_weights
from common.config.schema import Declaration, RunConfig
from common.contract.workload import Workload
from common.data.batches import Batch, DataSource
from common.distributed.layout import Layout
from common.errors import CheckpointError, ConfigError
from common.optim.learning_rate import linear_from_zero
from common.optim.optimizer import ClipNorm, ParameterGroup
from common.step.train_step import SAMPLES, Losses, TrainStep

DROPOUT_INDICES = 1 << 32
"""Maximum number of elements of one dropout in :mod:`common.ops.dropout`, which numbers them with 32 bits."""


class BertPretraining(Workload):
    """Masked-language-model and next-sentence pretraining of BERT."""

    config_type: ClassVar[type] = BertConfig
    title = "BERT"
    own: BertConfig
    model: Bert

    def __init__(self, cfg: RunConfig, layout: Layout) -> None:
        super().__init__(cfg, layout)
        own = self.own
        if own.reader.eval_rows > cfg.benchmark.eval_samples:
            raise ConfigError(
                f"reader.eval_rows={own.reader.eval_rows}: no batch has more rows than there are sequences, "
                f"benchmark.eval_samples={cfg.benchmark.eval_samples}"
            )
        if own.reader.graph_per_count and cfg.grad_accumulation_steps > 1:
            raise ConfigError(
                f"reader.graph_per_count=true with {cfg.grad_accumulation_steps} micro-batches a step: they differ in "
                "their counts of sequences, so that no captured graph would fit; use reader.graph_per_count=false"
            )
        self._settings = BertDataSettings(own.facts, own.reader)
        self._shape = training_shape(own.facts, own.reader, cfg.micro_batch // self._settings.samples_per_row)
        if self._shape.tokens * own.facts.heads * own.facts.max_sequence_length > DROPOUT_INDICES:
            raise ConfigError(
                f"micro_batch={cfg.micro_batch}: the attention has more than {DROPOUT_INDICES} probabilities, which "
                "dropout cannot number; use a smaller one"
            )
        drawn = layout.shared_generator("weights", layout.device) if cfg.assets_dir is None else None
        self.model = Bert(own.facts, drawn, own.model.implementations, layout.device, self.dtype)
        self.choices.update(self.model.chosen)
        if cfg.assets_dir is not None:
            self._load(cfg.assets_dir, own.model.initial_checkpoint)

    def _load(self, assets_dir: Path, name: str) -> None:
        try:
            load_weights(self.model, find_checkpoint(assets_dir, name))
        except CheckpointError as error:
            raise CheckpointError(
                f"{error} (model.initial_checkpoint={name} in assets_dir={assets_dir}; 'mlperf-suite download "
                "benchmark=bert' says where the rules' checkpoint comes from)"
            ) from error

    def parameter_groups(self) -> list[ParameterGroup]:
        """Return a group of weights with decay and trust ratio, and a group of biases and norms with neither.

        The query, key and value parts of a QKV weight have separate trust ratios.
        """
        named = dict(self.model.named_parameters())
        weights = {name: parameter for name, parameter in named.items() if parameter.ndim > 1}
        vectors = {name: parameter for name, parameter in named.items() if parameter.ndim == 1}
        parts = {name: 3 for name in weights if name.endswith("qkv.weight")}
        decay = self.own.hparams.weight_decay
        return [ParameterGroup(weights, weight_decay=decay, trust_ratio=True, parts=parts), ParameterGroup(vectors)]

    @classmethod
    def declare(cls, cfg: RunConfig) -> Declaration:
        """Declare data format, schedule, batch constraints, and the need for the rules' checkpoint.

        A run ends after ``hparams.training_steps``. The logged decay power is 1, as the learning rate decays linearly.
        """
        own: BertConfig = cfg.workload
        checkpoint, broken = own.model.initial_checkpoint, []
        if cfg.assets_dir is None:
            broken.append(f"assets_dir=null: training starts from the rules' checkpoint ({checkpoint} in assets_dir)")
        return Declaration(
            data_format=FORMAT,
            schedule_options={"last_samples": own.hparams.training_steps * cfg.global_batch},
            micro_batch_multiple=BertDataSettings(own.facts, own.reader).samples_per_row,
            initialised_tensors=initial_weight_names(own.facts.layers),
            derived_values={"learning_rate_decay_power": 1.0},
            forbidden=broken,
            order_of_data=lambda: f"{own.reader.format}, {own.reader.order}",
        )

    def build_step(self) -> TrainStep:
        """Return a step that accumulates micro-batches and then updates with LAMB.

        The gradient is the mean over the micro-batches of all ranks. Each micro-batch averages over its own masked
        tokens and sequences, as in the reference implementation and in the submissions by NVIDIA.
        """
        hparams = self.own.hparams
        schedule = linear_from_zero(
            hparams.base_learning_rate,
            hparams.training_steps,
            hparams.warmup_steps,
            hparams.start_warmup_step,
            first_step_with_offset=1 if hparams.variant == "nvidia" else 0,
        )
        clip = ClipNorm(self.own.facts.max_grad_norm, hparams.clip)
        blocks, loss_scale = self.model.blocks, self.own.model.loss_scale
        return self.step_with(hparams.lamb(), schedule, blocks=blocks, clip=clip, loss_scale=loss_scale)

    def loss(self, micro_batch: Batch) -> Losses:
        """Return the mean masked-LM loss plus the mean next-sentence loss."""
        losses = pretraining_loss(self.model(micro_batch.tensors))
        sequences = (micro_batch.tensors["lengths"] > 0).sum()
        return Losses(losses.total, {"loss": losses.total.detach(), **losses.metrics, SAMPLES: sequences})

    def example_batches(self) -> Iterable[Batch]:
        """Yield a synthetic micro-batch with the mix of the real set, or one per number of sequences.

        The latter is for ``reader.graph_per_count``, which captures a graph for each number of sequences.
        """
        rows = self._shape.tokens // self._shape.row_length
        counts: list[int | None] = [None]
        if self.own.reader.graph_per_count:
            counts = list(range(rows, self._shape.sequences + 1))
        for count in counts:
            lengths = example_lengths(self._shape, count)
            shape = self._shape if count is None else self._shape.for_count(count)
            tensors = example(shape, self.own.facts.vocabulary, lengths)
            key = () if count is None else ("sequences", count)
            yield Batch(self.to_device(tensors), self.nominal_samples, key)

    def open_data(self, root: Path) -> DataSource:
        """Open the training shards."""
        return open_train(root, self._settings, self.layout, self.cfg.micro_batch, self.cfg.grad_accumulation_steps)

    def evaluation(self, layout: Layout) -> MaskedLmAccuracy:
        """Return the evaluation of masked-LM accuracy on the ranks of ``layout``."""
        return MaskedLmAccuracy(self.model, self._settings, layout, capture=self.cfg.cuda_graphs)

    def sample_flops(self) -> float:
        """Return the FLOPs of one nominal sample, computed from the example micro-batch."""
        lengths = example_lengths(self._shape)
        masked = round(0.15 * sum(lengths))
        return self.model.architecture.training_flops(lengths, masked) / self.cfg.micro_batch
