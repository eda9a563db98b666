"""Synthetic evaluation: noise, and weights with which the network emits tokens at the rate of real transcripts.

The time of decoding depends on the number of tokens. A network with random weights emits no token at all, or one at
every frame.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from benchmarks.rnnt.config import RnntConfig
from benchmarks.rnnt.data import PADDING, EvalBatches
from benchmarks.rnnt.evaluate import Transcription
from benchmarks.rnnt.model import Rnnt
from benchmarks.rnnt.synthetic import eval_seconds
from common.data.batches import HostBatch
from common.distributed.layout import Layout
from common.evaluation.forward import evaluating

TOKENS_A_SECOND = 4.6
"""Tokens per second in LibriSpeech's transcripts."""

OPEN, CLOSED = 4.0, -4.0
"""Biases of LSTM gates that let everything through, or nothing."""

SHIFT = 1.3
"""How strongly a token shifts the probability of the next one, in standard deviations of the audio noise. The same kind
of token becomes less likely, the other kind more likely."""

BISECTIONS = 12


class SyntheticUtterances:
    """Utterances of noise on the device; a :class:`common.data.batches.EvalSource`.

    Args:
        samples_N: number of audio samples of each utterance, over all ranks.
        layout: ranks that share the utterances.

    Attributes:
        seconds: total length of this rank's utterances.
    """

    def __init__(self, samples_N: NDArray[np.int64], own: RnntConfig, layout: Layout) -> None:
        self.eval_samples, batch = len(samples_N), own.reader.eval_batch
        shard = EvalBatches(samples_N, own.reader.eval_buckets, own.facts, batch, layout.size("dp"), layout.index("dp"))
        self._batches, self.seconds = [], 0.0
        for position in range(shard.batches):
            real = shard.samples(position)
            self.seconds += float(samples_N[real].sum()) / own.facts.sample_rate
            utterance_B = np.array([*real, *[shard.filler] * (batch - len(real))])
            length_B = samples_N[utterance_B]
            capacity_B = -(-length_B // 8) * 8  # the reader aligns utterances to 8 samples
            tensors = {
                "audio": torch.randint(-3000, 3001, (int(capacity_B.sum()),), dtype=torch.int16, device=layout.device),
                "audio_lengths": torch.from_numpy(length_B),
                "audio_offsets": torch.from_numpy(np.cumsum(capacity_B) - capacity_B),
                "speeds": torch.ones(batch, dtype=torch.float64),
                "resampled_lengths": torch.from_numpy(length_B),
                "utterance_seeds": torch.from_numpy(utterance_B),
                "utterance": torch.from_numpy(np.where(np.arange(batch) < len(real), utterance_B, PADDING)),
            }
            moved = {name: tensor.to(layout.device) for name, tensor in tensors.items()}
            self._batches.append(HostBatch(moved, batch, position, shard.key(position)))

    def __len__(self) -> int:
        return len(self._batches)

    def __iter__(self) -> Iterator[HostBatch]:
        return iter(self._batches)

    def close(self) -> None:
        """Do nothing: no file is open."""


class SyntheticTranscription(Transcription):
    """Evaluation of noise with weights that emit :data:`TOKENS_A_SECOND`."""

    def open_data(self, root: Path) -> None:
        """Create this rank's utterances and the weights."""
        super().open_data(root)
        assert isinstance(self._source, SyntheticUtterances)
        with evaluating(self._model):
            draw_emitting_weights(self._model)
            set_threshold(self._model, self, round(TOKENS_A_SECOND * self._source.seconds))


def synthetic_lengths(utterances: int, own: RnntConfig) -> NDArray[np.int64]:
    """Return (``utterances``,) lengths in audio samples, distributed like those of dev-clean; always the same ones.

    No length exceeds the longest audio that fits into the largest of ``reader.eval_buckets`` of ``own``.
    """
    longest = own.facts.largest_resampled(max(own.reader.eval_buckets))
    drawn_N = eval_seconds(utterances, np.random.default_rng(1)) * own.facts.sample_rate
    return np.minimum(drawn_N, longest).astype(np.int64)


@torch.no_grad()
def draw_emitting_weights(model: Rnnt) -> None:
    """Draw weights that emit a token when a projection of the audio has risen or fallen far enough since the last one.

    Even tokens are of one kind, odd ones of the other. The first feature of the prediction network is the kind of the
    last token. The first two units of the joint network compare it with one direction of the encoder's output. All
    other weights are random; they decide which token of a kind it is.
    """
    generator = torch.Generator().manual_seed(1)
    for parameter in model.parameters():
        deviation = parameter.shape[1] ** -0.5 if parameter.ndim > 1 else 0.1
        parameter.copy_(deviation * torch.randn(parameter.shape, generator=generator))
    for stack in (model.pre_rnn, model.post_rnn):
        for layer in range(stack.layers):
            stack.weights(layer).ih_GI.mul_(2.0)
            stack.weights(layer).bias_ih_G[stack.width : 2 * stack.width] = CLOSED  # noise has no memory
    rnn, joint = model.dec_rnn, model.joint
    for layer in range(rnn.layers):
        weights = rnn.weights(layer)
        weights.hh_GH.zero_()
        for gate, bias in enumerate((OPEN, CLOSED, 0.0, OPEN)):
            rows = slice(gate * rnn.width, (gate + 1) * rnn.width)
            weights.bias_ih_G[rows] = bias
            if bias:
                weights.ih_GI[rows] = 0.0
        first = 2 * rnn.width  # row of the first feature of the cell's input
        weights.ih_GI[first] = 0.0
        weights.ih_GI[first, 0] = OPEN
        weights.bias_hh_G.zero_()
    kind_V = 1.0 - 2.0 * (torch.arange(len(model.pred_embed.weight)) % 2).to(model.pred_embed.weight)
    model.pred_embed.weight[:, 0] = kind_V
    _, state = model.predict_step(torch.zeros(1, dtype=torch.int64, device=kind_V.device), model.initial_state(1))
    size = float(state[0][-1, 0, 0])  # output of the prediction network's first feature for an even token
    joint.joint_enc.weight[1] = -joint.joint_enc.weight[0]
    joint.joint_pred.weight[:2] = 0.0
    joint.joint_pred.weight[0, 0], joint.joint_pred.weight[1, 0] = -SHIFT / size, SHIFT / size
    joint.joint_net.weight[:, :2] = 0.0
    joint.joint_net.weight[:-1, 0] = 20.0 * (kind_V > 0)
    joint.joint_net.weight[:-1, 1] = 20.0 * (kind_V < 0)
    joint.joint_net.bias[-1] = 8.0  # larger than the random logits


@torch.no_grad()
def set_threshold(model: Rnnt, evaluation: Transcription, tokens: int) -> None:
    """Set the threshold on the projected audio so that this rank's utterances yield about ``tokens`` tokens.

    Raises:
        RuntimeError: the encoder's output is not finite.
    """
    decoder, joint = evaluation.decoder, model.joint
    joint.joint_enc.bias[:2] = 0.0
    evaluation.encode()
    real_SN = torch.arange(len(decoder.f_SNJ), device=decoder.length_N.device)[:, None] < decoder.length_N
    if int(real_SN.sum()) < 2:  # a rank with no utterance decodes nothing
        return
    projected = decoder.f_SNJ[:, :, 0][real_SN].float()
    deviation, mean = float(projected.std()), float(projected.mean())
    if not math.isfinite(deviation):
        raise RuntimeError("the encoder's output is not finite: its LSTM or the features are wrong")
    joint.joint_enc.weight[:2] /= deviation
    joint.joint_enc.bias[0], joint.joint_enc.bias[1] = -mean / deviation, mean / deviation
    evaluation.encode()
    low, high = -4.0, 4.0
    for _ in range(BISECTIONS):
        joint.joint_pred.bias[:2] = -SHIFT - (low + high) / 2
        decoder()
        if int(decoder.count_N.sum()) > tokens:
            low = (low + high) / 2
        else:
            high = (low + high) / 2
