"""Schedules of several trainings on the GPUs of one node.

Each job runs once, without interruption, on a number of GPUs that the schedule chooses. There are two objectives: the
makespan (end of the last job) and the mean completion time.

One of the best schedules starts its jobs in the order of a list, each as early as possible, but none before its
predecessor in the list. :func:`optimal` searches all lists with all numbers of GPUs. A :class:`_States` has the partial
schedules that have started the same set of jobs. All sets with one more job follow from those before. A partial
schedule is dropped if

- a lower bound of its objective is not below the best known value;
- a later job would fit into the time for which its GPUs stand idle;
- another one with the same jobs has all GPUs free at least as early, at no higher cost.

A first pass keeps only the most promising partial schedules of each set. Its result is the bound of the second pass,
which keeps all others and so is exact. :func:`longest_first` is for larger problems (list scheduling; R. L. Graham,
"Bounds on multiprocessing timing anomalies", 1969).

Shapes: S partial schedules, G GPUs.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

MOST_JOBS = 10
MOST_GPUS = 8
"""Largest problem that :func:`optimal` solves, in about a minute."""
BEAM = 64
"""Partial schedules of each set of jobs that the first pass keeps."""

Objective = Literal["makespan", "mean"]
Curve = Mapping[int, float]
"""Seconds of a job by number of GPUs."""
Array = np.ndarray[Any, Any]


@dataclass(frozen=True)
class PlannedJob:
    """One job of a schedule.

    Attributes:
        gpus: indices of its GPUs.
        start, end: seconds since the start of the schedule.
    """

    name: str
    gpus: tuple[int, ...]
    start: float
    end: float


@dataclass(frozen=True)
class GpuSchedule:
    """A schedule; its jobs are in the order of their starts."""

    jobs: tuple[PlannedJob, ...]

    @property
    def makespan(self) -> float:
        """End of the last job, in seconds."""
        return max(job.end for job in self.jobs)

    @property
    def mean(self) -> float:
        """Mean completion time, in seconds."""
        return math.fsum(job.end for job in self.jobs) / len(self.jobs)

    def value(self, objective: Objective) -> float:
        """Return the objective, in seconds."""
        return self.makespan if objective == "makespan" else self.mean


def listed(order: Sequence[tuple[str, int]], curves: Mapping[str, Curve], gpus: int) -> GpuSchedule:
    """Start the jobs of a list, each as early as possible, but none before its predecessor.

    Args:
        order: name and number of GPUs of each job.
        gpus: number of GPUs of the node.
    """
    free = [0.0] * gpus
    jobs: list[PlannedJob] = []
    start = 0.0
    for name, width in order:
        start = max(start, sorted(free)[width - 1])
        taken = [gpu for gpu in range(gpus) if free[gpu] <= start][:width]
        end = start + curves[name][width]
        for gpu in taken:
            free[gpu] = end
        jobs.append(PlannedJob(name, tuple(taken), start, end))
    return GpuSchedule(tuple(jobs))


def optimal(curves: Mapping[str, Curve], gpus: int, objective: Objective) -> GpuSchedule:
    """Return a schedule with the smallest possible objective.

    Raises:
        ValueError: there are more than :data:`MOST_JOBS` jobs or :data:`MOST_GPUS` GPUs, or a job that no number of
            GPUs up to ``gpus`` can run.
    """
    if len(curves) > MOST_JOBS or gpus > MOST_GPUS:
        raise ValueError(f"{len(curves)} jobs on {gpus} GPUs: at most {MOST_JOBS} jobs and {MOST_GPUS} GPUs")
    best = longest_first(curves, gpus, objective)
    search = _Search(curves, gpus, objective)
    for most in (BEAM, None):
        best = search.better_than(best, most) or best
    return best


def longest_first(curves: Mapping[str, Curve], gpus: int, objective: Objective) -> GpuSchedule:
    """Return a good schedule for any number of jobs.

    For each time that occurs in a curve, every job gets the fewest GPUs with which it needs no longer, or else those of
    its shortest time. The jobs start in the order of their times: for the makespan the longest first, for the mean
    completion time the shortest first. The result is the best of these schedules.

    Raises:
        ValueError: a job cannot run on any number of GPUs up to ``gpus``.
    """
    sign = -1 if objective == "makespan" else 1
    usable = {name: _useful(name, curve, gpus) for name, curve in curves.items()}

    def within(limit: float) -> GpuSchedule:
        widths = {
            name: min((width for width in curve if curve[width] <= limit), default=max(curve))
            for name, curve in usable.items()
        }
        order = sorted(widths.items(), key=lambda item: sign * usable[item[0]][item[1]])
        return listed(order, usable, gpus)

    limits = sorted({seconds for curve in usable.values() for seconds in curve.values()})
    return min((within(limit) for limit in limits), key=lambda schedule: schedule.value(objective))


def in_turn(curves: Mapping[str, Curve], gpus: int) -> GpuSchedule:
    """Return the schedule with one job at a time, the shortest first, each on its largest number of GPUs."""
    order = [(name, max(_useful(name, curve, gpus, faster=False))) for name, curve in curves.items()]
    clock, jobs = 0.0, []
    for name, width in sorted(order, key=lambda item: curves[item[0]][item[1]]):
        jobs.append(PlannedJob(name, tuple(range(width)), clock, clock + curves[name][width]))
        clock = jobs[-1].end
    return GpuSchedule(tuple(jobs))


def one_gpu_each(curves: Mapping[str, Curve], gpus: int, objective: Objective) -> GpuSchedule | None:
    """Return the schedule of :func:`longest_first` with one GPU for every job; None if a job needs more."""
    if any(1 not in curve for curve in curves.values()):
        return None
    return longest_first({name: {1: curve[1]} for name, curve in curves.items()}, gpus, objective)


def _useful(name: str, curve: Curve, gpus: int, faster: bool = True) -> dict[int, float]:
    """Return the points with at most ``gpus`` GPUs, ascending; with ``faster`` only those faster than with fewer."""
    kept: dict[int, float] = {}
    for width in sorted(curve):
        if width <= gpus and not (faster and kept and curve[width] >= min(kept.values())):
            kept[width] = curve[width]
    if not kept:
        raise ValueError(f"{name} needs {min(curve)} GPUs; there are {gpus}")
    return kept


@dataclass(frozen=True)
class _States:
    """Partial schedules that have started the same jobs.

    Attributes:
        free_SG: times at which the GPUs become free, ascending, none before the start of the last job.
        cost_S: end of the last job so far for the makespan, sum of all ends for the mean completion time.
        job_S, width_S: index of the job that was started last, and its number of GPUs.
        before_S: index of the partial schedule without this job.
    """

    free_SG: Array
    cost_S: Array
    job_S: Array
    width_S: Array
    before_S: Array

    def at(self, index_S: Array) -> _States:
        """Return some of the partial schedules."""
        return _States(*(values[index_S] for values in vars(self).values()))


class _Search:
    """Search over all lists of jobs. Sets of jobs are bit masks."""

    def __init__(self, curves: Mapping[str, Curve], gpus: int, objective: Objective) -> None:
        self._names = list(curves)
        self._given = curves
        self._gpus = gpus
        self._objective: Objective = objective
        self._curves = [_useful(name, curve, gpus) for name, curve in curves.items()]
        self._all = (1 << len(self._names)) - 1

    def better_than(self, known: GpuSchedule, most: int | None) -> GpuSchedule | None:
        """Return the best schedule with a smaller objective than ``known``; None if there is none.

        Args:
            most: number of partial schedules of each set of jobs that are kept; None for all.
        """
        best = known.value(self._objective) * (1 if self._objective == "makespan" else len(self._names))
        best *= 1 - 1e-12
        layer = {0: _States(np.zeros((1, self._gpus)), np.zeros(1), *(np.zeros(1, np.int64) for _ in range(3)))}
        found = dict(layer)
        for _ in self._names:
            layer = self._next(layer, best, most)
            found |= layer
        if self._all not in layer:
            return None
        order, done = [], self._all
        index = int(layer[done].cost_S.argmin())
        while done:
            states = found[done]
            job = int(states.job_S[index])
            order.append((self._names[job], int(states.width_S[index])))
            index, done = int(states.before_S[index]), done & ~(1 << job)
        return listed(order[::-1], self._given, self._gpus)

    def _next(self, layer: Mapping[int, _States], best: float, most: int | None) -> dict[int, _States]:
        """Return the partial schedules with one more job."""
        parts: dict[int, list[_States]] = {}
        for done, states in layer.items():
            for job, started in self._started(self._all & ~done, states):
                parts.setdefault(done | 1 << job, []).append(started)
        after = {}
        for done, pieces in parts.items():
            joined = _States(*map(np.concatenate, zip(*(vars(piece).values() for piece in pieces), strict=True)))
            bound_S = self._bound(self._all & ~done, joined, best)
            order_S = np.argsort(bound_S, kind="stable")
            order_S = order_S[bound_S[order_S] < best]
            kept = _undominated(joined.at(order_S if most is None else order_S[: 8 * most]))
            if len(kept.cost_S):
                after[done] = kept if most is None else kept.at(np.arange(min(most, len(kept.cost_S))))
        return after

    def _started(self, remaining: int, states: _States) -> Iterator[tuple[int, _States]]:
        """Start each remaining job on each number of GPUs; yield the job and the partial schedules with it."""
        jobs = [job for job in range(len(self._names)) if remaining >> job & 1]
        ends = {job: self._earliest_end(job, states) for job in jobs}
        for job in jobs:
            others = [ends[other] for other in jobs if other != job]
            latest_S = np.min(others, 0) if others else np.inf  # from here on, another job would fit before
            for width, seconds in self._curves[job].items():
                index_S = np.flatnonzero(states.free_SG[:, width - 1] < latest_S)
                start_S = states.free_SG[index_S, width - 1]
                end_S = start_S + seconds
                free_SG = np.maximum(states.free_SG[index_S], start_S[:, None])
                free_SG[:, :width] = end_S[:, None]
                free_SG.sort(1)
                cost_S = states.cost_S[index_S]
                cost_S = np.maximum(cost_S, end_S) if self._objective == "makespan" else cost_S + end_S
                same = np.ones_like(index_S)
                yield job, _States(free_SG, cost_S, job * same, width * same, index_S)

    def _earliest_end(self, job: int, states: _States) -> Array:
        return np.min([states.free_SG[:, width - 1] + seconds for width, seconds in self._curves[job].items()], 0)

    def _bound(self, remaining: int, states: _States, best: float) -> Array:
        """Return a lower bound of the objective for every continuation that is better than ``best``.

        Makespan: all work fits into the time of all GPUs. The work of a job is the smallest GPU time with which it ends
        before ``best``. Mean completion time: the larger of two sums of ends, one with the jobs spread over all free
        GPUs in the order of their work, one with each job started at once.
        """
        free_SG, cost_S = states.free_SG, states.cost_S
        jobs = [job for job in range(len(self._names)) if remaining >> job & 1]
        if self._objective == "makespan":
            work_S = free_SG.sum(1)
            for job in jobs:
                points = [
                    np.where(free_SG[:, width - 1] + seconds < best, width * seconds, np.inf)
                    for width, seconds in self._curves[job].items()
                ]
                work_S = work_S + np.min(points, 0)
            return np.maximum(np.maximum(cost_S, free_SG[:, -1]), work_S / self._gpus)
        sums_SG, counts_G = free_SG.cumsum(1), np.arange(1, self._gpus + 1)
        works = [min(width * seconds for width, seconds in self._curves[job].items()) for job in jobs]
        spread_S, at_once_S = np.zeros_like(cost_S), np.zeros_like(cost_S)
        for job, work in zip(jobs, np.cumsum(sorted(works)), strict=True):
            spread_S += ((sums_SG + work) / counts_G).min(1)
            at_once_S += self._earliest_end(job, states)
        return cost_S + np.maximum(spread_S, at_once_S)


def _undominated(states: _States) -> _States:
    """Return the states that no other one equals or beats in all free times and in its cost, in the same order."""
    values = np.concatenate([states.free_SG, states.cost_S[:, None]], 1)
    order_S = np.argsort(values.sum(1), kind="stable")
    values = values[order_S]
    kept_S = np.ones(len(values), np.bool_)
    for index in range(len(values)):
        if kept_S[index]:
            kept_S[index + 1 :] &= (values[index + 1 :] < values[index]).any(1)
    return states.at(np.sort(order_S[kept_S]))
