"""Schema of the configuration, as frozen dataclasses.

Workloads receive :class:`RunConfig`, which has no data folder. The data folder is in :class:`SessionConfig`, which only
the trainer reads.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

from common.config.ranges import AtLeast, Positive, Range
from common.config.system import SystemConfig
from common.errors import ConfigError

Precision = Literal["fp64", "fp32", "bf16", "fp16"]
Role = Literal["linear", "attn", "comm"]
LoggedPrecision = Literal["fp64", "fp32", "tf32", "bfloat16", "fp16", "fp8", "mxfp6", "nvfp4", "mxfp4", "int8", "int4"]

CUSTOM = "custom"
"""``data_set`` of data that are neither synthetic nor the benchmark's own."""
SYNTHETIC = "synthetic"
"""``data_set`` of synthetic data."""
DataSetName = Range(f"it is {SYNTHETIC} now", lambda value: value != "stand-in")

BucketSize = Range("a bucket has a positive, finite size", lambda value: 2**-20 <= value < math.inf)
Divisor = Range("a divisor is positive and finite", Positive.holds)
Seed = Range("seeds are 0 or more, and below 2**64", lambda value: 0 <= value < 2**64)
LONGEST_TIMEOUT = 10**7
"""Largest ``timeout_seconds``, about four months. Timeouts of PyTorch overflow with much larger values."""
Timeout = Range(f"positive, and at most {LONGEST_TIMEOUT:,} seconds", lambda value: 0 < value <= LONGEST_TIMEOUT)


@dataclass(frozen=True)
class TargetConfig:
    """The target of a metric."""

    value: float
    direction: Literal["higher", "lower"]

    def met(self, value: float) -> bool:
        """Return whether ``value`` of the metric meets the target; NaN never does."""
        return value >= self.value if self.direction == "higher" else value <= self.value

    def __str__(self) -> str:
        return f"{'>=' if self.direction == 'higher' else '<='} {self.value:g}"


@dataclass(frozen=True)
class BenchmarkConfig:
    """What the rules fix for a benchmark, and its dataset constants.

    Attributes:
        name: name on the command line; also the key of ``WORKLOADS``.
        targets: metric to target; a single evaluation must reach all of them.
        data_set: name of the data: ``synthetic``, ``custom`` (other data than the benchmark's), or the name of the
            benchmark's data. Only the last can earn a result.
        schedule: options of the evaluation schedule that the rules leave free.
        facts: dataset constants, validated by the workload's own dataclass.
        log_keys: section -> {key in the log: path of the value}. The sections ``always``, and those named like the
            values of ``hparams.optimizer`` and ``hparams.scheduler``, are logged.
    """

    name: str
    description: str
    targets: dict[str, TargetConfig]
    train_samples: Annotated[int, AtLeast(1)]
    eval_samples: Annotated[int, AtLeast(1)]
    data_set: Annotated[str, DataSetName]
    schedule: dict[str, Any]
    facts: dict[str, Any]
    log_keys: dict[str, dict[str, str]]

    @property
    def synthetic(self) -> bool:
        """Whether the data are synthetic."""
        return self.data_set == SYNTHETIC

    @property
    def custom(self) -> bool:
        """Whether the data are neither synthetic nor the benchmark's own."""
        return self.data_set == CUSTOM

    def judged(self, values: Mapping[str, float]) -> dict[str, float]:
        """Return the metrics that have a target, in the order of the targets.

        Raises:
            ValueError: the evaluation lacks a metric that has a target.
        """
        missing = [metric for metric in self.targets if metric not in values]
        if missing:
            raise ValueError(f"the evaluation of {self.name} gives no {missing[0]}: it has {', '.join(values)}")
        return {metric: values[metric] for metric in self.targets}

    def reached(self, values: Mapping[str, float]) -> bool:
        """Return whether one evaluation meets every target. Raise ValueError if a metric is missing."""
        return all(self.targets[metric].met(value) for metric, value in self.judged(values).items())

    def __post_init__(self) -> None:
        if not self.targets:
            raise ConfigError("targets: a benchmark has at least one metric with a target")


@dataclass(frozen=True)
class ScaleConfig:
    """Number and kind of machines.

    Attributes:
        gpus_per_node: ranks per node: GPUs, or processes on a CPU.
        gpu: whether the scale requires GPUs; on a CPU it then runs only with ``device=cpu``.
    """

    nodes: Annotated[int, AtLeast(1)]
    gpus_per_node: Annotated[int, AtLeast(1)]
    gpu: bool = False


