"""RNN-T by its definition, with PyTorch's layers and autograd, one utterance at a time.

The loss sums over all alignments one by one, or follows the recursion of Graves (arXiv:1211.3711), section 2.4.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from benchmarks.rnnt.ops.joint import JointPasses
from benchmarks.rnnt.ops.transducer_loss import LossPasses, joint_loss
from benchmarks.rnnt.packed_rows import PackedRows, packed_rows
from common.ops.dropout.reference import DropoutMask


class Case(NamedTuple):
    """A small micro-batch.

    Attributes:
        tokens_BU: padded with the blank, which must not be read.
        frames, lengths: frames and tokens of each utterance.
    """

    tokens_BU: Tensor
    frames: list[int]
    lengths: list[int]
    rows: PackedRows


def case(frames: list[int], lengths: list[int], classes: int, seed: int = 0, spare: int | None = 3) -> Case:
    """Return random tokens, and capacity for ``spare`` rows more than needed; None: the maximum for these lengths."""
    random = torch.Generator().manual_seed(seed)
    most_frames, most_tokens = max(frames) + 1, max(lengths) + 1
    tokens_BU = torch.randint(classes - 1, (len(frames), most_tokens), generator=random, dtype=torch.int32)
    used = sum(each * (length + 1) for each, length in zip(frames, lengths, strict=True))
    capacity = None if spare is None else used + spare
    rows = packed_rows(torch.tensor(frames), torch.tensor(lengths), most_frames, most_tokens, capacity)
    for utterance, length in enumerate(lengths):
        tokens_BU[utterance, length:] = classes - 1
    return Case(tokens_BU, frames, lengths, rows)


def used_rows(rows: PackedRows) -> int:
    """Return the number of rows in use."""
    return int(rows.offsets[-1])


def lattice(logits_RV: Tensor, case: Case, utterance: int) -> Tensor:
    """Return the logits of an utterance, (S, U + 1, V)."""
    begin, columns = int(case.rows.offsets[utterance]), case.lengths[utterance] + 1
    frames = case.frames[utterance]
    return logits_RV[begin : begin + frames * columns].view(frames, columns, -1)


def by_alignments(logits_SNV: Tensor, labels: list[int]) -> Tensor:
    """Return the loss: minus the logarithm of the sum over all orders of S - 1 blanks and U labels, then a blank."""
    scores = logits_SNV.double().log_softmax(-1)
    frames, tokens = scores.shape[0], len(labels)
    steps = frames - 1 + tokens
    paths = []
    for at in itertools.combinations(range(steps), tokens):
        s = u = 0
        total = torch.zeros((), dtype=torch.float64)
        for step in range(steps):
            if step in at:
                total = total + scores[s, u, labels[u]]
                u += 1
            else:
                total = total + scores[s, u, -1]
                s += 1
        paths.append(total + scores[s, u, -1])
    assert len(paths) == math.comb(steps, tokens)
    return -torch.stack(paths).logsumexp(0)


def by_recursion(logits_SNV: Tensor, labels: Sequence[int]) -> Tensor:
    """Return the loss, frame by frame and token by token, with autograd."""
    scores = logits_SNV.double().log_softmax(-1)
    alpha: list[list[Tensor]] = []
    for s in range(scores.shape[0]):
        line: list[Tensor] = []
        for u in range(len(labels) + 1):
            paths = [scores.new_zeros(())] if s == u == 0 else []
            if s > 0:
                paths.append(alpha[s - 1][u] + scores[s - 1, u, -1])
            if u > 0:
                paths.append(line[u - 1] + scores[s, u - 1, labels[u - 1]])
            line.append(torch.stack(paths).logsumexp(0))
        alpha.append(line)
    return -(alpha[-1][-1] + scores[-1, -1, -1])


def expected(logits_RV: Tensor, case: Case, d_loss_B: Tensor) -> tuple[Tensor, Tensor]:
    """Return losses and the gradient of the logits, by the recursion in float64."""
    leaf = logits_RV.detach().double().requires_grad_()
    losses = []
    for utterance, length in enumerate(case.lengths):
        labels = case.tokens_BU[utterance, :length].tolist()
        losses.append(by_recursion(lattice(leaf, case, utterance), labels))
    losses_B = torch.stack(losses)
    (gradient_RV,) = torch.autograd.grad(losses_B, leaf, d_loss_B.double())
    return losses_B.detach(), gradient_RV


def packed_loss(passes: LossPasses, logits_RV: Tensor, tokens_BU: Tensor, rows: PackedRows) -> Tensor:
    """Return the loss of given logits: they are the hidden layer, and the last layer multiplies by the identity.

    Logits that are exactly zero get no gradient.
    """

    def backward(d_RV: Tensor, live_R: Tensor, *others: object) -> tuple[Tensor, Tensor]:
        return d_RV.masked_fill(~live_R[:, None], 0), unused

    identity_VV = torch.eye(logits_RV.shape[1], dtype=logits_RV.dtype, device=logits_RV.device)
    unused = identity_VV.new_zeros(1)
    joint = JointPasses(lambda logits, *others: logits.clone(), backward)
    dropout = DropoutMask(0.0, rows.offsets[0], 0)
    return joint_loss(joint, passes, logits_RV, unused, identity_VV, identity_VV[0] * 0, tokens_BU, rows, dropout)


class PlainRnnt(nn.Module):
    """The reference's layers without dropout, with the names of its logs."""

    def __init__(self, features: int, encoder: int, prediction: int, joint: int, classes: int) -> None:
        super().__init__()
        self.pre_rnn = nn.LSTM(features, encoder, 2)
        self.post_rnn = nn.LSTM(2 * encoder, encoder, 3)
        self.pred_embed = nn.Embedding(classes - 1, prediction)
        self.dec_rnn = nn.LSTM(prediction, prediction, 2)
        self.joint_enc = nn.Linear(encoder, joint)
        self.joint_pred = nn.Linear(prediction, joint)
        self.joint_net = nn.Linear(joint, classes)

    def forward(self, features_TF: Tensor, tokens: Sequence[int]) -> Tensor:
        """Return the negative log-likelihood of one utterance's tokens, 0-d fp64."""
        return by_recursion(self.logits(features_TF, tokens), tokens)

    def logits(self, features_TF: Tensor, tokens: Sequence[int]) -> Tensor:
        """Return the logits after every frame and number of tokens, (S, U + 1, V)."""
        first, _ = self.pre_rnn(features_TF)
        if len(first) % 2:
            first = torch.cat([first, torch.zeros_like(first[:1])])
        encoded, _ = self.post_rnn(torch.cat([first[0::2], first[1::2]], 1))
        embedded = self.pred_embed(torch.tensor(tokens, dtype=torch.int64))
        predicted, _ = self.dec_rnn(torch.cat([torch.zeros_like(self.pred_embed.weight[:1]), embedded]))
        joined = self.joint_enc(encoded)[:, None] + self.joint_pred(predicted)[None]
        return self.joint_net(torch.relu(joined))
