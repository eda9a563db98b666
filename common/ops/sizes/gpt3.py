"""Sizes of a layer of GPT-3 175B, at which its operations are measured: two rows of 2,048 tokens.

Whole, and split by columns over four ranks, each of which has a quarter of the tokens between the products.
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
"""Ranks that a layer is split over."""
