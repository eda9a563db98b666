"""Gather the weights that the ranks of a shard have updated, bucket by bucket, while the forward pass already runs.

An update leaves each rank with the new weights of its shard only. The gathers start at the beginning of the *next*
iteration, in the order in which the forward pass reads the weights, and each block of the model waits for its weights
just before it runs. A captured iteration therefore waits for every gather that it starts. Between iterations the
model has the weights of the update before the last; :meth:`WeightGatherer.gather` brings it up to date.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from common.optim.partition import Partition, Piece

AHEAD = 2
"""A block that runs starts the gathers of the block this many positions later.

Starting all gathers at once was slow: behind a hundred captured gathers, the first block was seen to wait until most
were done, probably because a GPU's queue holds only so many kernels, in capture order. Measurements:
docs/performance.md, "Every workload on two GPUs".
"""


@dataclass(frozen=True)
class _Gather:
    """The gather of one bucket from ``piece`` into ``weights``.

    ``readers`` are the indices of the blocks that read it; -1 stands for other code.
    """

    piece: Tensor
    weights: Tensor
    readers: frozenset[int]


class WeightGatherer:
    """Gathers shards into the flat parameter buffers.

    Args:
        group: ranks that share the shards; None if there is nothing to gather.
        blocks: parts of the model by name, in the order of the forward pass. A block's parameters must be read only
            while it runs, or later. Parameters outside all blocks are waited for at once. Without blocks nothing is
            overlapped. For a block that is compiled alone, give the result of ``torch.compile(block)``.

    Attributes:
        overlapped: whether gathers run at the start of the next iteration; else they run right after the update.
        sends: False starts no gather, so that the model keeps its weights; for measurements only.

    Raises:
        ValueError: a block is a container that never runs itself.
    """

    def __init__(
        self,
        partitions: Sequence[Partition],
        group: dist.ProcessGroup | None,
        blocks: Sequence[tuple[str, nn.Module]],
    ) -> None:
        self._group = group
        self.overlapped = group is not None and bool(blocks)
        self.sends = True
        self._started = 0  # number of gathers started, in their order
        self._works: dict[int, dist.Work] = {}
        self._hooks: list[RemovableHandle] = []
        self._gathers: list[_Gather] = []
        self._blocks = tuple(blocks) if group is not None else ()
        if group is None:
            return
        blocks_of: dict[int, set[int]] = {}
        for block, (name, module) in enumerate(blocks):
            if isinstance(module, nn.ModuleList | nn.ModuleDict):
                raise ValueError(f"block {name!r} is a {type(module).__name__}, which never runs: name its members")
            for parameter in module.parameters():
                blocks_of.setdefault(id(parameter), set()).add(block)
        found = [_gather_of(partition, piece, blocks_of) for partition in partitions for piece in partition.pieces]
        self._gathers = sorted(found, key=lambda gather: min(gather.readers))
        self._started = len(self._gathers)
        for block, (_, module) in enumerate(blocks):
            self._hooks.append(self._register(block, module))

    def begin(self) -> None:
        """Start the gathers at the beginning of an iteration.

        Raises:
            RuntimeError: a block was compiled in place, so the hook that waits would be compiled with it.
        """
        for name, module in self._blocks:
            if module._compiled_call_impl is not None:
                raise RuntimeError(
                    f"block {name!r} was compiled in place: its weights cannot be waited for; use what "
                    "torch.compile(block) returns, in the model and in blocks"
                )
        if self.overlapped:
            self.join()  # an aborted iteration may have left some, which other ranks may have started already
            self._started = 0
            self._start(AHEAD - 1)
            self._wait_for(-1)

    def start_all(self) -> None:
        """Start all remaining gathers. Call this before other collectives of the group."""
        self._start(len(self._blocks))

    def join(self) -> None:
        """Start all remaining gathers, and wait for those that no block has waited for."""
        self.start_all()
        for at in list(self._works):
            self._works.pop(at).wait()

    def gather(self) -> None:
        """Gather everything and wait for it; on a GPU the current stream waits."""
        self.join()
        self._started = 0
        self.join()

    def close(self) -> None:
        """Remove the hooks from the blocks."""
        for hook in self._hooks:
            hook.remove()
        self._hooks = []

    def _register(self, block: int, module: nn.Module) -> RemovableHandle:
        def enter(*_: object) -> None:
            self._start(block + AHEAD)
            self._wait_for(block)

        return module.register_forward_pre_hook(enter)

    def _start(self, block: int) -> None:
        """Start the remaining gathers that ``block`` or an earlier block reads first."""
        if not self.sends:
            return
        while self._started < len(self._gathers) and min(self._gathers[self._started].readers) <= block:
            gather = self._gathers[self._started]
            work = dist.all_gather_into_tensor(gather.weights, gather.piece, group=self._group, async_op=True)
            assert work is not None  # this rank is a member of the group
            self._works[self._started] = work
            self._started += 1

    def _wait_for(self, block: int) -> None:
        for at in [at for at in self._works if block in self._gathers[at].readers]:
            self._works.pop(at).wait()


def wait_for_weights(block: nn.Module) -> None:
    """Wait for the weights of a block if other code reads them before the block runs.

    Like the block itself, this starts gathers of later blocks, so all ranks must call it in the same order.
    """
    for hook in block._forward_pre_hooks.values():
        hook(block, ())


def _gather_of(partition: Partition, piece: Piece, blocks_of: Mapping[int, set[int]]) -> _Gather:
    readers = [blocks_of.get(id(segment.parameter), {-1}) for segment in piece.bucket.segments]
    weights = partition.buffer.parameters[piece.bucket.start : piece.bucket.stop]
    return _Gather(partition.shard.parameters[piece.place], weights, frozenset().union(*readers))
