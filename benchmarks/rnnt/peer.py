"""The same training with PyTorch's own parts.

The network of the rules of ``nn.LSTM`` and ``nn.Linear`` in PyTorch's automatic mixed precision in fp16 with its
gradient scaler; the sum of both networks broadcast over frames and tokens; torchaudio's ``rnnt_loss``, over as many
utterances at a time as stay below 2**31 logits, beyond which it corrupts memory; the norm of the gradient clipped;
fused AdamW; averaged weights. Compiled, that is all but the LSTMs and torchaudio's loss.

Utterances are noise, with the lengths that our step's example has. torchaudio is no dependency of the suite: install it
beside.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from benchmarks.rnnt import example
from benchmarks.rnnt.config import Architecture, Facts
from common.config.schema import RunConfig
from common.contract.peer import Peer
from common.data.batches import Batch
from common.data.order import sample_generator
from common.errors import ConfigError
from common.optional_packages import OptionalPackage

LOGITS = 2**31
"""Beyond so many the loss's indices overflow."""
EMA = 0.995
TORCHAUDIO = OptionalPackage("torchaudio", ("torchaudio.functional:rnnt_loss",))


class Part(NamedTuple):
    """Some utterances of a micro-batch, and their longest.

    Attributes:
        utterances: which.
        frames: joined ones of the longest.
        tokens: of the one with most.
    """

    utterances: slice
    frames: int
    tokens: int


Loss = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
"""Of logits (B, S, U + 1, V), tokens, frames and token counts of each utterance, all int32: (B,)."""


class Joint(nn.Module):
    """The sum of both networks, over all frames and tokens, as logits."""

    def __init__(self, shape: Architecture) -> None:
        super().__init__()
        self.dropout = nn.Dropout(shape.joint_dropout)
        self.last = nn.Linear(shape.joint_width, shape.classes)

    def forward(self, f_BSJ: Tensor, g_BNJ: Tensor) -> Tensor:
        """(B, S, N, V)."""
        logits_BSNV: Tensor = self.last(self.dropout(torch.relu(f_BSJ[:, :, None] + g_BNJ[:, None])))
        return logits_BSNV


class Network(nn.Module):
    """The network.

    Args:
        shape: of the rules.
        features: of a frame.
        compiled: compile what is no LSTM.
    """

    def __init__(self, shape: Architecture, features: int, compiled: bool) -> None:
        super().__init__()
        width, predicted = shape.encoder_width, shape.prediction_width
        between = shape.encoder_dropout if shape.pre_layers > 1 else 0.0
        self.pre_rnn = nn.LSTM(features, width, shape.pre_layers, dropout=between)
        between = shape.encoder_dropout if shape.post_layers > 1 else 0.0
        self.post_rnn = nn.LSTM(2 * width, width, shape.post_layers, dropout=between)
        self.embed = nn.Embedding(shape.blank, predicted)
        between = shape.prediction_dropout if shape.prediction_layers > 1 else 0.0
        self.dec_rnn = nn.LSTM(predicted, predicted, shape.prediction_layers, dropout=between)
        self.after_encoder = nn.Dropout(shape.encoder_dropout)
        self.after_prediction = nn.Dropout(shape.prediction_dropout)
        self.joint_enc = nn.Linear(width, shape.joint_width)
        self.joint_pred = nn.Linear(predicted, shape.joint_width)
        self.joint = Joint(shape)
        self._logits: Callable[[Tensor, Tensor], Tensor] = (
            torch.compile(self.joint.forward) if compiled else self.joint.forward
        )
        self._join = torch.compile(self._joined) if compiled else self._joined

    def forward(self, features_TBF: Tensor, tokens_BU: Tensor) -> tuple[Tensor, Tensor]:
        """Both networks' parts of the joint one: (B, S, J) and (B, U + 1, J)."""
        embedded_NBP = nn.functional.pad(self.embed(tokens_BU.T), (0, 0, 0, 0, 1, 0))
        predicted_NBP, _ = self.dec_rnn(embedded_NBP)
        g_BNJ = self.joint_pred(self.after_prediction(predicted_NBP)).transpose(0, 1)
        first_TBH, _ = self.pre_rnn(features_TBF)
        encoded_SBH, _ = self.post_rnn(self._join(first_TBH))
        f_BSJ = self.joint_enc(self.after_encoder(encoded_SBH)).transpose(0, 1)
        return f_BSJ, g_BNJ

    def _joined(self, first_TBH: Tensor) -> Tensor:
        frames, batch, width = first_TBH.shape
        dropped = nn.functional.pad(self.after_encoder(first_TBH), (0, 0, 0, 0, 0, frames % 2))
        return dropped.view(-1, 2, batch, width).transpose(1, 2).reshape(-1, batch, 2 * width)

    def backward(
        self,
        tensors: dict[str, Tensor],
        loss: Loss,
        scale: Callable[[Tensor], Tensor],
        autocast: Callable[[], AbstractContextManager[object]],
        parts: Sequence[Part],
    ) -> Tensor:
        """Leave the gradients of the scaled mean loss in the parameters; returns the mean loss.

        Args:
            tensors: as :meth:`benchmarks.rnnt.model.Rnnt.loss` takes them.
            loss: of some utterances.
            scale: multiplies the loss.
            autocast: what the forward pass runs in.
            parts: of the micro-batch, whose logits there are at a time.
        """
        tokens_BU, token_lengths_B = tensors["tokens"], tensors["token_lengths"]
        frames_B = (tensors["feature_lengths"] + 1) // 2
        with autocast():
            f_BSJ, g_BNJ = self(tensors["features"], tokens_BU)
        f_leaf, g_leaf = f_BSJ.detach().requires_grad_(), g_BNJ.detach().requires_grad_()
        total = torch.zeros((), device=f_BSJ.device)
        for part, frames, tokens in parts:
            with autocast():
                logits_BSNV = self._logits(f_leaf[part, :frames], g_leaf[part, : tokens + 1])
            losses_B = loss(logits_BSNV, tokens_BU[part, :tokens].contiguous(), frames_B[part], token_lengths_B[part])
            mean = losses_B.float().sum() / len(tokens_BU)
            scale(mean).backward()
            total += mean.detach()
        torch.autograd.backward([f_BSJ, g_BNJ], [f_leaf.grad, g_leaf.grad])
        return total


