"""Base of all language models as workloads: network, blocks, head, groups of parameters, and step.

A workload adds its configuration, objective, learning rate, data and evaluation. A step runs: trainer, step, stage
(:mod:`common.language.stage`), decoder, layer, half of a block, operation.
"""

from __future__ import annotations

import functools
from abc import abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor

from common.config.schema import LoggedPrecision, Role, RunConfig
from common.config.sections import used_layers
from common.contract.workload import Workload
from common.data.batches import Batch
from common.distributed.context_parallel import ContextSplit
from common.distributed.layout import Layout
from common.distributed.pipeline.order import layers_of
from common.distributed.tensor_parallel.layers import partial_parameters
from common.distributed.tensor_parallel.overlap import build_products
from common.distributed.tensor_parallel.ranks import TensorParallel
from common.distributed.tensor_split import TensorSplit
from common.errors import ConfigError
from common.language.architecture import choose_operations
from common.language.decoder import HandwrittenDecoder
from common.language.fp8_products import check_fp8
from common.language.head import LossHead, NextTokenHead, PendingGradients, TiedHead, UntiedHead
from common.language.lora import LoraSettings
from common.language.network import EMBEDDING, Decoder
from common.language.stage import Objective, Stage
from common.ops.cross_entropy import CROSS_ENTROPY, OF_A_PART
from common.ops.linear import IN_FP8
from common.ops.operation import AUTO, OperationRequest, asked_for, select
from common.optim.memory_plan import MemoryPlan, capacity_of
from common.optim.optimizer import ClipNorm, ParameterGroup
from common.optim.precision import LossScale
from common.step.chunk_graphs import ChunkGraphs
from common.step.pipeline import Pipeline
from common.step.train_step import ForwardBackward, Losses, TrainStep, accumulate


