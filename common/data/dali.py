"""What every DALI reader of the suite needs: is it there, making and running a pipeline, and sources of batches.

DALI runs ahead by its own queue; a batch arrives bound to PyTorch's current stream and is copied there into a tensor
of PyTorch's, so that DALI's buffer is free again and nothing waits on the host.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from common.data.batches import Block, HostBatch
from common.data.order import EpochStream, SampleShard, sample_generator
from common.errors import ConfigError, DataError
from common.optional_packages import OptionalPackage

DALI = OptionalPackage("DALI", ("nvidia.dali:Pipeline", "nvidia.dali.fn", "nvidia.dali.types"))


def choose_reader(requested: str) -> str:
    """``dali`` or ``torchvision``; ``auto`` is DALI where it is installed.

    Raises:
        ConfigError: DALI is asked for and cannot be imported.
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


def derived_seed(*key: int) -> int:
    """A 31-bit seed for DALI that depends on all of ``key``, e.g. (seed of the run, replica)."""
    return int(sample_generator(*key).integers(1, 2**31 - 1))


def new_pipeline(batch: int, device: torch.device, seed: int, threads: int, prefetch: int) -> Any:
    """A ``nvidia.dali.Pipeline`` without operators.

    Args:
        batch: samples of a run.
        device: where its outputs are.
        seed: of its random operators.
        threads: of the CPU.
        prefetch: batches that it makes ahead.
    """
    dali = importlib.import_module("nvidia.dali")
    index = None
    if device.type == "cuda":
        index = torch.cuda.current_device() if device.index is None else device.index
    return dali.Pipeline(
        batch_size=batch,
        num_threads=threads,
        device_id=index,
        seed=seed,
        prefetch_queue_depth=prefetch,
        exec_dynamic=True,
    )


class Runner(Protocol):
    """Gives the batches of a pipeline one after another."""

    def next(self) -> dict[str, Tensor]:
        """The next batch."""
        ...

    def skip(self, runs: int) -> None:
        """Leave out so many batches."""
        ...

    def close(self) -> None:
        """Release the pipeline."""
        ...


def decoder_arguments(
    device: torch.device, hardware_load: float, width: int, height: int, padding_bytes: int
) -> dict[str, Any]:
    """What DALI's decoder of whole pictures is called with; pixels come as they are stored, whatever EXIF says.

    Args:
        device: where the pictures are wanted.
        hardware_load: share of them for the GPU's JPEG engine.
        width, height: of the largest, px, for which memory is taken ahead.
        padding_bytes: of the decoder's buffers on the device and of its pinned ones.
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


class PipelineRunner:
    """Runs a built pipeline and hands its outputs over as PyTorch tensors.

    Args:
        pipeline: a ``nvidia.dali.Pipeline`` with dense outputs (every sample of one shape).
        names: name of each output.
        dtypes: wanted dtype of each output; DALI has no bfloat16.
        path: the file that the pipeline reads, for messages.
    """

    def __init__(self, pipeline: Any, names: tuple[str, ...], dtypes: tuple[torch.dtype, ...], path: Path) -> None:
        self._pipeline = pipeline
        self._names = names
        self._dtypes = dtypes
        self._path = path

    def next(self) -> dict[str, Tensor]:
        """The next batch: name to a tensor of PyTorch's, on the pipeline's device.

        Raises:
            DataError: DALI could not read or decode a sample; the message is DALI's.
        """
        outputs = self._run()
        return {
            name: torch.from_dlpack(output.as_tensor()).to(dtype, copy=True)
            for name, dtype, output in zip(self._names, self._dtypes, outputs, strict=True)
        }

    def skip(self, runs: int) -> None:
        """Run ``runs`` times and drop the outputs: the state afterwards is that of having used them."""
        for _ in range(runs):
            self._run()

    def close(self) -> None:
        """Release the pipeline: its threads, files and buffers."""
        self._pipeline = None

    def _run(self) -> Any:
        try:
            if self._pipeline.device_id is None or self._pipeline.device_id < 0:
                return self._pipeline.run()
            return self._pipeline.run(torch.cuda.current_stream(self._pipeline.device_id))
        except RuntimeError as error:
            raise DataError(f"{self._path}: DALI cannot read on: {' '.join(str(error).split())}") from error


class SlicedBatches:
    """Micro-batches as consecutive slices of a pipeline's larger batches; nothing is dropped or given twice.

    DALI is slow with tiny batches, so its own are ``multiplier`` micro-batches long.
    """

    def __init__(self, runner: Runner, micro_batch: int, multiplier: int) -> None:
        self._runner = runner
        self._micro_batch = micro_batch
        self._multiplier = multiplier
        self._slices: Iterator[dict[str, Tensor]] = iter(())
        self.delivered = 0
        """Micro-batches handed out or skipped since the pipeline began."""

    def next(self) -> dict[str, Tensor]:
        """The next micro-batch; raises as the runner does."""
        tensors = next(self._slices, None)
        if tensors is None:
            self._slices = self._cut(self._runner.next())
            tensors = next(self._slices)
        self.delivered += 1
        return tensors

    def advance_to(self, micro_batches: int) -> None:
        """Skip until ``micro_batches`` have been delivered in all.

        Raises:
            ValueError: more than that have been delivered: a pipeline does not run backwards.
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


