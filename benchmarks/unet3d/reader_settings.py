"""Options of the reader, which divides, caches and reads training volumes: the section ``reader`` of a recipe."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from common.config.ranges import AtLeast

CachePlace = Literal["auto", "device", "host"]


@dataclass(frozen=True)
class ReaderSettings:
    """Options of the reader that the rules do not fix.

    Attributes:
        shares: equal parts of the training set that never mix. With one share per replica, a replica reads and caches
            only its own volumes; with 1, every replica may need every volume; 0 chooses one per replica if that
            divides the volumes, otherwise 1. The order depends on shares and seed, not on the number of replicas.
        cache: location of the volumes: ``device``, or ``host`` memory, where the CPU cuts the crops; ``auto`` chooses
            the device if the volumes fit into half of its free memory. The crops are the same.
        threads: threads that read volumes; the same number cuts crops in host memory.
    """

    shares: Annotated[int, AtLeast(0, "a number of shares, or 0 to have it chosen")]
    cache: CachePlace
    threads: Annotated[int, AtLeast(1)]
