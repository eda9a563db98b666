# mypy: allow-untyped-defs
"""Triton kernel that resamples utterances to their speed.

For 192 utterances of 12.3 s, it computes 38 million samples from 32 to 38 recorded ones each. The filter is computed
where it is used. Terms that depend only on the tap are shared by all samples of an utterance, and loads have fixed
distances from each other. Loops keep the code within the instruction cache.
"""

from __future__ import annotations

import triton
import triton.language as tl

_PI: tl.constexpr = tl.constexpr(3.141592653589793)
_SCALE: tl.constexpr = tl.constexpr(1.0 / 32768.0)


@triton.jit
def _sinc(x):
    """Return sin(x) / x for x from 0 to pi, by its series."""
    y = x * x
    last = 1.6059044e-10 + y * (-7.6471637e-13 + y * 2.8114573e-15)
    middle = -1.9841270e-4 + y * (2.7557319e-6 + y * (-2.5052108e-8 + y * last))
    return 1.0 + y * (-1.6666667e-1 + y * (8.3333333e-3 + y * middle))


@triton.jit
def _sine(x):
    """Return sin(x) for x from -pi / 2 to pi / 2, by its series."""
    y = x * x
    last = 2.7557319e-6 + y * (-2.5052108e-8 + y * 1.6059044e-10)
    return x * (1.0 + y * (-1.6666667e-1 + y * (8.3333333e-3 + y * (-1.9841270e-4 + y * last))))


@triton.jit
def _cosine(x):
    """Return cos(x) for x from 0 to 0.7, by its series."""
    y = x * x
    return 1.0 + y * (-0.5 + y * (4.1666667e-2 + y * (-1.3888889e-3 + y * 2.4801587e-5)))


@triton.jit
def _heard(sample_ptr, near, length, tap: tl.constexpr, INSIDE: tl.constexpr):
    """Return recorded samples at ``near + tap``, zero beyond the ends; with INSIDE all are within the recording."""
    if INSIDE:
        sample = tl.load(sample_ptr + tap)
    else:
        sample = tl.load(sample_ptr + tap, mask=(near + tap >= 0) & (near + tap < length), other=0)
    return sample.to(tl.float32)


@triton.jit
def _two_taps(
    left_ptr, right_ptr, left_near, right_near, length, fraction, shared, tap, step: tl.constexpr, INSIDE: tl.constexpr
):
    """Return the samples at taps -tap and tap + 1, each divided by its distance.

    ``shared`` is the inverse of the product of both distances.
    """
    left = _heard(left_ptr, left_near, length, -step, INSIDE) * shared * ((tap + 1.0) - fraction)
    right = _heard(right_ptr, right_near, length, 1 + step, INSIDE) * shared * (fraction + tap)
    return left, right


@triton.jit
def _inverse(square):
    """Return 1 / square for positive numbers of moderate size."""
    root = tl.rsqrt(square)
    return root * root


@triton.jit
def _turned(sine, cosine, turn_sine, turn_cosine):
    """Return sine and cosine of the sum of two angles."""
    return sine * turn_cosine + cosine * turn_sine, cosine * turn_cosine - sine * turn_sine


@triton.jit
def _far_taps_longer(
    sample_ptr,
    near,
    length,
    fraction,
    slow_sine,
    slow_cosine,
    turn_sine,
    turn_cosine,
    LOBES: tl.constexpr,
    GROUP: tl.constexpr,
    INSIDE: tl.constexpr,
):
    """Return the sums of :func:`_filtered` for a = pi, where sin(a j) is zero and cos(a j) is a sign."""
    left_sine, left_cosine = turn_sine, turn_cosine
    product = fraction - fraction * fraction  # plus tap * (tap + 1): the product of both taps' distances
    even = tl.zeros_like(fraction)
    even_cosine = tl.zeros_like(fraction)
    even_sine = tl.zeros_like(fraction)
    sign = turn_cosine * 0.0 + 1.0
    tl.static_assert((LOBES - 1) % GROUP == 0)
    for start in range(0, LOBES - 1, GROUP):
        for step in tl.static_range(1, GROUP + 1):
            tap = start + (step + 0.0)
            sign = -sign
            right_sine, right_cosine = _turned(left_sine, left_cosine, turn_sine, turn_cosine)
            left, right = _two_taps(
                sample_ptr - start, sample_ptr + start, near - start, near + start, length, fraction,
                _inverse(product + tap * (tap + 1.0)), tap, step, INSIDE,
            )  # fmt: skip
            even += sign * left
            even += sign * right
            even_cosine += (sign * left_cosine) * left
            even_cosine += (sign * right_cosine) * right
            even_sine -= (sign * left_sine) * left
            even_sine += (sign * right_sine) * right
            left_sine, left_cosine = right_sine, right_cosine
    return even + slow_cosine * even_cosine + slow_sine * even_sine


