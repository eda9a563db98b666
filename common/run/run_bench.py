"""``bench.only=run``: times steps through the reader, beside evaluations and without them."""

from __future__ import annotations

import collections
import itertools
import math
from pathlib import Path

from common.config.schema import BenchConfig, RunConfig
from common.contract.evaluation import Evaluations
from common.contract.workload import Workload
from common.data.batches import Block
from common.data.prefetch import Prefetcher, side_stream
from common.distributed import job_store
from common.evaluation.modes import evaluation_mode
from common.evaluation.scorer_process import ScorerProcess
from common.run.bench_figures import BesideEvaluation, RunTiming, Timing
from common.run.kernel_profile import timed
from common.step.graphs import StepRunner


def time_run(
    run: RunConfig,
    data_dir: Path,
    options: BenchConfig,
    workload: Workload,
    runner: StepRunner,
    block: Block,
    scorer: ScorerProcess | None,
) -> RunTiming:
    """Time ``options.steps`` steps through the reader and two evaluations; extrapolate to ``block`` and its evaluation.

    If the evaluation set is smaller than the rules' set, its time is scaled up.
    """
    ranks, beside = run.evaluation.ranks, None
    evaluations = evaluation_mode(run, workload, workload.layout, scorer)
    workload.warm_up_reader()
    with runner.on_stream():
        evaluations.prepare(workload.weights)
        evaluations.open_data(data_dir)
        source = workload.open_data(data_dir)
        runner.warm_up(workload.examples_of_data(), iterations=1)
        samples = (options.warmup_steps + (2 if ranks else 1) * options.steps + 2) * run.global_batch
        batches = itertools.chain(source.batches(Block(0, 1, 0, 0, samples)))
        prefetcher = Prefetcher(workload.prepare, run.grad_accumulation_steps, side_stream(workload.layout.device))
        prefetcher.begin(batches)
        _feed(prefetcher, runner, options.warmup_steps)
        prefetcher.wait_seconds = 0.0
        seconds = timed(lambda: _feed(prefetcher, runner, options.steps), runner.cuda)
        wait = prefetcher.wait_seconds / options.steps * 1e3
        times = _time_evaluations(evaluations, workload, runner.cuda)
        if ranks:
            times = [[sum(parts), 0.0] for parts in times]  # training waits for none of it
            every = math.ceil(times[-1][0] / (seconds / options.steps))
            every = int(job_store.from_rank_0("bench/steps between evaluations", str(every)))
            beside = _time_beside(evaluations, workload, prefetcher, runner, options.steps, every)
        evaluations.dismiss(0)
        evaluations.close()
    collections.deque(batches, maxlen=0)  # the reader ends
    whole_set = run.benchmark.eval_samples / source.eval_samples
    source.close()
    training = Timing(seconds / options.steps * 1e3, run.global_batch)
    (first, _), (later, scoring) = times
    train_seconds, eval_seconds = block.samples / training.throughput, later * whole_set
    # Concurrent evaluation or scoring delays training only if it takes longer than the training between two
    # evaluations. Offline scoring never delays training, because its checkpoints wait on the disk.
    between = max(train_seconds, eval_seconds) if ranks else max(train_seconds + eval_seconds, scoring * whole_set)
    between = train_seconds if run.evaluation.offline else between
    return RunTiming(
        training, wait, source.eval_samples, first, later, scoring, block.samples / between, run.evaluation, beside
    )


def _time_beside(
    evaluations: Evaluations,
    workload: Workload,
    prefetcher: Prefetcher,
    runner: StepRunner,
    steps: int,
    every: int,
) -> BesideEvaluation:
    """Time ``steps`` steps during which the evaluation ranks get the weights before each ``every``-th step."""

    def work() -> None:
        for first in range(0, steps, every):
            evaluations.submit(workload.weights(), first)
            _feed(prefetcher, runner, min(every, steps - first))

    step_ms = timed(work, runner.cuda) / steps * 1e3
    collections.deque(evaluations.finish(), maxlen=0)
    sent = sum(tensor.nbytes for tensor in workload.weights().tensors.values())
    return BesideEvaluation(step_ms, every, sent)


def _feed(prefetcher: Prefetcher, runner: StepRunner, steps: int) -> None:
    for _ in range(steps):
        batches = prefetcher.take()
        assert batches is not None, "the reader ended early"
        runner(batches)
        prefetcher.consumed()


def _time_evaluations(evaluations: Evaluations, workload: Workload, cuda: bool) -> list[list[float]]:
    """Time two evaluations. Return for each the seconds that training waits, and then the seconds until the score.

    With background scoring, only rank 0 receives scores, so the second time is valid only there.
    """

    return [
        [
            timed(lambda: evaluations.submit(workload.weights(), 0), cuda),
            timed(lambda: list(evaluations.finish()), cuda),
        ]
        for _ in range(2)
    ]
