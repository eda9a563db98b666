"""``mlperf-suite bench``: how fast a workload's step is, and how much of that the whole run keeps.

Two figures. The *step*: forward, loss, backward, reduction and update on a synthetic batch that is already on the
device. The *run*: the same steps fed by the reader of the prepared data, with evaluations at their points. Their ratio
is the price of everything around the step. ``bench.only`` measures the step alone, or the reader alone
(:mod:`common.run.reader_bench`).
"""

from __future__ import annotations

import contextlib
import itertools
import json
import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from common.config.schema import BenchConfig, RunConfig, SessionConfig
from common.contract.evaluation import Evaluations
from common.contract.workload import Workload
from common.data.batches import Batch, Block, HostBatch
from common.data.prefetch import Prefetcher, side_stream
from common.distributed import job_store
from common.distributed.layout import Layout
from common.distributed.rank_info import RankInfo
from common.distributed.roles import Role
from common.evaluation.inline import InlineEvaluation
from common.evaluation.scorer_process import ScorerProcess
from common.evaluation.ways import way_to_evaluate
from common.mlperf.admission import evaluation_schedule
from common.observe.nvml import GpuMeter, device_uuid
from common.optional_packages import broken_packages
from common.run.bench_figures import RunTiming, Timing, figures, write_figures
from common.run.kernels import breakdown, meet, recorded
from common.run.reader_bench import time_reader
from common.step.graphs import CaptureCost, StepRunner

PEAK_FLOPS = {"H200": 989e12, "H100": 989e12, "A100": 312e12, "B200": 2250e12}
"""Dense bf16/fp16 matrix FLOP/s of a GPU, by a part of its name (vendor's data sheets)."""

EVALUATION_TIMES = "bench/evaluation times"
EVALUATION_TIMEOUT = timedelta(hours=2)

LABEL = 36
"""Characters of the names in the output."""


def bench(
    workload_type: type[Workload],
    run: RunConfig,
    session: SessionConfig,
    rank_info: RankInfo,
    device: torch.device,
    scorer: ScorerProcess | None = None,
) -> int:
    """Measure step and run, and print them on rank 0; returns the exit code.

    ``scorer`` is the process that scores, on rank 0 where the configuration has one.
    """
    options = session.bench
    role = Role.of(rank_info, run.evaluation.ranks)
    if role.name == "evaluate":
        return _bench_evaluation(workload_type, run, session, role, device)
    block = _block_between_evaluations(run)
    if not options.accumulate:
        one = run.micro_batch * run.layout["dp"]
        run = replace(run, global_batch=one, grad_accumulation_steps=1)
    layout = Layout(run.layout, role.rank, device, seed=0, ctas=run.system.network.ctas.by_axis())
    workload = workload_type(run, layout)
    say = print if rank_info.rank == 0 else _silent
    if options.only == "reader":
        say(_header(run, device, workload))
        reader = time_reader(workload, session.data_dir, run.grad_accumulation_steps, run.global_batch, options)
        say(_table(reader.rows(options, run.training_ranks)))
        workload.close()
        return 0
    torch.backends.cudnn.benchmark = not run.deterministic
    step = workload.build_step()
    runner = StepRunner(step, workload.model, run.grad_accumulation_steps, run.cuda_graphs)
    examples = list(workload.example_batches())
    began = time.perf_counter()
    runner.warm_up(examples)
    say(_header(run, device, workload))
    say(_table({"warm-up and capture": f"{time.perf_counter() - began:.1f} s", **capture_rows(runner.cost)}))
    batches = examples[:1] * run.grad_accumulation_steps
    options = options.within(_longest_iteration(runner, batches, device))
    if options != session.bench:
        say(_table({"iterations": f"{options.steps} timed, {options.warmup_steps} before them: bench.seconds"}))
    meter = GpuMeter(device_uuid(device))
    timing = _time_step(runner, batches, options.warmup_steps, options.steps, meter)
    meter.close()
    say(_step_text(timing, run, workload, device))
    exposed_ms = timing_of_run = None
    if device.type == "cuda":
        text, exposed_ms = _breakdown(runner, batches, options.profile_steps, workload.kernel_names())
        say(text)
    if options.only is None and session.data_dir.is_dir():
        timing_of_run = _time_run(run, session.data_dir, options, workload, runner, block, scorer)
        say(_run_text(timing_of_run, timing))
    elif options.only is None:
        say(f"{'run':<{LABEL}}not measured: there are no prepared data in {session.data_dir} (data_dir=…)")
    joules = _sum_over_ranks(timing.joules, device)
    if options.report is not None and rank_info.rank == 0:
        timing = replace(timing, joules=joules)
        write_figures(options.report, figures(timing, timing_of_run, exposed_ms, run, workload, device))
    runner.close()
    workload.close()
    return 0


