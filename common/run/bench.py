"""``mlperf-suite bench``: measures a workload's training step, and how much of that speed a whole run keeps.

The *step* is forward, loss, backward, reduction and update on a synthetic batch that is already on the device. The
*run* is the same steps fed by the reader of the prepared data, with evaluations at their points, or a generation of
self-play (:mod:`common.run.generation_bench`). ``bench.only`` selects one of the two, the reader alone
(:mod:`common.run.reader_bench`), the evaluation (:mod:`common.run.evaluation_bench`), the operations
(:mod:`common.ops.bench.operations`), or the step and the same training in other software
(:mod:`common.run.peer_bench`).
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import itertools
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from common.config.schema import BenchConfig, RunConfig, SessionConfig
from common.contract.workload import Peer, Workload
from common.data.batches import Batch, Block
from common.distributed import job_store
from common.distributed.groups import of_all_ranks
from common.distributed.layout import Layout
from common.distributed.rank_info import Role
from common.distributed.weights import Arrived
from common.errors import ConfigError
from common.evaluation.serving import WeightEvaluation
from common.mlperf.admission import evaluation_schedule
from common.observe.nvml import GpuMeter, device_uuid
from common.ops.bench.operations import operations_of, report, time_operations
from common.ops.operation import compiled_references
from common.optim.updater import SendingUpdater
from common.run.bench_figures import (
    Phases,
    RankFigures,
    Timing,
    breakdown_text,
    capture_rows,
    figures,
    header,
    ranks_text,
    run_text,
    step_text,
    step_times,
    table,
    write_figures,
)
from common.run.evaluation_bench import prepared_everywhere, time_evaluation
from common.run.generation_bench import time_generation
from common.run.kernel_profile import Breakdown, breakdown, elapsed, meet, recorded, timed
from common.run.kernel_work import cases_report, kernels_report, profiler_window
from common.run.peer_bench import PeerTiming, time_peers
from common.run.reader_bench import time_reader
from common.run.run_bench import time_run
from common.run.start import Start
from common.step.graphs import WARM_UP_ITERATIONS, StepRunner
from common.step.train_step import DeviceResult, TrainStep

EVALUATION_TIMEOUT = timedelta(hours=2)

METER_SECONDS = 0.1
"""Seconds between two readings of the GPU's sensors while steps are timed."""


def bench(start: Start, began: float) -> int:
    """Measure as configured, print the figures on rank 0, and return the exit code.

    Args:
        began: start time of this process, by ``time.perf_counter``.
    """
    with compiled_references() if start.session.bench.compiled else contextlib.nullcontext():
        return _bench(start, began)


