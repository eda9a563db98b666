"""How ``kernels.cu`` divides the rows of a batch and the units of a layer over the multiprocessors of a GPU."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from enum import IntEnum
from typing import NamedTuple

TILE_ROWS = 64
"""Of one product of a warpgroup."""
MOST_ROWS = 256
"""That one launch takes."""
THREADS = 256
BUFFERS = 4
"""Of what blocks hand to one another, which take turns."""
_TILES = 2
_COLUMNS = 128
"""More would leave a thread without registers for its sums."""
_DEPTH = 16
_UNITS = 8
_PAIR_BYTES = 1024
"""Of a pair of sums of all threads of a warpgroup."""
_READ, _READ_ALONE = 10e6, 8.4e4
"""Bytes a microsecond out of the L2 cache, of all multiprocessors and of one."""
_FLOPS = 3.8e6
"""A microsecond, of a multiprocessor, with what it does to their result."""
_FRAME, _CLUSTER, _COUNT, _AGAIN = 0.86, 0.62, 0.79, 0.16
"""Microseconds: of a frame, and of a product for every time that a cluster halves its sum; of a frame whose blocks
wait by counting; of a product whose threads load once more than their registers hold."""


_MOST_MEASURED = 2
"""Blocks of a cluster of all divisions that were fastest; larger ones stand behind these."""


class Wait(IntEnum):
    """How blocks know that what others make is there, see ``kernels.cu``."""

    COUNT = 0
    LOAD = 1


class Plan(NamedTuple):
    """A division.

    Attributes:
        backward: which way.
        width: H.
        groups: of rows, that know nothing of one another.
        rows: of a group at most.
        units: of a block.
        cluster: blocks that divide the sum of a product.
        wait: how blocks wait for one another, which makes no difference to the result.
    """

    backward: bool
    width: int
    groups: int
    rows: int
    units: int
    cluster: int
    wait: Wait = Wait.COUNT

    @property
    def group_blocks(self) -> int:
        """Blocks of a group."""
        return self.cluster * -(-self.width // (self.cluster * self.units))

    @property
    def blocks(self) -> int:
        """Of the grid."""
        return self.groups * self.group_blocks

    @property
    def tiles(self) -> int:
        """Products of a warpgroup at every frame."""
        return -(-self.rows // TILE_ROWS)

    @property
    def inner(self) -> int:
        """What a product sums over in all: the units before, or backward the gates behind."""
        return 4 * self.width if self.backward else self.width

    @property
    def own_columns(self) -> int:
        """Of a product's result that a block keeps."""
        return self.units if self.backward else 4 * self.units

    @property
    def columns(self) -> int:
        """Of a product's result."""
        return self.own_columns * self.cluster

    @property
    def chunks(self) -> int:
        """Chunks of 32 columns that a thread's warpgroup multiplies."""
        return self.inner // self.cluster // TILE_ROWS

    @property
    def depth(self) -> int:
        """Chunks of 32 columns that a thread loads ahead: what its registers hold."""
        return min(self.chunks, _DEPTH)

    @property
    def exchanged_bytes(self) -> int:
        """Sums of one product that the warpgroups of a block get from others."""
        return 2 * (2 * self.cluster - 1) * (self.own_columns // 8) * _PAIR_BYTES

    @property
    def shared_bytes(self) -> int:
        """Shared memory of a block."""
        return self.columns * (self.inner // self.cluster) * 2 + self.exchanged_bytes

    @property
    def fresh_words(self) -> int:
        """Of 4 bytes, of what blocks hand to one another."""
        return BUFFERS * self.groups * self.tiles * TILE_ROWS * self.inner // 2

    @property
    def microseconds(self) -> float:
        """What a frame takes on an H200, an estimate whose numbers were fitted to 33 measured divisions.

        Of 1,024 units and 192, 32 and 8 rows it misses the times by up to a quarter; the first of those that
        :func:`plans` gives is the fastest that was measured.
        """
        read = self.rows * self.inner // self.cluster * 2
        loads = max(read * self.blocks / _READ, read / _READ_ALONE)
        product = TILE_ROWS * self.columns * (self.inner // self.cluster) * 2 / _FLOPS
        product += math.log2(self.cluster) * _CLUSTER + (-(-self.chunks // self.depth) - 1) * _AGAIN
        return _FRAME + loads + (self.wait == Wait.COUNT) * _COUNT + self.tiles * product

    def macros(self, bfloat: bool) -> dict[str, int]:
        """What the source is compiled with."""
        return {
            "HIDDEN": self.width, "UNITS": self.units, "CLUSTER": self.cluster, "GROUP_BLOCKS": self.group_blocks,
            "ROWS": self.rows, "TILES": self.tiles, "DEPTH": self.depth, "BFLOAT": int(bfloat),
            "WAIT": int(self.wait), "BACKWARD": int(self.backward),
        }  # fmt: skip


def plans(
    backward: bool, width: int, batch: int, multiprocessors: int, shared_bytes: int, every: bool = False
) -> list[Plan]:
    """All divisions that fit, the fastest by estimate first.

    Forward blocks wait with ``LOAD``, where a thread has registers for all that it loads: it was faster with every
    division that was measured. Backward they count: there a wide layer can load all with clusters of 4 and 8 alone.

    Args:
        backward: which way.
        width: H, a multiple of 64.
        batch: rows, 1 ... ``MOST_ROWS``.
        multiprocessors: of the GPU.
        shared_bytes: that a block may have.
        every: with both ways of waiting.
    """

    def fitting() -> Iterator[Plan]:
        for groups in range(1, -(-batch // 16) + 1):
            rows = -(-batch // (16 * groups)) * 16
            if -(-batch // rows) != groups or rows > _TILES * TILE_ROWS:
                continue
            for cluster, units in itertools.product((1, 2, 4, 8), range(_UNITS, width + 1, _UNITS)):
                plan = Plan(backward, width, groups, rows, units, cluster)
                if (
                    plan.inner % (TILE_ROWS * cluster) == 0
                    and plan.columns <= _COLUMNS
                    and plan.blocks <= multiprocessors
                    and plan.shared_bytes <= shared_bytes
                ):
                    loads_all = plan.depth == plan.chunks
                    if every or backward or not loads_all:
                        yield plan
                    if loads_all and (every or not backward):
                        yield plan._replace(wait=Wait.LOAD)

    return sorted(
        fitting(), key=lambda plan: (plan.cluster > _MOST_MEASURED, plan.microseconds, plan.blocks, plan.wait)
    )