def _bench_evaluation(
    workload_type: type[Workload], run: RunConfig, session: SessionConfig, role: Role, device: torch.device
) -> int:
    """Measure the evaluation on the ranks that only evaluate, for the training ranks' rank 0 to print."""
    if session.bench.only is not None or not session.data_dir.is_dir():
        return 0
    layout = Layout(run.evaluation.layout, role.rank, device, 0, role.name, run.system.network.ctas.by_axis())
    torch.backends.cudnn.benchmark = not run.deterministic
    workload = workload_type(run, layout)
    evaluation = InlineEvaluation(workload.evaluation(layout), layout, role.first_rank)
    cuda = device.type == "cuda"
    with torch.cuda.stream(torch.cuda.Stream(device)) if cuda else contextlib.nullcontext():
        evaluation.prepare(workload.weights)
        evaluation.open_data(session.data_dir)
        times = _time_evaluations(evaluation, workload, cuda)
    job_store.from_rank(role.first_rank, EVALUATION_TIMES, json.dumps(times))
    evaluation.close()
    workload.close()
    return 0


def _time_evaluations(evaluations: Evaluations, workload: Workload, cuda: bool) -> list[list[float]]:
    """Of the first evaluation and of one after it, the seconds that training stands still, and those until the score.

    The latter are those of a score in the background, as rank 0 knows.
    """

    def wait() -> None:
        for _ in evaluations.finish():
            pass

    return [[_timed(lambda: evaluations.submit(workload.weights(), 0), cuda), _timed(wait, cuda)] for _ in range(2)]


def _silent(text: str) -> None:
    """Ranks other than 0 print nothing."""


def _table(rows: dict[str, str]) -> str:
    """Names and values in two columns; further lines of a value stand below its first.

    A name wider than its column has its value right behind it.
    """
    below = "\n" + " " * LABEL
    return "\n".join(f"{name + ' ':<{LABEL}}{below.join(value.splitlines())}" for name, value in rows.items())


def _header(run: RunConfig, device: torch.device, workload: Workload) -> str:
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"
    rows = {
        "benchmark": run.benchmark.description,
        "hardware": f"{run.world_size} x {name}",
        "versions": f"PyTorch {torch.__version__}, CUDA {torch.version.cuda}, cuDNN {torch.backends.cudnn.version()}",
        "micro-batch": f"{run.micro_batch} x {run.grad_accumulation_steps} accumulated, {run.precision}",
        **({"planned memory": plan} if (plan := workload.memory_plan()) else {}),
        **{f"implementation: {name}": choice for name, choice in workload.implementations().items()},
        **({"broken packages": "\n".join(broken)} if (broken := broken_packages()) else {}),
    }
    return _table(rows)


def capture_rows(cost: CaptureCost) -> dict[str, str]:
    """What the graphs of the step have taken; nothing where there are none."""
    if not cost.graphs:
        return {}
    taken = f"captured in {cost.seconds:.1f} s, {cost.memory / 1e9:.2f} GB in their pools and inputs"
    return {"CUDA graphs of the step": f"{cost.graphs}, {taken}"}


