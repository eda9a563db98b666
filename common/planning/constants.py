"""Constants of the model of steps and runs, with their sources. Rates and links of a machine are in its system file.

*Counted* constants follow from the algorithm, *measured* ones from the named measurements. *Assumed* constants were set
by hand without a measurement. Most are standard deviations, so a wrong one widens or narrows the interval;
`EXPOSED_SPLIT`, `SPLIT_LOSS` and `EVALUATION_SECONDS` change the estimate itself.
"""

from __future__ import annotations

from collections.abc import Mapping

FIXED = 0.08
FIXED_DEVIATION = 0.06
"""Measured: fraction of a micro-batch's time that does not depend on its size, and standard deviation of this fraction.
Workloads with several measured batches have 1 % (3D U-Net, 7 and 1 samples), 6 % (Stable Diffusion, 32 and 2), 8 %
(BERT, 96 and 8), 9 % (Mask R-CNN, 12 and 1) and 23 % (RNN-T, 192 and 8)."""
CURVED = 0.02
"""Assumed: standard deviation of the time in the middle between two measured batches, as a fraction."""
UPDATE_BYTES: Mapping[str, int] = {
    "lars": 26, "sgd": 20, "sgd_with_momentum": 20, "adam": 28, "adamw": 28, "lamb": 42, "adagrad": 20,
}  # fmt: skip
"""Counted: bytes read and written per parameter, for 16-bit weights and gradients, fp32 masters and moments. LARS and
LAMB read some values twice, for their norms. Measured: LARS 664 MB for 25.6 million parameters, LAMB 14.1 GB for 336
million."""

FORWARD, FROZEN_FORWARD = 1 / 3, 1 / 2
"""Counted: forward pass as a fraction of a micro-batch's time. The backward pass has two matrix products for each of
the forward pass. If the weights are frozen, as with LoRA, it has one, because it needs no gradients of weights."""
TP_COLLECTIVES = 9
"""Counted: all-gathers and reduce-scatters of a layer's tokens in both passes: two pairs forward, two pairs and one
repeated gather backward."""
EXPOSED_SPLIT = 0.5
"""Assumed: fraction of the collectives of tp and cp that is not hidden by products in the same layer."""
SPLIT_LOSS, SPLIT_DEVIATION = 0.05, 0.05
"""Assumed: loss of speed by halving layers or rows over ranks (smaller products), and its standard deviation, as
fractions."""

EVALUATION_SECONDS = 0.05
"""Assumed: seconds of an evaluation besides its forward passes."""

MODEL_DEVIATION = 0.1
"""Measured: standard deviation of the time on several nodes by errors of the model itself, as a fraction. The median
error of the published times of v3.0 to v4.0 is 7 %, which is that of a normal distribution with 0.1. Large errors are
more frequent than in a normal distribution (docs/notes/estimates.md)."""
NODE_DEVIATION = 0.01
"""Measured: standard deviation of the step of several GPUs of a node, as a fraction. The estimates of 13 pairs of GPUs
differ by so much from their steps (scripts/compare_two_gpus.py)."""
NETWORK_DEVIATION = 0.3
"""Assumed: standard deviation of communication between nodes, as a fraction."""
OTHER_PRECISION_DEVIATION = 0.1
"""Assumed: standard deviation of times that were measured in another precision, as a fraction."""
EVALUATION_DEVIATION, MEASURED_EVALUATION_DEVIATION = 0.5, 0.1
"""Assumed: standard deviations of an evaluation that was not measured, and of a measured one, as fractions."""
INPUT_DEVIATION = 0.02
"""Measured: standard deviation of the step if it was not measured through the reader, as a fraction. Steps through the
readers of docs/results/input are up to 3 % longer, except those of DLRM-DCNv2 with 9 %."""
READER_DEVIATION = 0.2
"""Assumed: standard deviation of the time that a step waits for input, as a fraction."""
