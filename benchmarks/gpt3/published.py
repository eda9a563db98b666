"""Load weights, masters and Adam moments from the published checkpoint into the parameters of this rank.

This works for any layout (``tp``, ``pp``, ``dp``). Among ranks with the same weights, the first one reads their part of
the checkpoint chunk by chunk, and broadcasts it from its GPU. Host memory contains only a few chunks at a time.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from benchmarks.gpt3.config import GptArchitecture
from benchmarks.gpt3.published_form import COMMON, MASTERS, MOMENTS, WEIGHTS, PublishedCheckpoint, pattern_of, shapes
from common.distributed.layout import AXES, Layout
from common.distributed.tensor_split import TensorSplit
from common.errors import CheckpointError
from common.formats.zarr import Region, ZarrArray, ZarrPiece
from common.optim.groups import SUMMED_AXES
from common.optim.optimizer import Optimizer

_THREADS = 8
"""Threads per rank that read chunks, because distributed file systems are fast only with many readers."""
_AHEAD = 16
"""Number of chunks to read ahead. A chunk of the largest tensors of GPT-3 has 38 MB."""


def load_published(
    folder: Path,
    model: nn.Module,
    optimizer: Optimizer | None,
    layout: Layout,
    architecture: GptArchitecture,
    steps: int,
    splits: Mapping[str, TensorSplit],
) -> None:
    """Set this rank's parameters and their optimizer state to those of the checkpoint in ``folder``. Collective.

    Args:
        folder: folder of the checkpoint's arrays, or a folder above it; only ranks that read need access.
        model: the parameters of this rank's stage, with their names in the whole network.
        optimizer: receives masters and moments, and ``steps`` as its step counter; None to load only weights.
        architecture: architecture of the whole network.
        steps: expected number of optimizer steps of the checkpoint.
        splits: how the ranks of ``tp`` split parameters, by name.

    Raises:
        CheckpointError: the checkpoint is missing, incomplete or damaged, belongs to another network, has another
            number of steps, or contains values that are not finite. All ranks raise the same error. Presence and
            shapes of all arrays are checked before any value is read.
    """
    kinds = (WEIGHTS,) if optimizer is None else (MASTERS, *MOMENTS)
    group = layout.group(*SUMMED_AXES)
    parameters = dict(model.named_parameters())
    tensors: list[tuple[_CheckpointPart, ...]] = []
    error = ""
    if reads := layout.index(*SUMMED_AXES) == 0:
        try:
            published = PublishedCheckpoint(folder, architecture, kinds)
            _check_steps(published, steps)
            for name, parameter in parameters.items():
                shape, split = tuple(parameter.shape), splits.get(name)
                tensors += [tuple(_parts(published, kind, name, shape, split)) for kind in kinds]
            for part in itertools.chain.from_iterable(tensors):
                part.array.check(part.region)
        except (CheckpointError, OSError) as problem:
            error = str(problem)
    _raise_together(error, layout)
    source = 0 if group is None else dist.get_global_rank(group, 0)
    read = _read(tensors, layout.device) if reads else None
    for name, parameter in parameters.items():
        found = {}
        for kind in kinds:
            # Zeros for elements that no chunk covers: padding rows of the embedding.
            tensor = torch.zeros(parameter.shape, dtype=torch.float32, device=layout.device)
            if read is not None and not error:
                try:
                    for target, values in iter(read.__next__, None):
                        tensor[target].copy_(values, non_blocking=True)
                except (CheckpointError, OSError) as problem:  # continue, because other ranks wait for the broadcasts
                    error = str(problem)
            if group is not None:
                dist.broadcast(tensor, source, group=group)
            if not error and not torch.isfinite(tensor).all():
                error = f"{folder}: {kind} of {name} are not all finite: damaged; fetch it again"
            found[kind] = tensor
        if optimizer is None:
            with torch.no_grad():
                parameter.copy_(found[WEIGHTS])
        else:
            optimizer.put(name, **found)
    _raise_together(error, layout)
    if optimizer is not None:
        optimizer.set_step(steps)


Slices = tuple[slice, ...]


@dataclass(frozen=True)
class _CheckpointPart:
    """Region of a checkpoint array, and its position in a parameter of this rank.

    Attributes:
        region: if layers are stacked, its first dimension selects one layer.
        dims: number of dimensions of the parameter.
        dim: dimension along which the parameter is split.
        row: offset of the region in the parameter along ``dim``.
    """

    array: ZarrArray
    region: Region
    dims: int
    dim: int
    row: int

    def chunks(self) -> Iterator[tuple[ZarrPiece, Slices]]:
        """Yield the needed piece of each chunk, and its position in the parameter."""
        for piece in self.array.pieces(self.region):
            target = list(piece.target[-self.dims :])
            rows = target[self.dim]
            target[self.dim] = slice(rows.start + self.row, rows.stop + self.row)
            yield piece, tuple(target)

    def read(self, piece: ZarrPiece, target: Slices, pin: bool) -> tuple[Slices, Tensor]:
        """Read a piece; return its position in the parameter and its values, in host memory."""
        values = self.array.read_piece(piece, pin)
        return target, values if values.ndim == self.dims else values[0]


def _check_steps(published: PublishedCheckpoint, steps: int) -> None:
    """Raise :class:`CheckpointError` if the checkpoint has another number of optimizer steps."""
    if published.steps != steps:
        raise CheckpointError(
            f"{published.folder / COMMON}: {published.steps} updates made the checkpoint, and checkpoint_steps={steps} "
            "are expected: it is another checkpoint"
        )


def _parts(
    published: PublishedCheckpoint, kind: str, name: str, shape: tuple[int, ...], split: TensorSplit | None
) -> Iterator[_CheckpointPart]:
    """Yield the regions that make up the parameter ``name`` of this rank, which has the shape ``shape``."""
    pattern, layer = pattern_of(name)
    expected = shapes(published.architecture).get(pattern)
    full, kept = (shape, shape) if split is None else (split.full_shape, split.kept_shape)
    if kept != expected:
        raise ValueError(f"{name} has the shape {kept}, and a published checkpoint {expected}")
    dim, pieces = (0, ((0, full[0]),)) if split is None else (split.dim, split.pieces[split.index])
    row = 0
    for start, stop in pieces:
        if start < (end := min(stop, kept[dim])):
            region = [(0, size) for size in full]
            region[dim] = (start, end)
            stacked = [] if layer is None else [(layer, layer + 1)]
            yield _CheckpointPart(published.arrays[kind][pattern], [*stacked, *region], len(shape), dim, row)
        row += stop - start


def _read(tensors: Iterable[Iterable[_CheckpointPart]], device: torch.device) -> Iterator[tuple[Slices, Tensor] | None]:
    """Yield position and values of each chunk of the first tensor, then None, then of the next tensor, and so on.

    Threads read chunks ahead.

    Args:
        device: device that the values will be copied to.
    """
    pin = device.type == "cuda"
    # threads must pin memory in the CUDA context of this device, not of the default device
    use_device = (lambda: torch.cuda.set_device(device)) if pin else None
    with ThreadPoolExecutor(_THREADS, "published checkpoint", use_device) as pool:

        def started() -> Iterator[Future[tuple[Slices, Tensor]] | None]:
            for parts in tensors:
                for part in parts:
                    for piece, target in part.chunks():
                        yield pool.submit(part.read, piece, target, pin)
                yield None

        waiting: deque[Future[tuple[Slices, Tensor]] | None] = deque()
        for future in started():
            waiting.append(future)
            if len(waiting) > _AHEAD:
                first = waiting.popleft()
                yield None if first is None else first.result()
        while waiting:
            first = waiting.popleft()
            yield None if first is None else first.result()


def _raise_together(error: str, layout: Layout) -> None:
    """Raise the first error of any rank on all ranks. Collective."""
    errors: list[Any] = [error]
    if (group := layout.group(*AXES)) is not None:
        errors = [None] * layout.world_size
        dist.all_gather_object(errors, error, group=group)
    for text in errors:
        if text:
            raise CheckpointError(text)