def torchaudio_loss(blank: int, dtype: torch.dtype) -> Loss:
    """torchaudio's, of logits that are cast to ``dtype``.

    Raises:
        ConfigError: it is not installed.
    """
    reason = TORCHAUDIO.unavailable()
    if reason is not None:
        raise ConfigError(f"the peer's loss is torchaudio's, and {reason}")
    functional: Any = importlib.import_module("torchaudio.functional")

    def loss(logits_BSNV: Tensor, tokens_BU: Tensor, frames_B: Tensor, lengths_B: Tensor) -> Tensor:
        losses_B: Tensor = functional.rnnt_loss(
            logits_BSNV.to(dtype), tokens_BU, frames_B, lengths_B, blank=blank, clamp=-1.0, reduction="none"
        )
        return losses_B

    return loss


def parts_of(tensors: dict[str, Tensor], classes: int, logits: int = LOGITS) -> list[Part]:
    """As many utterances at a time as have fewer than so many ``logits``, padded to the longest of them."""
    frames_B = ((tensors["feature_lengths"] + 1) // 2).tolist()
    tokens_B = tensors["token_lengths"].tolist()
    parts: list[Part] = []
    begin = frames = tokens = 0
    for utterance, (own_frames, own_tokens) in enumerate(zip(frames_B, tokens_B, strict=True)):
        most_frames, most_tokens = max(frames, own_frames), max(tokens, own_tokens)
        if utterance > begin and (utterance + 1 - begin) * most_frames * (most_tokens + 1) * classes >= logits:
            parts.append(Part(slice(begin, utterance), frames, tokens))
            begin, most_frames, most_tokens = utterance, own_frames, own_tokens
        frames, tokens = most_frames, most_tokens
    return [*parts, Part(slice(begin, len(frames_B)), frames, tokens)]


def step_of(
    model: Network, tensors: dict[str, Tensor], loss: Loss, classes: int, learning_rate: float = 1e-4
) -> Callable[[], Tensor]:
    """An iteration over one micro-batch: forward, loss, backward, clip, update, averages; returns the loss."""
    device = tensors["features"].device
    gpu = device.type == "cuda"
    optimizer = torch.optim.AdamW(model.parameters(), lr=learning_rate, weight_decay=1e-3, fused=gpu)
    scaler = torch.amp.GradScaler(device.type, init_scale=512.0, enabled=gpu)
    average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(EMA))
    parts = parts_of(tensors, classes)

    def autocast() -> AbstractContextManager[object]:
        return torch.autocast(device.type, torch.float16) if gpu else contextlib.nullcontext()

    def step() -> Tensor:
        total = model.backward(tensors, loss, scaler.scale, autocast, parts)
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad(set_to_none=True)
        average.update_parameters(model)
        return total

    return step


def micro_batch(facts: Facts, count: int, device: torch.device, *, average: bool) -> dict[str, Tensor]:
    """Utterances of noise, padded to the longest of them; features in fp32, which autocast casts."""
    numbers = sample_generator(0)
    lengths = example.average_lengths(count, facts) if average else example.real_lengths(count, facts, numbers)
    key = int(lengths.frames_B.max()), int(lengths.tokens_B.max())
    return example.batch(lengths, key, facts.features, facts.features, facts.blank, torch.float32, device)


def start(run: RunConfig, given: Batch, device: torch.device, compiled: bool = False) -> Callable[[], Tensor]:
    """See :class:`common.contract.peer.Peer`."""
    facts = run.workload.facts
    torch.backends.cudnn.benchmark = True
    loss = torchaudio_loss(facts.blank, torch.float16)
    network = Network(facts, facts.features, compiled).to(device).train()
    tensors = micro_batch(facts, run.micro_batch, device, average=run.workload.model.examples == "average")
    return step_of(network, tensors, loss, facts.classes)


PEERS = (
    Peer("nn.LSTM with torchaudio's loss, mixed precision in fp16", start),
    Peer("the same, compiled", functools.partial(start, compiled=True)),
)
