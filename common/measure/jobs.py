"""List the measurements of a node, and the ``bench`` arguments of each."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

_SCALE = re.compile(r"(\d+)x(\D\w*)")

OVERRIDES = {
    "dlrm": ("hparams.base_learning_rate=0.1",),  # hundreds of updates with one batch overflow at the rate of training
    "flux1": ("model.zero_std=0.02",),  # as for Stable Diffusion
    "rgat": ("model.example_papers=8417068",),  # of IGBH's 269 million; in a smaller graph, seeds have few neighbours
    "stable_diffusion": ("model.zero_std=0.02",),  # layers initialized to zero use less power until they are trained
}
"""Overrides by benchmark that make a step on a synthetic batch valid and as expensive as in training; for recipes of
GPUs only."""


@dataclass(frozen=True)
class Job:
    """One measurement.

    Attributes:
        gpus: number of GPUs of each copy.
        scale: name of the recipe.
        whole_run: whether to measure the reader and evaluations too, not only the step.
        copies: number of copies that run at the same time on separate GPUs. A step on one GPU runs on every GPU of the
            node if it is compared with a step on several GPUs.
        variant: name of what differs from the recipe; empty for the recipe itself.
        settings: further arguments of ``bench``.
        environment: environment variables of the measurement, in addition to those of this process.
        prefix: words before the command line, such as those of a profiler.
    """

    benchmark: str
    gpus: int
    scale: str
    whole_run: bool
    copies: int = 1
    variant: str = ""
    settings: Sequence[str] = ()
    environment: Mapping[str, str] = field(default_factory=dict)
    prefix: Sequence[str] = ()

    @property
    def taken(self) -> int:
        """Number of GPUs of all copies together."""
        return self.gpus * self.copies

    @property
    def name(self) -> str:
        """Name of the measurement's files, without extension."""
        return f"{self.benchmark}-{self.gpus}" + (f"-{self.variant}" if self.variant else "")

    def words(self) -> list[str]:
        """Return the arguments of ``bench``."""
        sizes = _SCALE.fullmatch(self.scale)
        apart = (
            []
            if sizes is not None and int(sizes[1]) == self.gpus
            else ["scale.nodes=1", f"scale.gpus_per_node={self.gpus}"]
        )
        only = [] if self.whole_run else ["bench.only=step"]
        traffic = ["bench.traffic=both"] if self.gpus > 1 else []
        overrides = () if sizes is None else OVERRIDES.get(self.benchmark, ())
        return [
            f"benchmark={self.benchmark}",
            f"scale={self.scale}",
            *apart,
            *only,
            *traffic,
            *overrides,
            *self.settings,
        ]


def jobs_of(
    scales: Mapping[str, Collection[str]], scale: str, gpus: Sequence[int], with_data: Collection[str], node: int
) -> list[Job]:
    """Return all measurements: first those that use the whole node, by benchmark, then the smaller ones.

    If several GPUs are measured too, one GPU is measured on every GPU of the node at the same time. A number of GPUs
    uses its own recipe if there is one, such as ``4xH200``, because its memory limits differ; otherwise it uses
    ``scale`` with that number of ranks.

    Args:
        scales: names of the recipes of each benchmark.
        scale: recipe to measure, such as ``8xH200``; benchmarks without it are skipped.
        with_data: benchmarks with prepared data; the whole run is measured on the largest number of GPUs.
    """
    made = []
    for benchmark, known in sorted(scales.items()):
        if scale not in known:
            continue
        for count in sorted(set(gpus)):
            sizes = _SCALE.fullmatch(scale)
            own = f"{count}x{sizes[2]}" if sizes is not None else scale
            whole_run = count == max(gpus) and benchmark in with_data
            copies = node if count == 1 < max(gpus) else 1
            made.append(Job(benchmark, count, own if own in known else scale, whole_run, copies))
    whole_node = sorted((job for job in made if job.taken == node), key=lambda job: (job.benchmark, -job.gpus))
    return whole_node + sorted((job for job in made if job.taken < node), key=lambda job: -job.gpus)