@triton.jit
def _six_sums(
    even,
    even_cosine,
    even_sine,
    odd,
    odd_cosine,
    odd_sine,
    left,
    right,
    left_sine,
    left_cosine,
    right_sine,
    right_cosine,
    slow_left_sine,
    slow_left_cosine,
    slow_right_sine,
    slow_right_cosine,
):
    """Update the six sums over taps: cos(a j) times 1, cos(w j) or sin(w j), and sin(a j) times the same."""
    even += left_cosine * left
    even -= right_cosine * right
    odd -= left_sine * left
    odd -= right_sine * right
    even_cosine += (left_cosine * slow_left_cosine) * left
    even_cosine -= (right_cosine * slow_right_cosine) * right
    odd_cosine -= (left_sine * slow_left_cosine) * left
    odd_cosine -= (right_sine * slow_right_cosine) * right
    even_sine -= (left_cosine * slow_left_sine) * left
    even_sine -= (right_cosine * slow_right_sine) * right
    odd_sine += (left_sine * slow_left_sine) * left
    odd_sine -= (right_sine * slow_right_sine) * right
    return even, even_cosine, even_sine, odd, odd_cosine, odd_sine


@triton.jit
def _far_taps_shorter(
    sample_ptr,
    near,
    length,
    fraction,
    cut,
    sine,
    slow_sine,
    slow_cosine,
    slow_turn_sine,
    slow_turn_cosine,
    SIDE: tl.constexpr,
    LOBES: tl.constexpr,
    GROUP: tl.constexpr,
    INSIDE: tl.constexpr,
):
    """Return the sums of :func:`_filtered` for ``cut`` below 1."""
    angle = cut * _PI
    turn_sine, turn_cosine = _sine(_PI - angle), -_sine(angle - 0.5 * _PI)
    left_sine, left_cosine = turn_sine, turn_cosine
    slow_left_sine, slow_left_cosine = slow_turn_sine, slow_turn_cosine
    product = fraction - fraction * fraction
    even = tl.zeros_like(fraction)
    even_cosine = tl.zeros_like(fraction)
    even_sine = tl.zeros_like(fraction)
    odd = tl.zeros_like(fraction)
    odd_cosine = tl.zeros_like(fraction)
    odd_sine = tl.zeros_like(fraction)
    tl.static_assert((LOBES - 2) % GROUP == 0)
    for start in range(0, LOBES - 2, GROUP):
        for step in tl.static_range(1, GROUP + 1):
            tap = start + (step + 0.0)
            right_sine, right_cosine = _turned(left_sine, left_cosine, turn_sine, turn_cosine)
            slow_right_sine, slow_right_cosine = _turned(
                slow_left_sine, slow_left_cosine, slow_turn_sine, slow_turn_cosine
            )
            left, right = _two_taps(
                sample_ptr - start, sample_ptr + start, near - start, near + start, length, fraction,
                _inverse(product + tap * (tap + 1.0)), tap, step, INSIDE,
            )  # fmt: skip
            even, even_cosine, even_sine, odd, odd_cosine, odd_sine = _six_sums(
                even, even_cosine, even_sine, odd, odd_cosine, odd_sine, left, right, left_sine, left_cosine,
                right_sine, right_cosine, slow_left_sine, slow_left_cosine, slow_right_sine, slow_right_cosine,
            )  # fmt: skip
            left_sine, left_cosine = right_sine, right_cosine
            slow_left_sine, slow_left_cosine = slow_right_sine, slow_right_cosine
    for tap in tl.static_range(LOBES - 1, SIDE):  # taps that may be beyond the filter's end
        right_sine, right_cosine = _turned(left_sine, left_cosine, turn_sine, turn_cosine)
        slow_right_sine, slow_right_cosine = _turned(slow_left_sine, slow_left_cosine, slow_turn_sine, slow_turn_cosine)
        shared = _inverse(product + tap * (tap + 1.0))
        left, right = _two_taps(sample_ptr, sample_ptr, near, near, length, fraction, shared, tap, tap, INSIDE)
        left = tl.where(cut * (fraction + tap) < LOBES, left, 0.0)
        right = tl.where(cut * ((tap + 1.0) - fraction) < LOBES, right, 0.0)
        even, even_cosine, even_sine, odd, odd_cosine, odd_sine = _six_sums(
            even, even_cosine, even_sine, odd, odd_cosine, odd_sine, left, right, left_sine, left_cosine,
            right_sine, right_cosine, slow_left_sine, slow_left_cosine, slow_right_sine, slow_right_cosine,
        )  # fmt: skip
        left_sine, left_cosine = right_sine, right_cosine
        slow_left_sine, slow_left_cosine = slow_right_sine, slow_right_cosine
    cosine = -_sine(angle * fraction - 0.5 * _PI)
    with_sine = even + slow_cosine * even_cosine + slow_sine * even_sine
    return sine * with_sine - cosine * (odd + slow_cosine * odd_cosine + slow_sine * odd_sine)


