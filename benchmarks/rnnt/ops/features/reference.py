"""Reference of :mod:`benchmarks.rnnt.ops.features` in fp32 or fp64: its input, its constants and its steps.

Shapes: B utterances of a micro-batch, A recorded samples of all of them, with gaps, N samples after resampling
(padded), T spliced frames (padded), S = splice * T frames (padded), W samples of a window, C taps and P phases of the
resampling filter, K bins of the spectrogram, M mel filters, F features of a spliced frame.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from benchmarks.rnnt.data_settings import AudioFacts
from common.ops.random_bits.reference import normal_pairs, words

_LINEAR_UNTIL = 1000.0
"""Upper end in Hz of the linear part of Slaney's scale (Auditory Toolbox, version 2, 1998)."""
_LINEAR_STEP = 200.0 / 3.0
"""Hz per mel in the linear part."""
_LOG_STEP = np.log(6.4) / 27.0
"""Increase of the natural logarithm of the frequency per mel above it."""


def mel_of_hz(frequency: NDArray[np.float64]) -> NDArray[np.float64]:
    """Convert Hz to Slaney's mel scale."""
    above = np.maximum(frequency, _LINEAR_UNTIL) / _LINEAR_UNTIL
    linear = np.minimum(frequency, _LINEAR_UNTIL) / _LINEAR_STEP
    return linear + np.log(above) / _LOG_STEP


def hz_of_mel(mel: NDArray[np.float64]) -> NDArray[np.float64]:
    """Convert Slaney's mel scale to Hz."""
    turn = _LINEAR_UNTIL / _LINEAR_STEP
    return np.minimum(mel, turn) * _LINEAR_STEP * np.exp(np.maximum(mel - turn, 0.0) * _LOG_STEP)


@functools.lru_cache(maxsize=4)
def mel_filters(facts: AudioFacts) -> NDArray[np.float64]:
    """Return triangles of equal area over the power spectrum, (M, K), with K = fft / 2 + 1."""
    bins = np.fft.rfftfreq(facts.fft, 1.0 / facts.sample_rate)
    ends = mel_of_hz(np.array([facts.mel_min, facts.mel_max]))
    corners = hz_of_mel(np.linspace(ends[0], ends[1], facts.mel_filters + 2))
    low, peak, high = (corners[first : first + facts.mel_filters, None] for first in range(3))
    triangles = np.minimum((bins - low) / (peak - low), (high - bins) / (high - peak))
    filters: NDArray[np.float64] = np.maximum(triangles, 0.0) * (2.0 / (high - low))
    filters.flags.writeable = False
    return filters


def hann(window: int) -> NDArray[np.float64]:
    """Return the periodic Hann window: its first value is 0, and its maximum in the middle is 1."""
    return 0.5 - 0.5 * np.cos(2.0 * np.pi * np.arange(window) / window)


def mask_widths(share: float, frames: int) -> NDArray[np.int32]:
    """Return widths of masks over frames for utterances of 0 to ``frames`` frames, (frames + 1,).

    Args:
        share: width as a fraction of the utterance; the product is rounded half to even.
    """
    return np.rint(np.arange(frames + 1) * share).astype(np.int32)


LOBES = 16
"""Zeros of the resampling filter to each side of its middle, the default of DALI."""

DITHER, MASKS = 1, 2
"""Sites of the random bits that an utterance's seed generates."""

NAMES = ("audio", "audio_lengths", "audio_offsets", "speeds", "resampled_lengths", "utterance_seeds")
"""Names of a reader's tensors, in the order of :class:`AudioBatch`."""


@dataclass(frozen=True)
class AudioBatch:
    """Utterances of a micro-batch, on one device.

    Attributes:
        audio_A: int16.
        length_B: int64, recorded samples.
        offset_B: int64, first sample in ``audio_A``.
        speed_B: fp64, factor of the duration.
        resampled_B: int64, samples after resampling: :func:`benchmarks.rnnt.data_settings.resampled`.
        seed_B: int64, random seed of noise and masks.
    """

    audio_A: Tensor
    length_B: Tensor
    offset_B: Tensor
    speed_B: Tensor
    resampled_B: Tensor
    seed_B: Tensor

    @classmethod
    def of(cls, tensors: Mapping[str, Tensor]) -> AudioBatch:
        """Return the batch of a reader's tensors."""
        return cls(*(tensors[name] for name in NAMES))

    def __len__(self) -> int:
        return len(self.length_B)


PHASES = 512
"""Phases of the resampling filter per sample; linear interpolation has an error of at most 2e-6 of the maximum."""

_CHUNK = {"cpu": 1 << 12, "cuda": 1 << 18}
"""Samples of all utterances that are resampled at once; on a CPU, their windows fit in a core's cache."""


