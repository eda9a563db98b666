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
        gpus: how many.
        scale: the recipe.
        whole_run: reader and evaluations too.
    """

    benchmark: str
    gpus: int
    scale: str
    whole_run: bool

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
        made_up = () if told is None else MADE_UP.get(self.benchmark, ())
        return [f"benchmark={self.benchmark}", f"scale={self.scale}", *apart, *only, *made_up]


def jobs_of(
    scales: Mapping[str, Collection[str]], scale: str, gpus: Sequence[int], with_data: Collection[str]
) -> list[Job]:
    """Every measurement, the most GPUs first: smaller ones then fill a node.

    A number of GPUs has the recipe of its own where there is one, such as ``4xH200``, since what fits differs; else it
    has the one that is asked for, with fewer ranks.

    Args:
        scales: recipes of each benchmark.
        scale: the recipe that is measured, such as ``8xH200``; benchmarks without it are left out.
        gpus: numbers of GPUs.
        with_data: benchmarks of which there are prepared data: the run is measured on the most GPUs.
    """
    made = []
    for benchmark, known in sorted(scales.items()):
        if scale not in known:
            continue
        for count in sorted(set(gpus)):
            told = _SCALE.fullmatch(scale)
            own = f"{count}x{told[2]}" if told is not None else scale
            whole_run = count == max(gpus) and benchmark in with_data
            made.append(Job(benchmark, count, own if own in known else scale, whole_run))
    return sorted(made, key=lambda job: -job.gpus)
