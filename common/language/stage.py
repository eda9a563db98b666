"""The parts of a decoder on one pipeline stage, with head and loss: what the passes of a step and of an evaluation run.

A stage without ``layout.pp`` has one part, the whole network. Legend: as in :mod:`common.language.architecture`.
"""

from __future__ import annotations

import contextlib
import functools
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from common.data.batches import Batch
from common.distributed.context_parallel import ContextSplit
from common.distributed.pipeline.links import Handed
from common.language.architecture import TokenPositions
from common.language.decoder import HandwrittenDecoder
from common.language.head import LossHead
from common.language.network import Decoder
from common.optim.communication import wait_for_weights
from common.step.passes import Chunk, nothing
from common.step.train_step import ForwardBackward, Losses, within


class Objective(ABC):
    """What a micro-batch trains: the input tokens, their labels, and the loss of the head."""

    @abstractmethod
    def tokens(self, tensors: dict[str, Tensor]) -> Tensor:
        """Return the input tokens (B, L) of this rank."""

    @abstractmethod
    def labels(self, tensors: dict[str, Tensor]) -> Tensor:
        """Return the next token of each input token (T,), which may be a token of another rank; -1 where not scored."""

    @abstractmethod
    def loss(self, head: LossHead, hidden_sE: Tensor, tensors: dict[str, Tensor]) -> Losses:
        """Return the loss, given the input of the head."""


@dataclass(frozen=True)
class MeanOverLabels(Objective):
    """The mean loss over all labels of rows that are ``tokens`` (B, S + 1) of a batch, with -1 for padding.

    Attributes:
        split: how rows are split over the ranks of cp.
        labels_per_row: number of labels of every training row.
    """

    split: ContextSplit
    labels_per_row: int

    def tokens(self, tensors: dict[str, Tensor]) -> Tensor:
        """Return the input tokens (B, L) of this rank."""
        return self.split.own_tokens(tensors["tokens"][:, :-1]).clamp(min=0)

    def labels(self, tensors: dict[str, Tensor]) -> Tensor:
        """Return the labels (T,)."""
        return self.split.own_tokens(tensors["tokens"][:, 1:]).reshape(-1)

    def loss(self, head: LossHead, hidden_sE: Tensor, tensors: dict[str, Tensor]) -> Losses:
        """Return this rank's part of the micro-batch's mean loss; the sum of the parts over cp is the mean.

        The metric ``loss`` is the part times the number of cp ranks, so that its mean over ranks is the mean loss.
        """
        factor = 1.0 / (len(tensors["tokens"]) * self.labels_per_row)
        part = head.summed_loss(hidden_sE, self.labels(tensors), factor)
        # the log shows the mean over ranks, so the metric is multiplied by the number of parts
        return Losses(part, {"loss": part.detach() * self.split.ranks})


class StagePart(torch.nn.Module):
    """Module of the layers in one part of the network, so that hooks can wait for its gathered weights.

    Args:
        number: index of the part on this stage.
    """

    def __init__(self, model: Decoder, network: Decoder | HandwrittenDecoder, number: int) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList(model.blocks(number))
        self._run = functools.partial(network.through, number)

    def forward(self, x_sE: Tensor, positions: TokenPositions) -> Tensor:
        """Return the hidden states (s, E) of this rank after these layers."""
        return self._run(x_sE, positions)