def _bench(start: Start, began: float) -> int:
    workload_type, run, session, rank_info = start.workload_type, start.run, start.session, start.rank_info
    device, options = start.device, start.session.bench
    phases = Phases(began)
    phases.end("imports", start.imported)
    phases.end("waiting for a turn", start.turn)
    phases.end("joining ranks")
    if options.only in ("ops", "tiles"):
        return _bench_operations(workload_type, run, options)
    role = Role.of(rank_info, run.other_ranks)
    if options.only == "evaluation":
        return _bench_evaluation_alone(start, role, phases)
    blocks = _first_blocks(run)
    if role.name == "play" or (role.name == "evaluate" and not blocks[-1].samples):
        return 0
    if role.name == "evaluate":
        return _bench_evaluation(workload_type, run, session, role, device)
    if options.only == "run" and not session.data_dir.is_dir():
        raise ConfigError(f"bench.only=run: there are no prepared data in {session.data_dir} (data_dir=…)")
    if options.only == "reader" and not blocks[-1].samples:
        raise ConfigError("bench.only=reader: a generation reads the games that it plays; bench.only=run measures both")
    peers = _peers(workload_type, run, options)
    run = replace(run, selfplay=replace(run.selfplay, training_ranks_play=True))  # the others take no part
    if not options.accumulate:
        one = run.micro_batch * run.layout["dp"]
        run = replace(run, global_batch=one, grad_accumulation_steps=1)
    layout = Layout(run.layout, role.rank, device, seed=0, ctas=run.system.network.ctas.by_axis())
    workload = workload_type(run, layout)
    say = print if rank_info.rank == 0 else _silent
    if options.only == "reader":
        return _bench_reader(run, session, workload, phases, say)
    torch.backends.cudnn.benchmark = not run.deterministic
    eager = device.type == "cpu" or not run.cuda_graphs
    step = workload.build_step()
    if not options.traffic:
        _stop_sending(step)
    runner = StepRunner(step, workload.model, run.grad_accumulation_steps, run.cuda_graphs)
    examples = list(workload.example_batches())
    phases.end("build")
    took = _warm_up(runner, examples, phases)
    say(header(run, device, workload))
    say(table({"warm-up and capture": f"{took:.1f} s", **capture_rows(runner.cost)}))
    if not options.traffic:
        say(table({"traffic": "none: ranks send no gradients and no weights"}))
    batches = examples[:1] * run.grad_accumulation_steps
    if options.seconds is not None:
        options = options.within(_longest_iteration(runner, batches, device))
    if options != session.bench:
        times = "" if options.repetitions == 1 else f" {options.repetitions} times"
        say(table({"iterations": f"{options.steps} timed{times}, {options.warmup_steps} before them: bench.seconds"}))
    timing, timing_of_run, of_generation, without_traffic, reserved = None, None, None, None, None
    kernels: dict[str, Any] | None = None
    by_rank: list[RankFigures] = []
    if options.only in (None, "step", "peer"):
        timing, by_rank, text, found = _measure_step(runner, batches, options, device, phases)
        reserved = torch.cuda.max_memory_reserved(device) if device.type == "cuda" else None
        say(step_text(timing, run, workload, device))
        say(ranks_text(by_rank))
        if text and options.only != "peer":
            say(text)
        if options.kernels:
            kernels = kernels_report(runner, batches, found, eager)
    if options.only == "counters":
        with runner.on_stream(), profiler_window(device):
            runner(batches)
    if options.only in (None, "run") and session.data_dir.is_dir() and not blocks[-1].samples:
        of_generation = time_generation(run, session.data_dir, workload, runner, blocks)
        phases.end("run")
        say(table(of_generation.rows()))
    elif options.only in (None, "run") and session.data_dir.is_dir():
        timing_of_run = time_run(run, session.data_dir, options, workload, runner, blocks[-1], start.scorer)
        phases.end("run")
        say(run_text(timing_of_run, timing, workload.sample_sizes()))
    elif options.only is None:
        say(table({"run": f"not measured: there are no prepared data in {session.data_dir} (data_dir=…)"}))
    if options.traffic == "both" and timing is not None and run.training_ranks > 1:
        runner.close()
        if device.type == "cuda":
            torch.cuda.empty_cache()  # the next graphs need the memory of the closed ones
        _stop_sending(step)
        _warm_up(runner, examples, phases, iterations=1)  # on the same stream, because gradients are bound to it
        coupled, coupled_by_rank, _, _ = _measure_step(runner, batches, options, device, phases)
        without_traffic = coupled, coupled_by_rank
        say(table({"step without gradients and weights": step_times(coupled)}))
        say(ranks_text(coupled_by_rank))
    say(table({"seconds of this process": phases.text()}))
    values = figures(timing, by_rank, timing_of_run, without_traffic, reserved, phases, run, workload, device)
    if of_generation is not None:
        values["generation"] = dataclasses.asdict(of_generation)
    chosen = workload.implementations()
    runner.close()
    workload.close()
    example = examples[0]
    del step, runner, workload, examples, batches  # frees CUDA graphs, weights, moments and the other batches
    if kernels is not None:
        if eager and device.type == "cuda" and run.world_size == 1:
            kernels["cases"] = cases_report(workload_type, chosen)
        values["kernels"] = kernels
    if peers and timing is not None:
        measured = time_peers(peers, run, example, device, options.steps)
        values["peers"] = [_reported(each, timing.throughput, say) for each in measured]
    if options.report is not None and rank_info.rank == 0:
        write_figures(options.report, {**values, "traffic": bool(options.traffic)})
    return 0


def _bench_reader(
    run: RunConfig, session: SessionConfig, workload: Workload, phases: Phases, say: Callable[[str], object]
) -> int:
    """Measure the reader alone."""
    say(header(run, workload.layout.device, workload))
    reader = time_reader(workload, session.data_dir, run.grad_accumulation_steps, run.global_batch, session.bench)
    phases.end("reader")
    say(table(reader.rows(session.bench, run.training_ranks)))
    if session.bench.report is not None and workload.layout.rank == 0:
        readers = run.training_ranks // run.layout["dp"]
        values = figures(None, (), None, None, None, phases, run, workload, workload.layout.device)
        write_figures(session.bench.report, {**values, "reader": reader.report(session.bench, readers)})
    workload.close()
    return 0


