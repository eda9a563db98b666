"""``bench.only=evaluation``: times the evaluation of a workload, with prepared data or with synthetic samples."""

from __future__ import annotations

import contextlib
import dataclasses
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from common.contract.evaluation import Evaluation, Predictions
from common.contract.workload import Workload
from common.distributed import job_store
from common.errors import ConfigError, DataError
from common.run.kernel_profile import Breakdown, breakdown, meet, recorded
from common.run.non_training_rank import own_stream

Result = TypeVar("Result")

LONGEST_PROFILE = 30.0
"""Longest evaluation under the profiler, in seconds, because the profiler keeps every kernel in host memory."""


@dataclass(frozen=True)
class EvaluationTiming:
    """Time and memory of an evaluation. Times are those of the slowest rank, in seconds.

    Attributes:
        samples: samples per evaluation, over all ranks.
        synthetic: whether the samples are synthetic; their predictions are not scored.
        warm_up: warm-up of reader, evaluation and scorer, with the capture of CUDA graphs.
        opening: opening the data, with the ground truth on rank 0; None for synthetic samples.
        first: predicting and scoring in the first evaluation. The report of synthetic samples omits scoring.
        repetitions: predicting and scoring in each later evaluation; scoring omitted likewise.
        allocated_bytes, reserved_bytes: highest peak of GPU memory on any rank; 0 on a CPU.
        profiled: one more evaluation under the profiler without scoring; None if it was not profiled.
        breakdown: device time of the profiled evaluation on this rank; None if it was not profiled.
    """

    samples: int
    ranks: int
    synthetic: bool
    warm_up: float
    opening: float | None
    first: tuple[float, float]
    repetitions: tuple[tuple[float, float], ...]
    allocated_bytes: int = 0
    reserved_bytes: int = 0
    profiled: float | None = None
    breakdown: Breakdown | None = None

    @property
    def predicting(self) -> float:
        """Median seconds of predicting."""
        return statistics.median(predicting for predicting, _ in self.repetitions)

    @property
    def scoring(self) -> float | None:
        """Median seconds of scoring; None for synthetic samples."""
        return None if self.synthetic else statistics.median(scoring for _, scoring in self.repetitions)

    @property
    def throughput(self) -> float:
        """Samples per second of predicting and scoring together, over all ranks."""
        return self.samples / (self.predicting + (self.scoring or 0.0))

    def rows(self) -> dict[str, str]:
        """Return the output rows of ``bench``, name to text."""
        first, median = f"{self.first[0]:.4f} s predicting", f" (median of {len(self.repetitions)})"
        kind, scoring = "synthetic samples", "not measured: these samples have no ground truth; set data_dir=…"
        if self.scoring is not None:
            first += f", {self.first[1]:.4f} s scoring"
            kind, scoring = "samples", f"{self.scoring:.4f} s{median}"
        seconds, ranks = self.predicting + (self.scoring or 0.0), f" on {self.ranks} ranks" if self.ranks > 1 else ""
        rows = {
            "warm-up": f"{self.warm_up:.4f} s",
            "opening the data": "not measured: synthetic samples" if self.opening is None else f"{self.opening:.4f} s",
            "first evaluation": first,
            "evaluation": f"{seconds:.4f} s, {self.throughput:,.1f} samples/s, {self.samples:,} {kind}{ranks}",
            "evaluation: predicting": f"{self.predicting:.4f} s{median}",
            "evaluation: scoring": scoring,
        }
        if self.reserved_bytes:
            reserved, allocated = self.reserved_bytes / 1e9, self.allocated_bytes / 1e9
            rows["peak memory"] = f"{reserved:.1f} GB reserved for tensors, {allocated:.1f} of it used"
        return rows

    def report(self) -> dict[str, Any]:
        """Return the content of the JSON report: the attributes, and the medians of predicting, scoring and throughput.

        For synthetic samples it omits the times of scoring.
        """
        values = dataclasses.asdict(self)
        if self.synthetic:
            values["first"], values["repetitions"] = self.first[:1], [times[:1] for times in self.repetitions]
        medians = {"predicting": self.predicting, "scoring": self.scoring, "samples_per_second": self.throughput}
        return {**values, **medians}