class PipelineTrainSource:
    """Training batches of one replica; a :class:`common.data.batches.DataSource` that only runs forward.

    DALI's random state advances with every batch and cannot be set to a position, so that resuming runs the batches
    that were consumed before and drops them.

    Args:
        runner: of a pipeline without an end over the samples of this replica.
        stream: how many micro-batches a block has.
        multiplier: micro-batches of a run of the pipeline.
        eval_samples, stand_in: of the data set.
        finish: makes the tensors of a batch of the pipeline's outputs.
    """

    def __init__(
        self,
        runner: PipelineRunner,
        stream: EpochStream,
        multiplier: int,
        eval_samples: int,
        stand_in: bool,
        finish: Callable[[dict[str, Tensor]], dict[str, Tensor]],
    ) -> None:
        self.train_samples, self.eval_samples, self.stand_in = stream.train_samples, eval_samples, stand_in
        self.stream = stream
        self._runner, self._finish = runner, finish
        self._sliced = SlicedBatches(runner, stream.micro_batch, multiplier)

    def batches(self, block: Block, start: int = 0) -> Iterator[HostBatch]:
        """Yield the micro-batches of ``block`` from position ``start``, after those that lie between.

        Raises:
            DataError: DALI could not read or decode a sample.
            ValueError: the position lies behind what was delivered; open the data again.
        """
        first, nominal = self.stream.first_micro_batch(block), self.stream.micro_batch * self.stream.replicas
        self._sliced.advance_to(first + start)
        for position in range(start, self.stream.micro_batches(block)):
            yield HostBatch(self._finish(self._sliced.next()), samples=nominal, position=position)

    def close(self) -> None:
        """Release the pipeline."""
        self._runner.close()


class PipelineEvalSource:
    """Evaluation batches of one replica; a :class:`common.data.batches.EvalSource`.

    Args:
        runner: of a pipeline that begins anew after ``shard.batches`` runs.
        shard: this replica's samples.
        finish: makes the tensors of a batch of the pipeline's outputs and the number of real samples, which come first.
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
        """Yield the batches of one evaluation; raises as training does."""
        self._runner.skip(-self._delivered % len(self))  # the rest of an evaluation that was left early
        self._delivered = 0
        for batch in range(len(self)):
            tensors = self._runner.next()
            self._delivered += 1
            made = self._finish(tensors, self.shard.valid(batch))
            yield HostBatch(made, self.shard.batch * self.shard.replicas, batch, self.shard.key(batch))

    def close(self) -> None:
        """Release the pipeline."""
        self._runner.close()
