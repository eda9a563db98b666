"""Workload of Llama 2 70B with low-rank adapters: its frozen base, loss, data and evaluation."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import ClassVar

import torch
from torch import Tensor

from benchmarks.llama2_70b_lora.base import BaseWeights
from benchmarks.llama2_70b_lora.config import LoraConfig
from benchmarks.llama2_70b_lora.data import FORMAT, EvaluationRows, example, open_evaluation, open_train
from benchmarks.llama2_70b_lora.evaluate import MeanOverRows, mean_of_rows
from common.config.schema import Declaration, RunConfig
from common.config.sections import unused_layers
from common.contract.evaluation import Weights
from common.data.batches import Batch, DataSource
from common.distributed.layout import Layout
from common.evaluation.counts import CountedEvaluation
from common.language.decoder import FROZEN_PRODUCTS
from common.language.fp8_products import load_frozen
from common.language.lora import LoraSettings
from common.language.memory import FrozenWorkspace
from common.language.network import Decoder
from common.language.workload import LanguageModel, lowest_precision
from common.nn.frozen import mark_frozen
from common.ops.operation import AUTO
from common.optim.learning_rate import cosine
from common.optim.memory_plan import MemoryPlan, plan


class LlamaLora(LanguageModel):
    """Fine-tuning of adapters for Llama 2 70B on packed documents."""

    config_type: ClassVar[type] = LoraConfig
    title = "Llama 2"
    whole: ClassVar[str] = "base"
    peers = "benchmarks.llama2_70b_lora.peer"
    axes: ClassVar[Mapping[str, str]] = {"dp": "have other rows", "cp": "share rows", "tp": "share layers"}
    own: LoraConfig

    @property
    def lora(self) -> LoraSettings:
        """Settings of the adapters."""
        return self.own.facts.lora

    @property
    def workspace(self) -> FrozenWorkspace:
        """Sizes of this rank's work: training, evaluation, or both."""
        return FrozenWorkspace(**self.sizes(), rank=self.own.facts.lora_rank, cast_apart=self.own.model.linear == "te")

    def planned(self, capacity: int) -> MemoryPlan:
        """Return the plan of the memory of ``capacity`` bytes."""
        return plan(self.workspace, capacity, *self._requested_counts())

    def recomputation(self) -> dict[str, int]:
        """Return ``recomputed_qkv`` and ``transposed_layers``: numbers of layers, 0 for ``auto`` before the plan."""
        recomputed, transposed = self._requested_counts()
        if self.memory is not None:
            recomputed, transposed = self.memory.recomputed, self.memory.transposed
        return {"recomputed_qkv": recomputed or 0, "transposed_layers": transposed or 0}

    def _requested_counts(self) -> tuple[int | None, int | None]:
        """Return ``recomputed_qkv`` and ``transposed_layers`` of the configuration; None for ``auto``."""
        model = self.own.model
        recomputed, transposed = model.recomputed_qkv, model.transposed_layers
        return None if recomputed == AUTO else int(recomputed), None if transposed == AUTO else int(transposed)

    def built(self, parts: Sequence[range]) -> Decoder:
        """Return the network with its base, of which each rank keeps its part, and fresh adapters. Collective."""
        cfg, model, layout = self.cfg, self.own.model, self.layout
        self._base = None if cfg.assets_dir is None else BaseWeights(cfg.assets_dir / model.base, self.own.facts)
        self._base_digest = None if self._base is None else self._base.digest()
        made = self.decoder(parts, "meta")
        in_fp8 = FROZEN_PRODUCTS[model.linear].state_type if model.linear in FROZEN_PRODUCTS else None
        load_frozen(made, self._base_tensors(made), layout.device, self.dtype, in_fp8)
        made.initialise_adapters(self.generator)
        mark_frozen(made, [name for name, tensor in made.named_parameters() if not tensor.requires_grad])
        return made

    def _base_tensors(self, model: Decoder) -> Iterator[tuple[str, Tensor]]:
        """Yield name and value of every frozen weight; one rank per node reads the base. Collective."""
        device = self.layout.device
        if self._base is None:
            yield from model.drawn_base(self.generator, device, self.dtype)
            return
        wanted = {name for name, parameter in model.named_parameters() if not parameter.requires_grad}
        node = self.layout.node(self.cfg.ranks_per_node)
        yield from self._base.tensors_of_node(wanted, node, device, self.dtype)

    @classmethod
    def declare(cls, cfg: RunConfig) -> Declaration:
        """Declare data format, schedule and precision, and the need for all layers of the rules' base.

        A run ends after ``hparams.training_steps``.
        """
        own: LoraConfig = cfg.workload
        broken = []
        if cfg.assets_dir is None:
            broken.append(f"assets_dir=null: training starts from the rules' base ({own.model.base} in assets_dir)")
        return Declaration(
            data_format=FORMAT,
            schedule_options={"last_samples": own.hparams.training_steps * cfg.global_batch},
            forbidden=broken + unused_layers(own, cls.whole, "layers"),
            lowest_precision=lowest_precision(own.model.linear, cfg.layout["tp"]),
        )

    def base_digest(self) -> str | None:
        """Return the digest of the base that the adapters belong to; None for random weights."""
        return self._base_digest

    def weights(self) -> Weights:
        """Return the adapters and the scales of FP8 products, which do not change in an evaluation. Collective."""
        scales = {name: buffer for name, buffer in self.model.named_buffers() if name.endswith("scales")}
        # Evaluation ranks may split layers differently, so all ranks of tp agree on common scales.
        if scales and self.parallel.size > 1:
            together = torch.cat([scale.view(-1) for scale in scales.values()])
            self.parallel.agree_on_scales_(together)
            parts = together.split([scale.numel() for scale in scales.values()])
            scales = {name: part.view_as(scales[name]) for name, part in zip(scales, parts, strict=True)}
        return Weights({**super().weights().tensors, **scales})

    def learning_rate(self) -> Callable[[Tensor], Tensor]:
        """Return the cosine with linear warm-up."""
        hparams = self.own.hparams
        return cosine(hparams.base_learning_rate, hparams.training_steps, hparams.warmup_steps)

    def objective(self) -> MeanOverRows:
        """Return the mean over rows of the mean loss in each row."""
        return MeanOverRows(self.split)

    def _eval_losses(self, tensors: dict[str, Tensor]) -> Tensor:
        """Return the losses (T,) of this rank's tokens, without dropout."""
        made = self.stage.scored(0, None, Batch(tensors, len(tensors["tokens"])))
        return made[0]

    def example_batches(self) -> Iterable[Batch]:
        """Yield one synthetic micro-batch, because all training micro-batches have the same shape."""
        example_batch = example(self.cfg.micro_batch, self.own.facts, self.split.local_length)
        yield Batch(self.to_device(example_batch), self.nominal_samples)

    def open_data(self, root: Path) -> DataSource:
        """Open the training rows."""
        facts, cfg = self.own.facts, self.cfg
        return open_train(
            root, facts, self.layout, cfg.micro_batch, cfg.grad_accumulation_steps, positions=self._columns()
        )

    def evaluation(self, layout: Layout) -> CountedEvaluation:
        """Return the evaluation of the mean loss of rows on the ranks of ``layout``."""
        rows = self.own.reader.eval_rows
        example_batch = example(rows, self.own.facts, self.split.local_length)
        del example_batch["dropout_seed"]
        inputs = self.to_device({**example_batch, "present": torch.ones(rows, dtype=torch.bool)})

        def open_rows(root: Path) -> EvaluationRows:
            return open_evaluation(root, self.own.facts, layout, rows, self._columns())

        return mean_of_rows(self.model, self._eval_losses, inputs, layout, open_rows, self.cfg.cuda_graphs)

    def _columns(self) -> Tensor | None:
        """Return the positions in a row that belong to this rank; None for all."""
        return self.split.positions() if self.split.ranks > 1 else None

    def sample_flops(self) -> float:
        """Return the FLOPs of one row: forward and backward, but without weight gradients of the frozen base."""
        shape, length = self.architecture, self.own.facts.row_length
        attention = shape.attention_flops(length)
        features = shape.hidden + shape.qkv_features + shape.attention_features + shape.hidden
        adapters = shape.layers * self.own.facts.lora_rank * features
        return 2 * (shape.forward_flops(length) - attention) + 3 * attention + 6.0 * adapters * length
