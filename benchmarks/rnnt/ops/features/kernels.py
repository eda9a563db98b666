# mypy: allow-untyped-defs
"""Triton kernels that make features of recorded utterances.

At 192 utterances of 12.3 s: 38 million samples, 236 thousand frames. Resampling takes the most arithmetic, 0.7 Gmul-add
of filter taps that are computed where they are used; the spectrogram is 26 Gmul-add on tensor cores, since the
products with even and odd parts of a window need half of what the transform's matrix would, and no spectrum is written.

All skip what lies beyond an utterance's length, which stands on the device.
"""

from __future__ import annotations

import triton
import triton.language as tl

from common.ops.random_bits.kernels import normal_pair, site_keys, word

_PI: tl.constexpr = tl.constexpr(3.141592653589793)
_SCALE: tl.constexpr = tl.constexpr(1.0 / 32768.0)


@triton.jit
def _sinc(x):
    """sin(x) / x."""
    near = tl.abs(x) < 1e-3
    safe = tl.where(near, 1.0, x)
    return tl.where(near, 1.0 - x * x * 0.16666667, tl.sin(safe) / safe)


@triton.jit
def _recorded(row_ptr, place, length):
    inside = (place >= 0) & (place < length)
    return tl.load(row_ptr + place, mask=inside, other=0).to(tl.float32)


