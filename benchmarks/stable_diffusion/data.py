"""Stable Diffusion's training data: prepared tars (:mod:`benchmarks.stable_diffusion.prepared`) to micro-batches.

A batch has ``moments`` (N, 2C, H, W) fp32 or bf16, as the tars have them; the captions, either ``context`` (N, T, K) of
the same dtype, as they were encoded, or ``tokens`` (N, T) int64; and ``sample_ids`` (N,) int64. These count the samples
of the whole training, of which noise and times are functions: a picture that comes again has others.

The index of a tar tells where any sample is, so that the buffer of :mod:`benchmarks.stable_diffusion.order` holds
numbers and no samples: memory is that of the batches that are read ahead, and any position is resumed at once.

Legend: N samples of a micro-batch, C channels of a latent, H its height, W its width, T tokens of a caption, K features
of one.
"""

from __future__ import annotations

import os
import threading
import weakref
from collections import OrderedDict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from benchmarks.stable_diffusion.config import StableDiffusionConfig
from benchmarks.stable_diffusion.formats import MEMBERS, SampleShape, decode_caption
from benchmarks.stable_diffusion.frozen.tokenizer import Tokenizer
from benchmarks.stable_diffusion.order import ResampledLane
from benchmarks.stable_diffusion.prepared import Prepared, open_prepared
from common.data.batches import Block, HostBatch
from common.data.order import MicroBatches
from common.data.threads import PendingBatch, SampleThreads
from common.distributed.layout import Layout
from common.errors import ConfigError, DataError

_VERIFY = "check the data with 'mlperf-suite verify benchmark=stable_diffusion --data-dir DATA'"
_PICTURE, _CAPTION = 0, 2  # columns of an index
_LEAST_OPEN = 16


class MomentsSource:
    """Training micro-batches of one replica; a :class:`common.data.batches.DataSource`.

    Args:
        prepared: the data.
        own: the workload's configuration.
        micro_batches: this replica's part of every global batch.
        seed: of the order.
        tokenizer: of captions that are wanted as tokens; None for encoded ones.
        pin_memory: of the tensors.
    """

    def __init__(
        self,
        prepared: Prepared,
        own: StableDiffusionConfig,
        micro_batches: MicroBatches,
        seed: int,
        tokenizer: Tokenizer | None,
        pin_memory: bool,
    ) -> None:
        counts = prepared.manifest.counts
        self.train_samples, self.eval_samples = counts["train_samples"], counts["eval_samples"]
        self.stand_in = prepared.manifest.stand_in
        self._prepared, self._micro_batches = prepared, micro_batches
        self._member, self._shape = MEMBERS[prepared.kind], sample_shape(own)
        self._tokenizer, self._tokenizing = tokenizer, threading.Lock()
        self._pin_memory = pin_memory
        lanes = [micro_batches.lane(step) for step in range(micro_batches.accumulation)]
        self._lanes = [ResampledLane(prepared.samples, own.reader.shuffle_buffer, seed, lane) for lane in lanes]
        self._open: OrderedDict[int, _Tar] = OrderedDict()
        self._most_open = max(_LEAST_OPEN, 2 * len(lanes))
        self._threads = SampleThreads(own.reader.threads, own.reader.prefetch)

    def batches(self, block: Block, start: int = 0) -> Iterator[HostBatch]:
        """Yield the micro-batches of ``block`` from position ``start``.

        Raises:
            DataError: a tar or its index is missing, cut off or damaged, or a sample isn't what it has to be.
        """
        mine = self._micro_batches
        first, positions = mine.first(block), range(start, mine.count(block))
        begun = (self._begin(first + position) for position in positions)
        nominal = mine.micro_batch * mine.replicas
        for position, tensors in zip(positions, self._threads.collect(begun), strict=True):
            yield HostBatch(tensors, samples=nominal, position=position)

    def close(self) -> None:
        """Stop the threads and close the tars."""
        self._threads.close()
        self._open.clear()

    def _begin(self, number: int) -> PendingBatch:
        """Begin this replica's micro-batch ``number``."""
        mine, count = self._micro_batches, self._micro_batches.micro_batch
        step, accumulation_step = mine.place(number)
        tar_N, row_N = self._lanes[accumulation_step].take(step * count, count)
        tars = [self._tar(int(tar)) for tar in tar_N]
        everywhere = mine.everywhere(number)
        tensors = self._empty(count)
        torch.arange(everywhere * count, (everywhere + 1) * count, out=tensors["sample_ids"])
        memory = {name: _as_numpy(tensor) for name, tensor in tensors.items()}

        def fill(slot: int) -> None:
            self._fill(memory, slot, tars[slot], int(row_N[slot]))

        return self._threads.begin(tensors, count, fill)

    def _empty(self, count: int) -> dict[str, Tensor]:
        captions = (count, *self._shape.captions)
        wanted = {"moments": ((count, *self._shape.moments), self._member.dtype), "sample_ids": ((count,), torch.int64)}
        if self._tokenizer is None:
            wanted["context"] = (captions, self._member.dtype)
        else:
            wanted["tokens"] = (captions[:2], torch.int64)
        pin = self._pin_memory
        return {name: torch.empty(shape, dtype=dtype, pin_memory=pin) for name, (shape, dtype) in wanted.items()}

    def _fill(self, memory: dict[str, NDArray[Any]], slot: int, tar: _Tar, row: int) -> None:
        """Read one sample into its place; by a thread."""
        name = f"{tar.path}, sample {row}"
        sample = self._member.decode(tar.read(row, _PICTURE), self._shape, name)
        memory["moments"][slot] = _as_numpy(sample.moments_CHW)
        if self._tokenizer is not None:
            caption = decode_caption(tar.read(row, _CAPTION), name)
            with self._tokenizing:  # it keeps words that it has seen
                memory["tokens"][slot] = self._tokenizer([caption])[0].numpy()
        else:
            assert sample.captions_TK is not None
            memory["context"][slot] = _as_numpy(sample.captions_TK)

    def _tar(self, number: int) -> _Tar:
        """A tar, one of those that are kept open. One that threads still read is closed once they have."""
        if number not in self._open:
            while len(self._open) >= self._most_open:
                self._open.popitem(last=False)
            self._open[number] = _Tar(self._prepared, number)
        self._open.move_to_end(number)
        return self._open[number]


