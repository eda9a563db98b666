"""Dot interaction: the products of all pairs of a sample's vectors, behind the first of these vectors.

Naumov et al., arXiv:1906.00091, section 2.1. Shapes: B samples, F vectors (the bottom MLP's and one of every table), W
width of a vector, P = F (F - 1) / 2 pairs.
"""

from __future__ import annotations

from benchmarks.dlrm.ops.dot_interaction.plain import dot_interaction_torch
from common.ops.implementation import Implementation, always

IMPLEMENTATIONS = {
    "torch": Implementation("torch", dot_interaction_torch, always),
}
"""Signature: ``dot_interaction(x_BFW, columns)``."""