@triton.jit
def features_resample_kernel(
    audio_ptr,  # (A,) int16
    length_ptr,  # (B,) int64
    offset_ptr,  # (B,) int64
    speed_ptr,  # (B,) fp64
    resampled_ptr,  # (B,) int64
    signal_ptr,  # (B, N) fp32
    N,
    SIDE: tl.constexpr,  # taps to each side
    LOBES: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """BLOCK samples of an utterance at its speed.

    The sines and cosines of the taps follow from those of the fraction by the theorem of addition. It cancels where a
    tap is near, so that the two nearest ones are computed by themselves.
    """
    row = tl.program_id(1)
    first = tl.program_id(0) * BLOCK
    samples = tl.load(resampled_ptr + row).to(tl.int32)
    if first < samples:
        length = tl.load(length_ptr + row).to(tl.int32)
        row_ptr = audio_ptr + tl.load(offset_ptr + row)
        speed = tl.load(speed_ptr + row)
        place = first + tl.arange(0, BLOCK)
        out_ptr = signal_ptr + row.to(tl.int64) * N + place
        if speed == 1.0:
            tl.store(out_ptr, _recorded(row_ptr, place, length) * _SCALE, mask=place < samples)
        else:
            at = (place.to(tl.float64) + 0.5) / speed - 0.5
            floor = tl.floor(at)
            fraction = (at - floor).to(tl.float32)
            below = floor.to(tl.int32)
            cut = tl.minimum(speed, 1.0).to(tl.float32)
            angle, slow = cut * _PI, cut * (_PI / LOBES)  # of a sample's distance, in the filter and in its envelope
            total = tl.zeros([BLOCK], tl.float32)
            for tap in tl.static_range(2):
                distance = fraction - tap
                weight = _sinc(angle * distance) * (0.5 + 0.5 * tl.cos(slow * distance))
                total += weight * _recorded(row_ptr, below + tap, length)
            sine, cosine = tl.sin(angle * fraction), tl.cos(angle * fraction)
            slow_sine, slow_cosine = tl.sin(slow * fraction), tl.cos(slow * fraction)
            turn_sine, turn_cosine = tl.sin(angle), tl.cos(angle)
            slow_turn_sine, slow_turn_cosine = tl.sin(slow), tl.cos(slow)
            before_sine, before_cosine = turn_sine, turn_cosine
            slow_before_sine, slow_before_cosine = slow_turn_sine, slow_turn_cosine
            for tap in tl.static_range(1, SIDE):
                # The sample at -tap, and that at tap + 1.
                after_sine = before_sine * turn_cosine + before_cosine * turn_sine
                after_cosine = before_cosine * turn_cosine - before_sine * turn_sine
                slow_after_sine = slow_before_sine * slow_turn_cosine + slow_before_cosine * slow_turn_sine
                slow_after_cosine = slow_before_cosine * slow_turn_cosine - slow_before_sine * slow_turn_sine
                left, right = fraction + tap, (tap + 1) - fraction
                shared = 1.0 / (left * right)
                left_sine = before_sine * cosine + before_cosine * sine
                right_sine = after_sine * cosine - after_cosine * sine
                left_window = 0.5 + 0.5 * (slow_before_cosine * slow_cosine - slow_before_sine * slow_sine)
                right_window = 0.5 + 0.5 * (slow_after_cosine * slow_cosine + slow_after_sine * slow_sine)
                left_weight = tl.where(cut * left < LOBES, left_sine * left_window * right, 0.0)
                right_weight = tl.where(cut * right < LOBES, right_sine * right_window * left, 0.0)
                heard = left_weight * _recorded(row_ptr, below - tap, length)
                heard += right_weight * _recorded(row_ptr, below + (tap + 1), length)
                total += heard * (shared / angle)
                before_sine, before_cosine = after_sine, after_cosine
                slow_before_sine, slow_before_cosine = slow_after_sine, slow_after_cosine
            tl.store(out_ptr, total * (cut * _SCALE), mask=place < samples)


@triton.jit
def _window_power(row_ptr, block, samples, WINDOW: tl.constexpr):
    """Sums of squares of the WINDOW windows that begin in ``block``, -1 where one does not fit.

    Each is what is left of this block and what comes first of the next: sums of positive numbers, nothing cancels.
    """
    place = tl.arange(0, WINDOW)
    start = block * WINDOW
    here = tl.load(row_ptr + start + place, mask=start + place < samples, other=0.0)
    next_place = start + WINDOW - 1 + place
    there = tl.load(row_ptr + next_place, mask=(place > 0) & (next_place < samples), other=0.0)
    power = tl.cumsum(here * here, 0, reverse=True) + tl.cumsum(there * there, 0)
    return tl.where(start + place + WINDOW <= samples, power, -1.0)


@triton.jit
def features_loudest_kernel(
    signal_ptr,  # (B, N) fp32
    resampled_ptr,  # (B,) int64
    loudest_ptr,  # (B, blocks) fp32
    N,
    WINDOW: tl.constexpr,
):
    """The largest power of the windows that begin in a block of WINDOW samples."""
    block, row = tl.program_id(0), tl.program_id(1)
    samples = tl.load(resampled_ptr + row).to(tl.int32)
    if block * WINDOW < samples:
        power = _window_power(signal_ptr + row.to(tl.int64) * N, block, samples, WINDOW)
        tl.store(loudest_ptr + row * tl.num_programs(0) + block, tl.max(power, 0))


@triton.jit
def features_sounding_kernel(
    signal_ptr,  # (B, N) fp32
    resampled_ptr,  # (B,) int64
    loudest_ptr,  # (B, blocks) fp32
    first_ptr,  # (B,) int32: first sample that is kept
    kept_ptr,  # (B,) int32: samples that are kept
    length_ptr,  # (B,) int32: spliced frames
    N,
    blocks,
    threshold,  # of the largest power
    HOP: tl.constexpr,
    SPLICE: tl.constexpr,
    WINDOW: tl.constexpr,
    BLOCKS: tl.constexpr,  # a power of 2
):
    """What is left of an utterance without silence at its ends."""
    row = tl.program_id(0)
    samples = tl.load(resampled_ptr + row).to(tl.int32)
    block = tl.arange(0, BLOCKS)
    there = block * WINDOW < samples
    loudest = tl.load(loudest_ptr + row * blocks + block, mask=there, other=-1.0)
    largest = tl.max(loudest, 0)
    first, kept = samples * 0, samples
    if largest > 0:
        enough = largest * threshold
        loud = loudest >= enough
        row_ptr = signal_ptr + row.to(tl.int64) * N
        place = tl.arange(0, WINDOW)
        first_block = tl.min(tl.where(loud, block, BLOCKS), 0)
        power = _window_power(row_ptr, first_block, samples, WINDOW)
        first = first_block * WINDOW + tl.min(tl.where(power >= enough, place, WINDOW - 1), 0)
        last_block = tl.max(tl.where(loud, block, 0), 0)
        power = _window_power(row_ptr, last_block, samples, WINDOW)
        last = last_block * WINDOW + tl.max(tl.where(power >= enough, place, 0), 0)
        kept = last + WINDOW - first
    tl.store(first_ptr + row, first)
    tl.store(kept_ptr + row, kept)
    tl.store(length_ptr + row, (kept // HOP + SPLICE) // SPLICE)


@triton.jit
def features_emphasise_kernel(
    signal_ptr,  # (B, N) fp32
    first_ptr,  # (B,) int32
    kept_ptr,  # (B,) int32
    seed_ptr,  # (B,) int64
    emphasised_ptr,  # (B, N) fp32
    N,
    dither,
    share,
    SITE: tl.constexpr,
    BLOCK: tl.constexpr,  # pairs of samples
):
    """2 * BLOCK samples with noise, less a share of the one before."""
    row = tl.program_id(1)
    pair = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    start = tl.load(first_ptr + row)
    end = start + tl.load(kept_ptr + row)
    if (tl.program_id(0) * 2 * BLOCK < end) & ((tl.program_id(0) + 1) * 2 * BLOCK > start):
        site = tl.full([], SITE, tl.int32)
        first_key, second_key = site_keys(seed_ptr + row, site)
        even_noise, odd_noise = normal_pair(pair.to(tl.uint32), first_key, second_key)
        _even, before_noise = normal_pair(tl.maximum(pair - 1, 0).to(tl.uint32), first_key, second_key)
        row_ptr = signal_ptr + row.to(tl.int64) * N
        even, odd = 2 * pair, 2 * pair + 1
        even_value = tl.load(row_ptr + even, mask=even < end, other=0.0) + dither * even_noise
        odd_value = tl.load(row_ptr + odd, mask=odd < end, other=0.0) + dither * odd_noise
        before_value = tl.load(row_ptr + even - 1, mask=(even > 0) & (even <= end), other=0.0) + dither * before_noise
        out_ptr = emphasised_ptr + row.to(tl.int64) * N
        before_even = tl.where(even == start, even_value, before_value)
        before_odd = tl.where(odd == start, odd_value, even_value)
        tl.store(out_ptr + even, even_value - share * before_even, mask=(even >= start) & (even < end))
        tl.store(out_ptr + odd, odd_value - share * before_odd, mask=(odd >= start) & (odd < end))


@triton.jit
def _reflected(place, last):
    """Places of an utterance that is longer than half a window, reflected at its first and at its last sample."""
    return last - tl.abs(last - tl.abs(place))


@triton.jit
def features_log_mel_kernel(
    emphasised_ptr,  # (B, N) fp32
    first_ptr,  # (B,) int32
    kept_ptr,  # (B,) int32
    cosine_ptr,  # (HALF, BINS) fp32: window and cosine, for the even part
    sine_ptr,  # (HALF, BINS) fp32
    filters_ptr,  # (BINS, MELS) fp32
    mel_ptr,  # (B, S, M) fp32
    mean_ptr,  # (B, tiles, MELS) fp32: of the frames of a tile
    spread_ptr,  # (B, tiles, MELS) fp32: sum of the squares of the distances from it
    N,
    S,
    M,
    log_floor,
    HOP: tl.constexpr,
    HALF: tl.constexpr,  # half of the window
    BINS: tl.constexpr,
    MELS: tl.constexpr,  # M and padding
    FRAMES: tl.constexpr,
    DEPTH: tl.constexpr,  # places of the window at a time
    WIDTH: tl.constexpr,  # bins at a time
):
    """FRAMES frames of an utterance: logarithms of the power in the mel filters.

    Where the window has the values w at k samples to both sides of its middle, the real part of the transform is the
    product of w (x[k] + x[-k]) with cosines, the imaginary one that of w (x[k] - x[-k]) with sines; the power doesn't
    depend on where the frame begins. Three tf32 products each make an fp32 one.
    """
    tile, row = tl.program_id(0), tl.program_id(1)
    kept = tl.load(kept_ptr + row)
    frames = kept // HOP + 1
    if tile * FRAMES < frames:
        row_ptr = emphasised_ptr + row.to(tl.int64) * N + tl.load(first_ptr + row)
        frame = tile * FRAMES + tl.arange(0, FRAMES)
        real_frame = frame < frames
        middle = tl.where(real_frame, frame, 0) * HOP
        depth = tl.arange(0, DEPTH)
        mel = tl.arange(0, MELS)
        energy = tl.zeros([FRAMES, MELS], tl.float32)
        for bins in range(0, BINS, WIDTH):
            column = bins + tl.arange(0, WIDTH)
            real = tl.zeros([FRAMES, WIDTH], tl.float32)
            imaginary = tl.zeros([FRAMES, WIDTH], tl.float32)
            for start in range(0, HALF, DEPTH):
                side = start + depth
                after = tl.load(row_ptr + _reflected(middle[:, None] + side[None, :], kept - 1))
                before = tl.load(row_ptr + _reflected(middle[:, None] - side[None, :], kept - 1))
                table = side[:, None] * BINS + column[None, :]
                cosine = tl.load(cosine_ptr + table)
                sine = tl.load(sine_ptr + table)
                real = tl.dot(after + before, cosine, real, input_precision="tf32x3")
                imaginary = tl.dot(after - before, sine, imaginary, input_precision="tf32x3")
            power = real * real + imaginary * imaginary
            filters = tl.load(filters_ptr + column[:, None] * MELS + mel[None, :])
            energy = tl.dot(power, filters, energy, input_precision="tf32x3")
        value = tl.log(tl.maximum(energy, log_floor))
        inside = real_frame[:, None] & (mel < M)[None, :]
        tl.store(mel_ptr + (row.to(tl.int64) * S + frame[:, None]) * M + mel[None, :], value, mask=inside)
        count = tl.minimum(frames - tile * FRAMES, FRAMES)
        mean = tl.sum(tl.where(inside, value, 0.0), 0) / count
        distance = tl.where(inside, value - mean[None, :], 0.0)
        out = (row * tl.num_programs(0) + tile) * MELS + mel
        tl.store(mean_ptr + out, mean)
        tl.store(spread_ptr + out, tl.sum(distance * distance, 0))


@triton.jit
def _below(count, index, first_key, second_key):
    """An integer from 0 to below ``count``: the upper half of its product with 32 random bits."""
    bits = word(index.to(tl.uint32), first_key, second_key)
    return ((bits.to(tl.uint64) * count.to(tl.uint64)) >> 32).to(tl.int32)


@triton.jit
def features_splice_kernel(
    mel_ptr,  # (B, S, M) fp32
    mean_ptr,  # (B, tiles, MELS) fp32
    spread_ptr,  # (B, tiles, MELS) fp32
    kept_ptr,  # (B,) int32
    seed_ptr,  # (B,) int64
    least_ptr,  # (S + 1,) int32: least width of a mask over frames, by the utterance's frames
    most_ptr,  # (S + 1,) int32: largest width
    features_ptr,  # (T, B, F)
    T,
    S,
    M,
    F,
    utterances,
    tiles,
    HOP: tl.constexpr,
    SPLICE: tl.constexpr,
    FRAMES: tl.constexpr,  # of a tile
    TILES: tl.constexpr,  # tiles, to a power of 2
    MELS: tl.constexpr,
    AUGMENTED: tl.constexpr,
    FREQ_MASKS: tl.constexpr,
    TIME_MASKS: tl.constexpr,
    FREQ_LEAST: tl.constexpr,
    FREQ_MOST: tl.constexpr,
    SITE: tl.constexpr,
    UTTERANCES: tl.constexpr,  # to a power of 2
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,  # F to a power of 2
):
    """ROWS spliced frames of an utterance: normalised over all its frames, masked, and zero beyond its end."""
    row = tl.program_id(1)
    frames = tl.load(kept_ptr + row) // HOP + 1
    line = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, COLUMNS)
    mel = column % M
    frame = line[:, None] * SPLICE + (column // M)[None, :]
    value = tl.zeros([ROWS, COLUMNS], tl.float32)
    if tl.program_id(0) * ROWS * SPLICE < frames:
        tile = tl.arange(0, TILES)
        count = tl.minimum(tl.maximum(frames - tile * FRAMES, 0), FRAMES).to(tl.float32)
        used = (count > 0)[:, None]
        part = (row * tiles + tile)[:, None] * MELS + mel[None, :]
        means = tl.load(mean_ptr + part, mask=used, other=0.0)
        mean = tl.sum(means * count[:, None], 0) / frames
        away = tl.where(used, means - mean[None, :], 0.0)
        spread = tl.sum(tl.load(spread_ptr + part, mask=used, other=0.0) + away * away * count[:, None], 0)
        variance = spread / frames
        scale = tl.where(variance > 0, 1.0 / tl.sqrt_rn(tl.where(variance > 0, variance, 1.0)), 0.0)
        inside = (frame < frames) & (column < SPLICE * M)[None, :]
        source = (row.to(tl.int64) * S + line[:, None] * SPLICE) * M + column[None, :]
        value = (tl.load(mel_ptr + source, mask=inside, other=0.0) - mean[None, :]) * scale[None, :]
        if AUGMENTED:
            other = tl.arange(0, UTTERANCES)
            kept = tl.load(kept_ptr + other, mask=other < utterances, other=0)
            longest = tl.max(kept, 0) // HOP + 1
            masks: tl.constexpr = FREQ_MASKS + TIME_MASKS
            first_key, second_key = site_keys(seed_ptr + row, tl.full([], SITE, tl.int32))
            least = tl.load(least_ptr + frames)
            most = tl.load(most_ptr + frames)
            for mask in tl.static_range(masks):
                number = tl.full([], mask, tl.int32)
                if mask < FREQ_MASKS:
                    width = FREQ_LEAST + _below(
                        tl.full([], FREQ_MOST - FREQ_LEAST + 1, tl.int32), number, first_key, second_key
                    )
                    start = _below(tl.maximum(M - width, 1), number + masks, first_key, second_key)
                    covered = ((mel >= start) & (mel < start + width))[None, :]
                else:
                    width = least + _below(most - least + 1, number, first_key, second_key)
                    start = _below(tl.maximum(longest - width, 1), number + masks, first_key, second_key)
                    covered = (frame >= start) & (frame < start + width)
                value = tl.where(covered, 0.0, value)
        value = tl.where(inside, value, 0.0)
    out = (line[:, None].to(tl.int64) * utterances + row) * F + column[None, :]
    tl.store(features_ptr + out, value, mask=(line < T)[:, None] & (column < F)[None, :])