def _longest_iteration(runner: StepRunner, batches: list[Batch], device: torch.device) -> float:
    """Seconds of an iteration on the rank that takes longest, so that all time as many. Collective."""
    with runner.on_stream():
        runner(batches)
        seconds = torch.tensor(_timed(lambda: runner(batches), runner.cuda), dtype=torch.float64, device=device)
    if dist.is_initialized():
        dist.all_reduce(seconds, dist.ReduceOp.MAX)
    return seconds.item()


def _time_step(runner: StepRunner, batches: list[Batch], warmup: int, steps: int, meter: GpuMeter) -> Timing:
    with runner.on_stream():
        for _ in range(warmup):
            runner(batches)
        meet(runner.cuda)  # what has not run yet would be counted
        before = meter.energy_joules()
        seconds = _timed(lambda: [runner(batches) for _ in range(steps)], runner.cuda)
        after = meter.energy_joules()
        result = runner(batches)
        last = runner.step.read(result.names, result.values.tolist())
    joules = None if before is None or after is None else (after - before) / steps
    return Timing(seconds / steps * 1e3, sum(batch.samples for batch in batches), joules, last.overflow)


def _timed(work: Callable[[], object], cuda: bool) -> float:
    meet(cuda)
    return _elapsed(work, cuda)


def _elapsed(work: Callable[[], object], cuda: bool) -> float:
    if cuda:
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        work()
        end.record()
        end.synchronize()
        return start.elapsed_time(end) / 1e3
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


def _sum_over_ranks(joules: float | None, device: torch.device) -> float | None:
    """Over all ranks; None if one doesn't know. Collective."""
    total = torch.tensor(math.nan if joules is None else joules, dtype=torch.float64, device=device)
    if dist.is_initialized():
        dist.all_reduce(total)
    return None if total.isnan() else total.item()


def _step_text(timing: Timing, run: RunConfig, workload: Workload, device: torch.device) -> str:
    per_rank = timing.throughput / run.training_ranks
    rows = {
        "step": f"{timing.step_ms:.3f} ms, {_rate(timing.throughput)} samples/s ({_rate(per_rank)} a rank)",
    }
    if timing.overflow:
        rows["step: not valid"] = "the last gradients were not finite, so that nothing was updated"
    if device.type == "cuda":
        peak = next((v for k, v in PEAK_FLOPS.items() if k in torch.cuda.get_device_name(device)), None)
        if flops := workload.sample_flops() * per_rank:  # else nobody has counted them
            share = f", {flops / peak:.1%} MFU of {peak / 1e12:,.0f}" if peak else ""
            rows["model FLOP/s a rank"] = f"{flops / 1e12:.1f} TFLOP/s{share}"
        reserved, used = torch.cuda.max_memory_reserved(device), torch.cuda.max_memory_allocated(device)
        rows["peak memory"] = (
            f"{reserved / 1e9:.1f} GB reserved for tensors, {used / 1e9:.1f} of it used; "
            f"{_device_memory(device) / 1e9:.1f} GB of the GPU taken in all"
        )
    return _table(rows)


def _rate(samples: float) -> str:
    """Whole numbers, or four digits of a small one."""
    return f"{samples:,.0f}" if samples >= 1000 else f"{samples:.4g}"


def _device_memory(device: torch.device) -> int:
    """Bytes of the GPU that are taken, by whomever."""
    free, total = torch.cuda.mem_get_info(device)
    return total - free


def _breakdown(
    runner: StepRunner, batches: list[Batch], steps: int, own: Sequence[tuple[str, str]]
) -> tuple[str, float]:
    """Device time of one step by kind of kernel, and the time in which no kernel ran; exposed communication in ms."""
    with runner.on_stream():
        kernels, seconds = recorded(
            lambda: runner(batches), lambda: _elapsed(lambda: [runner(batches) for _ in range(steps)], True)
        )
    found, total = breakdown(kernels, steps, own), seconds / steps * 1e3
    rows = found.rows(**{"no kernel (gaps)": total - found.busy_ms})
    return "\n".join([f"{'breakdown of a step':<{LABEL}}{total:.3f} ms under the profiler", *rows]), found.exposed_ms


