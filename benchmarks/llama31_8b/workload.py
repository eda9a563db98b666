"""Workload of Llama 3.1 8B: connects model, data, optimizer and evaluation."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import ClassVar

import torch
from torch import Tensor

from benchmarks.llama31_8b.config import LlamaConfig, RowFacts
from benchmarks.llama31_8b.data import example, open_evaluation, open_train
from benchmarks.llama31_8b.evaluate import log_perplexity
from benchmarks.llama31_8b.model import HiddenStates, Llama
from common.config.schema import Declaration, RunConfig
from common.contract.workload import Workload
from common.data.batches import Batch, DataSource, EvalSource
from common.data.megatron.preparation import FORMAT
from common.distributed.context_parallel.split import ContextSplit
from common.distributed.layout import Layout
from common.distributed.tensor_parallel.layers import partial_parameters
from common.distributed.tensor_parallel.overlap import build_products
from common.distributed.tensor_parallel.ranks import TensorParallel
from common.distributed.tensor_split import Split
from common.errors import ConfigError
from common.evaluation.counted import CountedEvaluation
from common.nn.decoder import Decoder, split_attention
from common.nn.frozen_decoder.products import check_fp8
from common.nn.trained_decoder.decoder import TrainedDecoder
from common.nn.trained_decoder.head import Head
from common.nn.trained_decoder.memory import MemoryPlan, Workspace, plan
from common.nn.trained_decoder.operations import choose
from common.ops.cross_entropy import CROSS_ENTROPY
from common.ops.operation import AUTO, OperationRequest, asked_for, select
from common.optim.communication import wait_for_weights
from common.optim.groups import shard_ranks
from common.optim.learning_rate import cosine_to
from common.optim.optimizer import ClipNorm, ParameterGroup
from common.optim.precision import LossScale, gradient_dtype
from common.step.chunk_graphs import ChunkGraphs
from common.step.passes import Chunk, nothing
from common.step.pipeline import accumulate_chunk
from common.step.train_step import ForwardBackward, Losses, TrainStep, within


class LlamaPretraining(Workload):
    """Pre-training of Llama 3.1 8B on rows of tokens."""

    config_type: ClassVar[type] = LlamaConfig
    title = "Llama 3.1"
    axes: ClassVar[Mapping[str, str]] = {"dp": "have other rows", "cp": "share rows", "tp": "share layers"}
    own: LlamaConfig
    model: Decoder

    def __init__(self, cfg: RunConfig, layout: Layout) -> None:
        super().__init__(cfg, layout)
        model, facts = self.own.model, self.own.facts
        if model.layers > facts.layers:
            raise ConfigError(f"model.layers={model.layers}: the network has {facts.layers}; 0 uses all")
        split = ContextSplit.from_layout(layout, facts.row_length)
        self.architecture = dataclasses.replace(facts, layers=model.layers or facts.layers)
        parallel = TensorParallel.from_layout(layout)
        if model.linear == "fp8":
            tokens = [self._train_tokens(split), self._eval_tokens(split)]
            check_fp8("fp8", self.architecture, parallel.size, tokens, layout.device, self.dtype)
        self.memory = self._plan(split)
        self.model = Decoder(self.architecture, layout.device, self.dtype, parallel=parallel)
        self.model.initialise(lambda name: layout.shared_generator(f"weights/{name}", layout.device))
        self._trained: TrainedDecoder | None = None
        if model.blocks == "written":
            self._trained = self._written_blocks(split)
        self._network = Llama(self.model, self._hidden_states(split), self._head(), split)
        self.choices |= {"linear": model.linear, "blocks": model.blocks}

    def _hidden_states(self, split: ContextSplit) -> HiddenStates:
        if self._trained is not None:
            return self._trained.hidden_states
        attend = split_attention(split)
        return lambda tokens_BL, places: self.model.hidden_states(tokens_BL, places, attend)

    def _written_blocks(self, split: ContextSplit) -> TrainedDecoder:
        model, device = self.own.model, self.layout.device
        operations, chosen = choose(model.implementations, self.architecture, split, device, self.dtype)
        self.choices |= chosen
        if self.memory is not None:
            recomputed = self.memory.recomputed_gate_up
        else:
            recomputed = 0 if model.recomputed_gate_up == AUTO else int(model.recomputed_gate_up)
        most_tokens = max(self._train_tokens(split), self._eval_tokens(split))
        trains = self.layout.role == "train"
        with asked_for("model.token_products", model.token_products):
            products = build_products(self.model.parallel, device, model.token_products)
        self.choices["token_products"] = products.name
        return TrainedDecoder(
            self.model, operations, model.linear, most_tokens, recomputed, products,
            model.implementations["accumulation"], model.transposed_layers if trains else 0,
            own_eval_scales=not trains or self.cfg.evaluation.offline,
        )  # fmt: skip

    def _train_tokens(self, split: ContextSplit) -> int:
        """Return the tokens in a training micro-batch on this rank; 0 if it only evaluates."""
        return self.cfg.micro_batch * split.local_length if self.layout.role == "train" else 0

    def _eval_tokens(self, split: ContextSplit) -> int:
        """Return the tokens in an evaluation micro-batch on this rank; 0 if other ranks evaluate."""
        elsewhere = self.layout.role == "train" and self.cfg.evaluation.ranks
        return 0 if elsewhere else self.own.reader.eval_rows * split.local_length

    def _plan(self, split: ContextSplit) -> MemoryPlan | None:
        """Return the memory plan of the GPU; None on a CPU, and for autograd, whose memory cannot be planned."""
        cfg, model, device = self.cfg, self.own.model, self.layout.device
        if device.type != "cuda" or model.blocks != "written":
            return None
        trains = self.layout.role == "train"
        half = self.dtype.itemsize == 2
        workspace = Workspace(
            self.architecture,
            self._train_tokens(split),
            split.ranks,
            self._eval_tokens(split),
            self.dtype.itemsize,
            (2 if cfg.optimizer.masters == "remainder" and self.dtype == torch.bfloat16 else 4) if half else 0,
            shard_ranks(cfg.optimizer.shard, self.layout, cfg.scale.gpus_per_node) if trains else 1,
            model.linear == "fp8",
            model.head_chunk,
            alone=self.layout.world_size == 1,
            layer_ranks=self.layout.size("tp"),
            transposed_layers=model.transposed_layers if trains else 0,
            gradient_bytes=gradient_dtype(self.dtype, cfg.optimizer.gradients).itemsize,
            chunk_graphs=cfg.chunk_graphs,
        )
        asked = None if model.recomputed_gate_up == AUTO else int(model.recomputed_gate_up)
        return plan(workspace, torch.cuda.get_device_properties(device).total_memory, asked)

    def _head(self) -> Head:
        model = self.own.model
        request = OperationRequest(self.layout.device, self.dtype, {"columns": self.own.facts.vocabulary})
        chosen = select(model.implementations, "cross_entropy", CROSS_ENTROPY, request)
        self.choices["cross_entropy"] = chosen.name
        return Head(chosen.function, model.head_chunk)

    @classmethod
    def declare(cls, cfg: RunConfig) -> Declaration:
        """Declare data format, schedule and logged values, and that a valid run trains all layers."""
        own: LlamaConfig = cfg.workload
        broken = []
        if own.model.layers not in (0, own.facts.layers):
            broken.append(f"model.layers={own.model.layers}: the network has {own.facts.layers}")
        last = min(own.facts.max_steps * cfg.global_batch, own.reader.index_rows)  # end of the order
        return Declaration(
            data_format=FORMAT,
            schedule_options={"last_samples": last},
            derived_values={
                "end_learning_rate": _end_rate(own),
                "decay_steps": own.facts.max_steps - own.hparams.warmup_steps,
            },
            chunk_graphs=True,
            forbidden=broken,
            lowest_precision={"linear": "fp8"} if own.model.linear == "fp8" else {},
        )

    def memory_plan(self) -> str:
        """Return a description of the planned memory by category; empty without a plan."""
        return "" if self.memory is None else self.memory.in_words()

    def tensor_splits(self) -> dict[str, Split]:
        """Return how the ranks of tp split parameters, by name."""
        return self.model.tensor_splits()

    def parameter_groups(self) -> list[ParameterGroup]:
        """Return the parameter groups; all except norms have weight decay, gradients of norms are summed over tp."""
        partial = partial_parameters(self.model)
        groups: dict[tuple[bool, tuple[str, ...]], dict[str, torch.nn.Parameter]] = {}
        for name, parameter in self.model.named_parameters():
            axes = tuple(axis for axis in partial.get(name, ()) if self.layout.size(axis) > 1)
            groups.setdefault((parameter.ndim > 1, axes), {})[name] = parameter
        decay = self.own.hparams.weight_decay
        return [
            ParameterGroup(named, weight_decay=decay if decays else 0.0, summed_over=axes)
            for (decays, axes), named in groups.items()
        ]

    def build_step(self) -> TrainStep:
        """Return a step that accumulates micro-batches, clips the mean gradient, and applies AdamW."""
        own = self.own
        rate = own.hparams.base_learning_rate
        schedule = cosine_to(rate, _end_rate(own), own.facts.max_steps, own.hparams.warmup_steps)
        clip = ClipNorm(own.facts.max_grad_norm, "after_reduction")
        graphs = ChunkGraphs() if self.cfg.chunk_graphs else None
        passes = None if graphs is None else functools.partial(self._in_graphs, graphs)
        step = self.step_with(
            own.hparams.adamw(), schedule, blocks=self._readers(), clip=clip, loss_scale=own.model.loss_scale,
            passes=passes,
        )  # fmt: skip
        step.chunk_graphs = graphs
        if self._trained is not None:
            step.forward_backward = within(self._trained.same_weights, step.forward_backward)
        return step

    def _readers(self) -> Sequence[tuple[str, torch.nn.Module]]:
        """Return the modules that wait for gathered weights, in the order of the forward pass.

        With autograd, the last norm and the head are not among them.
        """
        if self._trained is not None:
            return self._trained.readers
        return [("embedding", self.model.embedding), *self.model.layers.named_children()]

    def _prepare(self) -> None:
        """Wait for all gathered weights, and cast them if necessary."""
        for _, reader in self._readers():
            wait_for_weights(reader)
        if self._trained is not None:
            self._trained.prepare()

    def _in_graphs(self, graphs: ChunkGraphs, scale: LossScale | None) -> ForwardBackward:
        """Return a function that runs the micro-batches of a step with one forward and one backward graph."""
        trained, count = self._trained, self.cfg.grad_accumulation_steps
        begin_backward = nothing if trained is None else trained.begin_backward
        chunk = Chunk(self.model, lambda _, batch: self.loss(batch), self._prepare, begin_backward)
        return accumulate_chunk(self.layout, chunk, ["loss"], count, scale, graphs)

    def loss(self, micro_batch: Batch) -> Losses:
        """Return this rank's part of the mean loss over all tokens; the sum of the parts over cp is the mean."""
        part = self._network.loss(micro_batch.tensors["tokens"])
        # the log shows the mean over ranks, so the metric is multiplied by the number of parts
        return Losses(part, {"loss": part.detach() * self.layout.size("cp")})

    def example_batches(self) -> Iterable[Batch]:
        """Yield one synthetic micro-batch, because all training micro-batches have the same shape."""
        made_up = {"tokens": example(self.cfg.micro_batch, self.row_facts)["tokens"]}
        yield Batch(self.to_device(made_up), self.nominal_samples)

    @property
    def row_facts(self) -> RowFacts:
        """Constants of the data that the reader needs."""
        facts = self.own.facts
        return RowFacts(facts.vocabulary, facts.row_length, self.cfg.benchmark.eval_samples, self.own.reader.index_rows)

    def open_data(self, root: Path) -> DataSource:
        """Open the training rows; ranks that share rows read them completely."""
        cfg = self.cfg
        return open_train(root, self.row_facts, self.layout, cfg.micro_batch, cfg.grad_accumulation_steps)

    def evaluation(self, layout: Layout) -> CountedEvaluation:
        """Return the evaluation of log perplexity on the ranks of ``layout``."""
        rows = self.own.reader.eval_rows
        tokens = example(rows, self.row_facts)["tokens"]
        inputs = self.to_device({"tokens": tokens, "present": torch.ones(rows, dtype=torch.bool)})

        def open_rows(root: Path) -> EvalSource:
            return open_evaluation(root, self.row_facts, layout, rows)

        def losses(batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
            return self._network.losses(batch["tokens"])

        within = contextlib.nullcontext if self._trained is None else self._trained.evaluating
        return log_perplexity(self.model, losses, inputs, layout, open_rows, self.cfg.cuda_graphs, within)

    def sample_flops(self) -> float:
        """Return the FLOPs of one row, forward and backward, with only the causal half of the attention."""
        return 3.0 * self.architecture.forward_flops(self.own.facts.row_length)


def _end_rate(own: LlamaConfig) -> float:
    return own.facts.end_learning_rate_share * own.hparams.base_learning_rate
