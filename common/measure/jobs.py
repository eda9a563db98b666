"""Which measurements a node makes, and with which words ``bench`` makes one."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

_SCALE = re.compile(r"(\d+)x(\D\w*)")

MADE_UP = {
    "rgat": ("model.example_papers=8417068",),  # of IGBH's 269 million: in a small graph seeds have few neighbours
    "stable_diffusion": ("model.zero_std=0.02",),  # layers that begin as zeros take less power until they have learnt
}
"""What makes the synthetic batches of a recipe of GPUs cost what those of training do."""


@dataclass(frozen=True)
class Job:
    """One measurement.

    Attributes:
        benchmark: our name.
        gpus: how many it has at a time.
        scale: the recipe.
        whole_run: reader and evaluations too.
        copies: how many are started together, each on GPUs of its own: one on every GPU of the node, where the step of
            several GPUs is compared with that of each alone.
    """

    benchmark: str
    gpus: int
    scale: str
    whole_run: bool
    copies: int = 1

    @property
    def taken(self) -> int:
        """GPUs of all copies."""
        return self.gpus * self.copies

    @property
    def name(self) -> str:
        """Of its files."""
        return f"{self.benchmark}-{self.gpus}"

    def words(self) -> list[str]:
        """What ``bench`` is told about benchmark and scale."""
        told = _SCALE.fullmatch(self.scale)
        apart = (
            []
            if told is not None and int(told[1]) == self.gpus
            else ["scale.nodes=1", f"scale.gpus_per_node={self.gpus}"]
        )
        only = [] if self.whole_run else ["bench.only=step"]
        traffic = ["bench.traffic=both"] if self.gpus > 1 else []
        made_up = () if told is None else MADE_UP.get(self.benchmark, ())
        return [f"benchmark={self.benchmark}", f"scale={self.scale}", *apart, *only, *traffic, *made_up]


def jobs_of(
    scales: Mapping[str, Collection[str]], scale: str, gpus: Sequence[int], with_data: Collection[str], node: int
) -> list[Job]:
    """Every measurement: first those that take the whole node, by benchmark, then smaller ones, which fill it.

    One GPU alone is measured on all GPUs of the node at the same time, where several are measured too. A number of
    GPUs has the recipe of its own where there is one, such as ``4xH200``, since what fits differs; else it has the one
    that is asked for, with fewer ranks.

    Args:
        scales: recipes of each benchmark.
        scale: the recipe that is measured, such as ``8xH200``; benchmarks without it are left out.
        gpus: numbers of GPUs.
        with_data: benchmarks of which there are prepared data: the run is measured on the most GPUs.
        node: GPUs of the node.
    """
    made = []
    for benchmark, known in sorted(scales.items()):
        if scale not in known:
            continue
        for count in sorted(set(gpus)):
            told = _SCALE.fullmatch(scale)
            own = f"{count}x{told[2]}" if told is not None else scale
            whole_run = count == max(gpus) and benchmark in with_data
            copies = node if count == 1 < max(gpus) else 1
            made.append(Job(benchmark, count, own if own in known else scale, whole_run, copies))
    whole_node = sorted((job for job in made if job.taken == node), key=lambda job: (job.benchmark, -job.gpus))
    return whole_node + sorted((job for job in made if job.taken < node), key=lambda job: -job.gpus)
