# mypy: allow-untyped-defs
"""Triton kernels that compute features of resampled utterances.

192 utterances of 12.3 s have 38 million samples and 236 thousand frames. The spectrogram takes 40 G multiply-adds,
three times in half precision, and reads only as many bytes as there are samples, because neither frames nor spectra
are written. All kernels skip what is beyond an utterance's length, which is on the device.
"""

from __future__ import annotations

import triton
import triton.language as tl

from common.ops.random_bits.kernels import normal_pair, site_keys, word


@triton.jit
def _window_power(row_ptr, block, samples, WINDOW: tl.constexpr):
    """Return the sums of squares of the WINDOW windows that begin in ``block``, -1 if one does not fit.

    Each sum has a part in this block and one in the next. All terms are positive, so nothing cancels.
    """
    position = tl.arange(0, WINDOW)
    start = block * WINDOW
    here = tl.load(row_ptr + start + position, mask=start + position < samples, other=0.0)
    next_position = start + WINDOW - 1 + position
    there = tl.load(row_ptr + next_position, mask=(position > 0) & (next_position < samples), other=0.0)
    power = tl.cumsum(here * here, 0, reverse=True) + tl.cumsum(there * there, 0)
    return tl.where(start + position + WINDOW <= samples, power, -1.0)


@triton.jit
def features_loudest_kernel(
    signal_ptr,  # (B, N) fp32
    resampled_ptr,  # (B,) int64
    loudest_ptr,  # (B, blocks) fp32
    N,
    WINDOW: tl.constexpr,
):
    """Write the maximum power of the windows that begin in a block of WINDOW samples. Grid (blocks, B)."""
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
    threshold,  # relative to the largest power
    HOP: tl.constexpr,
    SPLICE: tl.constexpr,
    WINDOW: tl.constexpr,
    BLOCKS: tl.constexpr,  # a power of 2
):
    """Write first sample and lengths of an utterance without silence at its ends. Grid (B,)."""
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
        position = tl.arange(0, WINDOW)
        first_block = tl.min(tl.where(loud, block, BLOCKS), 0)
        power = _window_power(row_ptr, first_block, samples, WINDOW)
        first = first_block * WINDOW + tl.min(tl.where(power >= enough, position, WINDOW - 1), 0)
        last_block = tl.max(tl.where(loud, block, 0), 0)
        power = _window_power(row_ptr, last_block, samples, WINDOW)
        last = last_block * WINDOW + tl.max(tl.where(power >= enough, position, 0), 0)
        kept = last + WINDOW - first
    tl.store(first_ptr + row, first)
    tl.store(kept_ptr + row, kept)
    tl.store(length_ptr + row, (kept // HOP + SPLICE) // SPLICE)


@triton.jit
def _parts(values, DTYPE: tl.constexpr):
    """Return ``values`` in half precision, and the rounding errors in half precision."""
    high = values.to(DTYPE)
    return high, (values - high.to(tl.float32)).to(DTYPE)


@triton.jit
def _store_reflected(high_ptr, low_ptr, values, index, kept, P, HALF: tl.constexpr):
    """Store samples ``index`` of an utterance at offset HALF, and those near its ends also reflected beyond them."""
    high, low = _parts(values, tl.float16)
    inside = (index >= 0) & (index < kept)
    tl.store(high_ptr + HALF + index, high, mask=inside)
    tl.store(low_ptr + HALF + index, low, mask=inside)
    left = inside & (index > 0) & (index <= HALF)
    tl.store(high_ptr + HALF - index, high, mask=left)
    tl.store(low_ptr + HALF - index, low, mask=left)
    mirrored = HALF + 2 * (kept - 1) - index
    right = inside & (index < kept - 1) & (index >= kept - 1 - HALF) & (mirrored < P)
    tl.store(high_ptr + mirrored, high, mask=right)
    tl.store(low_ptr + mirrored, low, mask=right)


@triton.jit
def features_emphasise_kernel(
    signal_ptr,  # (B, N) fp32
    first_ptr,  # (B,) int32
    kept_ptr,  # (B,) int32
    seed_ptr,  # (B,) int64
    emphasised_ptr,  # (2, B, P) fp16: in two parts, with the first sample at offset HALF
    N,
    P,
    dither,
    share,
    scale,
    SITE: tl.constexpr,
    HALF: tl.constexpr,
    BLOCK: tl.constexpr,  # pairs of samples
):
    """Write 2 * BLOCK samples with noise and pre-emphasis, reflected at the ends of the utterance."""
    row = tl.program_id(1)
    pair = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    start = tl.load(first_ptr + row)
    kept = tl.load(kept_ptr + row)
    end = start + kept
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
        before_even = tl.where(even == start, even_value, before_value)
        before_odd = tl.where(odd == start, odd_value, even_value)
        high_ptr = emphasised_ptr + row.to(tl.int64) * P
        low_ptr = high_ptr + tl.num_programs(1).to(tl.int64) * P
        _store_reflected(high_ptr, low_ptr, (even_value - share * before_even) * scale, even - start, kept, P, HALF)
        _store_reflected(high_ptr, low_ptr, (odd_value - share * before_odd) * scale, odd - start, kept, P, HALF)


@triton.jit
def _product(high, low, table_ptr, low_table_ptr, total):
    """Return ``total`` plus the product of two matrices in two parts each, without the product of both low parts."""
    table = tl.load(table_ptr)
    total = tl.dot(high, tl.load(low_table_ptr), total)
    total = tl.dot(low, table, total)
    return tl.dot(high, table, total)


@triton.jit
def features_log_mel_kernel(
    emphasised_ptr,  # (2, B, P) fp16: output of features_emphasise_kernel
    kept_ptr,  # (B,) int32
    cosine_ptr,  # (2, WINDOW, BINS) fp16: window and cosine, in two parts
    sine_ptr,  # (2, WINDOW, BINS) fp16
    filters_ptr,  # (2, BINS, MELS) bf16
    mel_ptr,  # (B, S, M) fp32
    mean_ptr,  # (B, tiles, MELS) fp32: mean over the frames of a tile
    spread_ptr,  # (B, tiles, MELS) fp32: sum of squared deviations from it
    P,
    S,
    M,
    log_floor,
    HOP: tl.constexpr,
    WINDOW: tl.constexpr,
    BINS: tl.constexpr,
    MELS: tl.constexpr,  # M and padding
    FRAMES: tl.constexpr,
    DEPTH: tl.constexpr,  # samples of the window at a time
    WIDTH: tl.constexpr,  # bins at a time
):
    """Write logarithms of the power in the mel filters for FRAMES frames of an utterance. Grid (tiles, B).

    The Fourier transform is a product with window and cosines, and one with window and sines. Samples and tables are
    sums of two fp16 numbers, 22 bits in total. Power and filters, which have any magnitude and are positive, are sums
    of two bf16 numbers, 16 bits in total.
    """
    tile, row = tl.program_id(0), tl.program_id(1)
    frames = tl.load(kept_ptr + row) // HOP + 1
    if tile * FRAMES < frames:
        high_ptr = emphasised_ptr + row.to(tl.int64) * P
        low_ptr = high_ptr + tl.num_programs(1).to(tl.int64) * P
        frame = tile * FRAMES + tl.arange(0, FRAMES)
        real_frame = frame < frames
        sample = tl.where(real_frame, frame, 0)[:, None] * HOP + tl.arange(0, DEPTH)[None, :]
        table = tl.arange(0, DEPTH)[:, None] * BINS + tl.arange(0, WIDTH)[None, :]
        mel = tl.arange(0, MELS)
        filters = tl.arange(0, WIDTH)[:, None] * MELS + mel[None, :]
        energy = tl.zeros([FRAMES, MELS], tl.float32)
        for bins in range(0, BINS, WIDTH):
            real = tl.zeros([FRAMES, WIDTH], tl.float32)
            imaginary = tl.zeros([FRAMES, WIDTH], tl.float32)
            for start in range(0, WINDOW, DEPTH):
                high = tl.load(high_ptr + start + sample)
                low = tl.load(low_ptr + start + sample)
                cosine = cosine_ptr + (start * BINS + bins) + table
                sine = sine_ptr + (start * BINS + bins) + table
                real = _product(high, low, cosine, cosine + WINDOW * BINS, real)
                imaginary = _product(high, low, sine, sine + WINDOW * BINS, imaginary)
            strong, weak = _parts(real * real + imaginary * imaginary, tl.bfloat16)
            filter_ptr = filters_ptr + bins * MELS + filters
            energy = _product(strong, weak, filter_ptr, filter_ptr + BINS * MELS, energy)
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
    """Return an integer in [0, count): the upper half of its product with 32 random bits."""
    bits = word(index.to(tl.uint32), first_key, second_key)
    return ((bits.to(tl.uint64) * count.to(tl.uint64)) >> 32).to(tl.int32)


@triton.jit
def features_splice_kernel(
    mel_ptr,  # (B, S, M) fp32
    mean_ptr,  # (B, tiles, MELS) fp32
    spread_ptr,  # (B, tiles, MELS) fp32
    kept_ptr,  # (B,) int32
    seed_ptr,  # (B,) int64
    least_ptr,  # (S + 1,) int32: minimum width of a mask over frames, by the utterance's frames
    most_ptr,  # (S + 1,) int32: maximum width
    features_ptr,  # (T, B, F)
    T,
    S,
    M,
    F,
    utterances,
    tiles,
    HOP: tl.constexpr,
    SPLICE: tl.constexpr,
    FRAMES: tl.constexpr,  # frames per tile
    TILES: tl.constexpr,  # tiles, rounded up to a power of 2
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
    """Write ROWS spliced frames of an utterance: normalised over all its frames, masked, and zero beyond its end."""
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
                    start = _below(M - width + 1, number + masks, first_key, second_key)
                    covered = ((mel >= start) & (mel < start + width))[None, :]
                else:
                    width = least + _below(most - least + 1, number, first_key, second_key)
                    start = _below(longest - width + 1, number + masks, first_key, second_key)
                    covered = (frame >= start) & (frame < start + width)
                value = tl.where(covered, 0.0, value)
        value = tl.where(inside, value, 0.0)
    out = (line[:, None].to(tl.int64) * utterances + row) * F + column[None, :]
    tl.store(features_ptr + out, value, mask=(line < T)[:, None] & (column < F)[None, :])
