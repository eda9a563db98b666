"""For every anchor of a picture the box that it has to find.

Ren et al., arXiv:1506.01497, section 3.1.2 (thresholds, and the best anchors of a box that no anchor overlaps enough);
Liu et al., arXiv:1512.02325, section 2.2 (SSD's rule).
"""

from __future__ import annotations

from common.ops.anchor_matching.plain import match_torch
from common.ops.implementation import Implementation, always

IMPLEMENTATIONS = {"torch": Implementation("torch", match_torch, always)}
"""Functions: :func:`match_torch`."""