def _peers(workload_type: type[Workload], run: RunConfig, options: BenchConfig) -> Sequence[Peer]:
    """Return the peers to time; empty unless ``bench.only=peer``."""
    if options.only != "peer":
        return ()
    if not workload_type.peers:
        raise ConfigError(f"bench.only=peer: {workload_type.title} is compared with no other software")
    if run.world_size > 1:
        raise ConfigError("bench.only=peer: measures one GPU; use a recipe with one rank")
    peers: Sequence[Peer] = importlib.import_module(workload_type.peers).PEERS
    return peers


def _reported(peer: PeerTiming, own_throughput: float, say: Callable[[str], object]) -> dict[str, Any]:
    """Print a peer's timing and return it for the report."""
    say(table({f"peer: {peer.name}": peer.text(own_throughput)}))
    return dataclasses.asdict(peer)


def _bench_operations(workload_type: type[Workload], run: RunConfig, options: BenchConfig) -> int:
    """Measure operations in worker processes, which use the GPU exclusively."""
    if run.world_size > 1:
        raise ConfigError(f"bench.only={options.only}: measures one GPU; use a recipe with one rank")
    operations = operations_of(workload_type.config_type.__module__, options.operations)
    measured = time_operations(operations, tiles=options.only == "tiles")
    if options.report is not None:
        write_figures(options.report, report(measured))
    return 0


def _warm_up(
    runner: StepRunner, examples: Sequence[Batch], phases: Phases, iterations: int = WARM_UP_ITERATIONS
) -> float:
    """Warm up and capture the step; return the seconds."""
    runner.warm_up(examples, iterations)
    captured = runner.cost.seconds
    return phases.end("warm-up", time.perf_counter() - captured) + phases.end("capture")


def _stop_sending(step: TrainStep) -> None:
    for updater in step.updaters:
        if isinstance(updater, SendingUpdater):
            updater.stop_sending()


def _measure_step(
    runner: StepRunner,
    batches: list[Batch],
    options: BenchConfig,
    device: torch.device,
    phases: Phases,
) -> tuple[Timing, list[RankFigures], str, Breakdown | None]:
    """Return the timing with the energy of all ranks, every rank's figures, and this rank's breakdown. Collective.

    The breakdown is text and an object; on a CPU, "" and None.
    """
    meter = GpuMeter(device_uuid(device), interval_seconds=METER_SECONDS)
    timing, means = _time_step(runner, batches, options, meter)
    meter.close()
    phases.end("measuring")
    text, found = "", None
    if device.type == "cuda":
        text, found = _breakdown(runner, batches, options.profile_steps)
        phases.end("profile")
    by_rank = of_all_ranks(RankFigures.of(timing, means, found))
    joules = [rank.joules for rank in by_rank if rank.joules is not None]
    return replace(timing, joules=sum(joules) if len(joules) == len(by_rank) else None), by_rank, text, found


def _bench_evaluation(
    workload_type: type[Workload], run: RunConfig, session: SessionConfig, role: Role, device: torch.device
) -> int:
    """Evaluate the weights of the training ranks on the evaluation ranks, until the training ranks have measured."""
    if session.bench.only not in (None, "run") or not session.data_dir.is_dir():
        return 0
    workload = _evaluated_workload(workload_type, run, role, device)
    evaluation = workload.evaluation(workload.layout)
    with torch.cuda.stream(torch.cuda.Stream(device)) if device.type == "cuda" else contextlib.nullcontext():
        evaluation.warm_up()
        served = WeightEvaluation(run, workload, evaluation, EVALUATION_TIMEOUT)
        served.open_data(session.data_dir)
        while isinstance(item := served.receiver.take(), Arrived):
            served.evaluate(item)
    served.end()
    evaluation.close()
    workload.close()
    return 0


def _bench_evaluation_alone(start: Start, role: Role, phases: Phases) -> int:
    """Measure the evaluation on the ranks that evaluate and print it on the first of them. All ranks call this."""
    prepared = prepared_everywhere(start.session.data_dir)
    if role.name == ("evaluate" if start.run.evaluation.ranks else "train"):
        _measure_evaluation(start, role, phases, prepared)
    job_store.meet("bench/evaluation measured", EVALUATION_TIMEOUT)  # rank 0 hosts the store and must not exit first
    return 0


