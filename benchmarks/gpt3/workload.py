"""Workload of GPT-3: connects network, pipeline stages, data, optimizer and evaluation."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import ClassVar

import torch
from torch import Tensor

from benchmarks.gpt3 import memory
from benchmarks.gpt3.config import Facts, GptConfig, RowFacts
from benchmarks.gpt3.data import example, open_evaluation, open_train
from benchmarks.gpt3.evaluate import log_perplexity
from benchmarks.gpt3.network import EMBEDDING, Gpt
from benchmarks.gpt3.operations import choose_operations
from benchmarks.gpt3.published import load_published
from benchmarks.gpt3.written import WrittenGpt
from common.config.schema import Declaration, LoggedPrecision, Role, RunConfig
from common.contract.workload import Workload
from common.data.batches import Batch, DataSource, EvalSource
from common.data.megatron.preparation import FORMAT
from common.distributed.layout import Layout
from common.distributed.pipeline.links import Handed
from common.distributed.pipeline.order import check_numbers, layers_of
from common.distributed.tensor_parallel.layers import partial_parameters
from common.distributed.tensor_parallel.overlap import build_products
from common.distributed.tensor_parallel.ranks import TensorParallel
from common.distributed.tensor_split import Split
from common.errors import ConfigError
from common.evaluation.counted import CountedEvaluation
from common.ops.operation import asked_for
from common.optim.communication import wait_for_weights
from common.optim.groups import shard_ranks
from common.optim.learning_rate import cosine_of_samples
from common.optim.optimizer import ClipNorm, ParameterGroup
from common.optim.precision import gradient_dtype
from common.step.chunk_graphs import ChunkGraphs
from common.step.passes import Chunk, nothing
from common.step.pipeline import Pipeline
from common.step.train_step import Losses, TrainStep, within


class Part(torch.nn.Module):
    """Module of the layers in one part of the network, so that hooks can wait for its gathered weights.

    Args:
        number: index of the part on this stage.
    """

    def __init__(self, network: Gpt | WrittenGpt, number: int) -> None:
        super().__init__()
        model = network if isinstance(network, Gpt) else network.model
        self.layers = torch.nn.ModuleList(model.blocks(number))
        self._run = functools.partial(network.through, number)

    def forward(self, x_sE: Tensor, rows: int) -> Tensor:
        """Return the hidden states of this rank after these layers."""
        return self._run(x_sE, rows)


class GptPretraining(Workload):
    """Pre-training of GPT-3 on rows of tokens."""

    config_type: ClassVar[type] = GptConfig
    title = "GPT-3"
    axes: ClassVar[Mapping[str, str]] = {
        "dp": "have other rows", "tp": "share layers", "pp": "have other layers",
    }  # fmt: skip
    own: GptConfig
    model: Gpt

    def __init__(self, cfg: RunConfig, layout: Layout) -> None:
        super().__init__(cfg, layout)
        stage, stages = layout.coordinate("pp"), layout.size("pp")
        if layout.role == "evaluate" and stages > 1:
            raise ConfigError(f"evaluation.layout.pp={stages}: ranks that only evaluate have the whole network")
        self.architecture = _used(self.own)
        chunks = self.own.model.chunks if layout.role == "train" else 1  # several chunks only help in training
        parts = layers_of(self.architecture.layers, stage, stages, chunks)
        parallel = TensorParallel.from_layout(layout)
        self.model = Gpt(
            self.architecture, parts, stage == 0, stage == stages - 1, layout.device, self.dtype, parallel
        )  # fmt: skip
        self.model.initialise(lambda name: layout.shared_generator(f"weights/{name}", layout.device))
        self._written = self._written_blocks() if self.own.model.blocks == "written" else None
        self._network: Gpt | WrittenGpt = self.model if self._written is None else self._written
        self._parts = [Part(self._network, number) for number in range(len(parts))]
        model = self.own.model
        self.choices |= {"linear": model.linear, "blocks": model.blocks}
        self._pipeline = Pipeline(layout, len(parts), cfg.grad_accumulation_steps, self._handed)

    def _written_blocks(self) -> WrittenGpt:
        model, device, parallel = self.own.model, self.layout.device, self.model.parallel
        operations, chosen = choose_operations(
            model.implementations, self.architecture, device, self.dtype, parallel.size
        )
        with asked_for("model.token_products", model.token_products):
            products = build_products(parallel, device, model.token_products)
        self.choices |= {**chosen, "token_products": products.name}
        trains = self.layout.role == "train"
        most_rows = max(trains * self.cfg.micro_batch, self.own.reader.eval_rows)
        return WrittenGpt(
            self.model,
            operations,
            model.linear,
            most_rows * self.own.facts.row_length,
            products,
            model.implementations["accumulation"],
            model.put_off_head,
            own_eval_scales=not trains or self.cfg.evaluation.offline,
        )

    def _handed(self, batch: Batch) -> Handed:
        """Return shape and dtype of the hidden states that this rank passes to the next stage."""
        tokens = len(batch.tensors["tokens"]) * self.own.facts.row_length
        own = self.model.parallel.own_count(tokens)
        return Handed((own, self.architecture.hidden), self.dtype)

    @classmethod
    def declare(cls, cfg: RunConfig) -> Declaration:
        """Declare data format, schedule and logged values, and the need for all layers of the rules' checkpoint.

        Raises:
            ConfigError: stages and chunks do not divide layers or micro-batches.
        """
        own: GptConfig = cfg.workload
        facts, batch, stages = own.facts, cfg.global_batch, cfg.layout["pp"]
        check_numbers(stages, own.model.chunks, cfg.grad_accumulation_steps)
        layers_of(_used(own).layers, 0, stages, own.model.chunks)
        if cfg.chunk_graphs and own.model.put_off_head:
            raise ConfigError(
                f"model.put_off_head={own.model.put_off_head}: cuda_graphs=chunks has no room for gradients of logits "
                "that wait for the end of a step; use put_off_head=0, or cuda_graphs=true"
            )
        broken = []
        if cfg.assets_dir is None:
            broken.append("assets_dir=null: training starts from the rules' checkpoint, in assets_dir")
        if own.model.layers not in (0, facts.layers):
            broken.append(f"model.layers={own.model.layers}: the network has {facts.layers}")
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
            forbidden=broken,
            lowest_precision=_lowest_precision(own, cfg.layout["tp"]),
        )

    def tensor_splits(self) -> dict[str, Split]:
        """Return how the ranks of tp split parameters, by name."""
        return self.model.tensor_splits()

    def parameter_groups(self) -> list[ParameterGroup]:
        """Return the groups of parameters; all have weight decay.

        Gradients of some parameters are summed over tp, that of the embedding over the first and the last stage.
        """
        decay, partial = self.own.hparams.weight_decay, partial_parameters(self.model)
        named = dict(self.model.named_parameters())
        tied = {EMBEDDING: named.pop(EMBEDDING)} if EMBEDDING in named else {}
        parts = {name: parameter for name, parameter in named.items() if partial.get(name)}
        whole = {name: parameter for name, parameter in named.items() if name not in parts}
        over = ("tp",) if self.layout.size("tp") > 1 else ()
        return [
            ParameterGroup(whole, weight_decay=decay),
            ParameterGroup(parts, weight_decay=decay, summed_over=over),
            ParameterGroup(tied, weight_decay=decay, tied_over=("pp",)),
        ]

    def build_step(self) -> TrainStep:
        """Return a step that runs all micro-batches through all stages, clips the mean gradient, and applies AdamW."""
        cfg, own = self.cfg, self.own
        facts, rate, begun = own.facts, own.hparams.base_learning_rate, _starts_from_checkpoint(cfg)
        schedule = cosine_of_samples(
            rate, _end_rate(own), facts.warmup_samples, facts.decay_samples, cfg.global_batch, _consumed(cfg),
            facts.checkpoint_steps if begun else 0,
        )  # fmt: skip
        chunks = [self._chunk(number) for number in range(len(self.model.parts))]
        graphs = ChunkGraphs() if cfg.chunk_graphs else None
        staged = self.layout.size("pp") > 1 or graphs is not None
        step = self.step_with(
            own.hparams.adamw(),
            schedule,
            blocks=[(f"part {number}", part) for number, part in enumerate(self._parts)],
            clip=ClipNorm(facts.max_grad_norm, "after_reduction"),
            loss_scale=own.model.loss_scale,
            passes=(lambda scale: self._pipeline.forward_backward(chunks, ["loss"], scale, graphs)) if staged else None,
        )
        step.chunk_graphs = graphs
        step.rehearsing = self._pipeline.rehearsing if self.layout.size("pp") > 1 else None
        if self._written is not None:
            step.forward_backward = within(self._written.same_weights, step.forward_backward)
        return step

    def load_start(self) -> None:
        """Load weights and moments of the rules' checkpoint, if ``assets_dir`` is set. Collective."""
        cfg, facts = self.cfg, self.own.facts
        if cfg.assets_dir is None:
            return
        folder = cfg.assets_dir / (self.own.model.checkpoint or "")
        steps, splits = facts.checkpoint_steps, self.tensor_splits()
        load_published(folder, self.model, self._optimizer, self.layout, self.architecture, steps, splits)

    def _chunk(self, number: int) -> Chunk:
        """Return part ``number`` of the network on this stage, for training."""
        return Chunk(
            self.model.chunk_module(number),
            lambda x_sE, batch: self._trained(number, x_sE, batch),
            lambda: self._prepare(number),
            self._written.begin_backward if self._written is not None else nothing,
        )

    def _prepare(self, number: int) -> None:
        """Wait for the gathered weights of part ``number`` of this stage, and cast them if necessary."""
        wait_for_weights(self._parts[number])
        if self._written is not None:
            self._written.prepare(number)

    def _trained(self, number: int, x_sE: Tensor | None, batch: Batch) -> Tensor | Losses:
        """Return the output of part ``number``, or the mean loss if it is the last part of the network."""
        x_sE = self._through(number, x_sE, batch)
        if not self._ends(number):
            return x_sE
        tokens_BR = batch.tensors["tokens"]
        labels_T, chunk = tokens_BR[:, 1:].reshape(-1), self.own.model.head_chunk
        labels = len(tokens_BR) * (self.own.facts.row_length - 1)  # all training rows have equally many labels
        mean = self._network.summed_loss(x_sE, labels_T, chunk, 1.0 / labels)
        return Losses(mean, {"loss": mean.detach()})

    def _scored(self, number: int, x_sE: Tensor | None, batch: Batch) -> Tensor | tuple[Tensor, Tensor]:
        """Return the output of part ``number``, or losses (T,) and a mask of scored tokens if it is the last part."""
        x_sE = self._through(number, x_sE, batch)
        if not self._ends(number):
            return x_sE
        labels_T = batch.tensors["tokens"][:, 1:].reshape(-1)
        return self._network.losses(x_sE, labels_T, self.own.model.head_chunk), labels_T >= 0

    def _through(self, number: int, x_sE: Tensor | None, batch: Batch) -> Tensor:
        """Return the hidden states after the layers of part ``number``."""
        tokens_BR = batch.tensors["tokens"]
        if x_sE is None:
            x_sE = self._network.embed(tokens_BR[:, :-1].clamp(min=0))
        made: Tensor = self._parts[number](x_sE, len(tokens_BR))
        return made

    def _ends(self, number: int) -> bool:
        """Return whether part ``number`` of this stage is the last part of the network."""
        return self._pipeline.last and number == len(self.model.parts) - 1

    def loss(self, micro_batch: Batch) -> Losses:
        """Return the mean loss over the labels of a micro-batch; only if one stage has all layers."""
        made = self._trained(0, None, micro_batch)
        assert isinstance(made, Losses), "a stage that is not the last has no loss"
        return made

    def example_batches(self) -> Iterable[Batch]:
        """Yield one synthetic micro-batch, because all training micro-batches have the same shape."""
        made_up = {"tokens": example(self.cfg.micro_batch, self.row_facts)["tokens"]}
        yield Batch(self.to_device(made_up), self.nominal_samples)

    @property
    def row_facts(self) -> RowFacts:
        """Constants of the data that the reader needs."""
        facts, rows = self.own.facts, self.own.reader.index_rows
        labels = self.cfg.benchmark.eval_samples
        return RowFacts(facts.vocabulary, facts.row_length, facts.eval_rows, labels, rows, _consumed(self.cfg))

    def open_data(self, root: Path) -> DataSource:
        """Open the training rows; all stages of a replica read the same rows."""
        cfg = self.cfg
        return open_train(root, self.row_facts, self.layout, cfg.micro_batch, cfg.grad_accumulation_steps)

    def evaluation(self, layout: Layout) -> CountedEvaluation:
        """Return the evaluation of log perplexity on the ranks of ``layout``."""
        reader = self.own.reader
        rows = reader.eval_rows * reader.eval_micro_batches
        tokens = example(rows, self.row_facts)["tokens"]
        inputs = self.to_device({"tokens": tokens, "present": torch.ones(rows, dtype=torch.bool)})
        functions = [
            lambda x_sE, batch, number=number: self._scored(number, x_sE, batch)
            for number in range(len(self.model.parts))
        ]

        def open_rows(root: Path) -> EvalSource:
            return open_evaluation(root, self.row_facts, layout, rows)

        def losses(batch: dict[str, Tensor]) -> Iterator[tuple[Tensor, Tensor]]:
            parts = batch["tokens"].split(reader.eval_rows)
            yield from self._pipeline.forward(functions, [Batch({"tokens": part}, len(part)) for part in parts])

        within = contextlib.nullcontext if self._written is None else self._written.evaluating
        return log_perplexity(self.model, losses, inputs, layout, open_rows, self.cfg.cuda_graphs, within)

    def memory_plan(self) -> str:
        """Return a description of the planned memory by category.

        Empty without a GPU, and if autograd builds the backward pass, because its memory cannot be planned.
        """
        cfg, model, layout = self.cfg, self.own.model, self.layout
        if self._written is None or layout.device.type != "cuda":
            return ""
        shards = shard_ranks(cfg.optimizer.shard, layout, cfg.scale.gpus_per_node)
        masters = {"fp32": 4, "remainder": 2 if self.dtype == torch.bfloat16 else 4}[cfg.optimizer.masters]
        place = memory.Place(layout.coordinate("pp"), layout.size("pp"), model.chunks, layout.size("tp"), shards)
        step = memory.Step(
            cfg.grad_accumulation_steps, cfg.micro_batch * self.own.facts.row_length, self.dtype.itemsize,
            masters if self.dtype.itemsize == 2 else 0, model.linear == "fp8", model.put_off_head,
            gradient_dtype(self.dtype, cfg.optimizer.gradients).itemsize, cfg.chunk_graphs,
        )  # fmt: skip
        parameters = sum(parameter.numel() for parameter in self.model.parameters())
        return memory.expected(self.architecture, parameters, place, step).in_words()

    def sample_flops(self) -> float:
        """Return the FLOPs of one row, forward and backward, with only the causal half of the attention."""
        return 3.0 * self.architecture.forward_flops(self.own.facts.row_length)


