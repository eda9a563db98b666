"""Pre-train the small base of the synthetic data: a decoder without adapters, for some seconds."""

from __future__ import annotations

import hashlib

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from common.language.architecture import LlamaArchitecture
from common.language.network import Decoder

LEARNING_RATE = 4e-3
WARMUP = 0.1
"""Fraction of the steps in which the learning rate rises; then it falls to 0 as a cosine."""


def pretrain(
    architecture: LlamaArchitecture, rows_RS: NDArray[np.int32], steps: int, seed: int, batch: int = 8
) -> dict[str, Tensor]:
    """Return the weights of a decoder that was trained to predict every next token in ``rows_RS``.

    Args:
        rows_RS: rows of tokens; repeated if necessary.
        batch: rows per step of AdamW.

    Returns:
        Parameters by name, fp32, in host memory.
    """

    def generator_of(name: str) -> torch.Generator:
        digest = hashlib.sha256(f"{seed}/{name}".encode()).digest()
        return torch.Generator().manual_seed(int.from_bytes(digest[:8], "little") >> 1)

    model = Decoder(architecture)
    model.initialise(generator_of)
    optimizer = torch.optim.AdamW(model.parameters(), LEARNING_RATE, (0.9, 0.98), weight_decay=0.01)
    warmup = max(1, round(WARMUP * steps))

    def share(step: int) -> float:
        if step < warmup:
            return (step + 1) / warmup
        return 0.5 * (1 + float(np.cos(np.pi * (step - warmup) / max(1, steps - warmup))))

    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, share)
    for step in range(steps):
        numbers = np.arange(step * batch, (step + 1) * batch) % len(rows_RS)
        mean = next_token_losses(model, torch.from_numpy(rows_RS[numbers]).long()).mean()
        optimizer.zero_grad()
        mean.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
    return {name: parameter.detach() for name, parameter in model.named_parameters()}


def next_token_losses(model: Decoder, tokens_BS: Tensor) -> Tensor:
    """Return the cross-entropy (B, S - 1) in nats of each token except the first of a row."""
    logits_BSV = model.forward_logits(tokens_BS)[:, :-1]
    return F.cross_entropy(logits_BSV.flatten(0, 1), tokens_BS[:, 1:].flatten(), reduction="none").view(
        len(tokens_BS), -1
    )


@torch.no_grad()
def mean_of_rows(
    architecture: LlamaArchitecture,
    weights: dict[str, Tensor],
    tokens_RS: NDArray[np.int32],
    scored_RS: NDArray[np.bool_],
    batch: int = 16,
) -> float:
    """Return the metric of the benchmark for a base: the mean over rows of the mean loss of scored tokens, in nats."""
    model = Decoder(architecture)
    model.load_state_dict(weights)
    means: list[Tensor] = []
    for first in range(0, len(tokens_RS), batch):
        losses = next_token_losses(model, torch.from_numpy(tokens_RS[first : first + batch]).long()).double()
        marks = torch.from_numpy(scored_RS[first : first + batch, 1:]).double()
        means.append(((losses * marks).sum(1) / marks.sum(1))[marks.sum(1) > 0])
    return float(torch.cat(means).mean())