@triton.jit
def _filtered(
    sample_ptr,
    near,
    length,
    fraction,
    cut,
    SIDE: tl.constexpr,
    LOBES: tl.constexpr,
    LONGER: tl.constexpr,
    INSIDE: tl.constexpr,
):
    """Return the recorded samples times the filter around ``near + fraction``; LONGER is for ``cut`` = 1.

    With fraction f and tap j, the filter at f - j is sin(a (f - j)) / (a (f - j)) times (1 + cos(w (f - j))) / 2.
    With the angle addition formulas, sine and cosine of f are factors of sums over j. The terms of these sums are
    x[j]/(f-j) times products of sines and cosines of a j and w j, which are the same for a whole utterance. For near
    taps, where this would cancel, the filter is computed directly. Taps -j and j + 1 share one inverse.
    """
    angle, slow = cut * _PI, cut * (_PI / LOBES)
    slow_sine, slow_cosine = _sine(slow * fraction), _cosine(slow * fraction)
    slow_turn_sine, slow_turn_cosine = _sine(slow), _cosine(slow)
    ratio = _sinc(angle * fraction)
    total = ratio * (0.5 + 0.5 * slow_cosine) * _heard(sample_ptr, near, length, 0, INSIDE)
    window = 0.5 + 0.5 * (slow_cosine * slow_turn_cosine + slow_sine * slow_turn_sine)
    total += _sinc(angle * (1.0 - fraction)) * window * _heard(sample_ptr, near, length, 1, INSIDE)
    sine = angle * fraction * ratio
    if LONGER:
        far = sine * _far_taps_longer(
            sample_ptr, near, length, fraction, slow_sine, slow_cosine, slow_turn_sine, slow_turn_cosine, LOBES, 5,
            INSIDE,
        )  # fmt: skip
    else:
        far = _far_taps_shorter(
            sample_ptr, near, length, fraction, cut, sine, slow_sine, slow_cosine, slow_turn_sine, slow_turn_cosine,
            SIDE, LOBES, 7, INSIDE,
        )  # fmt: skip
    return (total + far * (0.5 / angle)) * cut


@triton.jit
def features_resample_kernel(
    audio_ptr,  # (A,) int16
    length_ptr,  # (B,) int64
    offset_ptr,  # (B,) int64
    speed_ptr,  # (B,) fp64
    resampled_ptr,  # (B,) int64
    signal_ptr,  # (B, N) fp32
    N,
    SIDE: tl.constexpr,  # taps on each side
    LOBES: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Write BLOCK samples of an utterance at its speed. Grid (ceil(N / BLOCK), B)."""
    row = tl.program_id(1)
    first = tl.program_id(0) * BLOCK
    samples = tl.load(resampled_ptr + row).to(tl.int32)
    if first < samples:
        length = tl.load(length_ptr + row).to(tl.int32)
        row_ptr = audio_ptr + tl.load(offset_ptr + row)
        speed = tl.load(speed_ptr + row)
        sample = first + tl.arange(0, BLOCK)
        out_ptr = signal_ptr + row.to(tl.int64) * N + sample
        used = sample < samples
        if speed == 1.0:
            tl.store(out_ptr, tl.load(row_ptr + sample, mask=used, other=0).to(tl.float32) * _SCALE, mask=used)
        else:
            wanted = tl.minimum(sample, samples - 1)
            at = wanted.to(tl.float64) * (1.0 / speed)
            floor = tl.floor(at)
            fraction = (at - floor).to(tl.float32)
            near = floor.to(tl.int32)
            sample_ptr = row_ptr + near
            cut = tl.minimum(speed, 1.0).to(tl.float32)
            inside = (tl.min(near, 0) >= SIDE) & (tl.max(near, 0) + SIDE < length)
            if speed > 1.0:
                if inside:
                    value = _filtered(sample_ptr, near, length, fraction, cut, SIDE, LOBES, True, True)
                else:
                    value = _filtered(sample_ptr, near, length, fraction, cut, SIDE, LOBES, True, False)
            else:
                if inside:
                    value = _filtered(sample_ptr, near, length, fraction, cut, SIDE, LOBES, False, True)
                else:
                    value = _filtered(sample_ptr, near, length, fraction, cut, SIDE, LOBES, False, False)
            tl.store(out_ptr, value * _SCALE, mask=used)
