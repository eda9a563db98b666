"""Which measurements a node makes, which of them run beside each other, and with which words ``bench`` makes one."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

_SCALE = re.compile(r"(\d+)x(\D\w*)")


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
        return [f"benchmark={self.benchmark}", f"scale={self.scale}", *apart, *only]


def jobs_of(
    scales: Mapping[str, Collection[str]], scale: str, gpus: Sequence[int], with_data: Collection[str]
) -> list[Job]:
    """Every measurement, benchmark by benchmark, the most GPUs first.

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
        for count in sorted(set(gpus), reverse=True):
            told = _SCALE.fullmatch(scale)
            own = f"{count}x{told[2]}" if told is not None else scale
            whole_run = count == max(gpus) and benchmark in with_data
            made.append(Job(benchmark, count, own if own in known else scale, whole_run))
    return made


def waves(jobs: Iterable[Job], gpus: int) -> list[list[Job]]:
    """Jobs that run beside each other, on GPUs of their own, as many as the node has GPUs for.

    Each is in the first wave that has room for it. Readers and evaluations need the node's processors: a whole run has
    a wave of its own.

    Args:
        jobs: benchmark by benchmark, the most GPUs first.
        gpus: of the node.

    Raises:
        ValueError: a job needs more.
    """
    made: list[list[Job]] = []
    for job in jobs:
        if job.gpus > gpus:
            raise ValueError(f"{job.name} needs {job.gpus} GPUs, and there are {gpus}")
        fitting = (wave for wave in made if _fits(job, wave, gpus))
        if (wave := next(fitting, None)) is not None:
            wave.append(job)
        else:
            made.append([job])
    return made


def _fits(job: Job, wave: Sequence[Job], gpus: int) -> bool:
    return not any(each.whole_run for each in (job, *wave)) and job.gpus + sum(other.gpus for other in wave) <= gpus
