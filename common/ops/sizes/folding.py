"""Sizes of OpenFold: residues of a crop, rows of its alignment, channels."""

from __future__ import annotations

import torch

RESIDUES = 256
"""Residues of a crop."""
CLUSTERS = 128
"""Rows of the alignment in the Evoformer: 124 clusters of sequences and 4 templates."""
SEQUENCES = 1024
"""Extra sequences of the alignment."""
TEMPLATES = 4
MSA, PAIR = 256, 128
"""Channels of the alignment and of the pairs."""
DTYPES = (torch.float32, torch.bfloat16)