@dataclass(frozen=True)
class EvaluationConfig:
    """Where evaluations run and how they are scored.

    Attributes:
        ranks: number of ranks, the last ones of the job, that only evaluate. 0: training stops while the training
            ranks predict.
        layout: sizes of all axes for the evaluation ranks; empty without them.
        scoring: ``inline``: rank 0 of the predicting ranks scores; ``background``: a process of training rank 0 scores
            during training; ``offline``: checkpoints are written at the evaluation points, and scored by the
            evaluation ranks during training or by all ranks after it.
        scorer_threads: CPU threads of the background process.
        first: offline: first checkpoint that is scored, counted from 1; the next ones follow until one passes.
        all: offline: score from the first checkpoint on, as the rules require of one run in a result.
        by_command: offline: the run ends after training, and ``mlperf-suite score`` scores the checkpoints.
        buffers: offline: copies of the weights in host memory that wait for the disk. Training waits if all are in use.
    """

    ranks: int = 0
    layout: dict[str, int] = field(default_factory=dict)
    scoring: Literal["inline", "background", "offline"] = "inline"
    scorer_threads: Annotated[int, AtLeast(1, "at least 1 thread scores")] = 4
    first: Annotated[int, AtLeast(1, "checkpoints count from 1")] = 1
    all: bool = False
    by_command: bool = False
    buffers: Annotated[int, AtLeast(1, "at least 1 copy is written from")] = 2

    @property
    def offline(self) -> bool:
        """Whether checkpoints are scored offline."""
        return self.scoring == "offline"

    @property
    def begins_with(self) -> int:
        """Number of the first checkpoint that is scored, from 1."""
        return 1 if self.all else self.first

    def __post_init__(self) -> None:
        if not self.offline:
            for name, given in (("first", self.first != 1), ("all", self.all), ("by_command", self.by_command)):
                if given:
                    raise ConfigError(f"{name}={getattr(self, name)}: is for scoring=offline, this is {self.scoring}")
        if self.by_command and self.ranks:
            raise ConfigError(f"by_command=true: the {self.ranks} evaluation ranks would have nothing to do")


@dataclass(frozen=True)
class SelfPlayConfig:
    """Which ranks play the games, in a run that learns by self-play.

    Attributes:
        ranks: number of ranks that only play; their numbers are between those of training and of evaluation ranks.
        training_ranks_play: training ranks also play while they wait for games.
    """

    ranks: int = 0
    training_ranks_play: bool = True


@dataclass(frozen=True)
class SubmissionConfig:
    """Submitter and system, logged as ``submission_*``."""

    org: str = "unset"
    platform: str = "unset"
    division: Literal["closed", "open"] = "closed"
    status: Literal["onprem", "cloud", "preview", "research"] = "onprem"


@dataclass(frozen=True)
class OptimizerConfig:
    """How gradients are reduced and applied. These settings are not hyperparameters in the sense of the rules.

    Attributes:
        bucket_mb: MiB of gradients per collective.
        overlap: reduce during the backward pass, and gather updated weights during the forward pass.
        shard: ``none``: every rank updates all weights; ``node``: the ranks of a node share the update; ``all``: all
            ranks with the same weights (``layout.dp`` and ``layout.cp``) share it.
        reduction: with shards: ``scatter``: each rank receives only the sum of its shard (several nodes then sum
            shards); ``all_reduce``: each rank receives the whole sum and keeps its shard.
        exchange: with shards and ``scatter``, what moves gradients and weights between the ranks that share:
            ``collectives``, or ``copy_engines``, only between the GPUs of a machine that can map each other's memory.
        grad_predivide: divisor of the scaled fp16 loss, so that sums of gradients over ranks stay in fp16's range; the
            update multiplies by it. With a power of two, only gradients below fp16's smallest normal number change.
        implementation: implementation of the update rule.
        masters: master copies of bf16 weights: ``fp32``, or ``remainder``: the low 16 bits of fp32.
        gradients: precision in which bf16 and fp16 gradients are summed over micro-batches and ranks: ``same``: that
            of the weights; ``fp32``, for 2 more bytes per weight.
    """

    bucket_mb: Annotated[float, BucketSize] = 32.0
    overlap: bool = True
    shard: Literal["none", "node", "all"] = "none"
    reduction: Literal["scatter", "all_reduce"] = "scatter"
    exchange: Literal["collectives", "copy_engines"] = "collectives"
    grad_predivide: Annotated[float, Divisor] = 1.0
    implementation: str = "auto"
    masters: Literal["fp32", "remainder"] = "fp32"
    gradients: Literal["same", "fp32"] = "same"

    def arguments(self) -> dict[str, Any]:
        """Return keyword arguments for :class:`common.optim.optimizer.Optimizer`."""
        others = dataclasses.asdict(self)
        del others["grad_predivide"]  # belongs to the loss scale
        return {"bucket_bytes": int(others.pop("bucket_mb") * 2**20), **others}