class _Tar:
    """A tar, opened by the first thread that reads of it, and closed when nobody refers to it any more."""

    def __init__(self, prepared: Prepared, number: int) -> None:
        self.path = prepared.root / prepared.tars[number]
        self._prepared, self._number = prepared, number
        self._opening = threading.Lock()
        self._opened: tuple[int, NDArray[np.int64]] | None = None

    def read(self, row: int, column: int) -> bytes:
        """The member of sample ``row`` whose offset is in ``column`` of the index.

        Raises:
            DataError: tar or index are missing, cut off or damaged.
        """
        file, index = self._open()
        offset, size = index[row, column : column + 2].tolist()
        try:
            content = os.pread(file, size, offset)
        except OSError as error:
            raise DataError(f"{self.path} cannot be read: {error.strerror}") from error
        if len(content) != size:
            raise DataError(f"{self.path} is cut off: sample {row} ends at byte {offset + size}; {_VERIFY}")
        return content

    def _open(self) -> tuple[int, NDArray[np.int64]]:
        with self._opening:
            if self._opened is None:
                index = self._prepared.index(self._number)
                try:
                    file = os.open(self.path, os.O_RDONLY)
                except OSError as error:
                    raise DataError(f"{self.path} cannot be opened: {error.strerror}; {_VERIFY}") from error
                weakref.finalize(self, os.close, file)
                self._opened = (file, index)
            return self._opened


def sample_shape(own: StableDiffusionConfig) -> SampleShape:
    """What the samples of a configuration have to be."""
    facts = own.facts
    moments = (2 * facts.latent_channels, facts.latent_size, facts.latent_size)
    return SampleShape(moments, (facts.context_length, facts.context_width))


def open_train(
    root: Path,
    own: StableDiffusionConfig,
    layout: Layout,
    micro_batch: int,
    grad_accumulation_steps: int = 1,
    assets_dir: Path | None = None,
) -> MomentsSource:
    """Open the training data under ``root`` for this rank; after ``run_start``.

    Args:
        root: prepared data.
        own: the workload's configuration.
        layout: the replica (axis dp), the device and the seed.
        micro_batch: samples of a micro-batch of one replica.
        grad_accumulation_steps: micro-batches per step of a replica.
        assets_dir: where the tokenizer's merges are, which ``reader.captions=tokens`` needs.

    Raises:
        DataError: the manifest is missing or damaged, or the merges are.
        ConfigError: the data have no encoded captions though the reader is to deliver these, or there is no
            ``assets_dir`` though it is to deliver tokens.
    """
    prepared = open_prepared(root)
    tokenizer = None
    if own.reader.captions == "tokens":
        if assets_dir is None:
            raise ConfigError("assets_dir=null: reader.captions=tokens needs the tokenizer's merges in it")
        tokenizer = Tokenizer(assets_dir / own.assets.vocabulary, own.text.vocabulary, own.text.context)
    elif not MEMBERS[prepared.kind].encoded:
        raise ConfigError(
            f"reader.captions=encoded: {root} has .{prepared.kind} members, without encoded captions; prepare them, or "
            "use reader.captions=tokens"
        )
    replicas = MicroBatches(micro_batch, grad_accumulation_steps, layout.size("dp"), layout.index("dp"))
    return MomentsSource(prepared, own, replicas, layout.seed, tokenizer, layout.device.type == "cuda")


def _as_numpy(tensor: Tensor) -> NDArray[Any]:
    """The same memory; values that numpy has no type for as integers."""
    return (tensor.view(torch.int16) if tensor.dtype == torch.bfloat16 else tensor).numpy()
