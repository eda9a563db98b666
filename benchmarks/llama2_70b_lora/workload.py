"""Workload of Llama 2 70B with low-rank adapters: connects model, data, optimizer and evaluation."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import ClassVar

import torch
from torch import Tensor

from benchmarks.llama2_70b_lora.base import BaseWeights
from benchmarks.llama2_70b_lora.config import LlamaConfig
from benchmarks.llama2_70b_lora.data import EvaluationRows, example, open_evaluation, open_train
from benchmarks.llama2_70b_lora.evaluate import mean_of_rows
from benchmarks.llama2_70b_lora.loss import training_loss
from benchmarks.llama2_70b_lora.rows import FORMAT
from common.config.schema import Declaration, LoggedPrecision, Role, RunConfig
from common.contract.evaluation import Weights
from common.contract.workload import Workload
from common.data.batches import Batch, DataSource
from common.distributed.context_parallel.split import ContextSplit
from common.distributed.layout import Layout
from common.distributed.tensor_parallel.cross_entropy import next_token_loss
from common.distributed.tensor_parallel.layers import partial_parameters
from common.distributed.tensor_parallel.overlap import build_products
from common.distributed.tensor_parallel.ranks import TensorParallel
from common.distributed.tensor_split import Split
from common.errors import ConfigError
from common.evaluation.counted import CountedEvaluation
from common.nn.decoder import Decoder, DecoderArchitecture, split_attention
from common.nn.frozen import mark_frozen
from common.nn.frozen_decoder.decoder import IN_FP8, FrozenDecoder, load_frozen
from common.nn.frozen_decoder.memory import MemoryPlan, Workspace, plan
from common.nn.frozen_decoder.operations import choose
from common.nn.frozen_decoder.products import check_fp8
from common.nn.lora import TokenPlaces
from common.nn.scratch import Scratch
from common.ops.operation import AUTO, asked_for
from common.optim.learning_rate import cosine
from common.optim.optimizer import ClipNorm, ParameterGroup
from common.step.train_step import Losses, TrainStep


class LlamaLora(Workload):
    """Fine-tuning of adapters for Llama 2 70B on packed documents."""

    config_type: ClassVar[type] = LlamaConfig
    title = "Llama 2"
    peers = "benchmarks.llama2_70b_lora.peer"
    axes: ClassVar[Mapping[str, str]] = {"dp": "have other rows", "cp": "share rows", "tp": "share layers"}
    own: LlamaConfig
    model: Decoder

    def __init__(self, cfg: RunConfig, layout: Layout) -> None:
        super().__init__(cfg, layout)
        model, facts = self.own.model, self.own.facts
        if model.layers > facts.layers:
            raise ConfigError(f"model.layers={model.layers}: the base has {facts.layers}; 0 uses all")
        self._split = ContextSplit.from_layout(layout, facts.row_length)
        parallel = TensorParallel.from_layout(layout)
        self.architecture = _first_layers(facts, model.layers or facts.layers)
        self.workspace = self._workspace()
        most_tokens = (self.workspace.tokens, self.workspace.eval_tokens)
        if model.linear in IN_FP8:
            check_fp8(model.linear, self.architecture, parallel.size, most_tokens, layout.device, self.dtype)
        self.memory = self._plan()
        self._base = None if cfg.assets_dir is None else BaseWeights(cfg.assets_dir / model.base, _first_layers(facts))
        self._base_digest = None if self._base is None else self._base.digest()
        self.model = Decoder(self.architecture, "meta", self.dtype, facts.lora, parallel)
        recomputed, transposed = self._layer_counts()
        load_frozen(self.model, self._base_tensors(), layout.device, self.dtype, model.linear, transposed)
        self.model.initialise_adapters(lambda name: layout.shared_generator(f"weights/{name}", layout.device))
        mark_frozen(self.model, [name for name, tensor in self.model.named_parameters() if not tensor.requires_grad])
        self._blocks: Decoder | FrozenDecoder = self.model
        if model.blocks == "frozen":
            operations, self.choices = choose(
                model.implementations, self.architecture, self._split, layout.device, self.dtype
            )
            scratch = Scratch(layout.device)
            if model.linear in IN_FP8:  # allocate the largest size now: CUDA graphs need a fixed address
                scratch.wide((max(most_tokens), 2 * facts.feed_forward // parallel.size), self.dtype)
            with asked_for("model.token_products", model.token_products):
                products = build_products(parallel, layout.device, model.token_products)
            self.choices["token_products"] = products.name
            self._blocks = FrozenDecoder(self.model, operations, products, scratch, recomputed)
        self.choices |= {"linear": model.linear, "blocks": model.blocks}

    def _workspace(self) -> Workspace:
        """Return the sizes of this rank's work (training, evaluation, or both), for planning the memory."""
        model, length = self.own.model, self._split.local_length
        trains = self.layout.role == "train"
        evaluates = not (trains and self.cfg.evaluation.ranks)
        return Workspace(
            self.architecture, trains * self.cfg.micro_batch * length, self.layout.size("tp"), self._split.ranks,
            evaluates * self.own.reader.eval_rows * length, self.own.facts.lora_rank, self.dtype.itemsize,
            model.linear in IN_FP8, model.head_chunk, alone=self.layout.world_size == 1,
            cast_apart=model.linear == "te",
        )  # fmt: skip

    def _plan(self) -> MemoryPlan | None:
        """Return the memory plan of the GPU; None on a CPU, and for autograd, whose memory cannot be planned."""
        model, device = self.own.model, self.layout.device
        if device.type != "cuda" or model.blocks != "frozen":
            return None
        memory = torch.cuda.get_device_properties(device).total_memory
        return plan(self.workspace, memory, *self._requested_counts())

    def _requested_counts(self) -> tuple[int | None, int | None]:
        """Return ``recomputed_qkv`` and ``transposed_layers`` of the configuration; None for ``auto``."""
        model = self.own.model
        recomputed, transposed = model.recomputed_qkv, model.transposed_layers
        return None if recomputed == AUTO else int(recomputed), None if transposed == AUTO else int(transposed)

    def _layer_counts(self) -> tuple[int, int]:
        """Return the numbers of layers that recompute query, key and value, and that keep transposed weights."""
        if self.memory is not None:
            return self.memory.recomputed_qkv, self.memory.transposed_layers
        recomputed, transposed = self._requested_counts()
        return recomputed or 0, transposed or 0

    def _base_tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Yield name and value of every frozen weight; one rank per node reads the base. Collective."""
        device = self.layout.device
        if self._base is None:
            yield from self.model.drawn_base(
                lambda name: self.layout.shared_generator(f"weights/{name}", device), device, self.dtype
            )
            return
        wanted = {name for name, parameter in self.model.named_parameters() if not parameter.requires_grad}
        node = self.layout.node(self.cfg.scale.gpus_per_node)
        yield from self._base.tensors_of_node(wanted, node, device, self.dtype)

    @classmethod
    def declare(cls, cfg: RunConfig) -> Declaration:
        """Declare data format, schedule and precision, and the need for all layers of the rules' base.

        A run ends after ``hparams.training_steps``.
        """
        own: LlamaConfig = cfg.workload
        broken = []
        if cfg.assets_dir is None:
            broken.append(f"assets_dir=null: training starts from the rules' base ({own.model.base} in assets_dir)")
        if own.model.layers not in (0, own.facts.layers):
            broken.append(f"model.layers={own.model.layers}: the base has {own.facts.layers}")
        lowest: dict[Role, LoggedPrecision] = {}
        if own.model.linear in IN_FP8:
            lowest = {"linear": "fp8"}
            if cfg.layout["tp"] > 1:  # tokens are gathered in the FP8 format of the products
                lowest["comm"] = "fp8"
        return Declaration(
            data_format=FORMAT,
            schedule_options={"last_samples": own.hparams.training_steps * cfg.global_batch},
            forbidden=broken,
            lowest_precision=lowest,
        )

    def memory_plan(self) -> str:
        """Return a description of the planned memory by category; empty without a plan."""
        return "" if self.memory is None else self.memory.in_words()

    def base_digest(self) -> str | None:
        """Return the digest of the base that the adapters belong to; None for random weights."""
        return self._base_digest

    def weights(self) -> Weights:
        """Return the adapters and the scales of FP8 products, which do not change in an evaluation. Collective."""
        scales = {name: buffer for name, buffer in self.model.named_buffers() if name.endswith(("scales", "scale"))}
        # Evaluation ranks may split layers differently, so all ranks of tp agree on common scales.
        if scales and self.model.parallel.size > 1:
            together = torch.cat([scale.view(-1) for scale in scales.values()])
            self.model.parallel.agree_on_scales_(together)
            parts = together.split([scale.numel() for scale in scales.values()])
            scales = {name: part.view_as(scales[name]) for name, part in zip(scales, parts, strict=True)}
        return Weights({**super().weights().tensors, **scales})

    def tensor_splits(self) -> dict[str, Split]:
        """Return how the ranks of tp split the parameters of the adapters, by name."""
        trained = {name for name, parameter in self.model.named_parameters() if parameter.requires_grad}
        return {name: split for name, split in self.model.tensor_splits().items() if name in trained}

    def parameter_groups(self) -> list[ParameterGroup]:
        """Return the groups of adapters; all have weight decay, and the gradients of some are summed over axes."""
        partial = partial_parameters(self.model)
        groups: dict[tuple[str, ...], dict[str, torch.nn.Parameter]] = {}
        for name, parameter in self.model.named_parameters():
            if parameter.requires_grad:
                axes = tuple(axis for axis in partial.get(name, ()) if self.layout.size(axis) > 1)
                groups.setdefault(axes, {})[name] = parameter
        decay = self.own.hparams.weight_decay
        return [ParameterGroup(named, weight_decay=decay, summed_over=axes) for axes, named in groups.items()]

    def build_step(self) -> TrainStep:
        """Return a step that accumulates micro-batches, clips the mean gradient, and applies AdamW."""
        hparams = self.own.hparams
        schedule = cosine(hparams.base_learning_rate, hparams.training_steps, hparams.warmup_steps)
        clip = ClipNorm(self.own.facts.max_grad_norm, "after_reduction")
        return self.step_with(hparams.adamw(), schedule, clip=clip, loss_scale=self.own.model.loss_scale)

    def loss(self, micro_batch: Batch) -> Losses:
        """Return the mean over rows of the mean loss in each row."""
        tensors = micro_batch.tensors
        losses_T = self._losses(tensors, tensors["dropout_seed"])
        part, whole = training_loss(losses_T, tensors["labels"], self._split)
        return Losses(part, {"loss": whole})

    def _losses(self, tensors: dict[str, Tensor], seed: Tensor | None = None) -> Tensor:
        """Return the losses (T,) of this rank's tokens; without ``seed`` there is no dropout, as in an evaluation."""
        device, length = self.layout.device, self.own.facts.row_length
        places = TokenPlaces.of(len(tensors["tokens"]), length, self._split.positions(device), seed)
        if isinstance(self._blocks, Decoder):
            hidden_sE = self._blocks.hidden_states(tensors["tokens"], places, split_attention(self._split))
        else:
            hidden_sE = self._blocks.hidden_states(tensors["tokens"], places)
        labels_T, chunk = tensors["labels"].flatten(), self.own.model.head_chunk
        return next_token_loss(hidden_sE, self.model.head.weight, labels_T, self.model.parallel, chunk)

    def example_batches(self) -> Iterable[Batch]:
        """Yield one synthetic micro-batch, because all training micro-batches have the same shape."""
        made_up = example(self.cfg.micro_batch, self.own.facts, self._split.local_length)
        yield Batch(self.to_device(made_up), self.nominal_samples)

    def open_data(self, root: Path) -> DataSource:
        """Open the training rows."""
        facts, cfg = self.own.facts, self.cfg
        columns = self._split.positions() if self._split.ranks > 1 else None
        return open_train(root, facts, self.layout, cfg.micro_batch, cfg.grad_accumulation_steps, positions=columns)

    def evaluation(self, layout: Layout) -> CountedEvaluation:
        """Return the evaluation of the mean loss of rows on the ranks of ``layout``."""
        rows = self.own.reader.eval_rows
        made_up = example(rows, self.own.facts, self._split.local_length)
        del made_up["dropout_seed"]
        inputs = self.to_device({**made_up, "present": torch.ones(rows, dtype=torch.bool)})
        columns = self._split.positions() if self._split.ranks > 1 else None

        def open_rows(root: Path) -> EvaluationRows:
            return open_evaluation(root, self.own.facts, layout, rows, columns)

        return mean_of_rows(self.model, self._losses, inputs, layout, open_rows, self.cfg.cuda_graphs)

    def sample_flops(self) -> float:
        """Return the FLOPs of one row: forward and backward, but without weight gradients of the frozen base."""
        shape, length = self.architecture, self.own.facts.row_length
        attention = shape.attention_flops(length)
        features = shape.hidden + shape.qkv_features + shape.attention_features + shape.hidden
        adapters = shape.layers * self.own.facts.lora_rank * features
        return 2 * (shape.forward_flops(length) - attention) + 3 * attention + 6.0 * adapters * length


def _first_layers(facts: DecoderArchitecture, layers: int | None = None) -> DecoderArchitecture:
    """Return the architecture from ``facts`` with the given number of layers; None for all."""
    names = [field.name for field in dataclasses.fields(DecoderArchitecture)]
    values = {name: getattr(facts, name) for name in names}
    return DecoderArchitecture(**{**values, "layers": layers or facts.layers})