@torch.no_grad()
def features_reference(
    audio: AudioBatch,
    facts: AudioFacts,
    frames: int,
    columns: int,
    augmented: bool,
    dtype: torch.dtype,
    precision: torch.dtype = torch.float32,
) -> tuple[Tensor, Tensor]:
    """Return the features of a micro-batch.

    Args:
        frames: T, the maximum over all utterances.
        columns: F, at least ``facts.splice * facts.mel_filters``; further columns are zero.
        augmented: whether to apply SpecAugment's masks.
        precision: dtype of the computation: fp32, or fp64 for comparisons.

    Returns:
        (T, B, F), zero beyond each utterance's length, and these lengths, (B,) int32.
    """
    padded, device = frames, audio.length_B.device
    if device.type == "cpu":  # reading lengths is free here
        frames = min(frames, -(-(int(audio.resampled_B.max()) // facts.hop + 1) // facts.splice))
    signal_BN = resample(audio, facts.largest_resampled(frames), facts, precision)
    first_B, trimmed_B = sounding(signal_BN, audio.resampled_B, facts)
    emphasised_BN = emphasise(signal_BN, first_B, audio.seed_B, facts)
    length_B = trimmed_B // facts.hop + 1
    mel_BSM = log_mel(emphasised_BN, first_B, trimmed_B, frames * facts.splice, facts)
    mel_BSM = normalised(mel_BSM, length_B)
    if augmented:
        kept_BS, kept_BM = kept_by_masks(audio.seed_B, length_B, frames * facts.splice, facts)
        mel_BSM = mel_BSM * kept_BS[:, :, None] * kept_BM[:, None, :]
    spliced_BTF = mel_BSM.reshape(len(audio), frames, facts.splice * facts.mel_filters)
    features_TBF = torch.zeros((padded, len(audio), columns), dtype=dtype, device=device)
    features_TBF[:frames, :, : spliced_BTF.shape[2]] = spliced_BTF.transpose(0, 1)
    return features_TBF, (-(-length_B // facts.splice)).to(torch.int32)


def resample(audio: AudioBatch, samples: int, facts: AudioFacts, precision: torch.dtype) -> Tensor:
    """Return the utterances at their speeds, (B, N), between -1 and 1, zero beyond their ends.

    For an utterance whose duration is multiplied by c, sample m is at position m / c of the recording, as in DALI.
    Recorded samples at distance d have the weight r sinc(r d) cos^2(pi r d / (2 LOBES)) with r = min(1, c), which is
    zero from |r d| = LOBES on. The recording is extended by zeros. The filter is symmetric, so its phase is linear.
    Its values are interpolated linearly from a table of :data:`PHASES` phases per sample.

    Args:
        samples: N.
        precision: fp32 or fp64.
    """
    side, device = taps_each_side(facts), audio.speed_B.device
    if device.type == "cpu" and bool((audio.speed_B == 1).all()):
        return _recorded(audio, 0, samples, precision)
    # The window at n begins with recorded sample n - side.
    windows_BNC = _recorded(audio, -side, math.ceil(samples / min(1.0, facts.speed_min)) + 1 + side, precision).unfold(
        1, 2 * side, 1
    )
    table_BPC = _filters(audio.speed_B, side).to(precision)
    row_B1 = torch.arange(len(audio), device=device)[:, None]
    made_BN = torch.empty((len(audio), samples), dtype=precision, device=device)
    chunk = max(1, _CHUNK[device.type] // len(audio))
    for first in range(0, samples, chunk):
        position_N = torch.arange(first, min(first + chunk, samples), device=device)
        position_BN = position_N / audio.speed_B[:, None]
        below_BN = position_BN.floor()
        phase_BN = (position_BN - below_BN) * PHASES
        table_BN = phase_BN.floor().clamp(max=PHASES - 1)
        share_BN1 = (phase_BN - table_BN)[:, :, None].to(precision)
        low_BNC, high_BNC = (table_BPC[row_B1, table_BN.long() + more] for more in (0, 1))
        filter_BNC = low_BNC.lerp(high_BNC, share_BN1)
        heard_BNC = windows_BNC[row_B1, below_BN.long().clamp(-1, windows_BNC.shape[1] - 2) + 1]
        made_BN[:, first : first + chunk] = (heard_BNC * filter_BNC).sum(2)
    return torch.where(_within(audio.resampled_B, samples), made_BN, 0.0)


def _recorded(audio: AudioBatch, first: int, end: int, precision: torch.dtype) -> Tensor:
    """Return the recorded samples ``first`` ... ``end - 1``, (B, end - first); zeros outside of an utterance."""
    position_N = torch.arange(first, end, device=audio.length_B.device)
    inside_BN = (position_N >= 0) & (position_N < audio.length_B[:, None])
    source_BN = torch.where(inside_BN, position_N + audio.offset_B[:, None], 0)
    return torch.where(inside_BN, audio.audio_A[source_BN].to(precision) / 32768.0, 0.0)


def _filters(speed_B: Tensor, side: int) -> Tensor:
    """Return the filter's taps for each phase, (B, PHASES + 1, 2 * side), fp64."""
    cut_B11 = speed_B[:, None, None].clamp(max=1.0)
    fraction_P1 = (torch.arange(PHASES + 1, device=speed_B.device, dtype=torch.float64) / PHASES)[:, None]
    distance_BPC = cut_B11 * (fraction_P1 - torch.arange(1 - side, side + 1, device=speed_B.device))
    envelope_BPC = 0.5 + 0.5 * (distance_BPC * (math.pi / LOBES)).cos()
    return torch.where(distance_BPC.abs() < LOBES, cut_B11 * torch.sinc(distance_BPC) * envelope_BPC, 0.0)


def taps_each_side(facts: AudioFacts) -> int:
    """Return the maximum number of recorded samples on each side that contribute to a resampled one."""
    return math.ceil(LOBES / min(1.0, facts.speed_min))


def sounding(signal_BN: Tensor, samples_B: Tensor, facts: AudioFacts) -> tuple[Tensor, Tensor]:
    """Return the part of each utterance without silence at its ends: first sample and number of samples, (B,) int64.

    It extends from the start of the first to the end of the last loud window. A window of ``silence_window`` samples
    is loud if its mean square is at least ``silence_db`` relative to the utterance's maximum. Utterances that are
    shorter than a window, or completely silent, are kept whole.

    Args:
        signal_BN: the utterances, zero beyond their ends.
    """
    window, samples = facts.silence_window, signal_BN.shape[1]
    power_BN = torch.nn.functional.pad(signal_BN.double().square().cumsum(1), (1, window))
    power_BN[:, samples + 1 :] = power_BN[:, samples : samples + 1]
    windows_B = samples_B - window + 1
    position_N = torch.arange(samples, device=signal_BN.device)
    sum_BN = power_BN[:, window : window + samples] - power_BN[:, :samples]
    sum_BN = torch.where(position_N < windows_B[:, None], sum_BN, 0.0)
    largest_B = sum_BN.amax(1)
    loud_BN = (sum_BN >= largest_B[:, None] * 10.0 ** (facts.silence_db / 10.0)) & (position_N < windows_B[:, None])
    whole_B = (windows_B < 1) | (largest_B <= 0)
    first_B = torch.where(whole_B, 0, loud_BN.int().argmax(1))
    last_B = samples - 1 - loud_BN.flip(1).int().argmax(1)
    return first_B, torch.where(whole_B, samples_B, last_B + window - first_B)


def emphasise(signal_BN: Tensor, first_B: Tensor, seed_B: Tensor, facts: AudioFacts) -> Tensor:
    """Return the signal with noise and pre-emphasis, (B, N): a fraction of the previous sample is subtracted.

    The first sample, at ``first_B``, uses itself as previous sample. Values before it are undefined.
    """
    position_N = torch.arange(signal_BN.shape[1], device=signal_BN.device)
    pairs = normal_pairs(position_N[: (len(position_N) + 1) // 2], seed_B[:, None], DITHER, signal_BN.dtype)
    noise_BN = torch.stack(pairs, 2).flatten(1)[:, : len(position_N)]
    noisy_BN = signal_BN + facts.dither * noise_BN
    before_BN = torch.where(position_N == first_B[:, None], noisy_BN, noisy_BN.roll(1, 1))
    return noisy_BN - facts.preemphasis * before_BN


def log_mel(signal_BN: Tensor, first_B: Tensor, samples_B: Tensor, frames: int, facts: AudioFacts) -> Tensor:
    """Return the logarithms of the power in the mel filters, (B, S, M), zero beyond each utterance's frames.

    Frame s is centred on sample s * hop of the utterance, which is reflected at its ends.

    Args:
        signal_BN: signal that contains the utterances.
        first_B, samples_B: first sample and length of each utterance.
        frames: S.
    """
    device, half = signal_BN.device, facts.window // 2
    position_SW = (
        torch.arange(frames, device=device)[:, None] * facts.hop + torch.arange(-half, half, device=device)[None, :]
    )
    # Reflected positions are a triangle wave from 0 to the last sample and back.
    last_B11 = (samples_B - 1)[:, None, None]
    turning_BSW = position_SW.remainder((2 * last_B11).clamp(min=1))
    reflected_BSW = turning_BSW.minimum(2 * last_B11 - turning_BSW).clamp(min=0)
    source_BSW = (reflected_BSW + first_B[:, None, None]).clamp(max=signal_BN.shape[1] - 1)
    window_W, filters_KM = _constants(facts, device, signal_BN.dtype)
    framed_BSW = signal_BN.gather(1, source_BSW.flatten(1)).view(source_BSW.shape) * window_W
    spectrum_BSK = torch.fft.rfft(framed_BSW, facts.fft)
    power_BSK = spectrum_BSK.real.square() + spectrum_BSK.imag.square()
    logarithm_BSM = (power_BSK @ filters_KM).clamp(min=facts.log_floor).log()
    return torch.where(_within(samples_B // facts.hop + 1, frames)[:, :, None], logarithm_BSM, 0.0)


def normalised(mel_BSM: Tensor, length_B: Tensor) -> Tensor:
    """Return features (B, S, M), each with mean 0 and deviation 1 over the utterance's frames.

    They are zero beyond the utterance's length, and for constant features.
    """
    real_BS1 = _within(length_B, mel_BSM.shape[1])[:, :, None]
    count_B11 = length_B[:, None, None]
    mean_B1M = torch.where(real_BS1, mel_BSM, 0.0).sum(1, keepdim=True) / count_B11
    centred_BSM = torch.where(real_BS1, mel_BSM - mean_B1M, 0.0)
    variance_B1M = centred_BSM.square().sum(1, keepdim=True) / count_B11
    return centred_BSM * torch.where(variance_B1M > 0, variance_B1M.rsqrt(), 0.0)


def masks(seed_B: Tensor, length_B: Tensor, frames: int, facts: AudioFacts) -> tuple[Tensor, Tensor]:
    """Return first index and width of SpecAugment's masks, (B, masks) int64: masks over features, then over frames.

    As in the reference, they are uniform integers with both ends included: the width is between its minimum and
    maximum, the first index from 0 to ``size - width``, so a mask can reach the last feature or frame. The size is
    the number of features, or for masks over frames the length of the longest utterance of the micro-batch.

    Args:
        frames: upper bound of the frames.
    """
    count, device = facts.freq_masks + facts.time_masks, seed_B.device
    least, most = (widths[length_B].long() for widths in widths_by_length(facts, frames, device))
    over_features = torch.arange(count, device=device) < facts.freq_masks
    least_BC = torch.where(over_features, facts.freq_mask_min, least[:, None])
    most_BC = torch.where(over_features, facts.freq_mask_max, most[:, None])
    size_BC = torch.where(over_features, facts.mel_filters, length_B.amax())
    width_BC = least_BC + _below(most_BC - least_BC + 1, seed_B, torch.arange(count, device=device))
    first_BC = _below(size_BC - width_BC + 1, seed_B, torch.arange(count, 2 * count, device=device))
    return first_BC, width_BC


def kept_by_masks(seed_B: Tensor, length_B: Tensor, frames: int, facts: AudioFacts) -> tuple[Tensor, Tensor]:
    """Return the frames, (B, S), and features, (B, M), that no mask of :func:`masks` covers."""
    first_BC, width_BC = masks(seed_B, length_B, frames, facts)
    kept = []
    for chosen, size in ((slice(facts.freq_masks), facts.mel_filters), (slice(facts.freq_masks, None), frames)):
        position, first_BC1 = torch.arange(size, device=seed_B.device), first_BC[:, chosen, None]
        covered = (position >= first_BC1) & (position < first_BC1 + width_BC[:, chosen, None])
        kept.append(~covered.any(1))
    return kept[1], kept[0]


@functools.lru_cache(maxsize=64)
def widths_by_length(facts: AudioFacts, frames: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return minimum and maximum width of a mask over frames, by the utterance's frames, (frames + 1,) int32.

    The first call copies them to the device.
    """
    shares = facts.time_mask_min, facts.time_mask_max
    least, most = (torch.from_numpy(mask_widths(share, frames)).to(device) for share in shares)
    return least, most


@functools.lru_cache(maxsize=8)
def _constants(facts: AudioFacts, device: torch.device, precision: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return window and mel filters. The first call copies them to the device."""
    window_W, filters_KM = hann(facts.window), mel_filters(facts).T.copy()
    return torch.from_numpy(window_W).to(device, precision), torch.from_numpy(filters_KM).to(device, precision)


def _below(count_BC: Tensor, seed_B: Tensor, index_C: Tensor) -> Tensor:
    """Return near-uniform integers in [0, count_BC): the upper half of the product with 32 random bits."""
    bits_BC = words(index_C, seed_B[:, None], MASKS).long() & 0xFFFFFFFF
    return (bits_BC * count_BC) >> 32


def _within(length_B: Tensor, size: int) -> Tensor:
    """Return which of ``size`` positions are within each length: (B, size)."""
    return torch.arange(size, device=length_B.device) < length_B[:, None]