@dataclass(frozen=True)
class BenchConfig:
    """Options of ``bench``.

    Attributes:
        steps, warmup_steps: timed iterations, and iterations before them.
        profile_steps: iterations under the profiler, for the breakdown.
        seconds: time limit for the timed iterations of the step and of the run, each. If iterations are long, fewer
            (at least one) are timed, warmed up and profiled; None: no limit.
        accumulate: keep the recipe's accumulation. False measures one micro-batch and one update per iteration, like
            a rank of a larger system.
        only: ``step``: the step on a synthetic batch; ``reader``: the reader of the prepared data; ``run``: training
            through the reader, with evaluations; ``evaluation``: predicting and scoring, or without prepared data only
            predicting synthetic samples; ``ops``: every implementation of the workload's operations; ``tiles``: a
            search for better tiles of their kernels; ``peer``: the step, and the same training in other software;
            ``counters``: no figures, one step between ``cudaProfilerStart`` and ``cudaProfilerStop`` for a profiler;
            None: the step and, if there are prepared data, the run.
        operations: with ``ops`` and ``tiles``: parts of names of operations, or ``all`` for those of all workloads;
            empty: those of this workload.
        pause_ms: with ``reader``: pause after each step, in place of the training computation.
        report: JSON file for the figures, in addition to the printed output; None writes none.
        repetitions: how often ``steps`` iterations are timed, within ``seconds`` in total; with ``evaluation``, how
            many evaluations are timed after the first one. The median is reported.
        traffic: whether ranks send gradients and weights to each other. ``False`` keeps only model collectives and
            single numbers; ``both`` measures the step with this traffic, then without it.
        kernels: add the kernels of the step to ``report``; those of an eager step with their bytes and FLOPs
            (:mod:`common.run.kernel_work`).
        compiled: compile the reference implementations of operations by ``torch.compile``.
    """

    steps: Annotated[int, AtLeast(1, "at least 1 step is measured")] = 200
    warmup_steps: Annotated[int, AtLeast(0, "0 or more steps")] = 50
    profile_steps: Annotated[int, AtLeast(1, "at least 1 step is profiled")] = 10
    seconds: Annotated[float, Positive] | None = None
    accumulate: bool = False
    only: Literal["step", "reader", "run", "evaluation", "ops", "tiles", "peer", "counters"] | None = None
    operations: tuple[str, ...] = ()
    pause_ms: Annotated[float, AtLeast(0, "0 or more milliseconds")] = 0.0
    report: Path | None = None
    repetitions: Annotated[int, AtLeast(1, "at least 1 repetition is timed")] = 1
    traffic: Literal[True, False, "both"] = True
    kernels: bool = False
    compiled: bool = False

    def within(self, iteration: float) -> BenchConfig:
        """Return options with only as many iterations as fit in ``seconds``, if one takes ``iteration`` seconds."""
        part = math.inf if self.seconds is None else self.seconds / (iteration * self.steps)
        parts = {"steps": part / self.repetitions, "warmup_steps": part, "profile_steps": part}
        fewer = {
            name: max(min(1, getattr(self, name)), int(getattr(self, name) * share))
            for name, share in parts.items()
            if share < 1
        }
        return dataclasses.replace(self, **fewer)


