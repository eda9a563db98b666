"""Tables for the Triton kernels of the update rules: which thread block works on which part of a shard."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch
from torch import Tensor

from common.optim.shard import FRAGMENT_ALIGNMENT, Fragment


class BlockTables:
    """Blocks of equal size that cover fragments. No block contains parts of two fragments.

    Blocks also cover the padding behind a fragment. The padding is zero and stays zero, and including it keeps the
    mask aligned enough for vector loads.

    Args:
        fragments: fragments of one shard, or of several shards one after the other.
        block: elements per block.

    Attributes:
        count: number of blocks.
        first_blocks: index of the first block of each fragment, then the end of the last fragment's blocks; on the
            host.
        block_start: int64 (count,), offset of the block's first element.
        block_fragment: int32 (count,), index of the block's fragment.
        fragment_block: int32 (fragments + 1,), ``first_blocks`` on the device.
        fragment_tensor: int32 (fragments,), ``Fragment.tensor``.

    Raises:
        ValueError: a fragment does not start or stop on the alignment.
    """

    def __init__(self, fragments: Sequence[Fragment], block: int, device: torch.device) -> None:
        for fragment in fragments:
            if fragment.start % FRAGMENT_ALIGNMENT or fragment.stop % FRAGMENT_ALIGNMENT:
                raise ValueError(
                    f"the fragment of tensor {fragment.tensor} spans {fragment.start} to {fragment.stop}: "
                    f"both must be multiples of {FRAGMENT_ALIGNMENT}"
                )
        self._device = device
        starts = [range(f.start, f.stop, block) for f in fragments]
        self._owners = [index for index, blocks in enumerate(starts) for _ in blocks]
        self.count = len(self._owners)
        self.first_blocks = [0, *itertools.accumulate(len(blocks) for blocks in starts)]
        self.block_start = self.table([start for blocks in starts for start in blocks], torch.int64)
        self.block_fragment = self.table(self._owners, torch.int32)
        self.fragment_block = self.table(self.first_blocks, torch.int32)
        self.fragment_tensor = self.table([f.tensor for f in fragments], torch.int32)

    def by_block(self, values: Sequence[float], dtype: torch.dtype) -> Tensor:
        """Return a table (count,): for each block, the entry of ``values`` that belongs to its fragment."""
        return self.table([values[owner] for owner in self._owners], dtype)

    def table(self, values: Sequence[float], dtype: torch.dtype) -> Tensor:
        """Return ``values`` as a tensor on the device."""
        return torch.tensor(values, dtype=dtype, device=self._device)