def _lowest_precision(own: GptConfig, ranks: int) -> dict[Role, LoggedPrecision]:
    """Return the logged lowest precisions. With several ranks of tp, communication uses the FP8 of the products."""
    if own.model.linear != "fp8":
        return {}
    return {"linear": "fp8", "comm": "fp8"} if ranks > 1 else {"linear": "fp8"}


def _used(own: GptConfig) -> Facts:
    """Return the constants with the number of layers that ``model.layers`` selects.

    Raises:
        ConfigError: ``model.layers`` is larger than the number of layers.
    """
    if own.model.layers > own.facts.layers:
        raise ConfigError(f"model.layers={own.model.layers}: the network has {own.facts.layers}; 0 uses all")
    return dataclasses.replace(own.facts, layers=own.model.layers or own.facts.layers)


def _starts_from_checkpoint(cfg: RunConfig) -> bool:
    return cfg.assets_dir is not None


def _consumed(cfg: RunConfig) -> int:
    """Return the rows of the checkpoint, rounded up to whole batches; 0 without a checkpoint."""
    facts: Facts = cfg.workload.facts
    return facts.consumed(cfg.global_batch) if _starts_from_checkpoint(cfg) else 0


def _end_rate(own: GptConfig) -> float:
    return own.facts.end_learning_rate_share * own.hparams.base_learning_rate
