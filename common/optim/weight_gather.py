"""Gather the weights that the ranks of a shard have updated, bucket by bucket, while the forward pass already runs.

An update leaves each rank with the new weights of its own shard. The gathers open the *next* iteration rather than
close this one: they start in the order in which the forward pass reads the weights, and each block of the model waits
for its own just before it runs. A captured iteration is complete in itself that way: every gather that it starts it
also waits for. Between iterations the model holds the weights of one update before; :meth:`WeightGatherer.gather`
brings it up to date.

They do not start all at once: behind a hundred captured gathers the first block, which needed one of them, was seen to
wait until most were done, probably because a GPU's queue holds only so many kernels, in the order of their capture. So
each block starts those of a block further on, which the graph then holds in between. What that gave:
docs/performance.md, "Every workload on two GPUs".
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from common.optim.partition import Partition, Piece

AHEAD = 2
"""Blocks from one that runs to the one whose gathers it starts: those of the block between are underway, or done."""


@dataclass(frozen=True)
class _Gather:
    """One bucket: this rank's piece, where the whole goes, and the blocks that read it (-1: it is read anywhere)."""

    piece: Tensor
    weights: Tensor
    readers: frozenset[int]


class WeightGatherer:
    """Gathers shards into the flat parameter buffers.

    Args:
        partitions: the flat buffers and this rank's shards of them.
        group: ranks that share the shards; None where there is nothing to gather.
        blocks: parts of the model by name, in the order of the forward pass; a block's parameters are read only while
            it runs, or after it. Those of no block are waited for at once. Without blocks nothing is overlapped. Of a
            block that is compiled alone, give what ``torch.compile(block)`` returned.

    Attributes:
        overlapped: whether gathers open the next iteration; else they close the update.
        sends: False starts no gather, so that the model keeps the weights that it has; for measurements only.

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
        self._started = 0  # of the gathers, in their order
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
        """Start the gathers that open an iteration.

        Raises:
            RuntimeError: a block was compiled in place, so that the hook that waits would be compiled along.
        """
        for name, module in self._blocks:
            if module._compiled_call_impl is not None:
                raise RuntimeError(
                    f"block {name!r} was compiled in place: its weights cannot be waited for; use what "
                    "torch.compile(block) returns, in the model and in blocks"
                )
        if self.overlapped:
            self.join()  # an iteration that was given up may have left some, and other ranks may have started them
            self._started = 0
            self._start(AHEAD - 1)
            self._wait_for(-1)

    def start_all(self) -> None:
        """Start what no block has started: to be called before other collectives of the group."""
        self._start(len(self._blocks))

    def join(self) -> None:
        """Wait for what no block has waited for, or even started."""
        self.start_all()
        for at in list(self._works):
            self._works.pop(at).wait()

    def gather(self) -> None:
        """Gather everything and wait for it; on a GPU it is the current stream that waits."""
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
        """Start what ``block`` and those before it read first, as far as it has not been started."""
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
    """Wait for the weights of a block where something else reads them before it runs.

    As the block itself does, this starts gathers of others: all ranks do it in one order.
    """
    for hook in block._forward_pre_hooks.values():
        hook(block, ())


def _gather_of(partition: Partition, piece: Piece, blocks_of: Mapping[int, set[int]]) -> _Gather:
    readers = [blocks_of.get(id(segment.parameter), {-1}) for segment in piece.bucket.segments]
    weights = partition.buffer.parameters[piece.bucket.start : piece.bucket.stop]
    return _Gather(partition.shard.parameters[piece.place], weights, frozenset().union(*readers))