def _block_between_evaluations(run: RunConfig) -> Block:
    """The second block of the recipe's own run, or the only one: the first may be longer than the others."""
    blocks = evaluation_schedule(run).blocks(run.train_samples, run.global_batch)
    return list(itertools.islice(blocks, 2))[-1]


def _time_run(
    run: RunConfig,
    data_dir: Path,
    options: BenchConfig,
    workload: Workload,
    runner: StepRunner,
    block: Block,
    scorer: ScorerProcess | None,
) -> RunTiming:
    """Train through the reader, evaluate, and extend to ``block`` and the evaluation after it.

    As many steps as ``options`` says are timed. The evaluation of a smaller set than the rules' counts in proportion.
    """
    ranks = run.evaluation.ranks
    evaluations = None if ranks else way_to_evaluate(run, workload, workload.layout, scorer)
    workload.warm_up_reader()
    with runner.on_stream():
        if evaluations is not None:
            evaluations.prepare(workload.weights)
            evaluations.open_data(data_dir)
        source = workload.open_data(data_dir)
        runner.warm_up(workload.examples_of_data())
        samples = (options.warmup_steps + options.steps + 2) * run.global_batch
        batches = itertools.chain(source.batches(Block(0, 1, 0, 0, samples)))
        prefetcher = Prefetcher(workload.prepare, run.grad_accumulation_steps, side_stream(workload.layout.device))
        prefetcher.begin(batches)
        _feed(prefetcher, runner, options.warmup_steps)
        prefetcher.wait_seconds = 0.0
        seconds = _timed(lambda: _feed(prefetcher, runner, options.steps), runner.cuda)
        wait = prefetcher.wait_seconds / options.steps * 1e3
        if evaluations is not None:
            times = _time_evaluations(evaluations, workload, runner.cuda)
            evaluations.close()
        else:
            times = json.loads(job_store.from_rank(run.training_ranks, EVALUATION_TIMES, "", EVALUATION_TIMEOUT))
    _drain(batches)
    whole_set = run.benchmark.eval_samples / source.eval_samples
    source.close()
    training = Timing(seconds / options.steps * 1e3, run.global_batch)
    (first, _), (later, scoring) = times
    train_seconds, eval_seconds = block.samples / training.throughput, later * whole_set
    # Who evaluates or scores meanwhile holds training up only by taking longer than it does between two evaluations;
    # checkpoints, which are scored offline, wait on the disk.
    between = max(train_seconds, eval_seconds) if ranks else max(train_seconds + eval_seconds, scoring * whole_set)
    between = train_seconds if run.evaluation.offline else between
    return RunTiming(
        training, wait, source.eval_samples, first, later, scoring, block.samples / between, run.evaluation
    )


def _feed(prefetcher: Prefetcher, runner: StepRunner, steps: int) -> None:
    for _ in range(steps):
        batches = prefetcher.take()
        assert batches is not None, "the reader ended early"
        runner(batches)
        prefetcher.consumed()


def _drain(batches: Iterator[HostBatch]) -> None:
    for _ in batches:
        pass


def _run_text(timing: RunTiming, step: Timing) -> str:
    run, evaluation = timing.training, timing.evaluation
    rows = {
        "run: training": f"{run.step_ms:.3f} ms, {_rate(run.throughput)} samples/s, "
        f"{run.throughput / step.throughput:.3f} of the step; host waited {timing.data_wait_ms:.2f} ms for data",
        "run: evaluation": f"{timing.first_evaluation:.2f} s first, {timing.later_evaluation:.2f} s after, "
        f"of {timing.eval_samples:,} samples"
        + (f", on ranks of its own ({evaluation.ranks})" if evaluation.ranks else "")
        + (f"; scored in the background, {timing.scoring:.2f} s" if evaluation.scoring == "background" else "")
        + ("; scored offline, which training does not wait for" if evaluation.offline else ""),
        "run: with evaluations": f"{_rate(timing.with_evaluations)} samples/s, "
        f"{timing.with_evaluations / step.throughput:.3f} of the step",
    }
    return _table(rows)
