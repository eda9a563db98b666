"""Sizes of a layer of GPT-3 175B for its operations: two sequences of 2,048 tokens.

Cases have the whole layer, or a rank's part with tensor parallelism over four ranks. Between the products, each of the
four ranks holds a quarter of the tokens.
"""

from __future__ import annotations

ROWS = 2
LENGTH = 2048
TOKENS = ROWS * LENGTH
HIDDEN = 12288
HEADS = 96
HEAD_SIZE = 128
FEED_FORWARD = 49152
EPSILON = 1e-5

RANKS = (4, 1)
"""Numbers of tensor-parallel ranks."""
