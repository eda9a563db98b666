"""RNN-T without any of the suite's code: ``torch.nn`` layers, one utterance at a time, the loss by its definition.

The loss sums over alignments cell by cell, with autograd through it all.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn


class PlainRnnt(nn.Module):
    """The reference's layers, dropout aside, under the names of its logs."""

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
        """Negative log-likelihood of the tokens of one utterance, 0-d."""
        log_probabilities_SNV = self.log_probabilities(features_TF, tokens)
        blank = log_probabilities_SNV.shape[2] - 1
        frames, last = len(log_probabilities_SNV), len(tokens)
        alpha: dict[tuple[int, int], Tensor] = {(0, 0): log_probabilities_SNV.new_zeros(())}
        for frame in range(frames):
            for token in range(last + 1):
                ways = []
                if frame:
                    ways.append(alpha[frame - 1, token] + log_probabilities_SNV[frame - 1, token, blank])
                if token:
                    ways.append(alpha[frame, token - 1] + log_probabilities_SNV[frame, token - 1, tokens[token - 1]])
                if ways:
                    alpha[frame, token] = torch.logsumexp(torch.stack(ways), 0)
        return -(alpha[frames - 1, last] + log_probabilities_SNV[frames - 1, last, blank])

    def log_probabilities(self, features_TF: Tensor, tokens: Sequence[int]) -> Tensor:
        """Of every class, after every frame and number of tokens: (S, N, V)."""
        first, _ = self.pre_rnn(features_TF)
        if len(first) % 2:
            first = torch.cat([first, torch.zeros_like(first[:1])])
        encoded, _ = self.post_rnn(torch.cat([first[0::2], first[1::2]], 1))
        embedded = self.pred_embed(torch.tensor(tokens, dtype=torch.int64))
        predicted, _ = self.dec_rnn(torch.cat([torch.zeros_like(self.pred_embed.weight[:1]), embedded]))
        joined = self.joint_enc(encoded)[:, None] + self.joint_pred(predicted)[None]
        return torch.log_softmax(self.joint_net(torch.relu(joined)), 2)
