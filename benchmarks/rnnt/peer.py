"""Peers of RNN-T: the same training with modules of PyTorch and the loss of torchaudio.

- The network of the rules consists of ``nn.LSTM`` and ``nn.Linear``, and its joint network broadcasts over frames and
  tokens.
- Training uses automatic mixed precision in fp16 with a gradient scaler, clipping, fused AdamW, and averaged weights.
- ``rnnt_loss`` of torchaudio corrupts memory from 2**31 logits on, so each call gets only as many utterances as fit.
- The compiled variant compiles the joint network's logits and the joining of frames.

Utterances are noise with the lengths of our own example batch. torchaudio is not a dependency of the suite and has to
be installed separately.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from benchmarks.rnnt import example
from benchmarks.rnnt.config import Facts
from common.config.schema import RunConfig
from common.contract.workload import Peer
from common.data.batches import Batch
from common.errors import ConfigError
from common.optional_packages import OptionalPackage

LOGITS = 2**31
"""Number of logits from which indices overflow in the loss."""
EMA = 0.995
TORCHAUDIO = OptionalPackage("torchaudio", ("torchaudio.functional:rnnt_loss",))


Part = tuple[slice, int, int]
"""Consecutive utterances of a micro-batch: their indices, and their largest numbers of joined frames and of tokens."""

Loss = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
"""Function from logits (B, S, U + 1, V), and tokens, frame counts and token counts as int32, to losses (B,)."""


class PeerJoint(nn.Module):
    """Joint network: from the sum of both networks, for all frames and tokens, to logits."""

    def __init__(self, facts: Facts) -> None:
        super().__init__()
        self.dropout = nn.Dropout(facts.joint_dropout)
        self.last = nn.Linear(facts.joint_width, facts.classes)

    def forward(self, f_BSJ: Tensor, g_BNJ: Tensor) -> Tensor:
        """Return logits (B, S, N, V)."""
        logits_BSNV: Tensor = self.last(self.dropout(torch.relu(f_BSJ[:, :, None] + g_BNJ[:, None])))
        return logits_BSNV


class Network(nn.Module):
    """The network of the rules.

    Args:
        compiled: whether to compile the joint network's logits and the joining of frames; the rest is eager.
    """

    def __init__(self, facts: Facts, compiled: bool) -> None:
        super().__init__()
        width, predicted = facts.encoder_width, facts.prediction_width

        def lstm(inputs: int, width: int, layers: int, dropout: float) -> nn.LSTM:
            return nn.LSTM(inputs, width, layers, dropout=dropout if layers > 1 else 0.0)  # only between layers

        self.pre_rnn = lstm(facts.features, width, facts.pre_layers, facts.encoder_dropout)
        self.post_rnn = lstm(2 * width, width, facts.post_layers, facts.encoder_dropout)
        self.embed = nn.Embedding(facts.blank, predicted)
        self.dec_rnn = lstm(predicted, predicted, facts.prediction_layers, facts.prediction_dropout)
        self.after_encoder = nn.Dropout(facts.encoder_dropout)
        self.after_prediction = nn.Dropout(facts.prediction_dropout)
        self.joint_enc = nn.Linear(width, facts.joint_width)
        self.joint_pred = nn.Linear(predicted, facts.joint_width)
        self.joint = PeerJoint(facts)
        self._logits: Callable[[Tensor, Tensor], Tensor] = (
            torch.compile(self.joint.forward) if compiled else self.joint.forward
        )
        self._join = torch.compile(self._joined) if compiled else self._joined

    def forward(self, features_TBF: Tensor, tokens_BU: Tensor) -> tuple[Tensor, Tensor]:
        """Return the inputs of the joint network from both networks: (B, S, J) and (B, U + 1, J)."""
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
        """Write the gradients of the scaled mean loss to the parameters, and return the mean loss.

        Args:
            tensors: micro-batch in the format of :meth:`benchmarks.rnnt.model.Rnnt.loss`.
            scale: multiplies the loss by the loss scale.
            autocast: returns the context of the forward pass.
            parts: parts of the micro-batch. Logits exist for one part at a time.
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
    """Return torchaudio's loss of logits that are cast to ``dtype`` first.

    Raises:
        ConfigError: torchaudio is not installed.
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
    """Divide a micro-batch into consecutive parts, each as large as possible.

    Args:
        classes: logits per pair of frame and token position.
        logits: a part has fewer logits than this, including padding, unless it is a single utterance.
    """
    frames_B = ((tensors["feature_lengths"] + 1) // 2).tolist()
    tokens_B = tensors["token_lengths"].tolist()
    parts: list[Part] = []
    begin = frames = tokens = 0
    for utterance, (own_frames, own_tokens) in enumerate(zip(frames_B, tokens_B, strict=True)):
        most_frames, most_tokens = max(frames, own_frames), max(tokens, own_tokens)
        if utterance > begin and (utterance + 1 - begin) * most_frames * (most_tokens + 1) * classes >= logits:
            parts.append((slice(begin, utterance), frames, tokens))
            begin, most_frames, most_tokens = utterance, own_frames, own_tokens
        frames, tokens = most_frames, most_tokens
    return [*parts, (slice(begin, len(frames_B)), frames, tokens)]


def step_of(
    model: Network, tensors: dict[str, Tensor], loss: Loss, classes: int, learning_rate: float = 1e-4
) -> Callable[[], Tensor]:
    """Return a function that runs an iteration on a micro-batch, with clipping and averages, and returns the loss."""
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


def micro_batch(facts: Facts, examples: str, count: int, device: torch.device) -> dict[str, Tensor]:
    """Return ``count`` utterances of noise, padded to the longest. Features are in fp32, and autocast casts them.

    Args:
        examples: option ``model.examples``.
    """
    lengths = example.lengths_of(examples, count, facts)
    key = int(lengths.frames_B.max()), int(lengths.tokens_B.max())
    return example.batch(lengths, key, facts.features, facts.features, facts.blank, torch.float32, device)


def start(run: RunConfig, given: Batch, device: torch.device, compiled: bool = False) -> Callable[[], Tensor]:
    """Start the peer; see :class:`common.contract.workload.Peer`."""
    facts = run.workload.facts
    torch.backends.cudnn.benchmark = True
    loss = torchaudio_loss(facts.blank, torch.float16)
    network = Network(facts, compiled).to(device).train()
    tensors = micro_batch(facts, run.workload.model.examples, run.micro_batch, device)
    return step_of(network, tensors, loss, facts.classes)


PEERS = (
    Peer("nn.LSTM with torchaudio's loss, mixed precision in fp16", start),
    Peer("the same, compiled", functools.partial(start, compiled=True)),
)
