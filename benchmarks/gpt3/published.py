"""Training starts from the published checkpoint: weights, masters and Adam's moments into this rank's part of them.

Whatever ranks share layers (``tp``), have other layers (``pp``) or have the same ones (``dp``): of those with the same
weights the first one reads, chunk by chunk and only what is its part, and sends it to the others from its GPU. Host
memory holds some chunks at a time.
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

from benchmarks.gpt3.architecture import Architecture
from benchmarks.gpt3.published_form import COMMON, MASTERS, MOMENTS, WEIGHTS, Published, pattern_of, shapes
from common.distributed.layout import AXES, Layout
from common.distributed.tensor_split import Split
from common.errors import CheckpointError
from common.formats.zarr import Piece, Region, ZarrArray
from common.optim.groups import SUMMED_AXES
from common.optim.optimizer import Optimizer

_THREADS = 8
"""That read chunks of one rank: a file system of many servers is fast only for many readers."""
_AHEAD = 16
"""Chunks that are read ahead: 38 MB each of the largest tensors of GPT-3."""


def load_published(
    folder: Path,
    model: nn.Module,
    optimizer: Optimizer | None,
    layout: Layout,
    architecture: Architecture,
    steps: int,
    splits: Mapping[str, Split],
) -> None:
    """Set this rank's parameters and their optimizer state to those of the checkpoint in ``folder``. Collective.

    Args:
        folder: folder of the checkpoint's arrays, or a folder above it; only ranks that read need it.
        model: its parameters have the names of the whole network; those of this rank's stage are there.
        optimizer: receives masters and moments, and ``steps`` as its step counter; None to load weights alone.
        layout: the ranks.
        architecture: of the whole network.
        steps: updates that made the checkpoint; it must say the same.
        splits: of the parameters that the ranks of ``tp`` hold together.

    Raises:
        CheckpointError: the checkpoint is missing, incomplete, damaged or of another network, or was made by another
            number of updates; every rank raises the same. Before the first value is read all of it is looked at; a
            value that is not finite, or a chunk that cannot be read after all, ends the reading.
    """
    kinds = (WEIGHTS,) if optimizer is None else (MASTERS, *MOMENTS)
    group = layout.group(*SUMMED_AXES)
    parameters = dict(model.named_parameters())
    tensors: list[tuple[_Part, ...]] = []
    error = ""
    if reads := layout.index(*SUMMED_AXES) == 0:
        try:
            published = Published(folder, architecture, kinds)
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
            # Zeros, for what no chunk covers: rows of a table behind the last word.
            tensor = torch.zeros(parameter.shape, dtype=torch.float32, device=layout.device)
            if read is not None and not error:
                try:
                    for place, values in iter(read.__next__, None):
                        tensor[place].copy_(values, non_blocking=True)
                except (CheckpointError, OSError) as problem:  # the others wait for the rest
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


Place = tuple[slice, ...]


@dataclass(frozen=True)
class _Part:
    """A region of an array, and where its rows begin in a parameter of this rank.

    Attributes:
        array: of the checkpoint.
        region: of the array; where layers are stacked its first dimension is of one layer.
        dims: of the parameter.
        dim: along which rows are counted.
        row: the first one in the parameter.
    """

    array: ZarrArray
    region: Region
    dims: int
    dim: int
    row: int

    def chunks(self) -> Iterator[tuple[Piece, Place]]:
        """What is needed of each chunk, and its place in the parameter."""
        for piece in self.array.pieces(self.region):
            place = list(piece.place[-self.dims :])
            rows = place[self.dim]
            place[self.dim] = slice(rows.start + self.row, rows.stop + self.row)
            yield piece, tuple(place)

    def read(self, piece: Piece, place: Place, pin: bool) -> tuple[Place, Tensor]:
        """A place in the parameter and its values, in host memory."""
        values = self.array.read_piece(piece, pin)
        return place, values if values.ndim == self.dims else values[0]


def _check_steps(published: Published, steps: int) -> None:
    """Refuse a checkpoint of another number of updates."""
    if published.steps != steps:
        raise CheckpointError(
            f"{published.folder / COMMON}: {published.steps} updates made the checkpoint, and checkpoint_steps={steps} "
            "are expected: it is another checkpoint"
        )


def _parts(published: Published, kind: str, name: str, shape: tuple[int, ...], split: Split | None) -> Iterator[_Part]:
    """What makes a parameter of this rank, of ``shape``."""
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
            yield _Part(published.arrays[kind][pattern], [*stacked, *region], len(shape), dim, row)
        row += stop - start


def _read(tensors: Iterable[Iterable[_Part]], device: torch.device) -> Iterator[tuple[Place, Tensor] | None]:
    """What makes each tensor, one chunk after the other, then None, then the next tensor; chunks are read ahead.

    Args:
        tensors: the parts of each.
        device: where they go; the threads pin their memory with its context, not with another GPU's.
    """
    pin = device.type == "cuda"
    use_device = (lambda: torch.cuda.set_device(device)) if pin else None
    with ThreadPoolExecutor(_THREADS, "published checkpoint", use_device) as pool:

        def started() -> Iterator[Future[tuple[Place, Tensor]] | None]:
            for parts in tensors:
                for part in parts:
                    for piece, place in part.chunks():
                        yield pool.submit(part.read, piece, place, pin)
                yield None

        waiting: deque[Future[tuple[Place, Tensor]] | None] = deque()
        for future in started():
            waiting.append(future)
            if len(waiting) > _AHEAD:
                first = waiting.popleft()
                yield None if first is None else first.result()
        while waiting:
            first = waiting.popleft()
            yield None if first is None else first.result()


def _raise_together(error: str, layout: Layout) -> None:
    """Raise the first error of any rank on all of them."""
    errors: list[Any] = [error]
    if (group := layout.group(*AXES)) is not None:
        errors = [None] * layout.world_size
        dist.all_gather_object(errors, error, group=group)
    for text in errors:
        if text:
            raise CheckpointError(text)
