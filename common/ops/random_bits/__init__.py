"""Random bits that are a pure function of (seed, site, index): a hash instead of a generator.

In uint32, with a 64-bit seed::

    mix(x):   x ^= x >> 16;  x *= 0x7feb352d;  x ^= x >> 15;  x *= 0x846ca68b;  x ^= x >> 16
    k1        = mix(low(seed) ^ mix(site * 0x9e3779b9 + 1))
    k2        = mix(high(seed) + mix(k1 ^ site))
    hash(x)   = mix(mix(x ^ k1) ^ k2)

``mix`` is the integer hash "lowbias32" of C. Wellons' hash prospector. The bits need no state and no memory: backward,
other ranks, replayed graphs and all implementations compute the same bits from the seed on the device. Indices are
below 2**32. :mod:`common.ops.random_bits.kernels` is the same for Triton.

Pairs of independent normal numbers are computed from two words each by the method of Box and Muller. With u = (word +
1/2) / 2**32 in fp32, which is at most 1 and never 0::

    sqrt(-2 log u(2 index)) * (cos, sin)(2 pi u(2 index + 1))

Words and u are the same on all devices; logarithm, sine and cosine may be rounded differently.
"""
