"""FP8 by its definition in NumPy, and comparison of FP8 tensors.

Codes are decoded from their bits; rounding searches the nearest code (Micikevicius et al., arXiv:2209.05433, table 1).
"""

from __future__ import annotations

import numpy as np
import torch

from common.ops.fp8_cast.reference import Fp8Tensor, Scaling

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
LARGEST = {E4M3: 448.0, E5M2: 57344.0}
NAN_CODE = 0x7F


def _decoded(exponent_bits: int, mantissa_bits: int, last: int) -> np.ndarray:
    """Return the values of the codes 0 to ``last``: all finite non-negative values."""
    codes = np.arange(last + 1)
    exponent, mantissa = codes >> mantissa_bits, codes & ((1 << mantissa_bits) - 1)
    bias = (1 << (exponent_bits - 1)) - 1
    fraction = mantissa / (1 << mantissa_bits)
    return np.where(exponent > 0, (1 + fraction) * 2.0 ** (exponent - bias), fraction * 2.0 ** (1 - bias))


CODES = {E4M3: _decoded(4, 3, 0x7E), E5M2: _decoded(5, 2, 0x7B)}


def encode(values: np.ndarray, dtype: torch.dtype) -> np.ndarray:
    """Return the bytes of ``values``, rounded to nearest even and saturated. Values that are not finite become NaN."""
    table = CODES[dtype]
    finite = np.isfinite(values)
    magnitude = np.minimum(np.abs(np.where(finite, values, 0.0)).astype(np.float64), table[-1])
    above = np.searchsorted(table, magnitude)
    below = np.maximum(above - 1, 0)
    up, down = table[above] - magnitude, magnitude - table[below]
    code = np.where((up < down) | ((up == down) & (above % 2 == 0)), above, below)
    code = np.where(table[above] == magnitude, above, code)
    signed = code + np.where(np.signbit(values), 0x80, 0)
    return np.where(finite, signed, NAN_CODE).astype(np.uint8)


def decode(bytes_: np.ndarray, dtype: torch.dtype) -> np.ndarray:
    """Return the float64 values of finite codes."""
    return CODES[dtype][bytes_ & 0x7F] * np.where(bytes_ & 0x80, -1.0, 1.0)


def scale_of(amax: float, dtype: torch.dtype) -> np.float32:
    """Return the scale that maps ``amax`` to the largest value."""
    return np.float32(LARGEST[dtype]) / np.float32(amax)


def first_scale(x: torch.Tensor, dtype: torch.dtype) -> np.float32:
    """Return the scale at the first use, from four times the amax of every ceil(rows / 256)-th row."""
    values = x.detach().float().numpy()
    return scale_of(4 * np.abs(values[:: -(-len(values) // 256)]).max(), dtype)


def quantised(x: torch.Tensor, scale: np.float32, dtype: torch.dtype) -> np.ndarray:
    """Return ``x`` after quantisation to FP8 at a scale, in float64."""
    scaled = x.detach().float().numpy() * np.float32(scale)
    return decode(encode(scaled, dtype), dtype) * np.float64(np.float32(1) / np.float32(scale))


def codes(x8: Fp8Tensor) -> torch.Tensor:
    """Return the indices of the codes in the order of their values."""
    byte = x8.data.view(torch.uint8).int()
    return torch.where(byte < 128, byte, 128 - byte)


def assert_same_fp8(
    found: Fp8Tensor | None,
    ours: Scaling | None,
    expected: Fp8Tensor | None,
    plain: Scaling | None,
    of: torch.dtype,
    noise: float = 1e-6,
) -> None:
    """Check that bytes are equal or, in a few places, neighbours, and that scales and given states are equal.

    Values up to ``noise`` times the largest value are not compared, because they may be differences of large terms.
    """
    assert found is not None
    assert expected is not None
    assert found.data.dtype == expected.data.dtype
    assert found.source.dtype == of
    assert found.source.shape == found.data.shape
    nans, expected_nans = (x8.data.float().isnan() for x8 in (found, expected))
    assert torch.equal(nans, expected_nans)
    sizes = torch.maximum(*(x8.data.float().abs().nan_to_num(0.0) for x8 in (found, expected)))
    apart = torch.where(sizes > noise * sizes.max(), (codes(found) - codes(expected)).abs(), 0)
    assert apart.max() <= 1
    assert apart.count_nonzero() <= max(1, apart.numel() // 100)
    assert (found.transposed is None) == (expected.transposed is None)
    if found.transposed is not None:
        assert torch.equal(found.transposed.view(torch.uint8), found.data.view(torch.uint8).t())
    torch.testing.assert_close(found.scale_inverse, expected.scale_inverse, rtol=1e-6, atol=0)
    if ours is not None and plain is not None:
        torch.testing.assert_close(ours.scale, plain.scale, rtol=1e-6, atol=0)
        assert not ours.pending.any()


def check_fp8(found: Fp8Tensor | None, values: torch.Tensor, state: Scaling, scale: float, dtype: torch.dtype) -> None:
    """Check bytes and scales of computed ``values``.

    At a first use, ``scale`` is 0, and the scale comes from four times the amax of every ceil(rows / 32)-th row.
    """
    assert found is not None
    values = values.float()
    used = np.float32(scale)
    if not scale:
        used = scale_of(4 * values[:: -(-len(values) // 32)].abs().max().item(), dtype)
    assert found.scale_inverse.item() == np.float32(1) / used
    np.testing.assert_array_equal(found.data.view(torch.uint8), encode(values.numpy() * used, dtype))
    assert state.scale.item() == scale_of(values.abs().max().item(), dtype)
