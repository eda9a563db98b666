"""Llama 2 70B with low-rank adapters as a workload: wires model, data, optimizer and evaluation."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import ClassVar

import torch
from torch import Tensor

from benchmarks.llama2_70b_lora.base import BaseWeights
from benchmarks.llama2_70b_lora.config import LlamaConfig
from benchmarks.llama2_70b_lora.data import open_evaluation, open_train
from benchmarks.llama2_70b_lora.evaluate import MeanOfRows
from benchmarks.llama2_70b_lora.loss import training_loss
from common.config.schema import Declaration, RunConfig
from common.contract.workload import Workload
from common.data.batches import Batch, DataSource
from common.distributed.layout import Layout
from common.errors import ConfigError
from common.nn.decoder import Decoder, DecoderArchitecture
from common.nn.frozen_decoder.decoder import FrozenDecoder, load_frozen
from common.nn.frozen_decoder.memory import MemoryPlan, Workspace, plan
from common.nn.frozen_decoder.operations import choose
from common.nn.lora import TokenPlaces
from common.ops.implementation import AUTO
from common.optim.learning_rate import cosine
from common.optim.optimizer import ClipNorm, ParameterGroup
from common.step.train_step import Losses, TrainStep


class LlamaLora(Workload):
    """Fine-tuning of Llama 2 70B's adapters on packed documents."""

    config_type: ClassVar[type] = LlamaConfig
    title = "Llama 2's"
    own: LlamaConfig
    model: Decoder

    def __init__(self, cfg: RunConfig, layout: Layout) -> None:
        super().__init__(cfg, layout)
        own, model = self.own, self.own.model
        facts = own.facts
        if model.layers > facts.layers:
            raise ConfigError(f"model.layers={model.layers}: the base has {facts.layers}; 0 uses all")
        layers = model.layers or facts.layers
        names = [field.name for field in dataclasses.fields(DecoderArchitecture)]
        self.architecture = DecoderArchitecture(**{**{n: getattr(facts, n) for n in names}, "layers": layers})
        self.memory = self._plan()
        self._base: BaseWeights | None = None
        if cfg.assets_dir is not None:
            self._base = BaseWeights(cfg.assets_dir / model.base, facts)
        self.model = Decoder(self.architecture, "meta", self.dtype, facts.lora)
        load_frozen(self.model, self._base_tensors(), layout.device, self.dtype, model.linear == "fp8")
        self.model.initialise_adapters(lambda name: layout.shared_generator(f"weights/{name}", layout.device))
        operations, self.choices = choose(model, self.architecture, layout.device, self.dtype)
        self.choices["linear"] = model.linear
        self._frozen = FrozenDecoder(self.model, operations, self.memory.recomputed_qkv if self.memory else 0)

    def _plan(self) -> MemoryPlan | None:
        """How the step fits into the GPU; None on a CPU."""
        model = self.own.model
        recomputed = None if model.recomputed_qkv == AUTO else int(model.recomputed_qkv)
        if self.layout.device.type != "cuda":
            return None
        rows, length = self.cfg.micro_batch, self.own.facts.row_length
        workspace = Workspace(
            self.architecture, rows, length, self.own.facts.lora_rank, self.dtype.itemsize, model.linear == "fp8",
            model.head_chunk,
        )  # fmt: skip
        return plan(workspace, torch.cuda.get_device_properties(self.layout.device).total_memory, recomputed)

    def _base_tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Name and value of every frozen weight."""
        if self._base is None:
            device = self.layout.device
            yield from self.model.drawn_base(
                lambda name: self.layout.shared_generator(f"weights/{name}", device), device, self.dtype
            )
            return
        wanted = {name for name, parameter in self.model.named_parameters() if not parameter.requires_grad}
        yield from ((name, tensor) for name, tensor in self._base.tensors() if name in wanted)

    @classmethod
    def declare(cls, cfg: RunConfig) -> Declaration:
        """A run ends after ``hparams.training_steps``; training starts from the rules' base, all of it."""
        own: LlamaConfig = cfg.workload
        broken = []
        if cfg.assets_dir is None:
            broken.append(f"assets_dir=null: training starts from the rules' base ({own.model.base} in assets_dir)")
        if own.model.layers not in (0, own.facts.layers):
            broken.append(f"model.layers={own.model.layers}: the base has {own.facts.layers}")
        return Declaration(
            schedule_options={"last_samples": own.hparams.training_steps * cfg.global_batch},
            forbidden=broken,
        )

    def memory_plan(self) -> str:
        """Bytes by kind."""
        return "" if self.memory is None else self.memory.in_words()

    def base_digest(self) -> str | None:
        """Which base the adapters belong to."""
        return None if self._base is None else self._base.digest()

    def parameter_groups(self) -> list[ParameterGroup]:
        """All adapters decay."""
        trained = {name: parameter for name, parameter in self.model.named_parameters() if parameter.requires_grad}
        return [ParameterGroup(trained, weight_decay=self.own.hparams.weight_decay)]

    def build_step(self) -> TrainStep:
        """Accumulated micro-batches, then AdamW on the mean gradient, clipped."""
        hparams = self.own.hparams
        schedule = cosine(hparams.base_learning_rate, hparams.training_steps, hparams.warmup_steps)
        clip = ClipNorm(self.own.facts.max_grad_norm, "after_reduction")
        return self.step_with(hparams.adamw(), schedule, clip=clip)

    def loss(self, micro_batch: Batch) -> Losses:
        """Mean over the rows of each row's mean loss."""
        tensors = micro_batch.tensors
        losses_T = self._losses(tensors, tensors["dropout_seed"])
        part, whole = training_loss(losses_T, tensors["labels"], self.layout.group("cp"))
        return Losses(part, {"loss": whole})

    def _losses(self, tensors: dict[str, Tensor], seed: Tensor | None = None) -> Tensor:
        """Losses (T,) of this rank's tokens; without a seed as in an evaluation."""
        places = TokenPlaces.whole(*tensors["tokens"].shape, seed=seed, device=self.layout.device)
        blocks = self._frozen if self.own.model.blocks == "frozen" else self.model
        hidden_TE = blocks.hidden_states(tensors["tokens"], places)
        labels_T = tensors["labels"].flatten()
        return next_token_loss(hidden_TE, self.model.head.weight, labels_T, chunk=self.own.model.head_chunk)

    def _made_up(self, rows: int) -> dict[str, Tensor]:
        """Tokens and labels of which every position counts."""
        facts, generator = self.own.facts, self.layout.generator("example")
        shape = rows, facts.row_length
        draw = lambda: torch.randint(facts.vocabulary, shape, generator=generator, dtype=torch.int32)  # noqa: E731
        return self.to_device({"tokens": draw(), "labels": draw()})

    def example_batches(self) -> Iterable[Batch]:
        """Random rows; all of training has the same shape."""
        seed = torch.zeros((), dtype=torch.int64, device=self.layout.device)
        yield Batch({**self._made_up(self.cfg.micro_batch), "dropout_seed": seed}, self.nominal_samples)

    def open_data(self, root: Path) -> DataSource:
        """Open the training rows."""
        facts, cfg = self.own.facts, self.cfg
        return open_train(root, facts, self.layout, cfg.micro_batch, cfg.grad_accumulation_steps)

    def evaluation(self, layout: Layout) -> MeanOfRows:
        """Mean loss of the rows on the ranks of ``layout``."""
        rows = self.own.reader.eval_rows
        example = {**self._made_up(rows), "real": torch.ones(rows, dtype=torch.int32, device=layout.device)}
        return MeanOfRows(
            self.model, self._losses, example, layout,
            lambda root: open_evaluation(root, self.own.facts, layout, rows), self.cfg.cuda_graphs,
        )  # fmt: skip

    def sample_flops(self) -> float:
        """FLOPs of one row: products forward and towards the input, attention, adapters forward and backward."""
        shape, length = self.architecture, self.own.facts.row_length
        attention = shape.attention_flops(length)
        adapters = sum(parameter.numel() for parameter in self.model.parameters() if parameter.requires_grad)
        return 2 * (shape.forward_flops(length) - attention) + 3 * attention + 6.0 * adapters * length
