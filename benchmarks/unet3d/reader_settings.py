"""How training volumes are dealt, kept and augmented: the section ``reader`` of a recipe."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from common.ranges import require

CachePlace = Literal["auto", "device", "host"]
Variant = Literal["reference", "nvidia"]


@dataclass(frozen=True)
class ReaderSettings:
    """What the rules leave open.

    Attributes:
        shares: parts of the training set that never mix. With one for each replica, a replica reads and keeps its own
            volumes only; with 1, every replica may meet every volume; 0: one for each replica where that divides the
            volumes, else 1. Shares and seed decide on the order, the number of replicas does not.
        cache: where volumes are kept: on the ``device``, or in ``host`` memory, from which the CPU cuts the crops;
            ``auto``: on the device where they fit. The crops are the same.
        cache_gb: how much of a GPU's memory ``auto`` may take, in 10^9 bytes; 0 for half of what is free.
        cache_dtype: of the images there: ``fp32``, or that of the ``training``, which halves them.
        threads: that read volumes, and that cut crops in host memory.
        brightness: ``reference`` multiplies intensities by 1 + f, ``nvidia`` by f; f is uniform in [0.7, 1.3].
        noise: ``reference`` draws the standard deviation from [0, 0.1], with ``nvidia`` it is 0.1.
        augment: implementation of the augmentation.
    """

    shares: int
    cache: CachePlace
    cache_gb: float
    cache_dtype: Literal["fp32", "training"]
    threads: int
    brightness: Variant
    noise: Variant
    augment: str

    def __post_init__(self) -> None:
        require(
            "reader",
            self,
            shares=(self.shares >= 0, "a number of shares, or 0 to have it chosen"),
            cache_gb=(0 <= self.cache_gb < math.inf, "finite and not negative"),
            threads=(self.threads >= 1, "at least 1"),
        )
