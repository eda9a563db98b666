"""What every DALI reader of the suite needs: is it there, running a pipeline, slicing its batches.

DALI runs ahead by its own queue; a batch arrives bound to PyTorch's current stream and is copied there into a tensor
of PyTorch's, so that DALI's buffer is free again and nothing waits on the host.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from common.data.order import sample_generator
from common.errors import DataError


@functools.cache
def unavailable() -> str | None:
    """Why DALI cannot be used here; None when it can."""
    try:
        importlib.import_module("nvidia.dali")
    except (ImportError, OSError) as error:  # OSError: a library of its own does not load
        return f"nvidia.dali cannot be imported ({error})"
    return None


def derived_seed(*key: int) -> int:
    """A 31-bit seed for DALI that depends on all of ``key``, e.g. (seed of the run, replica)."""
    return int(sample_generator(*key).integers(1, 2**31 - 1))


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

    def __init__(self, runner: PipelineRunner, micro_batch: int, multiplier: int) -> None:
        self._runner = runner
        self._micro_batch = micro_batch
        self._multiplier = multiplier
        self._slices: Iterator[dict[str, Tensor]] = iter(())
        self.delivered = 0
        """Micro-batches handed out or skipped since the pipeline began."""

    def next(self) -> dict[str, Tensor]:
        """The next micro-batch; raises as :meth:`PipelineRunner.next`."""
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
