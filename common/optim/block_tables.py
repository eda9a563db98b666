"""Tables of the update rules' Triton kernels: which block works on which part of a shard."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch
from torch import Tensor

from common.optim.shard import FRAGMENT_ALIGNMENT, Fragment


class BlockTables:
    """Blocks of equal size over fragments, none of which straddles two.

    Blocks cover the padding behind a fragment too: it is zero everywhere and stays zero, and the mask then keeps a
    granularity that allows vector loads.

    Args:
        fragments: of one shard, or of several, one after the other.
        block: elements for one program.
        device: of the tables.

    Attributes:
        count: how many blocks there are.
        first_blocks: on the host, the first block of each fragment, and the end of the last one's.
        block_start: int64 (count,), offset of the first element.
        block_fragment: int32 (count,), number of the fragment.
        fragment_block: int32 (fragments + 1,), ``first_blocks``.
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
        """A table (count,) of what each block's fragment has, of ``values`` by fragment."""
        return self.table([values[owner] for owner in self._owners], dtype)

    def table(self, values: Sequence[float], dtype: torch.dtype) -> Tensor:
        """``values`` on the device."""
        return torch.tensor(values, dtype=dtype, device=self._device)
