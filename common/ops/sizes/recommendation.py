"""Sizes of DLRM-DCNv2's linear layers for the operations of recommendation.

The batch has 6,912 samples: an eighth of 55,296.
"""

from __future__ import annotations

SAMPLES = 6912
LAST_INPUTS = 256
"""Inputs of the last layer, whose output is the logit."""

LAYERS = {
    "bottom 1": (16, 512),
    "bottom 2": (512, 256),
    "bottom 3": (256, 128),
    "top 1": (3456, 1024),
    "top 2": (1024, 1024),
    "top 3": (1024, 512),
    "top 4": (512, 256),
}
"""Inputs and outputs of each linear layer. The inputs of the first layer are padded."""
