"""Features with the Triton kernels of this package: six launches per micro-batch.

Shapes: B utterances, N samples after resampling (padded), T spliced frames (padded), S = splice * T frames, M mel
filters, F features of a spliced frame (padded).
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import numpy as np
import torch
import triton
from numpy.typing import NDArray
from torch import Tensor

from benchmarks.rnnt.data_settings import AudioFacts
from benchmarks.rnnt.ops.features import kernels, resample_kernels
from benchmarks.rnnt.ops.features.reference import (
    DITHER,
    LOBES,
    MASKS,
    AudioBatch,
    hann,
    mel_filters,
    taps_each_side,
    widths_by_length,
)
from common.ops.tile import Tile
from common.ops.triton_support import require_contiguous

TILES: dict[str, Tile] = {
    "resample": Tile(rows=512, columns=1, depth=1, warps=4, stages=1),
    "emphasise": Tile(rows=1024, columns=1, depth=1, warps=4, stages=1),
    "log_mel": Tile(rows=64, columns=64, depth=64, warps=4, stages=2),
    "splice": Tile(rows=32, columns=1, depth=1, warps=4, stages=1),
}

_SAMPLE_SCALE = 4096.0
"""Factor of samples in half precision: samples of magnitude up to about 3 neither overflow nor underflow."""

_WINDOW_WARPS = 4
"""Warps of the programs that sum windows; equal for both kernels, so that both round equally."""


class Signal(NamedTuple):
    """Resampled and trimmed utterances.

    Attributes:
        samples_BN: fp32, undefined beyond their ends.
        first_B, kept_B: int32, first sample after initial silence, and number of samples kept from there.
        length_B: int32, number of spliced frames.
    """

    samples_BN: Tensor
    first_B: Tensor
    kept_B: Tensor
    length_B: Tensor


@torch.no_grad()
def features(
    audio: AudioBatch, facts: AudioFacts, frames: int, columns: int, augmented: bool, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Return the features (T, B, F) and their lengths (B,) int32.

    See :func:`benchmarks.rnnt.ops.features.reference.features_reference`. Utterances must exceed half a window.

    Raises:
        ValueError: an input is not contiguous.
    """
    signal = trimmed(resample(audio, frames, facts), audio, facts)
    mel_BSM, statistics = log_mel(emphasise(signal, audio, facts), signal.kept_B, frames, facts)
    return splice(mel_BSM, statistics, signal, audio, frames, columns, augmented, dtype, facts), signal.length_B


def resample(audio: AudioBatch, frames: int, facts: AudioFacts) -> Tensor:
    """Return the utterances at their speeds, (B, N) fp32; N is one more than ``frames`` can use."""
    require_contiguous(
        audio_A=audio.audio_A,
        length_B=audio.length_B,
        offset_B=audio.offset_B,
        speed_B=audio.speed_B,
        resampled_B=audio.resampled_B,
        seed_B=audio.seed_B,
    )
    samples, tile = facts.largest_resampled(frames) + 1, TILES["resample"]
    signal_BN = torch.empty((len(audio), samples), dtype=torch.float32, device=audio.audio_A.device)
    resample_kernels.features_resample_kernel[(triton.cdiv(samples, tile.rows), len(audio))](
        audio.audio_A, audio.length_B, audio.offset_B, audio.speed_B, audio.resampled_B, signal_BN, samples,
        SIDE=taps_each_side(facts), LOBES=LOBES, BLOCK=tile.rows, num_warps=tile.warps,
    )  # fmt: skip
    return signal_BN


def trimmed(signal_BN: Tensor, audio: AudioBatch, facts: AudioFacts) -> Signal:
    """Return the utterances with begin and length of the part without silence at the ends."""
    batch, samples = signal_BN.shape
    blocks, device = triton.cdiv(samples, facts.silence_window), signal_BN.device
    loudest_BK = torch.empty((batch, blocks), dtype=torch.float32, device=device)
    kernels.features_loudest_kernel[(blocks, batch)](
        signal_BN, audio.resampled_B, loudest_BK, samples, WINDOW=facts.silence_window, num_warps=_WINDOW_WARPS
    )
    first_B, kept_B, length_B = torch.empty((3, batch), dtype=torch.int32, device=device)
    kernels.features_sounding_kernel[(batch,)](
        signal_BN, audio.resampled_B, loudest_BK, first_B, kept_B, length_B, samples, blocks,
        10.0 ** (facts.silence_db / 10.0), HOP=facts.hop, SPLICE=facts.splice, WINDOW=facts.silence_window,
        BLOCKS=triton.next_power_of_2(blocks), num_warps=_WINDOW_WARPS,
    )  # fmt: skip
    return Signal(signal_BN, first_B, kept_B, length_B)


