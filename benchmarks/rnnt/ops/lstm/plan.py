"""Plans for ``kernels.cu``: division of a batch's rows and a layer's units over the multiprocessors of a GPU."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from enum import IntEnum
from typing import NamedTuple

TILE_ROWS = 64
"""Rows of one product of a warpgroup."""
MOST_ROWS = 256
"""Maximum rows per launch."""
THREADS = 256
BUFFERS = 4
"""Exchange buffers between blocks, which are used in turn."""
_TILES = 2
_COLUMNS = 128
"""Maximum columns of a product; more would not leave enough registers for its sums."""
_DEPTH = 16
_UNITS = 8
_PAIR_BYTES = 1024
"""Bytes of a pair of sums of all threads of a warpgroup."""
_READ, _READ_ALONE = 10e6, 8.4e4
"""Bytes per microsecond from the L2 cache, for all multiprocessors together and for a single one."""
_FLOPS = 3.8e6
"""FLOPs per microsecond of one multiprocessor, including the processing of the result."""
_FRAME, _CLUSTER, _COUNT, _AGAIN = 0.86, 0.62, 0.79, 0.16
"""Microseconds of the time estimate.

They are: per frame; per product and halving of its sum by a cluster; per frame whose blocks wait by counting; per
product for each additional load when registers do not hold everything."""


_MOST_MEASURED = 2
"""Largest cluster of all plans that were fastest in measurements; plans with larger ones are ranked after these."""


class Wait(IntEnum):
    """How blocks detect that data of other blocks have arrived; see ``kernels.cu``."""

    COUNT = 0
    LOAD = 1


class LstmPlan(NamedTuple):
    """A division of the work.

    Attributes:
        backward: direction.
        width: H.
        groups: independent groups of rows.
        rows: maximum rows per group.
        units: units per block.
        cluster: blocks that divide the sum of a product.
        wait: how blocks wait for one another; does not affect the result.
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
        """Blocks per group."""
        return self.cluster * -(-self.width // (self.cluster * self.units))

    @property
    def blocks(self) -> int:
        """Blocks of the grid."""
        return self.groups * self.group_blocks

    @property
    def tiles(self) -> int:
        """Products of a warpgroup per frame."""
        return -(-self.rows // TILE_ROWS)

    @property
    def inner(self) -> int:
        """Length of a product's sum: the previous units, or in backward the gates of the next frame."""
        return 4 * self.width if self.backward else self.width

    @property
    def own_columns(self) -> int:
        """Columns of a product's result that a block keeps."""
        return self.units if self.backward else 4 * self.units

    @property
    def columns(self) -> int:
        """Columns of a product's result."""
        return self.own_columns * self.cluster

    @property
    def chunks(self) -> int:
        """Chunks of 32 columns that a thread's warpgroup multiplies."""
        return self.inner // self.cluster // TILE_ROWS

    @property
    def depth(self) -> int:
        """Chunks of 32 columns that a thread loads ahead, limited by its registers."""
        return min(self.chunks, _DEPTH)

    @property
    def exchanged_bytes(self) -> int:
        """Bytes of sums of one product that the warpgroups of a block receive from others."""
        return 2 * (2 * self.cluster - 1) * (self.own_columns // 8) * _PAIR_BYTES

    @property
    def shared_bytes(self) -> int:
        """Shared memory of a block, in bytes."""
        return self.columns * (self.inner // self.cluster) * 2 + self.exchanged_bytes

    @property
    def fresh_words(self) -> int:
        """Words of 4 bytes in the exchange buffers between blocks."""
        return BUFFERS * self.groups * self.tiles * TILE_ROWS * self.inner // 2

    @property
    def microseconds(self) -> float:
        """Estimated time of a frame on an H200; its constants were fitted to 33 measured plans.

        For 1,024 units and 192, 32 and 8 rows, the error is at most a quarter, and the first plan of :func:`plans` is
        the fastest that was measured.
        """
        read = self.rows * self.inner // self.cluster * 2
        loads = max(read * self.blocks / _READ, read / _READ_ALONE)
        product = TILE_ROWS * self.columns * (self.inner // self.cluster) * 2 / _FLOPS
        product += math.log2(self.cluster) * _CLUSTER + (-(-self.chunks // self.depth) - 1) * _AGAIN
        return _FRAME + loads + (self.wait == Wait.COUNT) * _COUNT + self.tiles * product

    def macros(self, bfloat: bool) -> dict[str, int]:
        """Return the macros for the compilation."""
        return {
            "HIDDEN": self.width, "UNITS": self.units, "CLUSTER": self.cluster, "GROUP_BLOCKS": self.group_blocks,
            "ROWS": self.rows, "TILES": self.tiles, "DEPTH": self.depth, "BFLOAT": int(bfloat),
            "WAIT": int(self.wait), "BACKWARD": int(self.backward),
        }  # fmt: skip


def plans(
    backward: bool, width: int, batch: int, multiprocessors: int, shared_bytes: int, every: bool = False
) -> list[LstmPlan]:
    """Return all plans that fit, the fastest by estimate first.

    Forward blocks wait with ``LOAD`` if a thread has registers for everything it loads; this was faster in all
    measurements. Backward blocks count, because a wide layer could use ``LOAD`` only with clusters of 4 and 8.

    Args:
        backward: direction.
        width: H, a multiple of 64.
        batch: rows, 1 ... ``MOST_ROWS``.
        multiprocessors: number of the GPU's multiprocessors.
        shared_bytes: maximum shared memory of a block.
        every: whether to include both ways of waiting.
    """

    def fitting() -> Iterator[LstmPlan]:
        for groups in range(1, -(-batch // 16) + 1):
            rows = -(-batch // (16 * groups)) * 16
            if -(-batch // rows) != groups or rows > _TILES * TILE_ROWS:
                continue
            for cluster, units in itertools.product((1, 2, 4, 8), range(_UNITS, width + 1, _UNITS)):
                plan = LstmPlan(backward, width, groups, rows, units, cluster)
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
