"""Sizes of Llama-2-70B for the operations of a decoder. A case has one sequence, whatever the recipe's batch size."""

from __future__ import annotations

TOKENS = 8192
HIDDEN = 8192
HEADS = 64
KV_HEADS = 8
HEAD_SIZE = 128
FEED_FORWARD = 28672
RANK = 16
EPSILON = 1e-5
ROPE_BASE = 10_000.0

QKV = (HEADS + 2 * KV_HEADS) * HEAD_SIZE
LINEAR = {
    "QKV": (QKV, HIDDEN),
    "output": (HIDDEN, HEADS * HEAD_SIZE),
    "gate and up": (2 * FEED_FORWARD, HIDDEN),
    "down": (HIDDEN, FEED_FORWARD),
}
"""Rows and columns of the weight of each linear layer."""
