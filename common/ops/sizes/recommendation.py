"""Sizes of DLRM-DCNv2's linear layers, at which operations of recommendation are measured.

A batch is 6,912 samples, an eighth of 55,296, whatever the number of packs.
"""

from __future__ import annotations

SAMPLES = 6912
LAST_INPUTS = 256
"""Of the layer whose output is the logit."""

LAYERS = {
    "bottom 1": (16, 512),
    "bottom 2": (512, 256),
    "bottom 3": (256, 128),
    "top 1": (3456, 1024),
    "top 2": (1024, 1024),
    "top 3": (1024, 512),
    "top 4": (512, 256),
}
"""Linear layer to its inputs, of which the first layer's are padded, and its outputs."""
