"""CRC-32C (Castagnoli; RFC 3720, section 12.1 and appendix B.4) in NumPy, a gigabyte in a few seconds.

The register of a CRC is linear over GF(2): after words w_0 ... w_{n-1} of 32 bits, lowest bit first, it is the sum of
``A^(n-i) w_i``, where A is the effect of 32 zero bits. So N = ``REGISTERS`` registers run in parallel: register k
takes words k, k + N, k + 2 N, ..., and each step multiplies by ``A^N``.
"""

from __future__ import annotations

from functools import cache

import numpy as np
from numpy.typing import NDArray

Words = NDArray[np.uint32]

REGISTERS = 1 << 14
"""Number of parallel registers: 64 KiB, which stay in a core's cache together with the tables."""

_POLYNOMIAL = 0x82F63B78  # reflected
_MASK_DELTA = 0xA282EAD8


def _after_bits(register: int, bits: int) -> int:
    for _ in range(bits):
        register = register >> 1 ^ (_POLYNOMIAL if register & 1 else 0)
    return register


def _apply(columns: Words, values: Words) -> Words:
    """Return the product of a matrix, given by its 32 columns, with each of ``values``."""
    product = np.zeros_like(values)
    for bit in range(32):
        product ^= columns[bit] * (values >> np.uint32(bit) & np.uint32(1))
    return product


@cache
def _power_of_two(exponent: int) -> Words:
    """Return the columns of ``A^(2^exponent)``."""
    if exponent == 0:
        return np.array([_after_bits(1 << bit, 32) for bit in range(32)], dtype=np.uint32)
    root = _power_of_two(exponent - 1)
    return _apply(root, root)


@cache
def _tables() -> tuple[Words, Words]:
    """Return ``A^REGISTERS`` times every low and every high half of a word."""
    columns, halves = _power_of_two(REGISTERS.bit_length() - 1), np.arange(1 << 16, dtype=np.uint32)
    return _apply(columns, halves), _apply(columns, halves << np.uint32(16))


def crc32c(data: bytes | NDArray[np.uint8]) -> int:
    """Return the CRC-32C of ``data``."""
    source = np.frombuffer(data, np.uint8) if isinstance(data, bytes) else data
    size = source.size
    if size < 4:
        register = 0xFFFFFFFF
        for byte in source.tolist():
            register = _after_bits(register ^ byte, 8)
        return register ^ 0xFFFFFFFF
    count = min(REGISTERS, 1 << (-(-size // 4) - 1).bit_length())
    padded = np.zeros(-(-size // (4 * count)) * 4 * count, np.uint8)
    padded[-size:] = source  # zero words before the data change nothing
    padded[-size : padded.size - size + 4] ^= 0xFF  # the same as the usual start value of the register
    rows = padded.view("<u4").reshape(-1, count)
    registers = rows[0].astype(np.uint32)
    if len(rows) > 1:
        low, high = _tables()
        for row in rows[1:]:
            registers = low[registers & np.uint32(0xFFFF)] ^ high[registers >> np.uint32(16)] ^ row
    # Until one register is left, add the first half, times the power of A by which it is ahead, to the second half.
    while registers.size > 1:
        half = registers.size // 2
        registers = _apply(_power_of_two(half.bit_length() - 1), registers[:half]) ^ registers[half:]
    return int(_apply(_power_of_two(0), registers)[0]) ^ 0xFFFFFFFF


def masked_crc32c(data: bytes | NDArray[np.uint8]) -> int:
    """Return the CRC in the form that TensorFlow stores: rotated right by 15 bits, plus a constant."""
    crc = crc32c(data)
    return ((crc >> 15 | crc << 17) + _MASK_DELTA) & 0xFFFFFFFF