def time_evaluation(workload: Workload, data_dir: Path, prepared: bool, repetitions: int) -> EvaluationTiming:
    """Evaluate the current network once and then ``repetitions`` times. Collective.

    Args:
        prepared: whether this folder exists; otherwise, synthetic samples are evaluated.

    Raises:
        ConfigError: there are no prepared data, and the workload has no synthetic samples.
        DataError: the data are damaged, or not those of the workload.
    """
    layout = workload.layout
    evaluation = workload.evaluation(layout) if prepared else workload.synthetic_evaluation(layout)
    if evaluation is None:
        raise ConfigError(
            f"bench.only=evaluation: there are no prepared data in {data_dir} (data_dir=…), and {workload.title}'s "
            "evaluation has no synthetic samples"
        )

    def predict() -> Predictions | None:
        return evaluation.predict(workload.weights())

    with contextlib.closing(evaluation), own_stream(layout.device):
        timing = _time(workload, evaluation, data_dir, prepared, repetitions)
        if layout.device.type != "cuda" or timing.predicting > LONGEST_PROFILE:
            return timing
        kernels, (profiled, _) = recorded(lambda: None, lambda: _elapsed(predict, layout.device))
    return dataclasses.replace(timing, profiled=profiled, breakdown=breakdown(kernels, 1))


def prepared_everywhere(data_dir: Path) -> bool:
    """Return whether all ranks see the folder of the prepared data. All ranks of the job call this.

    Raises:
        DataError: only some ranks see it.
    """
    answers = set(job_store.from_all_ranks("bench/data_dir", str(data_dir.is_dir())))
    if len(answers) > 1:
        raise DataError(f"{data_dir} exists on some ranks only: prepare the data on every node, or on a shared folder")
    return answers == {str(True)}


def _time(
    workload: Workload, evaluation: Evaluation, data_dir: Path, scored: bool, repetitions: int
) -> EvaluationTiming:
    """Time all parts of the evaluation. Collective."""
    layout, device = workload.layout, workload.layout.device
    scorer = evaluation.scorer if scored and layout.rank == 0 else None
    samples = workload.cfg.benchmark.eval_samples

    def warm_up() -> None:
        if scored and layout.role == "train":
            workload.warm_up_reader()  # training ranks do this before they open data
        evaluation.warm_up()
        if scorer is not None:
            scorer.warm_up()

    def open_data() -> None:
        evaluation.open_data(data_dir)
        if scorer is not None:
            scorer.open_data(data_dir)

    def evaluate() -> tuple[float, float]:
        nonlocal samples
        predicting, predictions = _timed(lambda: evaluation.predict(workload.weights()), device)
        if scorer is None:
            return predicting, 0.0
        assert predictions is not None, "rank 0 predicts"
        began = time.perf_counter()
        samples = int(scorer.score(predictions).get("eval_samples", samples))
        return predicting, time.perf_counter() - began

    times = [_timed(warm_up, device)[0], _timed(open_data, device)[0]]
    for _ in range(1 + repetitions):
        times += evaluate()
    memory = [0, 0]
    if device.type == "cuda":
        memory = [torch.cuda.max_memory_allocated(device), torch.cuda.max_memory_reserved(device)]
    largest = torch.tensor([*times, *memory], dtype=torch.float64, device=device)
    if dist.is_initialized():
        dist.all_reduce(largest, dist.ReduceOp.MAX)
    warmed, opened, *evaluations, allocated, reserved = largest.tolist()
    first, *later = zip(evaluations[::2], evaluations[1::2], strict=True)
    return EvaluationTiming(
        samples,
        layout.world_size,
        not scored,
        warmed,
        opened if scored else None,
        first,
        tuple(later),
        int(allocated),
        int(reserved),
    )


def _timed(work: Callable[[], Result], device: torch.device) -> tuple[float, Result]:
    """Wait for the other ranks, then run ``work``; return its seconds and its result. Collective."""
    meet(device.type == "cuda")
    return _elapsed(work, device)


def _elapsed(work: Callable[[], Result], device: torch.device) -> tuple[float, Result]:
    """Run ``work`` until the device has finished; return its seconds and its result."""
    began = time.perf_counter()
    result = work()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - began, result
