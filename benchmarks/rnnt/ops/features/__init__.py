"""Recorded utterances to features: speed, silence, noise, log-mel, normalisation, SpecAugment, splicing.

In the order of the reference (MLPerf Training v3.1, rnnt, ``pipeline.py`` with DALI's operators): resampled to an
utterance's speed, trimmed, dithered, emphasised, a power spectrogram, Slaney's mel filters, the natural logarithm,
normalised over the utterance's own frames, masked in training, and spliced. What an utterance becomes depends on itself
and its seed alone, but for the masks over frames, which lie anywhere in the longest utterance of the micro-batch.
"""

from __future__ import annotations

from benchmarks.rnnt.ops.features.plain import features_torch
from common.ops.implementation import Implementation, always

IMPLEMENTATIONS = {
    "torch": Implementation("torch", features_torch, always),
}
"""Signature: ``features(audio, facts, frames, columns, augmented, dtype)``; a request's dtype is that of its
result."""
