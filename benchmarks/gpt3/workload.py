"""Workload of GPT-3: its learning rate, starting point, data and memory."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import ClassVar

from torch import Tensor

from benchmarks.gpt3.config import Facts, GptConfig
from benchmarks.gpt3.data import ROWS
from benchmarks.gpt3.published import load_published
from common.config.schema import Declaration, RunConfig
from common.config.sections import unused_layers, used_layers
from common.data.megatron.preparation import FORMAT
from common.distributed.pipeline.order import check_numbers, layers_of
from common.errors import ConfigError
from common.language.memory import StageWorkspace
from common.language.pretraining import Pretraining, RowFacts
from common.language.workload import lowest_precision
from common.optim.learning_rate import cosine_of_samples
from common.optim.memory_plan import MemoryPlan


class GptPretraining(Pretraining):
    """Pre-training of GPT-3 on rows of tokens."""

    config_type: ClassVar[type] = GptConfig
    title = "GPT-3"
    axes: ClassVar[Mapping[str, str]] = {
        "dp": "have other rows", "tp": "share layers", "pp": "have other layers",
    }  # fmt: skip
    rows = ROWS
    own: GptConfig

    @classmethod
    def declare(cls, cfg: RunConfig) -> Declaration:
        """Declare data format, schedule and logged values, and the need for all layers of the rules' checkpoint.

        Raises:
            ConfigError: stages and chunks do not divide layers or micro-batches.
        """
        own: GptConfig = cfg.workload
        facts, batch, stages = own.facts, cfg.global_batch, cfg.layout["pp"]
        check_numbers(stages, own.model.chunks, cfg.grad_accumulation_steps)
        layers_of(used_layers(facts, own.model, cls.whole, "layers").layers, 0, stages, own.model.chunks)
        if cfg.chunk_graphs and own.model.put_off_head:
            raise ConfigError(
                f"model.put_off_head={own.model.put_off_head}: cuda_graphs=chunks has no buffers for gradients of "
                "logits that wait for the end of a step; use put_off_head=0, or cuda_graphs=true"
            )
        broken = []
        if cfg.assets_dir is None:
            broken.append("assets_dir=null: training starts from the rules' checkpoint, in assets_dir")
        consumed = _consumed(cfg)
        return Declaration(
            data_format=FORMAT,
            schedule_options={"last_samples": own.reader.index_rows - consumed},  # end of the shuffled order
            derived_values={
                "init_checkpoint_step": consumed // batch,
                "end_learning_rate": _end_rate(own),
                "warmup_steps": facts.steps(facts.warmup_samples, batch),
                "decay_steps": facts.steps(facts.decay_samples, batch),
            },
            sample_tokens=facts.row_length,
            chunk_graphs=True,
            forbidden=broken + unused_layers(own, cls.whole, "layers"),
            lowest_precision=lowest_precision(own.model.linear, cfg.layout["tp"]),
        )

    def learning_rate(self) -> Callable[[Tensor], Tensor]:
        """Return the cosine with linear warm-up, counted in samples."""
        cfg, facts, rate = self.cfg, self.own.facts, self.own.hparams.base_learning_rate
        return cosine_of_samples(
            rate, _end_rate(self.own), facts.warmup_samples, facts.decay_samples, cfg.global_batch, _consumed(cfg),
            0 if cfg.assets_dir is None else facts.checkpoint_steps,
        )  # fmt: skip

    def load_start(self) -> None:
        """Load weights and moments of the rules' checkpoint, if ``assets_dir`` is set. Collective."""
        cfg, facts = self.cfg, self.own.facts
        if cfg.assets_dir is None:
            return
        folder = cfg.assets_dir / (self.own.model.checkpoint or "")
        steps, splits = facts.checkpoint_steps, self.tensor_splits()
        used = dataclasses.replace(facts, layers=self.architecture.layers)
        load_published(folder, self.model, self._optimizer, self.layout, used, steps, splits)

    @property
    def row_facts(self) -> RowFacts:
        """Constants of the data that the reader needs."""
        facts, rows = self.own.facts, self.own.reader.index_rows
        labels = self.cfg.benchmark.eval_samples
        return RowFacts(facts.vocabulary, facts.row_length, facts.eval_rows, rows, labels, _consumed(self.cfg))

    def memory_plan(self) -> str:
        """Return a description of the estimated memory by category.

        Empty without a GPU, and if autograd builds the backward pass, because its memory cannot be planned.
        """
        layout = self.layout
        if self.stage.handwritten is None or layout.device.type != "cuda":
            return ""
        work = StageWorkspace(
            **self.trained_sizes(),
            own_parameters=sum(parameter.numel() for parameter in self.model.parameters()),
            stage=layout.coordinate("pp"),
            stages=layout.size("pp"),
            chunks=self.own.model.chunks,
            micro_batches=self.cfg.grad_accumulation_steps,
            deferred_head=self.own.model.put_off_head,
        )
        return MemoryPlan(work.parts(0, 0), 0, 0, "", None).in_words()


def _consumed(cfg: RunConfig) -> int:
    """Return the rows of the checkpoint, rounded up to whole batches; 0 without a checkpoint."""
    facts: Facts = cfg.workload.facts
    return 0 if cfg.assets_dir is None else facts.consumed(cfg.global_batch)


def _end_rate(own: GptConfig) -> float:
    return own.facts.end_learning_rate_share * own.hparams.base_learning_rate
