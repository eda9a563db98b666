"""How ``kernels.cu`` divides the rows of a batch and the units of a layer over the multiprocessors of a GPU."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from enum import IntEnum
from typing import NamedTuple

TILE_ROWS = 64
"""Of one product of a warpgroup."""
MOST_ROWS = 256
"""That one launch takes."""
THREADS = 256
_BARRIER_BYTES = 16
BUFFERS = 4
"""Of what blocks hand to one another, which take turns."""
_TILES = 2
_COLUMNS = 128
"""More would leave a thread without registers for its sums."""
_DEPTH = 16
_UNITS = 8
_PAIR_BYTES = 1024
"""Of a pair of sums of all threads of a warpgroup."""
_READ, _READ_ALONE = 5.5e6, 8e4
"""Bytes a microsecond out of the L2 cache, of all multiprocessors and of one."""
_FLOPS = 7e6
"""A microsecond, of a multiprocessor."""
_SHARED = 2e5
"""Bytes a microsecond through the shared memory of a multiprocessor."""
_CLUSTER_BARRIER, _LATENCY, _INSTRUCTION = 0.4, 0.5, 0.016
"""Microseconds; the last two of the L2 cache and of a product of 16 columns of K."""


class Wait(IntEnum):
    """How blocks know that what others make is there, see ``kernels.cu``."""

    COUNT = 0
    LOOK = 1
    LOAD = 2


class Plan(NamedTuple):
    """A division.

    Attributes:
        backward: which way.
        width: H.
        groups: of rows, that know nothing of one another.
        rows: of a group at most.
        units: of a block.
        cluster: blocks that divide the sum of a product.
        wait: how blocks wait for one another.
        asynchronous: whether blocks of a cluster send sums by stores that count themselves, see ``kernels.cu``.

    The last two make no difference to the result. What stands here is what a training step was measured with.
    """

    backward: bool
    width: int
    groups: int
    rows: int
    units: int
    cluster: int
    wait: Wait = Wait.COUNT
    asynchronous: bool = False

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
        return self.columns * (self.inner // self.cluster) * 2 + self.exchanged_bytes + _BARRIER_BYTES

    @property
    def fresh_words(self) -> int:
        """Of 4 bytes, of what blocks hand to one another."""
        return BUFFERS * self.groups * self.tiles * TILE_ROWS * self.inner // 2

    @property
    def microseconds(self) -> float:
        """What a frame takes about, beside what it takes with every division: an estimate, for their order only."""
        read = self.rows * self.inner // self.cluster * 2
        loads = max(read * self.blocks / _READ, read / _READ_ALONE)
        products = TILE_ROWS * self.columns * (self.inner // self.cluster) * 2 / _FLOPS
        products = self.tiles * max(products, 2 * self.chunks * _INSTRUCTION)
        exchange = 2 * self.tiles * self.exchanged_bytes / _SHARED + self.tiles * (self.cluster > 1) * _CLUSTER_BARRIER
        again = (-(-self.chunks // _DEPTH) - 1) * self.tiles * _LATENCY
        waits = {Wait.COUNT: 3 * _LATENCY, Wait.LOOK: 2 * _LATENCY, Wait.LOAD: _LATENCY + loads * self.rows / TILE_ROWS}
        return max(loads, products) + exchange + again + waits[self.wait]

    def macros(self, bfloat: bool) -> dict[str, int]:
        """What the source is compiled with."""
        return {
            "HIDDEN": self.width, "UNITS": self.units, "CLUSTER": self.cluster, "GROUP_BLOCKS": self.group_blocks,
            "ROWS": self.rows, "TILES": self.tiles, "DEPTH": self.depth, "BFLOAT": int(bfloat),
            "WAIT": int(self.wait), "ASYNC": int(self.asynchronous), "BACKWARD": int(self.backward),
        }  # fmt: skip


def plans(
    backward: bool, width: int, batch: int, multiprocessors: int, shared_bytes: int, every: bool = False
) -> list[Plan]:
    """All divisions that fit, the fastest first.

    Args:
        backward: which way.
        width: H, a multiple of 64.
        batch: rows, 1 ... ``MOST_ROWS``.
        multiprocessors: of the GPU.
        shared_bytes: that a block may have.
        every: with every way of waiting and of sending sums, too.
    """
    ways = [(wait, sends) for wait in Wait for sends in (False, True)] if every else [(Wait.COUNT, False)]

    def fitting() -> Iterator[Plan]:
        for groups in range(1, -(-batch // 16) + 1):
            rows = -(-batch // (16 * groups)) * 16
            if -(-batch // rows) != groups or rows > _TILES * TILE_ROWS:
                continue
            for cluster, (wait, sends) in itertools.product((1, 2, 4, 8), ways):
                for units in range(_UNITS, width + 1, _UNITS):
                    plan = Plan(backward, width, groups, rows, units, cluster, wait, sends)
                    if (
                        (wait != Wait.LOAD or plan.depth == plan.chunks)
                        and (cluster > 1 or not sends)
                        and plan.inner % (TILE_ROWS * cluster) == 0
                        and plan.columns <= _COLUMNS
                        and plan.blocks <= multiprocessors
                        and plan.shared_bytes <= shared_bytes
                    ):
                        yield plan

    return sorted(fitting(), key=lambda plan: (plan.microseconds, plan.blocks, plan.wait, plan.asynchronous))