class LanguageModel(Workload):
    """Training of a decoder on rows of tokens.

    Its configuration has ``facts``, which are an :class:`Architecture` with ``row_length`` and ``max_grad_norm``;
    ``model``, a :class:`common.language.config.DecoderConfig`; ``hparams`` of AdamW; and ``reader.eval_rows``.

    Attributes:
        architecture: the part of the network that ``model.layers`` selects.
        split: how rows are split over the ranks of cp.
        stage: the parts of the network on this rank's stage, with the head; runs all passes.
    """

    model: Decoder
    whole: ClassVar[str] = "network"
    """What has all layers, in messages."""

    def __init__(self, cfg: RunConfig, layout: Layout) -> None:
        super().__init__(cfg, layout)
        model, facts = self.own.model, self.own.facts
        if layout.role == "evaluate" and layout.size("pp") > 1:
            raise ConfigError(
                f"evaluation.layout.pp={layout.size('pp')}: ranks that only evaluate have the whole network"
            )
        self.architecture = used_layers(facts, model, self.whole, "layers")
        self.split = ContextSplit.from_layout(layout, facts.row_length)
        self.parallel = TensorParallel.from_layout(layout)
        if model.linear in IN_FP8:
            tokens = (self.train_tokens, self.eval_tokens)
            check_fp8(model.linear, self.architecture, self.parallel.size, tokens, layout.device, self.dtype)
        plannable = layout.device.type == "cuda" and model.blocks != "autograd"
        self.memory = self.planned(capacity_of(layout.device)) if plannable else None
        stages = layout.size("pp")
        chunks = getattr(model, "chunks", 1) if layout.role == "train" else 1  # several chunks only help in training
        parts = layers_of(self.architecture.layers, layout.coordinate("pp"), stages, chunks)
        self.model = self.built(parts)
        handwritten = None if model.blocks == "autograd" else self._handwritten()
        self.stage = Stage(
            self.model, handwritten, self._head(handwritten is None), self.objective(), self.split,
            divisible="pp" in self.axes, adapters=self.lora is not None,
        )  # fmt: skip
        self.pipeline = Pipeline(layout, len(parts), cfg.grad_accumulation_steps, self.stage.handed)
        self.choices |= {"linear": model.linear, "blocks": model.blocks}

    @property
    def lora(self) -> LoraSettings | None:
        """Settings of the adapters; None if all weights are trained."""
        return None

    def planned(self, capacity: int) -> MemoryPlan | None:
        """Return the plan of the memory of ``capacity`` bytes, before anything is allocated. Default: None, no plan.

        There is none either if autograd builds the backward pass, because its memory cannot be planned.
        """
        return None

    def sizes(self) -> dict[str, Any]:
        """Return the arguments of every :class:`common.language.memory.Workspace`."""
        model = self.own.model
        return {
            "architecture": self.architecture,
            "tokens": self.train_tokens,
            "ranks": self.layout.size("tp"),
            "sharers": self.split.ranks,
            "eval_tokens": self.eval_tokens,
            "itemsize": self.dtype.itemsize,
            "fp8": model.linear in IN_FP8,
            "head_chunk": model.head_chunk,
            "alone": self.layout.world_size == 1,
        }

    def decoder(self, parts: Sequence[range], device: torch.device | str) -> Decoder:
        """Return this rank's parts of the network, uninitialised."""
        stage, stages = self.layout.coordinate("pp"), self.layout.size("pp")
        return Decoder(
            self.architecture, device, self.dtype, self.lora, self.parallel, parts=parts, first=stage == 0,
            last=stage == stages - 1, split=self.split,
        )  # fmt: skip

    def built(self, parts: Sequence[range]) -> Decoder:
        """Return this rank's parts of the network, initialised."""
        model = self.decoder(parts, self.layout.device)
        model.initialise(self.generator)
        return model

    def generator(self, name: str) -> torch.Generator:
        """Return the generator of the initial values of a parameter."""
        return self.layout.shared_generator(f"weights/{name}", self.layout.device)

    @property
    def train_tokens(self) -> int:
        """Tokens in a training micro-batch on this rank, over all ranks of tp; 0 if it only evaluates."""
        return self.cfg.micro_batch * self.split.local_length if self.layout.role == "train" else 0

    @property
    def eval_tokens(self) -> int:
        """Tokens in an evaluation micro-batch on this rank, over all ranks of tp; 0 if other ranks evaluate."""
        elsewhere = self.layout.role == "train" and self.cfg.evaluation.ranks
        return 0 if elsewhere else self.own.reader.eval_rows * self.split.local_length

    def recomputation(self) -> dict[str, int]:
        """Return how many layers recompute or keep what, as arguments of :class:`HandwrittenDecoder`. Default: none."""
        return {}

    def _handwritten(self) -> HandwrittenDecoder:
        model, device = self.own.model, self.layout.device
        operations, chosen = choose_operations(
            model.implementations, self.architecture, self.split, device, self.dtype, adapters=self.lora is not None
        )
        with asked_for("model.token_products", model.token_products):
            products = build_products(self.parallel, device, model.token_products)
        self.choices |= {**chosen, "token_products": products.name}
        buffered = self.lora is None or model.linear in IN_FP8
        return HandwrittenDecoder(
            self.model,
            operations,
            model.linear,
            max(self.train_tokens, self.eval_tokens) if buffered else 0,
            products=products,
            accumulation=model.implementations.get("accumulation", AUTO),
            own_eval_scales=self.layout.role != "train" or self.cfg.evaluation.offline,
            **self.recomputation(),
        )

    def _head(self, autograd: bool) -> LossHead | None:
        """Return the head; None on a stage without one. ``autograd``: whether the blocks run under autograd."""
        model, shape, parallel = self.own.model, self.architecture, self.parallel
        padded = shape.vocabulary if shape.words_per_rank > 1 else None
        if self.lora is not None or (shape.tied_head and autograd):
            return (
                NextTokenHead(self.model.head_weight, parallel, model.head_chunk, padded) if self.model.last else None
            )
        operation, columns = CROSS_ENTROPY, shape.vocabulary
        if shape.tied_head:
            operation, columns = OF_A_PART, shape.padded_vocabulary(parallel.size) // parallel.size
        request = OperationRequest(self.layout.device, self.dtype, {"columns": columns})
        chosen = select(model.implementations, "cross_entropy", operation, request)
        self.choices["cross_entropy"] = chosen.name
        if not self.model.last:
            return None
        weight, first = self.model.head_weight, self.model.first
        if shape.tied_head:
            # If the embedding is on the same stage, its backward pass is the last to add to this gradient.
            return TiedHead(
                weight, shape.vocabulary, parallel, chosen.function, finishes=not first, chunk=model.head_chunk,
                pending=PendingGradients(0 if first else model.put_off_head),
            )  # fmt: skip
        if parallel.size == 1:
            return UntiedHead(weight, chosen.function, model.head_chunk)
        return NextTokenHead(weight, parallel, model.head_chunk, padded)

    def tensor_splits(self) -> dict[str, TensorSplit]:
        """Return how the ranks of tp split trained parameters, by name."""
        trained = {name for name, parameter in self.model.named_parameters() if parameter.requires_grad}
        return {name: split for name, split in self.model.tensor_splits().items() if name in trained}

    def decays(self, parameter: torch.nn.Parameter) -> bool:
        """Return whether a parameter has weight decay. Default: all have."""
        return True

    def parameter_groups(self) -> list[ParameterGroup]:
        """Return the groups of trained parameters by weight decay and by the axes over which gradients are summed.

        The gradient of an embedding that the head shares is summed over the first and the last stage. A network that
        can be split into stages has weight decay on all parameters.
        """
        partial, decay = partial_parameters(self.model), self.own.hparams.weight_decay
        groups: dict[tuple[tuple[str, ...], tuple[str, ...], bool], dict[str, torch.nn.Parameter]] = {}
        if (
            "pp" in self.axes
        ):  # creating process groups is collective: every stage has all groups, some without parameters
            groups = {((), (), True): {}, ((), ("tp",), True): {}, (("pp",), (), True): {}}
        for name, parameter in self.model.named_parameters():
            if parameter.requires_grad:
                tied: tuple[str, ...] = ("pp",) if name == EMBEDDING and self.architecture.tied_head else ()
                axes = partial.get(name, ())
                if self.lora is not None:  # adapters are so small that one group is faster if nothing is summed
                    axes = self._shared(axes)
                groups.setdefault((tied, axes, self.decays(parameter)), {})[name] = parameter
        found = []
        for (tied, axes, decays), named in sorted(groups.items(), key=lambda group: group[0][:2]):
            summed = self._shared(axes)
            found.append(
                ParameterGroup(named, weight_decay=decay if decays else 0.0, summed_over=summed, tied_over=tied)
            )
        return found

    def _shared(self, axes: tuple[str, ...]) -> tuple[str, ...]:
        """Return the axes that have several ranks."""
        return tuple(axis for axis in axes if self.layout.size(axis) > 1)

    @abstractmethod
    def learning_rate(self) -> Callable[[Tensor], Tensor]:
        """Return the schedule; it maps the number of earlier updates to the rate."""

    def build_step(self) -> TrainStep:
        """Return a step that runs all micro-batches through all stages, clips the mean gradient, and applies AdamW."""
        cfg, own, staged = self.cfg, self.own, self.layout.size("pp") > 1
        graphs = ChunkGraphs() if cfg.chunk_graphs else None
        chunks = [self.stage.chunk(number) for number in range(len(self.model.parts))]
        passes: Callable[[LossScale | None], ForwardBackward] = functools.partial(accumulate, self.stage.loss)
        if staged or graphs is not None:
            passes = functools.partial(self.pipeline.forward_backward, chunks, ["loss"], graphs=graphs)
        step = self.step_with(
            own.hparams.adamw(),
            self.learning_rate(),
            blocks=self.stage.readers,
            clip=ClipNorm(own.facts.max_grad_norm, "after_reduction"),
            loss_scale=own.model.loss_scale,
            passes=passes,
        )
        step.chunk_graphs = graphs
        step.rehearsing = self.pipeline.rehearsing if staged else None
        step.forward_backward = self.stage.step(step.forward_backward)
        return step

    def loss(self, micro_batch: Batch) -> Losses:
        """Return the loss of a micro-batch; only if one stage has all layers."""
        return self.stage.loss(micro_batch)

    @abstractmethod
    def objective(self) -> Objective:
        """Return the object that gives input tokens, labels and loss of every micro-batch."""

    def sample_flops(self) -> float:
        """Return the FLOPs of one row, forward and backward, with only the causal half of the attention."""
        return 3.0 * self.architecture.forward_flops(self.own.facts.row_length)


def lowest_precision(linear: str, ranks: int) -> dict[Role, LoggedPrecision]:
    """Return the logged lowest precisions; empty without FP8. With several ranks of tp, tokens move in FP8, too."""
    if linear not in IN_FP8:
        return {}
    return {"linear": "fp8", "comm": "fp8"} if ranks > 1 else {"linear": "fp8"}