def emphasise(signal: Signal, audio: AudioBatch, facts: AudioFacts) -> Tensor:
    """Return the signal with noise and pre-emphasis, reflected at both ends: (2, B, P) fp16.

    An utterance begins at offset window / 2. The second part has the rounding errors of the first; both are scaled by
    :data:`_SAMPLE_SCALE`.
    """
    batch, samples = signal.samples_BN.shape
    half, tile = facts.window // 2, TILES["emphasise"]
    positions = -(-(samples + facts.window) // 16) * 16
    emphasised_2BP = torch.empty((2, batch, positions), dtype=torch.float16, device=signal.samples_BN.device)
    kernels.features_emphasise_kernel[(triton.cdiv(samples, 2 * tile.rows), batch)](
        signal.samples_BN, signal.first_B, signal.kept_B, audio.seed_B, emphasised_2BP, samples, positions,
        facts.dither, facts.preemphasis, _SAMPLE_SCALE, SITE=DITHER, HALF=half, BLOCK=tile.rows, num_warps=tile.warps,
    )  # fmt: skip
    return emphasised_2BP


def log_mel(
    emphasised_2BP: Tensor, kept_B: Tensor, frames: int, facts: AudioFacts
) -> tuple[Tensor, tuple[Tensor, Tensor]]:
    """Return logarithms of the power in the mel filters, (B, S, M) fp32, and means and spreads of tiles of frames."""
    (batch, positions), tile, device = emphasised_2BP.shape[1:], TILES["log_mel"], emphasised_2BP.device
    constants = _constants(facts, device)
    tiles, mels = triton.cdiv(frames * facts.splice, tile.rows), constants.filters.shape[2]
    mel_BSM = torch.empty((batch, frames * facts.splice, facts.mel_filters), dtype=torch.float32, device=device)
    mean_BKM, spread_BKM = torch.empty((2, batch, tiles, mels), dtype=torch.float32, device=device)
    kernels.features_log_mel_kernel[(tiles, batch)](
        emphasised_2BP, kept_B, constants.cosine, constants.sine, constants.filters, mel_BSM, mean_BKM, spread_BKM,
        positions, frames * facts.splice, facts.mel_filters, facts.log_floor, HOP=facts.hop, WINDOW=facts.window,
        BINS=facts.fft // 2, MELS=mels, FRAMES=tile.rows, DEPTH=tile.depth, WIDTH=min(tile.columns, facts.fft // 2),
        num_warps=tile.warps, num_stages=tile.stages,
    )  # fmt: skip
    return mel_BSM, (mean_BKM, spread_BKM)


def splice(
    mel_BSM: Tensor,
    statistics: tuple[Tensor, Tensor],
    signal: Signal,
    audio: AudioBatch,
    frames: int,
    columns: int,
    augmented: bool,
    dtype: torch.dtype,
    facts: AudioFacts,
) -> Tensor:
    """Return the features (T, B, F): normalised, masked if ``augmented``, and spliced."""
    batch, tile, device = len(audio), TILES["splice"], mel_BSM.device
    least, most = widths_by_length(facts, frames * facts.splice, device)
    features_TBF = torch.empty((frames, batch, columns), dtype=dtype, device=device)
    mean_BKM, spread_BKM = statistics
    tiles, mels = mean_BKM.shape[1:]
    kernels.features_splice_kernel[(triton.cdiv(frames, tile.rows), batch)](
        mel_BSM, mean_BKM, spread_BKM, signal.kept_B, audio.seed_B, least, most, features_TBF,
        frames, frames * facts.splice, facts.mel_filters, columns, batch, tiles,
        HOP=facts.hop, SPLICE=facts.splice, FRAMES=TILES["log_mel"].rows, TILES=triton.next_power_of_2(tiles),
        MELS=mels, AUGMENTED=augmented, FREQ_MASKS=facts.freq_masks, TIME_MASKS=facts.time_masks,
        FREQ_LEAST=facts.freq_mask_min, FREQ_MOST=facts.freq_mask_max, SITE=MASKS,
        UTTERANCES=triton.next_power_of_2(batch), ROWS=tile.rows, COLUMNS=triton.next_power_of_2(columns),
        num_warps=tile.warps,
    )  # fmt: skip
    return features_TBF


class _Constants(NamedTuple):
    cosine: Tensor
    sine: Tensor
    filters: Tensor


@functools.lru_cache(maxsize=8)
def _constants(facts: AudioFacts, device: torch.device) -> _Constants:
    """Return tables of transform and filters, in two parts each. The first call copies them to the device."""
    bins, window = facts.fft // 2, hann(facts.window)[:, None]
    angle = 2.0 * np.pi / facts.fft * np.outer(np.arange(facts.window), np.arange(bins))
    filters = np.zeros((bins, max(16, triton.next_power_of_2(facts.mel_filters))))
    filters[:, : facts.mel_filters] = mel_filters(facts).T[:bins] / _SAMPLE_SCALE**2
    return _Constants(
        _in_parts(window * np.cos(angle), torch.float16, device),
        _in_parts(window * np.sin(angle), torch.float16, device),
        _in_parts(filters, torch.bfloat16, device),
    )


def _in_parts(table: NDArray[np.float64], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return a table in half precision, stacked with its rounding errors."""
    whole = torch.from_numpy(table)
    high = whole.to(dtype)
    return torch.stack([high, (whole - high.double()).to(dtype)]).to(device)