class Stage:
    """The parts of the network on this rank's stage.

    Args:
        model: holds the weights, and runs the passes under autograd unless ``handwritten`` is given.
        handwritten: the same network with hand-written backward passes; None for autograd.
        head: head and loss; None on a stage without a head.
        split: how rows are split over the ranks of cp.
        divisible: whether the network can be split into several stages or parts.

    Attributes:
        parts: modules of the parts, for hooks.
        readers: modules that wait for gathered weights, by name in the order of the forward pass. Under autograd, the
            last norm and the head are not among them. With adapters there are none: these are too small to be gathered
            in blocks.
    """

    def __init__(
        self,
        model: Decoder,
        handwritten: HandwrittenDecoder | None,
        head: LossHead | None,
        objective: Objective,
        split: ContextSplit,
        *,
        divisible: bool,
        adapters: bool,
    ) -> None:
        self.model, self.handwritten, self.head = model, handwritten, head
        self.network: Decoder | HandwrittenDecoder = handwritten or model
        self.objective, self._split, self._divisible = objective, split, divisible
        self.parts = [StagePart(model, self.network, number) for number in range(len(model.parts))]
        self.readers: Sequence[tuple[str, torch.nn.Module]]
        if adapters:
            self.readers = ()
        elif divisible:
            self.readers = [(f"part {number}", part) for number, part in enumerate(self.parts)]
        elif handwritten is not None:
            self.readers = handwritten.readers
        else:
            self.readers = [("embedding", model.embedding), *model.layers.named_children()]

    @property
    def scoring(self) -> list[Callable[[Tensor | None, Batch], Tensor | tuple[Tensor, Tensor]]]:
        """Evaluation functions of this stage's parts, in order; each is :meth:`scored` of a part.

        They map (hidden states or None, batch) to hidden states, or in the last part of the network to losses (T,) and
        a mask (T,) of scored tokens.
        """
        return [functools.partial(self.scored, number) for number in range(len(self.parts))]

    def handed(self, batch: Batch) -> Handed:
        """Return shape and dtype of the hidden states that this rank passes to the next stage."""
        tokens = len(batch.tensors["tokens"]) * self._split.local_length
        model = self.model
        return Handed((model.parallel.own_count(tokens), model.architecture.hidden), model.dtype)

    def chunk(self, number: int) -> Chunk:
        """Return part ``number`` of the network on this stage, for training."""
        return Chunk(
            self.model.chunk_module(number),
            functools.partial(self.trained, number),
            functools.partial(self.prepare, number),
            nothing if self.handwritten is None else self.handwritten.begin_backward,
        )

    def prepare(self, number: int = 0) -> None:
        """Wait for the gathered weights of part ``number``, and cast them if necessary."""
        readers = [self.parts[number]] if self._divisible else [reader for _, reader in self.readers]
        for reader in readers:
            wait_for_weights(reader)
        if self.handwritten is not None:
            self.handwritten.prepare(number)

    def step(self, passes: ForwardBackward) -> ForwardBackward:
        """Return the passes of a step, within the context in which no weight changes."""
        return passes if self.handwritten is None else within(self._same_weights, passes)

    @contextlib.contextmanager
    def _same_weights(self) -> Iterator[None]:
        """Context of the passes of a step, during which no weight may change. Collective over tp.

        FP8 products cast their weights once. Deferred gradients of the head are added at the end; if the block fails,
        they are discarded.
        """
        with contextlib.ExitStack() as stack:
            if self.handwritten is not None:
                stack.enter_context(self.handwritten.same_weights())
            if self.head is not None:
                stack.enter_context(self.head.step())
            yield

    def evaluating(self) -> contextlib.AbstractContextManager[None]:
        """Return the context of the passes of an evaluation, in which weights do not change."""
        return contextlib.nullcontext() if self.handwritten is None else self.handwritten.evaluating()

    def loss(self, micro_batch: Batch) -> Losses:
        """Return loss and metrics of a micro-batch, on a stage that has the whole network."""
        made = self.trained(0, None, micro_batch)
        assert isinstance(made, Losses), "a stage that is not the last has no loss"
        return made

    def trained(self, number: int, x_sE: Tensor | None, batch: Batch) -> Tensor | Losses:
        """Return the hidden states after part ``number``, or the loss if it is the last part of the network.

        Args:
            x_sE: hidden states from the previous part; None in the first part of the network.
        """
        made = self._through(number, x_sE, batch.tensors)
        if not self._ends(number):
            return made
        assert self.head is not None
        return self.objective.loss(self.head, made, batch.tensors)

    def scored(self, number: int, x_sE: Tensor | None, batch: Batch) -> Tensor | tuple[Tensor, Tensor]:
        """Return the hidden states after part ``number``; in the last part losses (T,) and mask (T,) of scored tokens.

        Args:
            x_sE: hidden states from the previous part; None in the first part of the network.
        """
        made = self._through(number, x_sE, batch.tensors)
        if not self._ends(number):
            return made
        assert self.head is not None
        labels_T = self.objective.labels(batch.tensors)
        return self.head.losses(made, labels_T), labels_T >= 0

    def _through(self, number: int, x_sE: Tensor | None, tensors: dict[str, Tensor]) -> Tensor:
        """Return the output of part ``number``: the input of the head if it is the last part of the network."""
        rows, columns_L = len(tensors["tokens"]), self._split.positions(tensors["tokens"].device)
        positions = TokenPositions.of(rows, self._split.row_length, columns_L, tensors.get("dropout_seed"))
        if not self._divisible:
            return self.network.hidden_states(self.objective.tokens(tensors), positions)
        if x_sE is None:
            x_sE = self.network.embed(self.objective.tokens(tensors), positions)
        made: Tensor = self.parts[number](x_sE, positions)
        return self.network.normed(made) if self._ends(number) else made

    def _ends(self, number: int) -> bool:
        """Return whether part ``number`` of this stage is the last part of the network."""
        return self.model.last and number == len(self.parts) - 1
