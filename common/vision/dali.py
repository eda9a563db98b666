"""DALI: availability, pipelines, and how their outputs become batches."""

from __future__ import annotations

import importlib
import io
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor

from common.data.batches import HostBatch
from common.data.order import SampleShard
from common.errors import ConfigError, DataError
from common.optional_packages import OptionalPackage
from common.vision.pictures import ReaderConfig

DALI = OptionalPackage("DALI", ("nvidia.dali:Pipeline", "nvidia.dali.fn", "nvidia.dali.types"))


def choose_reader(requested: str) -> str:
    """Return ``dali`` or ``torchvision`` for the configured reader; ``auto`` selects DALI if it is installed.

    Raises:
        ConfigError: DALI is requested and cannot be imported.
    """
    if requested == "torchvision":
        return "torchvision"
    reason = DALI.unavailable()
    if requested == "auto":
        return "dali" if reason is None else "torchvision"
    if reason is not None:
        raise ConfigError(
            f"reader.reader=dali: {reason}; install the extra dali-cu13 (or dali-cu12), or reader.reader=torchvision"
        )
    return "dali"


def new_pipeline(batch: int, device: torch.device, reader: ReaderConfig, seed: int = 0) -> Any:
    """Return a ``nvidia.dali.Pipeline`` without operators.

    Args:
        batch: samples per run of the pipeline.
        reader: number of CPU threads, and of batches that DALI prepares in advance.
        seed: seed of the random operators.
    """
    dali = importlib.import_module("nvidia.dali")
    index = None
    if device.type == "cuda":
        index = torch.cuda.current_device() if device.index is None else device.index
    return dali.Pipeline(
        batch_size=batch,
        num_threads=reader.threads,
        device_id=index,
        seed=seed,
        prefetch_queue_depth=reader.prefetch,
        exec_dynamic=True,
    )


class Runner(Protocol):
    """Object that returns the batches of a pipeline one after another."""

    def next(self) -> dict[str, Tensor]:
        """Return the next batch by tensor name."""
        ...

    def skip(self, runs: int) -> None:
        """Skip ``runs`` batches."""
        ...

    def close(self) -> None:
        """Release the pipeline."""
        ...


def decoder_arguments(
    device: torch.device, hardware_load: float, width: int, height: int, padding_bytes: int
) -> dict[str, Any]:
    """Return the arguments of DALI's image decoder. Pixels are not rotated according to EXIF.

    Args:
        device: device on which the decoded pictures are needed.
        hardware_load: fraction of the pictures that the GPU's JPEG engine decodes.
        width, height: size of the largest picture in pixels, for which memory is allocated in advance.
        padding_bytes: size of the decoder's device buffers and of its pinned buffers.
    """
    types = importlib.import_module("nvidia.dali").types
    common = {"output_type": types.RGB, "adjust_orientation": False}
    if device.type != "cuda":
        return {**common, "device": "cpu"}
    return {
        **common,
        "device": "mixed",
        "hw_decoder_load": hardware_load,
        "preallocate_width_hint": width,
        "preallocate_height_hint": height,
        "device_memory_padding": padding_bytes,
        "host_memory_padding": padding_bytes,
    }


def normalized(
    pictures: Any,
    side: int,
    mean: Sequence[float],
    std: Sequence[float],
    dtype: torch.dtype,
    mirror: Any = 0,
    **options: Any,
) -> Any:
    """Return the node that crops the centre, mirrors and normalises pictures, (side, side, C), fp16 or fp32.

    Args:
        pictures: node of pictures that are at least ``side`` px high and wide.
        mean, std: values per channel, on the scale 0 to 255.
        mirror: number or node; 1 flips left to right.
        options: further arguments of ``crop_mirror_normalize``.
    """
    dali = importlib.import_module("nvidia.dali")
    return dali.fn.crop_mirror_normalize(
        pictures,
        dtype=dali.types.FLOAT16 if dtype == torch.float16 else dali.types.FLOAT,
        output_layout="HWC",
        crop=[side, side],
        mean=list(mean),
        std=list(std),
        mirror=mirror,
        **options,
    )


def synthetic_jpegs(count: int, width: int, height: int) -> list[NDArray[np.uint8]]:
    """Return ``count`` times one encoded picture of ``width`` x ``height`` px, for warm-up."""
    buffer = io.BytesIO()
    Image.new("RGB", (width, height), (120, 60, 30)).save(buffer, "JPEG")
    return [np.frombuffer(buffer.getvalue(), np.uint8)] * count


