"""Features of recorded utterances: speed, silence, noise, log-mel, normalisation, SpecAugment, splicing.

The order is that of the reference (MLPerf Training v3.1, rnnt, ``pipeline.py`` with DALI's operators): resampling to
the utterance's speed, trimming, dither, pre-emphasis, power spectrogram, Slaney's mel filters, natural logarithm,
normalisation over the utterance's frames, masks in training, splicing. The features of an utterance depend only on
itself and its seed, except for masks over frames, which are placed within the longest utterance of the micro-batch.
"""

from __future__ import annotations

from benchmarks.rnnt.ops.features.reference import features_reference
from common.ops.operation import Implementation, Operation, OperationRequest
from common.ops.triton_support import triton_unsupported

_DEPTH, _LARGEST_MELS, _LEAST_PERCENT = 64, 128, 50


def _unsupported(request: OperationRequest) -> str | None:
    for name, value in request.sizes.items():
        if name in ("fft", "silence_window") and (value < 32 or value & (value - 1)):
            return f"{name}={value} is no power of 2 from 32 on"
        if name == "window" and value % _DEPTH:
            return f"window={value} is no multiple of {_DEPTH}"
        if name == "mel_filters" and value > _LARGEST_MELS:
            return f"mel_filters={value} is more than {_LARGEST_MELS}"
        if name == "percent_of_speed" and value < _LEAST_PERCENT:
            return f"an utterance may last {value} % of its time, and from {_LEAST_PERCENT} % on it is resampled"
    return triton_unsupported(request)


FEATURES = Operation(
    "features",
    features_reference,
    {
        "triton": Implementation("benchmarks.rnnt.ops.features.triton:features", _unsupported),
    },
    kernel_names=(("features", r"^features_"),),
    cases="benchmarks.rnnt.ops.features.cases",
)
"""Signature: ``features(audio, facts, frames, columns, augmented, dtype)``; a request has the result's dtype."""
