"""RNN-T workload: connects network, data, optimizer and evaluation."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable
from pathlib import Path
from typing import ClassVar

from benchmarks.rnnt import example
from benchmarks.rnnt.config import RnntConfig
from benchmarks.rnnt.data import FeaturePreparer, open_eval, open_train
from benchmarks.rnnt.data_settings import SpeechDataSettings
from benchmarks.rnnt.evaluate import Transcription
from benchmarks.rnnt.model import IN_ORDER, PARTS, Rnnt, training_flops
from benchmarks.rnnt.prepared import FORMAT
from benchmarks.rnnt.synthetic_evaluation import SyntheticTranscription, SyntheticUtterances, synthetic_lengths
from benchmarks.rnnt.utterance_order import kept_samples
from common.config.schema import Declaration, RunConfig
from common.contract.workload import Workload
from common.data.batches import Batch, DataSource, HostBatch
from common.distributed.layout import Layout
from common.optim.learning_rate import held_exponential
from common.optim.optimizer import ClipNorm, ParameterGroup
from common.step.train_step import Losses, TrainStep


class SpeechRecognition(Workload):
    """Speech recognition with RNN-T."""

    config_type: ClassVar[type] = RnntConfig
    title = "RNN-T"
    peers = "benchmarks.rnnt.peer"
    own: RnntConfig
    model: Rnnt

    def __init__(self, cfg: RunConfig, layout: Layout) -> None:
        super().__init__(cfg, layout)
        own = self.own
        generator = layout.shared_generator("weights")
        self.model = Rnnt(own.facts, own.model, own.hparams.init_scale, generator, layout.device, self.dtype)
        audio = own.model.implementations["audio"]
        self._preparer = FeaturePreparer(own.facts, own.model.features, audio, layout.device, self.dtype)
        self.choices |= {**self.model.choices, "audio": self._preparer.choice}

    def parameter_groups(self) -> list[ParameterGroup]:
        """Return one group with all parameters, including biases, with weight decay and trust ratio."""
        decay = self.own.hparams.weight_decay
        return [ParameterGroup(self.model.in_order(), weight_decay=decay, trust_ratio=True)]

    @classmethod
    def declare(cls, cfg: RunConfig) -> Declaration:
        """Declare the run. An epoch has whole global batches; the schedules (``opt_*_alt_*``) are the rules'."""
        own: RnntConfig = cfg.workload
        return Declaration(
            data_format=FORMAT,
            initialised_tensors=PARTS,
            derived_values={"rules_functions": True},
            train_samples=kept_samples(cfg.benchmark.train_samples, cfg.global_batch),
            order_of_data=lambda: f"up to {own.hparams.max_duration:g} s, {own.hparams.num_buckets} buckets, presorted",
        )

    def build_step(self) -> TrainStep:
        """Build a step: accumulated micro-batches, then LAMB, then the averages of the weights."""
        own, hparams = self.own, self.own.hparams
        schedule = held_exponential(
            hparams.base_learning_rate,
            own.facts.learning_rate_min,
            hparams.decay_per_epoch,
            self.cfg.train_samples // self.cfg.global_batch,
            hparams.warmup_epochs,
            hparams.hold_epochs,
        )
        clip = ClipNorm(hparams.clip_norm, "after_reduction") if math.isfinite(hparams.clip_norm) else None
        return self.step_with(
            hparams.lamb(),
            schedule,
            blocks=[(name, self.model.get_submodule(name)) for name in IN_ORDER[:-1]],
            clip=clip,
            loss_scale=own.model.loss_scale,
            average_decay=hparams.ema,
        )

    def loss(self, micro_batch: Batch) -> Losses:
        """Return the mean loss of the utterances."""
        mean = self.model.loss(micro_batch.tensors, self._capacity(micro_batch)).mean()
        return Losses(mean, {"loss": mean.detach()})

    def _capacity(self, micro_batch: Batch) -> int:
        """Return the capacity of packed rows: the graph's, or the number of the batch's rows if that is larger."""
        assert isinstance(micro_batch.key, tuple)
        frames, tokens, *rows = micro_batch.key  # the reader appends the rows if they exceed the graph's capacity
        return rows[0] if rows else self.own.reader.rows.capacity(self.cfg.micro_batch, (frames, tokens))

    def example_batches(self) -> Iterable[Batch]:
        """Yield utterances of noise for each of the reader's buckets, beginning with that of a typical micro-batch."""
        own, count = self.own, self.cfg.micro_batch
        facts = own.facts
        lengths = example.lengths_of(own.model.examples, count, facts)
        first = example.own_key(lengths, own.reader.buckets)
        for key in sorted(own.reader.buckets, key=lambda key: key != first):
            fitted = example.fitted(lengths, key)
            tensors = example.batch(
                fitted, key, facts.features, own.model.features, facts.blank, self.dtype, self.layout.device
            )
            yield Batch(tensors, self.nominal_samples, key)

    def prepare(self, batch: HostBatch) -> Batch:
        """Copy audio to the device, and compute its features there."""
        return self._preparer(batch)

    def warm_up_reader(self) -> None:
        """Compute features of synthetic audio, so that all kernels are compiled."""
        self._preparer.warm_up(self.cfg.micro_batch, self.own.reader.buckets)

    def _data_settings(self) -> SpeechDataSettings:
        own = self.own
        return SpeechDataSettings(
            own.facts, own.reader, own.hparams.max_duration, own.hparams.num_buckets, self.cfg.train_samples
        )

    def open_data(self, root: Path) -> DataSource:
        """Open the training utterances."""
        return open_train(
            root, self._data_settings(), self.layout, self.cfg.micro_batch, self.cfg.grad_accumulation_steps
        )

    def evaluation(self, layout: Layout) -> Transcription:
        """Return the evaluation of the word error rate on the ranks of ``layout``."""
        open_source = functools.partial(open_eval, settings=self._data_settings(), layout=layout)
        eval_samples, capture = self.cfg.benchmark.eval_samples, self.cfg.cuda_graphs
        return Transcription(self.model, self.own, open_source, eval_samples, layout, self._preparer, capture)

    def synthetic_evaluation(self, layout: Layout) -> SyntheticTranscription:
        """Return an evaluation of noise in which the network emits as many tokens per second as transcripts have."""
        eval_samples, capture = self.cfg.benchmark.eval_samples, self.cfg.cuda_graphs
        source = SyntheticUtterances(synthetic_lengths(eval_samples, self.own), self.own, layout)
        return SyntheticTranscription(
            self.model, self.own, lambda root: source, eval_samples, layout, self._preparer, capture
        )

    def sample_flops(self) -> float:
        """Return the FLOPs of an average utterance."""
        lengths = example.average_lengths(1, self.own.facts)
        frames, tokens = int(lengths.frames_B[0]), int(lengths.tokens_B[0])
        return training_flops(self.own.facts, frames, tokens)