@dataclass(frozen=True)
class Declaration:
    """Settings that a workload derives from a configuration before it is built, also on machines without GPUs.

    Attributes:
        schedule_options: derived options of the benchmark's evaluation schedule; ``benchmark.schedule`` overrides them.
        micro_batch_multiple: ``micro_batch`` must be a multiple of this number of samples, which cannot be separated.
        largest_micro_batch: upper limit for ``micro_batch=auto``. On GPUs known to us, most networks do not become
            faster above the default.
        initialised_tensors: names of initialised weights, for the logs of rounds that require them.
        derived_values: further values for the benchmark's table of log keys.
        lowest_precision: precision of linear layers, attention and communication, in the words of the rules, where it
            differs from ``precision``.
        forbidden: violations of the closed division on real data, beyond the logged hyperparameters: one sentence for
            each value, ``key=value: the rule``.
        train_samples: samples per epoch if the rules allow to leave some out, such as an incomplete batch; None: all.
        sample_tokens: tokens per sample, where the rules count progress in tokens.
        chunk_graphs: whether each pass over a micro-batch can be a separate graph (``cuda_graphs=chunks``).
        data_format: name and version of the prepared data's format, as in their manifest; None if training needs no
            data folder.
        reads_unprepared: returns whether training can read a folder without manifest, in the layout of another tool.
        order_of_data: returns a description, for checkpoints, of what determines the sample order besides seed and
            batch sizes, such as the reader. Called only on training ranks, since it may depend on installed packages.
    """

    schedule_options: Mapping[str, Any] = field(default_factory=dict)
    micro_batch_multiple: int = 1
    largest_micro_batch: int = 512
    initialised_tensors: Sequence[str] = ()
    derived_values: Mapping[str, object] = field(default_factory=dict)
    lowest_precision: Mapping[Role, LoggedPrecision] = field(default_factory=dict)
    forbidden: Sequence[str] = ()
    train_samples: int | None = None
    sample_tokens: int | None = None
    chunk_graphs: bool = False
    data_format: str | None = None
    reads_unprepared: Callable[[Path], bool] | None = None
    order_of_data: Callable[[], str] = str


@dataclass(frozen=True)
class RunConfig:
    """The configuration that a workload receives.

    Attributes:
        micro_batch: samples of one forward and backward pass on one rank.
        global_batch: samples of one optimizer step over all ranks and micro-batches.
        grad_accumulation_steps: micro-batches of one optimizer step on one rank; derived.
        precision: precision of weights, activations and gradients; masters and statistics stay fp32.
        cuda_graphs: capture repeated work in CUDA graphs, in training and in evaluation.
        chunk_graphs: in training, one graph for each pass of each chunk instead of one per iteration.
        machines: number of nodes that the ranks of one machine act as, for tests of the code paths between nodes.
        recipe: benchmark and scale, such as ``bert/8xH200``.
    """

    benchmark: BenchmarkConfig
    scale: ScaleConfig
    system: SystemConfig
    layout: dict[str, int]
    micro_batch: int
    global_batch: int
    grad_accumulation_steps: int
    precision: Precision
    optimizer: OptimizerConfig
    deterministic: bool
    assets_dir: Path | None
    workload: Any
    evaluation: EvaluationConfig = field(default_factory=EvaluationConfig)
    selfplay: SelfPlayConfig = field(default_factory=SelfPlayConfig)
    cuda_graphs: bool = True
    chunk_graphs: bool = False
    machines: int = 1
    recipe: str = ""
    declaration: Declaration = field(default_factory=Declaration)

    @property
    def config_file(self) -> str:
        """Path in the repository of the file with the recipe, and its scale, for the log."""
        workload, _, scale = self.recipe.partition("/")
        return f"configs/recipe/{workload}.yaml:{scale}"

    @property
    def world_size(self) -> int:
        """Number of ranks on all nodes."""
        return self.scale.nodes * self.scale.gpus_per_node

    @property
    def ranks_per_node(self) -> int:
        """Number of consecutive ranks that reach each other without a network."""
        return self.scale.gpus_per_node // self.machines

    @property
    def training_ranks(self) -> int:
        """Number of training ranks on all nodes."""
        return self.world_size - self.evaluation.ranks - self.selfplay.ranks

    @property
    def other_ranks(self) -> dict[str, int]:
        """Number of ranks of each role but ``train``."""
        return {"play": self.selfplay.ranks, "evaluate": self.evaluation.ranks}

    @property
    def train_samples(self) -> int:
        """Training samples per epoch."""
        declared = self.declaration.train_samples
        return self.benchmark.train_samples if declared is None else declared


@dataclass(frozen=True)
class SessionConfig:
    """Settings that only the trainer sees: folders, log, faults, observation.

    Attributes:
        staging_dir: folder on a local disk of each node, to which a run copies the node's part of ``data_dir``; None:
            training reads ``data_dir``.
    """

    data_dir: Path
    staging_dir: Path | None
    output_dir: Path
    device: Literal["auto", "cpu", "cuda"]
    seed: Annotated[int, Seed] | None
    ruleset: str | None
    submission: SubmissionConfig
    cache_cleared: bool
    resume: Path | None
    checkpoint_every: Annotated[int, AtLeast(0, "0 or more steps")]
    keep_checkpoints: Annotated[int, AtLeast(1, "at least 1 is kept")]
    timeout_seconds: Annotated[float, Timeout]
    steps_ahead: Annotated[int, AtLeast(1, "the host runs at least 1 step ahead")]
    profile: str | None
    tensorboard: bool
    bench: BenchConfig
    synthetic: tuple[str, ...]
