"""Training data of Stable Diffusion: micro-batches from prepared tars (:mod:`benchmarks.stable_diffusion.prepared`).

A batch has ``moments`` (N, 2C, H, W), fp32 or bf16 as in the tars; either encoded captions ``context`` (N, T, K) of
the same dtype, or ``tokens`` (N, T) int64; and ``sample_ids`` (N,) int64. The ids count samples over the whole
training. Noise and times are functions of them, so a picture that is repeated gets other noise.

The shuffle buffer of :mod:`benchmarks.stable_diffusion.tar_order` holds sample numbers instead of samples, because the
index of a tar gives the offset of any sample. Only prefetched batches need memory, and training can resume at any
position.

Legend: N samples of a micro-batch, C channels of a latent, H its height, W its width, T tokens of a caption, K
features of a token.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from benchmarks.stable_diffusion.config import StableDiffusionConfig
from benchmarks.stable_diffusion.formats import MEMBERS, SampleShape
from benchmarks.stable_diffusion.frozen.clip_tokenizer import ClipTokenizer
from benchmarks.stable_diffusion.prepared import PreparedLatents, open_prepared
from benchmarks.stable_diffusion.tar_order import ResampledStream
from common.data.batches import Block, HostBatch
from common.data.open_files import OpenFile, OpenFiles
from common.data.order import MicroBatches
from common.data.threads import PendingBatch, SampleThreads
from common.distributed.layout import Layout
from common.errors import ConfigError
from common.formats.tar_index import decode_text

_VERIFY = "check the data with 'mlperf-suite verify benchmark=stable_diffusion --data-dir DATA'"
_PICTURE, _CAPTION = 0, 2  # columns of an index
_LEAST_OPEN = 16


class MomentsSource:
    """Training micro-batches of one replica; a :class:`common.data.batches.DataSource`.

    Args:
        micro_batches: this replica's part of every global batch.
        seed: seed of the sample order.
        tokenizer: creates ``tokens``; None: batches have encoded captions.
        pin_memory: whether the tensors are in pinned memory.
    """

    def __init__(
        self,
        prepared: PreparedLatents,
        own: StableDiffusionConfig,
        micro_batches: MicroBatches,
        seed: int,
        tokenizer: ClipTokenizer | None,
        pin_memory: bool,
    ) -> None:
        counts = prepared.manifest.counts
        self.train_samples, self.eval_samples = counts["train_samples"], counts["eval_samples"]
        self.synthetic = prepared.manifest.synthetic
        self._micro_batches = micro_batches
        self._member, self._shape = MEMBERS[prepared.kind], sample_shape(own)
        self._tokenizer, self._tokenizing = tokenizer, threading.Lock()
        self._pin_memory = pin_memory
        streams = [micro_batches.stream(step) for step in range(micro_batches.accumulation)]
        self._streams = [ResampledStream(prepared.samples, own.reader.shuffle_buffer, seed, index) for index in streams]
        self._tars = OpenFiles(max(_LEAST_OPEN, 2 * len(streams)), lambda number: _Tar(prepared, number))
        self._threads = SampleThreads(own.reader.threads, own.reader.prefetch)

    def batches(self, block: Block, start: int = 0) -> Iterator[HostBatch]:
        """Yield ``block`` from position ``start``: ``moments``, ``sample_ids``, and ``context`` or ``tokens``.

        Raises:
            DataError: a tar or its index is missing, truncated or damaged, or a sample has a wrong format or shape.
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
        self._tars.close()

    def _begin(self, number: int) -> PendingBatch:
        """Start to read this replica's micro-batch ``number``."""
        mine, count = self._micro_batches, self._micro_batches.micro_batch
        step, accumulation_step = mine.step_of(number)
        tar_N, row_N = self._streams[accumulation_step].take(step * count, count)
        tars = [self._tars.file(int(tar)) for tar in tar_N]
        everywhere = mine.global_index(number)
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
        """Read one sample into its slot of the batch. Runs in a thread."""
        name = f"{tar.path}, sample {row}"
        sample = self._member.decode(tar.member(row, _PICTURE), self._shape, name)
        memory["moments"][slot] = _as_numpy(sample.moments_CHW)
        if self._tokenizer is not None:
            caption = decode_text(tar.member(row, _CAPTION), name)
            with self._tokenizing:  # the tokenizer caches words
                memory["tokens"][slot] = self._tokenizer([caption])[0].numpy()
        else:
            assert sample.captions_TK is not None
            memory["context"][slot] = _as_numpy(sample.captions_TK)


class _Tar(OpenFile):
    """A tar file with its index, which are read when they are needed."""

    def __init__(self, prepared: PreparedLatents, number: int) -> None:
        super().__init__(prepared.root / prepared.tars[number], _VERIFY)
        self._prepared, self._number = prepared, number
        self._indexing = threading.Lock()
        self._index: NDArray[np.int64] | None = None

    def member(self, row: int, column: int) -> bytes:
        """Return one member of sample ``row``; ``column`` is the index column with the member's offset.

        Raises:
            DataError: the tar or its index is missing, truncated or damaged.
        """
        with self._indexing:
            if self._index is None:
                self._index = self._prepared.index(self._number)
        offset, size = self._index[row, column : column + 2].tolist()
        return self.read(offset, size, f"sample {row}")


def sample_shape(own: StableDiffusionConfig) -> SampleShape:
    """Return the shapes that the samples must have."""
    facts = own.facts
    moments = (2 * facts.latent_channels, facts.latent_size, facts.latent_size)
    return SampleShape(moments, (facts.context_length, facts.context_width))


def open_train(
    root: Path,
    own: StableDiffusionConfig,
    layout: Layout,
    micro_batch: int,
    grad_accumulation_steps: int,
    assets_dir: Path | None,
) -> MomentsSource:
    """Open the prepared data in ``root`` for this rank; call it after ``run_start``.

    Args:
        layout: gives replica (axis ``dp``), device and seed.
        micro_batch: samples per micro-batch of one replica.
        grad_accumulation_steps: micro-batches per step of a replica.
        assets_dir: folder with the tokenizer's merges; required by ``reader.captions=tokens``.

    Raises:
        DataError: the manifest or the file of merges is missing or damaged.
        ConfigError: ``reader.captions=encoded``, but the data have no encoded captions.
    """
    prepared = open_prepared(root)
    tokenizer = None
    if own.reader.captions == "tokens":
        assert assets_dir is not None, "the workload needs it too"
        tokenizer = ClipTokenizer(assets_dir / own.assets.vocabulary, own.text.vocabulary, own.text.context)
    elif not MEMBERS[prepared.kind].encoded:
        raise ConfigError(
            f"reader.captions=encoded: {root} has .{prepared.kind} members, without encoded captions; prepare them, or "
            "use reader.captions=tokens"
        )
    replicas = MicroBatches(micro_batch, grad_accumulation_steps, layout.size("dp"), layout.index("dp"))
    return MomentsSource(prepared, own, replicas, layout.seed, tokenizer, layout.device.type == "cuda")


def _as_numpy(tensor: Tensor) -> NDArray[Any]:
    """Return a view as a numpy array; bfloat16, which numpy lacks, is viewed as int16."""
    return (tensor.view(torch.int16) if tensor.dtype == torch.bfloat16 else tensor).numpy()
