"""How training volumes are dealt, kept and augmented: the section ``reader`` of a recipe."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from common.config.ranges import AtLeast

CachePlace = Literal["auto", "device", "host"]


@dataclass(frozen=True)
class ReaderSettings:
    """What the rules leave open.

    Attributes:
        shares: parts of the training set that never mix. With one for each replica, a replica reads and keeps its own
            volumes only; with 1, every replica may meet every volume; 0: one for each replica where that divides the
            volumes, else 1. Shares and seed decide on the order, the number of replicas does not.
        cache: where volumes are kept: on the ``device``, or in ``host`` memory, from which the CPU cuts the crops;
            ``auto``: on the device where they fit into half of the memory that is free. The crops are the same.
        threads: that read volumes, and that cut crops in host memory.
    """

    shares: Annotated[int, AtLeast(0, "a number of shares, or 0 to have it chosen")]
    cache: CachePlace
    threads: Annotated[int, AtLeast(1)]