class PipelineRunner:
    """Runs a built pipeline and returns its outputs as PyTorch tensors.

    Args:
        pipeline: a ``nvidia.dali.Pipeline`` with dense outputs (all samples have the same shape).
        dtypes: required dtype of each output; DALI has no bfloat16.
        path: the file that the pipeline reads, for messages.
    """

    def __init__(self, pipeline: Any, names: tuple[str, ...], dtypes: tuple[torch.dtype, ...], path: Path) -> None:
        self._pipeline = pipeline
        self._names = names
        self._dtypes = dtypes
        self._path = path

    def next(self) -> dict[str, Tensor]:
        """Return the next batch as name to PyTorch tensor, on the pipeline's device.

        Raises:
            DataError: DALI could not read or decode a sample; includes DALI's message.
        """
        outputs = self._run()
        # The copy runs on PyTorch's current stream. It releases DALI's buffer without waiting on the host.
        return {
            name: torch.from_dlpack(output.as_tensor()).to(dtype, copy=True)
            for name, dtype, output in zip(self._names, self._dtypes, outputs, strict=True)
        }

    def skip(self, runs: int) -> None:
        """Run the pipeline ``runs`` times and drop the outputs; its state afterwards is as if they had been used."""
        for _ in range(runs):
            self._run()

    def close(self) -> None:
        """Release the pipeline with its threads, files and buffers."""
        self._pipeline = None

    def _run(self) -> Any:
        try:
            if self._pipeline.device_id is None or self._pipeline.device_id < 0:
                return self._pipeline.run()
            return self._pipeline.run(torch.cuda.current_stream(self._pipeline.device_id))
        except RuntimeError as error:
            raise DataError(f"{self._path}: DALI cannot read on: {' '.join(str(error).split())}") from error


class SlicedBatches:
    """Cuts the batches of a pipeline into micro-batches, because DALI is slow with small batches.

    Returns every sample once. A batch of the pipeline has ``multiplier`` micro-batches.
    """

    def __init__(self, runner: Runner, micro_batch: int, multiplier: int) -> None:
        self._runner = runner
        self._micro_batch = micro_batch
        self._multiplier = multiplier
        self._slices: Iterator[dict[str, Tensor]] = iter(())
        self.delivered = 0
        """Number of micro-batches that were returned or skipped since the pipeline started."""

    def next(self) -> dict[str, Tensor]:
        """Return the next micro-batch by tensor name; raises the runner's errors."""
        tensors = next(self._slices, None)
        if tensors is None:
            self._slices = self._cut(self._runner.next())
            tensors = next(self._slices)
        self.delivered += 1
        return tensors

    def advance_to(self, micro_batches: int) -> None:
        """Skip micro-batches until ``micro_batches`` have been delivered in total.

        Raises:
            ValueError: more have been delivered already; a pipeline cannot go back.
        """
        if micro_batches < self.delivered:
            raise ValueError(f"{self.delivered} micro-batches are delivered already, {micro_batches} lies behind")
        while self.delivered < micro_batches and self.delivered % self._multiplier:
            self.next()
        runs = (micro_batches - self.delivered) // self._multiplier
        self._runner.skip(runs)
        self.delivered += runs * self._multiplier
        while self.delivered < micro_batches:
            self.next()

    def _cut(self, tensors: dict[str, Tensor]) -> Iterator[dict[str, Tensor]]:
        pieces = {name: tensor.split(self._micro_batch) for name, tensor in tensors.items()}
        for i in range(self._multiplier):
            yield {name: parts[i] for name, parts in pieces.items()}


class PipelineEvalSource:
    """Evaluation batches of one replica; a :class:`common.data.batches.EvalSource`.

    Args:
        runner: runner of a pipeline that restarts after ``shard.batches`` runs.
        shard: this replica's samples.
        finish: converts outputs of the pipeline, and the number of real samples, to the tensors of a batch. Real
            samples come before the padding.
    """

    def __init__(
        self,
        runner: Runner,
        shard: SampleShard,
        finish: Callable[[dict[str, Tensor], int], dict[str, Tensor]],
    ) -> None:
        self.eval_samples = shard.eval_samples
        self.shard = shard
        self._runner, self._finish = runner, finish
        self._delivered = 0

    def __len__(self) -> int:
        return self.shard.batches

    def __iter__(self) -> Iterator[HostBatch]:
        """Yield the batches of one evaluation; raises DataError if DALI could not read or decode a sample."""
        self._runner.skip(-self._delivered % len(self))  # the rest of an evaluation that ended early
        self._delivered = 0
        for batch in range(len(self)):
            tensors = self._runner.next()
            self._delivered += 1
            made = self._finish(tensors, self.shard.valid(batch))
            yield HostBatch(made, self.shard.batch * self.shard.replicas, batch, self.shard.key(batch))

    def close(self) -> None:
        """Release the pipeline."""
        self._runner.close()
