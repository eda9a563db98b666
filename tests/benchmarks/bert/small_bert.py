"""BERT in a size for tests, and a loss of it."""

from __future__ import annotations

from dataclasses import replace

from torch import Tensor

from benchmarks.bert.config import Facts
from benchmarks.bert.model import OPERATIONS, HeadOutputs
from common.mlperf.fixed import fixed_facts
from common.ops.operation import REFERENCE

LARGE = fixed_facts(Facts, "bert")
SMALL = replace(LARGE, vocabulary=150, hidden=32, layers=2, heads=4, feed_forward=56, max_sequence_length=16)
LENGTHS = [9, 16, 2, 12]
REFERENCES = dict.fromkeys(OPERATIONS, REFERENCE)


def mean_loss(heads: HeadOutputs) -> Tensor:
    """Means over what is there, without the reference's 1e-5."""
    return heads.masked_lm_losses.sum() / heads.masked.sum() + heads.next_sentence_losses.sum() / heads.present.sum()
