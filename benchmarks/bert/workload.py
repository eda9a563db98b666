"""BERT pretraining as a workload: wires model, data, optimizer and evaluation."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path
from typing import Any, ClassVar

from torch import Tensor, nn

from benchmarks.bert.collate import example, example_lengths, training_shape
from benchmarks.bert.config import BertConfig, ModelConfig
from benchmarks.bert.data import DataSettings, open_train
from benchmarks.bert.evaluate import MaskedLmAccuracy
from benchmarks.bert.model import Architecture, Bert, Implementations, pretraining_loss
from benchmarks.bert.tf_checkpoint import initial_weight_names, load_weights
from common.config import RunConfig
from common.data.source import Batch, DataSource, HostBatch
from common.distributed.layout import Layout
from common.errors import CheckpointError, ConfigError
from common.evaluation.base import Weights
from common.optim.adaptive import LAMB
from common.optim.optimizer import ClipNorm, Optimizer, ParameterGroup
from common.optim.schedules import linear_from_zero
from common.precision import DTYPES, LossScale
from common.step import TrainStep, accumulate
from common.workload import Losses, Workload

DROPOUT_INDICES = 1 << 32
"""Elements that :mod:`benchmarks.bert.ops.dropout` can tell apart."""


class BertPretraining(Workload):
    """Masked-language-model and next-sentence pretraining of BERT."""

    config_type: ClassVar[type] = BertConfig

    def __init__(self, cfg: RunConfig, layout: Layout) -> None:
        super().__init__(cfg, layout)
        own: BertConfig = cfg.workload
        self.own = own
        for axis in ("pp", "cp", "tp"):
            if layout.size(axis) != 1:
                raise ConfigError(f"layout.{axis}={layout.size(axis)}: BERT's ranks are data-parallel, use 1")
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
        self.dtype = DTYPES[cfg.precision]
        self._settings = DataSettings(own.facts, own.reader)
        unit = self.micro_batch_multiple(cfg)
        self._shape = training_shape(own.facts, own.reader, cfg.micro_batch // unit)
        if self._shape.tokens * own.facts.heads * own.facts.max_sequence_length > DROPOUT_INDICES:
            raise ConfigError(
                f"micro_batch={cfg.micro_batch}: the attention has more than {DROPOUT_INDICES} probabilities, which "
                "dropout cannot number; use a smaller one"
            )
        drawn = layout.shared_generator("weights", layout.device) if cfg.assets_dir is None else None
        self._network = Bert(_architecture(own), drawn, _requested(own.model), layout.device, self.dtype)
        self._network.train()
        if cfg.assets_dir is not None:
            self._load(cfg.assets_dir, own.model.initial_checkpoint)
        self._optimizer: Optimizer | None = None

    def _load(self, assets_dir: Path, name: str) -> None:
        try:
            load_weights(self._network, assets_dir / name)
        except CheckpointError as error:
            raise CheckpointError(
                f"{error} (model.initial_checkpoint={name} in assets_dir={assets_dir}; 'mlperf-suite download "
                "benchmark=bert' says where the rules' checkpoint comes from)"
            ) from error

    @property
    def model(self) -> nn.Module:
        """The network."""
        return self._network

    def parameter_groups(self) -> list[ParameterGroup]:
        """Weights with decay and trust ratio; biases and norms with neither. Query, key and value count as three."""
        named = dict(self._network.named_parameters())
        weights = {name: parameter for name, parameter in named.items() if parameter.ndim > 1}
        vectors = {name: parameter for name, parameter in named.items() if parameter.ndim == 1}
        parts = {name: 3 for name in weights if name.endswith("qkv.weight")}
        decay = self.own.hparams.weight_decay
        return [ParameterGroup(weights, weight_decay=decay, trust_ratio=True, parts=parts), ParameterGroup(vectors)]

    @classmethod
    def schedule_options(cls, cfg: RunConfig) -> dict[str, Any]:
        """A run ends after ``hparams.training_steps``."""
        return {"last_samples": cfg.workload.hparams.training_steps * cfg.global_batch, **cfg.benchmark.schedule}

    @classmethod
    def micro_batch_multiple(cls, cfg: RunConfig) -> int:
        """Samples that a row counts as."""
        own: BertConfig = cfg.workload
        return DataSettings(own.facts, own.reader).samples_per_row

    @classmethod
    def initialised_tensors(cls, cfg: RunConfig) -> list[str]:
        """The reference's names."""
        return initial_weight_names(cfg.workload.facts.layers)

    @classmethod
    def derived_values(cls, cfg: RunConfig) -> dict[str, object]:
        """The power of the learning rate's decay, which is linear."""
        return {"learning_rate_decay_power": 1.0}

    @classmethod
    def closed_division(cls, cfg: RunConfig) -> list[str]:
        """Training starts from the rules' checkpoint."""
        if cfg.assets_dir is None:
            checkpoint = cfg.workload.model.initial_checkpoint
            return [f"assets_dir=null: training starts from the rules' checkpoint ({checkpoint} in assets_dir)"]
        return []

    @classmethod
    def order_of_data(cls, cfg: RunConfig) -> str:
        """Format and order of the rows."""
        return f"{cfg.workload.reader.format}, {cfg.workload.reader.order}"

    def build_step(self) -> TrainStep:
        """Accumulated micro-batches, then LAMB.

        The gradient is the mean over the micro-batches of all ranks, each of which takes means over its own masked
        tokens and sequences, as in the reference and in NVIDIA's submissions.
        """
        hparams, cfg, facts = self.own.hparams, self.cfg, self.own.facts
        schedule = linear_from_zero(
            hparams.base_learning_rate,
            hparams.training_steps,
            hparams.warmup_steps,
            hparams.start_warmup_step,
            first_step_with_offset=1 if hparams.variant == "nvidia" else 0,
        )
        loss_scale = LossScale(self.layout.device, self.dtype, self.own.model.loss_scale)
        self._optimizer = Optimizer(
            self.parameter_groups(),
            LAMB(hparams.beta_1, hparams.beta_2, hparams.epsilon),
            schedule,
            self.layout,
            grad_divisor=cfg.grad_accumulation_steps * self.layout.size("dp"),
            ranks_per_node=cfg.scale.gpus_per_node,
            **cfg.optimizer.arguments(),
            blocks=self._network.blocks,
            clip=ClipNorm(facts.max_grad_norm, hparams.clip),
            micro_batches=cfg.grad_accumulation_steps,
            loss_scale=loss_scale,
        )
        return TrainStep(accumulate(self.loss, loss_scale), [self._optimizer], self.layout)

    def loss(self, micro_batch: Batch) -> Losses:
        """Mean masked-LM loss plus mean next-sentence loss; ``micro_batch`` as in :mod:`benchmarks.bert.collate`."""
        losses = pretraining_loss(self._network(micro_batch.tensors))
        sequences = (micro_batch.tensors["lengths"] > 0).sum()
        return Losses(losses.total, {"loss": losses.total.detach(), **losses.metrics, "sequences": sequences})

    def example_batches(self) -> Iterable[Batch]:
        """Rows filled as the real set's; with ``reader.graph_per_count`` a micro-batch for each count of sequences."""
        rows = self._shape.tokens // self._shape.row_length
        counts: list[int | None] = [None]
        if self.own.reader.graph_per_count:
            counts = list(range(rows, self._shape.sequences + 1))
        for count in counts:
            lengths = example_lengths(self._shape, count)
            shape = self._shape if count is None else self._shape.for_count(count)
            tensors = example(shape, self.own.facts.vocabulary, lengths)
            key = () if count is None else ("sequences", count)
            yield Batch(self._to_device(tensors), self._nominal_samples, key)

    @property
    def _nominal_samples(self) -> int:
        return self.cfg.micro_batch * self.layout.size("dp")

    def _to_device(self, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        return {name: tensor.to(self.layout.device, non_blocking=True) for name, tensor in tensors.items()}

    def open_data(self, root: Path) -> DataSource:
        """Open the training shards."""
        return open_train(root, self._settings, self.layout, self.cfg.micro_batch, self.cfg.grad_accumulation_steps)

    def prepare(self, batch: HostBatch) -> Batch:
        """Copy a host batch to the device."""
        return Batch(self._to_device(batch.tensors), batch.samples, batch.key)

    def weights(self) -> Weights:
        """The network's own weights, with the last update."""
        if self._optimizer is not None:
            self._optimizer.materialize()
        return Weights(dict(self._network.named_parameters()))

    def evaluation(self, layout: Layout) -> MaskedLmAccuracy:
        """Masked-LM accuracy on the ranks of ``layout``."""
        return MaskedLmAccuracy(self._network, self._settings, layout, capture=self.cfg.cuda_graphs)

    def sample_flops(self) -> float:
        """FLOPs of one nominal sample, from the example micro-batch."""
        lengths = example_lengths(self._shape)
        masked = round(0.15 * sum(lengths))
        return self._network.architecture.training_flops(lengths, masked) / self.cfg.micro_batch

    def implementations(self) -> dict[str, str]:
        """The operations', and how gradients and weights travel."""
        return {**self._network.chosen, **(self._optimizer.choices if self._optimizer is not None else {})}


def _architecture(own: BertConfig) -> Architecture:
    facts = own.facts
    return Architecture(
        vocabulary=facts.vocabulary,
        hidden=facts.hidden,
        layers=facts.layers,
        heads=facts.heads,
        feed_forward=facts.feed_forward,
        max_positions=facts.max_sequence_length,
        segment_types=facts.segment_types,
        dropout=facts.dropout,
        attention_dropout=facts.attention_dropout,
        norm_epsilon=facts.norm_epsilon,
        initializer_range=facts.initializer_range,
    )


def _requested(model: ModelConfig) -> Implementations:
    names = asdict(model)
    return Implementations(**{name: names[name] for name in Implementations.__dataclass_fields__})
