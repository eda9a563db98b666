"""Reader of the prepared format: a file of volumes and a file of parameters for each split, mapped into memory."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from common.data import manifest
from common.data.batches import Block, HostBatch
from common.data.order import EpochStream, EvalShard
from common.distributed.layout import Layout

FORMAT = "volumes-npy/1"
PREPARE_COMMAND = "mlperf-suite prepare benchmark=toy --raw-dir RAW --data-dir DATA"


class Volumes:
    """A split in ``root``; batches in pinned memory are copied to a GPU while it computes."""

    def __init__(self, root: Path, split: str, dtype: torch.dtype, pin_memory: bool) -> None:
        self.volume_NV = np.load(root / f"{split}_volumes.npy", mmap_mode="r")
        self.parameters_NP = np.load(root / f"{split}_parameters.npy", mmap_mode="r")
        self._dtype, self._pin = dtype, pin_memory

    def __len__(self) -> int:
        return len(self.volume_NV)

    def take(self, samples: list[int]) -> dict[str, Tensor]:
        """Return the samples as one batch."""
        made = {"volume": self.volume_NV[samples], "parameters": self.parameters_NP[samples]}
        tensors = {name: torch.from_numpy(array).to(self._dtype) for name, array in made.items()}
        return {name: tensor.pin_memory() if self._pin else tensor for name, tensor in tensors.items()}


class TrainSource:
    """Training micro-batches of one replica; a :class:`common.data.batches.DataSource`."""

    def __init__(self, root: Path, dtype: torch.dtype, layout: Layout, micro_batch: int, accumulation: int) -> None:
        found = manifest.read(root, FORMAT, PREPARE_COMMAND)
        self.train_samples, self.eval_samples = found.counts["train_samples"], found.counts["eval_samples"]
        self.synthetic = found.synthetic
        self._volumes = Volumes(root, "train", dtype, layout.device.type == "cuda")
        replicas, replica = layout.size("dp"), layout.coordinate("dp")
        seed = layout.shared_generator("order").initial_seed()
        self._stream = EpochStream(self.train_samples, micro_batch, accumulation, replicas, replica, seed)

    def batches(self, block: Block, start: int = 0) -> Iterator[HostBatch]:
        """Yield the micro-batches of ``block`` from position ``start``."""
        for position in range(start, self._stream.micro_batches(block)):
            samples = [sample for _, sample in self._stream.samples(block, position)]
            yield HostBatch(self._volumes.take(samples), self._stream.micro_batch * self._stream.replicas, position)

    def close(self) -> None:
        """Do nothing: there are no threads."""


def eval_batches(root: Path, dtype: torch.dtype, layout: Layout, batch: int) -> tuple[int, Iterator[dict[str, Tensor]]]:
    """Return the size of the evaluation set and this rank's batches; the last ones repeat volumes with weight 0."""
    volumes = Volumes(root, "eval", dtype, pin_memory=False)
    shard = EvalShard(len(volumes), batch, layout.size("dp"), layout.coordinate("dp"))

    def read() -> Iterator[dict[str, Tensor]]:
        for number in range(shard.batches):
            first = shard.start + number * batch
            samples = [min(first + slot, len(volumes) - 1) for slot in range(batch)]
            weight_B = (torch.arange(batch) < shard.valid(number)).to(dtype)
            yield {**volumes.take(samples), "weight": weight_B}

    return len(volumes), read()
