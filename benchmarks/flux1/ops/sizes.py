"""Sizes of FLUX.1-schnell for the cases of the operations."""

import torch

SAMPLES = 16
"""Samples of a micro-batch."""

TEXT, IMAGE = 256, 256
"""Tokens of a sample in each stream of a double block. A single block has the tokens of both."""

HIDDEN, HEADS, HEAD_SIZE = 3072, 24, 128
FEED_FORWARD = 4 * HIDDEN

EPSILON = 1e-6
"""Constant inside the square root of every norm."""

ROPE_BASE = 10_000.0

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
"""Dtypes of the activations; the recipe trains in bf16."""
