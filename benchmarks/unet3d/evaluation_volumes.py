"""The evaluation volumes of one rank on its device, cropped and padded, with the windows that the rank evaluates.

Volumes are assigned to groups of neighbouring ranks, and windows to the ranks of a group. All windows cost the same, so
work is counted in windows. The assignment depends only on the numbers of windows, so all ranks compute it without
communication.

Axes: D H W of a volume in voxels.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from benchmarks.unet3d.sliding_window import Geometry, Origin, SlidingWindow
from benchmarks.unet3d.volumes import VolumeEntry

LARGEST_SHARE = 8
"""Largest number of ranks that share a volume; the sums then stay within one node."""

SHARED_VOLUME = 0.25
"""Cost, in windows, of summing the logits of a shared volume over ranks: some hundred MB over NVLink."""


def shares_to_try(ranks: int) -> tuple[int, ...]:
    """Return possible sizes of groups of ranks: powers of two up to ``LARGEST_SHARE`` that divide ``ranks``."""
    powers = (2**power for power in range(LARGEST_SHARE.bit_length()))
    return tuple(size for size in powers if ranks % size == 0)


def assign_volumes(windows: Sequence[int], groups: int) -> list[list[int]]:
    """Assign volumes to groups of ranks: the largest volume first, each to the group with the least work.

    Returns:
        For each group the indices of its volumes, largest first.
    """
    assigned: list[list[int]] = [[] for _ in range(groups)]
    load = [0] * groups
    for volume in sorted(range(len(windows)), key=lambda volume: -windows[volume]):
        least = load.index(min(load))
        assigned[least].append(volume)
        load[least] += windows[volume]
    return assigned


def assign_windows(windows: Sequence[int], ranks: int, rank: int) -> list[range]:
    """Assign windows to one rank of a group: every ``ranks``-th window in the sequence of all its volumes.

    Args:
        windows: number of windows of each volume of the group.
        ranks: ranks of the group; their numbers of windows differ by at most one.
        rank: index of this rank in the group.

    Returns:
        For each volume the windows of this rank, possibly none.
    """
    assigned, before = [], 0
    for count in windows:
        assigned.append(range((rank - before) % ranks, count, ranks))
        before += count
    return assigned


def choose_share(windows: Sequence[int], ranks: int, batch: int, shares: Sequence[int]) -> int:
    """Return the group size for which the slowest rank finishes first; the smallest of equal ones.

    Args:
        windows: number of windows of each volume.
        ranks: all ranks of the evaluation.
        batch: windows per forward pass; an incomplete pass takes as long as a full one.
        shares: group sizes to choose from, each a divisor of ``ranks``.
    """
    return min(sorted(shares), key=lambda share: _longest(windows, ranks // share, share, batch))


def _longest(windows: Sequence[int], groups: int, share: int, batch: int) -> float:
    costs = []
    for volumes in assign_volumes(windows, groups):
        of_busiest_rank = math.ceil(sum(windows[volume] for volume in volumes) / share)
        summing = SHARED_VOLUME * len(volumes) if share > 1 else 0.0
        costs.append(math.ceil(of_busiest_rank / batch) * batch + summing)
    return max(costs)


READERS = 4
"""Volumes that a rank reads at the same time; each takes up to 400 MB of host memory."""

SYNTHETIC_SHAPES = (
    (1.5, 1.8, 1.8), (1.2, 2.0, 2.0), (2.3, 2.2, 2.2), (1.0, 1.7, 1.7), (3.1, 1.9, 1.9), (1.6, 2.6, 2.6),
)  # fmt: skip
"""Shapes of synthetic volumes, in multiples of the window; they are used in turn."""

Read = Callable[[VolumeEntry], tuple[NDArray[np.float32], NDArray[np.uint8]]]


@dataclass(frozen=True)
class WindowShare:
    """The windows of a volume that a rank evaluates.

    Attributes:
        volume: index among all evaluation cases.
        windows: indices of the rank's windows within the volume.
    """

    volume: int
    windows: range


@dataclass(frozen=True)
class CachedVolume:
    """A volume on the device.

    Attributes:
        index: index of its case among all evaluation cases.
        image: (D, H, W), cropped and padded, in the dtype of the network.
        label: (D, H, W), cropped, uint8.
        geometry: crop, padding and windows of the volume.
        origins: first voxel in the image of each window that this rank evaluates.
    """

    index: int
    image: Tensor
    label: Tensor
    geometry: Geometry
    origins: tuple[Origin, ...]


def shares_of_rank(windows: Sequence[int], ranks: int, rank: int, share: int) -> list[WindowShare]:
    """Return the work of one rank, in the order of its group's volumes.

    Args:
        windows: number of windows of each evaluation case.
        ranks, rank: number of ranks of the evaluation, and index of this one.
        share: number of neighbouring ranks that share their volumes; divides ``ranks``.
    """
    volumes = assign_volumes(windows, ranks // share)[rank // share]
    assigned = assign_windows([windows[volume] for volume in volumes], share, rank % share)
    return [WindowShare(volume, mine) for volume, mine in zip(volumes, assigned, strict=True)]


def cache_volumes(
    cases: Sequence[VolumeEntry],
    read: Read,
    shares: Sequence[WindowShare],
    window: SlidingWindow,
    device: torch.device,
    dtype: torch.dtype,
) -> list[CachedVolume]:
    """Read the volumes of ``shares`` to ``device``; return when they are complete. Raises the errors of ``read``."""

    def load(share: WindowShare) -> CachedVolume:
        case = cases[share.volume]
        geometry = window.geometry(case.shape)
        image, label = read(case)
        image_DHW = torch.from_numpy(np.ascontiguousarray(image[geometry.kept])).to(device).to(dtype)
        padded_DHW = window.padded(image_DHW, geometry)
        label_DHW = torch.from_numpy(np.ascontiguousarray(label[geometry.kept])).to(device)
        every_origin = geometry.origins
        origins = tuple(every_origin[number] for number in share.windows)
        return CachedVolume(share.volume, padded_DHW, label_DHW, geometry, origins)

    with ThreadPoolExecutor(READERS, thread_name_prefix="evaluation-volumes") as pool:
        volumes = list(pool.map(load, shares))
    if device.type == "cuda":
        torch.cuda.synchronize(device)  # each thread uses its own stream
    return volumes


def synthetic_cases(count: int, window: tuple[int, int, int]) -> list[VolumeEntry]:
    """Return ``count`` cases of several shapes for windows of ``window`` voxels."""
    cases = []
    for number in range(count):
        factors = SYNTHETIC_SHAPES[number % len(SYNTHETIC_SHAPES)]
        depth, height, width = (round(factor * size) for factor, size in zip(factors, window, strict=True))
        cases.append(VolumeEntry(f"case_{number:05d}", (depth, height, width), "eval"))
    return cases


def synthetic_voxels(case: VolumeEntry) -> tuple[NDArray[np.float32], NDArray[np.uint8]]:
    """Return noise, and labels that do not depend on it; both (D, H, W)."""
    generator = np.random.default_rng(0)
    image = generator.standard_normal(case.shape, dtype=np.float32)
    return image, generator.integers(3, size=case.shape, dtype=np.uint8)