def _measure_evaluation(start: Start, role: Role, phases: Phases, prepared: bool) -> None:
    """Measure the evaluation; the first rank that evaluates prints the result."""
    run, session = start.run, start.session
    workload = _evaluated_workload(start.workload_type, run, role, start.device)
    phases.end("build")
    timing = time_evaluation(workload, session.data_dir, prepared, session.bench.repetitions)
    phases.end("evaluation")
    if role.rank == 0:
        rows = {**timing.rows(), "seconds of this process": phases.text()}
        print(header(run, start.device, workload), table(rows), sep="\n")
        if timing.breakdown is not None and timing.profiled is not None:
            print(breakdown_text("breakdown of predicting", timing.breakdown, timing.profiled * 1e3))
        if session.bench.report is not None:
            values = figures(None, (), None, None, timing.reserved_bytes or None, phases, run, workload, start.device)
            write_figures(session.bench.report, {**values, "evaluation": timing.report()})
    workload.close()


def _evaluated_workload(workload_type: type[Workload], run: RunConfig, role: Role, device: torch.device) -> Workload:
    """Build the workload on the ranks of ``role``."""
    sizes = run.layout if role.name == "train" else run.evaluation.layout
    layout = Layout(sizes, role.rank, device, 0, role.name, run.system.network.ctas.by_axis())
    torch.backends.cudnn.benchmark = not run.deterministic
    return workload_type(run, layout)


def _silent(text: str) -> None:
    """Print nothing, on ranks other than 0."""


def _longest_iteration(runner: StepRunner, batches: list[Batch], device: torch.device) -> float:
    """Return the slowest rank's seconds per iteration, so that all ranks time the same number. Collective."""
    with runner.on_stream():
        runner(batches)
        seconds = torch.tensor(timed(lambda: runner(batches), runner.cuda), dtype=torch.float64, device=device)
    if dist.is_initialized():
        dist.all_reduce(seconds, dist.ReduceOp.MAX)
    return seconds.item()


def _time_step(
    runner: StepRunner, batches: list[Batch], options: BenchConfig, meter: GpuMeter
) -> tuple[Timing, dict[str, float]]:
    """Time the step. Return the timing, with the energy of this rank's GPU, and means of the GPU's readings."""
    steps = options.steps
    results: list[DeviceResult] = []
    host: list[float] = []

    def iterations() -> None:
        began = time.process_time()
        for _ in range(steps):
            results[:] = [runner(batches)]
        host.append(time.process_time() - began)

    with runner.on_stream():
        for _ in range(options.warmup_steps):
            runner(batches)
        meet(runner.cuda)  # otherwise, unfinished iterations would be measured too
        meter.means()
        before, sent_before = meter.energy_joules(), meter.sent_bytes()
        seconds = [timed(iterations, runner.cuda) for _ in range(options.repetitions)]
        after, sent_after, means = meter.energy_joules(), meter.sent_bytes(), meter.means()
        last = runner.step.read(results[0].names, results[0].values.tolist())
    iterated = steps * options.repetitions
    joules = None if before is None or after is None else (after - before) / iterated
    sent = None if sent_before is None or sent_after is None else (sent_after - sent_before) / iterated
    times = [each / steps * 1e3 for each in seconds]
    timing = Timing(
        statistics.median(times),
        sum(batch.samples for batch in batches),
        joules,
        last.overflow,
        tuple(times),
        sent,
        sum(host) / sum(seconds),
    )
    return timing, means


def _breakdown(runner: StepRunner, batches: list[Batch], steps: int) -> tuple[str, Breakdown]:
    """Profile steps. Return one step's breakdown, by kind of kernel with gaps, as text and as an object."""
    with runner.on_stream():
        kernels, seconds = recorded(
            lambda: runner(batches), lambda: elapsed(lambda: [runner(batches) for _ in range(steps)], True)
        )
    found = breakdown(kernels, steps)
    return breakdown_text("breakdown of a step", found, seconds / steps * 1e3), found


def _first_blocks(run: RunConfig) -> list[Block]:
    """Return the first two blocks of the recipe's own run, or the only one. The first may be longer than the others."""
    return list(itertools.islice(evaluation_schedule(run).blocks(run.train_samples, run.global_batch), 2))
