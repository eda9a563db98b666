"""Sizes of BERT-large for the operations of a transformer.

A batch consists of packs of 512 tokens. Of 48 packs, 23 contain one sequence, 2 contain two, and 23 contain three.
"""

from __future__ import annotations

import itertools
import random

import torch
from torch import Tensor

PACKS = 48
LENGTH = 512
HEADS = 16
HEAD_DIM = 64
HIDDEN = HEADS * HEAD_DIM
FEED_FORWARD = 4096
VOCABULARY = 30522
PADDED_VOCABULARY = 30528
MASKED = 80
"""Masked tokens per pack; ``LABELLED`` of them have a label."""

LABELLED = 76
LAYERS = 24
PROBABILITY = 0.1
SITE = 3


LINEAR = {
    "QKV": (HIDDEN, 3 * HIDDEN),
    "output": (HIDDEN, HIDDEN),
    "FC1": (HIDDEN, FEED_FORWARD),
    "FC2": (FEED_FORWARD, HIDDEN),
}
"""Columns and rows of the weight of each linear layer of an encoder layer."""


def sequence_lengths(packs: int) -> list[int]:
    """Return the lengths of all sequences in tokens, pack after pack. They are random but the same in every run."""
    generator = random.Random(0)
    lengths = []
    most = packs * 23 // 48
    for count, share in ((1, most), (2, packs - 2 * most), (3, most)):
        for _ in range(share):
            cuts = sorted(generator.sample(range(1, LENGTH), count - 1))
            lengths += [end - start for start, end in itertools.pairwise([0, *cuts, LENGTH])]
    return lengths


def sequences(packs: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return the starts and the lengths of all sequences, int32 (3 * packs,), padded with 0 for absent sequences."""
    lengths = sequence_lengths(packs)
    starts = [0, *itertools.accumulate(lengths[:-1])]
    absent = [0] * (3 * packs - len(lengths))
    first, second = (torch.tensor(values + absent, dtype=torch.int32, device=device) for values in (starts, lengths))
    return first, second


def pairs(packs: int) -> int:
    """Return the number of pairs of tokens that attend to each other."""
    return sum(length * length for length in sequence_lengths(packs))
