"""What a configuration holds, as frozen dataclasses.

What a workload gets (:class:`RunConfig`) has no data folder in it; that is in :class:`SessionConfig`, which only the
trainer reads.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

from common.config.ranges import AtLeast, Between, Positive, Range
from common.errors import ConfigError

Precision = Literal["fp64", "fp32", "bf16", "fp16"]
Role = Literal["linear", "attn", "comm"]
LoggedPrecision = Literal["fp64", "fp32", "tf32", "bfloat16", "fp16", "fp8", "mxfp6", "nvfp4", "mxfp4", "int8", "int4"]

CUSTOM = "custom"
"""``data_set`` of data that are neither synthetic nor the benchmark's."""

BucketSize = Range("a bucket has a positive, finite size", lambda value: 2**-20 <= value < math.inf)
Divisor = Range("a divisor is positive and finite", Positive.holds)


@dataclass(frozen=True)
class TargetConfig:
    """What a metric is to reach.

    Attributes:
        value: the target.
        direction: whether a larger or a smaller metric is better.
    """

    value: float
    direction: Literal["higher", "lower"]

    def met(self, value: float) -> bool:
        """Whether ``value`` of the metric meets the target; NaN never does."""
        return value >= self.value if self.direction == "higher" else value <= self.value

    def __str__(self) -> str:
        return f"{'>=' if self.direction == 'higher' else '<='} {self.value:g}"


@dataclass(frozen=True)
class BenchmarkConfig:
    """What the rules fix of a benchmark, and the facts of its data.

    Attributes:
        name: name on the command line; also the key of ``WORKLOADS``.
        targets: metric to what it is to reach; one evaluation must reach all of them.
        train_samples, eval_samples: sizes of the data set.
        data_set: name of the data; ``stand-in`` for synthetic and ``custom`` for other data than the benchmark's, which
            can earn no result.
        schedule: options of the evaluation schedule that the rules leave free.
        facts: constants of the workload, checked by the workload's own dataclass.
        log_keys: section -> {key in the log: path of the value}; the section ``always`` and the one named by
            ``hparams.optimizer`` are logged.
    """

    name: str
    description: str
    targets: dict[str, TargetConfig]
    train_samples: Annotated[int, AtLeast(1)]
    eval_samples: Annotated[int, AtLeast(1)]
    data_set: str
    schedule: dict[str, Any]
    facts: dict[str, Any]
    log_keys: dict[str, dict[str, str]]

    @property
    def stand_in(self) -> bool:
        """Whether the data are generated."""
        return self.data_set == "stand-in"

    @property
    def custom(self) -> bool:
        """Whether the data are neither synthetic nor the benchmark's."""
        return self.data_set == CUSTOM

    def judged(self, values: Mapping[str, float]) -> dict[str, float]:
        """Of the metrics of one evaluation those that have a target, in the order of the targets.

        Raises:
            ValueError: the evaluation lacks one.
        """
        missing = [metric for metric in self.targets if metric not in values]
        if missing:
            raise ValueError(f"the evaluation of {self.name} gives no {missing[0]}: it has {', '.join(values)}")
        return {metric: values[metric] for metric in self.targets}

    def reached(self, values: Mapping[str, float]) -> bool:
        """Whether the metrics of one evaluation meet every target; ValueError if one is lacking."""
        return all(self.targets[metric].met(value) for metric, value in self.judged(values).items())

    def __post_init__(self) -> None:
        if not self.targets:
            raise ConfigError("targets: a benchmark has at least one metric with a target")


@dataclass(frozen=True)
class ScaleConfig:
    """Machines.

    Attributes:
        nodes: number of them.
        gpus_per_node: ranks on each: GPUs, or processes on a CPU.
        gpu: the scale is one of GPUs, so that only ``device=cpu`` runs it on a CPU.
    """

    nodes: Annotated[int, AtLeast(1)]
    gpus_per_node: Annotated[int, AtLeast(1)]
    gpu: bool = False


@dataclass(frozen=True)
class EvaluationConfig:
    """Who predicts and who scores.

    Attributes:
        ranks: the last of the job's ranks, which only evaluate; with 0 the training ranks predict themselves and
            training stops meanwhile.
        layout: axes of these ranks, complete; of one rank where there are none.
        scoring: ``inline``: by rank 0 of those that predict; ``background``: by a process of training rank 0, while
            training goes on; ``offline``: checkpoints are written at the evaluation points and scored apart from the
            training, by the evaluation ranks meanwhile, or by all ranks after it.
        scorer_threads: of that process.
        first: offline, the first checkpoint that is scored, counted from 1: the others are scored in ascending order.
        all: offline, score from the first checkpoint of the run on, as the rules want it of one run in a result.
        by_command: offline, the run ends with its training, and ``mlperf-suite score`` scores the checkpoints.
        buffers: offline, copies in host memory of weights that are on their way to the disk; where the disk is behind
            with all of them, training waits.
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
        """Whether checkpoints are scored apart from the training."""
        return self.scoring == "offline"

    @property
    def begins_with(self) -> int:
        """The first checkpoint that is scored."""
        return 1 if self.all else self.first

    def __post_init__(self) -> None:
        if not self.offline:
            for name, given in (("first", self.first != 1), ("all", self.all), ("by_command", self.by_command)):
                if given:
                    raise ConfigError(f"{name}={getattr(self, name)}: is for scoring=offline, this is {self.scoring}")
        if self.by_command and self.ranks:
            raise ConfigError(f"by_command=true: the {self.ranks} evaluation ranks would have nothing to do")


@dataclass(frozen=True)
class BindingConfig:
    """Where ranks run (see :mod:`common.launch.binding`).

    Attributes:
        cpu: ``node``: the cores next to the rank's GPU; ``exclusive``: a share of them of its own; ``none``.
        memory: ``node``: the NUMA node of the rank's GPU; ``none``.
    """

    cpu: Literal["node", "exclusive", "none"] = "node"
    memory: Literal["node", "none"] = "node"


MOST_CTAS = 64
"""NCCL's channels; a thread block serves one."""

MOST_IN_A_CLUSTER = 8


@dataclass(frozen=True)
class Ctas:
    """Thread blocks (CTAs) that an operation of NCCL takes of a GPU, and their priority; None is NCCL's own choice.

    Not so of a pipeline's links: :func:`common.distributed.ctas.of_links`.

    Names and ranges: NCCL user guide, ``ncclConfig_t``: ``minCTAs``, ``maxCTAs``, ``cgaClusterSize``.

    Attributes:
        min, max: of one operation.
        cluster: of them that run side by side as one cluster; 0 for none.
        priority: priority of NCCL's stream. With ``high`` its thread blocks start on the next free multiprocessors,
            before waiting blocks of kernels that were launched earlier; with ``normal`` they queue behind those.
    """

    min: Annotated[int, Between(1, MOST_CTAS)] | None = None
    max: Annotated[int, Between(1, MOST_CTAS)] | None = None
    cluster: Annotated[int, Between(0, MOST_IN_A_CLUSTER)] | None = None
    priority: Literal["normal", "high"] = "normal"

    def __post_init__(self) -> None:
        if self.min is not None and self.max is not None and self.min > self.max:
            raise ConfigError(f"min={self.min}: more thread blocks than max={self.max}; give a smaller min")


@dataclass(frozen=True)
class CtasOfAxes:
    """Of communicators over an axis of the layout. One over several axes has those of ``dp``, else of the outermost."""

    pp: Ctas = field(default_factory=Ctas)
    dp: Ctas = field(default_factory=Ctas)
    cp: Ctas = field(default_factory=Ctas)
    tp: Ctas = field(default_factory=Ctas)

    def by_axis(self) -> dict[str, Ctas]:
        """Name of the axis to its thread blocks."""
        return {axis.name: getattr(self, axis.name) for axis in dataclasses.fields(self)}


@dataclass(frozen=True)
class NetworkConfig:
    """What NCCL may use of the network, and of the GPU for it.

    All but ``ctas`` become variables: :mod:`common.launch.nccl_settings`.

    Attributes:
        sharp: reduce gradients in InfiniBand's switches; the job needs Slurm's ``--network=sharp``.
        sharp_nodes: nodes from which on that pays; None for NCCL's own choice.
        user_buffers: register the buffers of captured collectives with the network; None for NCCL's own choice.
        nvls: reduce in the NVLink switches, which needs multicast; None for NCCL's own choice.
        ctas: thread blocks, which products then lack, and their priority.
    """

    sharp: bool = False
    sharp_nodes: int | None = None
    user_buffers: bool | None = None
    nvls: bool | None = None
    ctas: CtasOfAxes = field(default_factory=CtasOfAxes)


@dataclass(frozen=True)
class SystemConfig:
    """The machine: settings that are neither the benchmark's nor the recipe's.

    Attributes:
        environment: variables set on every rank unless the user has set them.
        vboost: level of the GPU's power slider that favours the tensor cores; None leaves it as it is.
        limits: what `doctor` demands of the machine.
    """

    name: str = "auto"
    environment: dict[str, str] = field(default_factory=dict)
    binding: BindingConfig = field(default_factory=BindingConfig)
    network: NetworkConfig = field(default_factory=NetworkConfig)
    vboost: int | None = None
    limits: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class SubmissionConfig:
    """Who submits what; goes into the log as ``submission_*``."""

    org: str = "unset"
    platform: str = "unset"
    division: Literal["closed", "open"] = "closed"
    status: Literal["onprem", "cloud", "preview", "research"] = "onprem"


@dataclass(frozen=True)
class OptimizerConfig:
    """How gradients are reduced and applied; not what the rules call hyperparameters.

    Attributes:
        bucket_mb: gradients that are reduced in one collective.
        overlap: reduce during the backward pass, and gather updated weights during the forward pass.
        shard: who updates: ``none``: every rank all weights; ``node``: the ranks of a node share the work; ``all``:
            all ranks with the same weights do (``layout.dp`` and ``layout.cp``).
        reduction: with shards: ``scatter``: each rank receives the sum of its shard alone (several nodes then sum
            shards); ``all_reduce``: one all-reduce over all ranks, of which each keeps its shard.
        grad_predivide: divisor of the scaled fp16 loss, so that sums of gradients over ranks stay in fp16's range; the
            update multiplies by it. With a power of two only gradients below fp16's smallest normal number change.
        implementation: of the update rule.
        masters: of bf16 weights: ``fp32``, or ``remainder``: the 16 bits that an fp32 has beyond its weight.
        gradients: of bf16 and fp16 weights: ``same`` adds them up, over micro-batches and ranks, in the weights'
            precision, ``fp32`` in fp32, for 2 bytes a weight more.
    """

    bucket_mb: Annotated[float, BucketSize] = 32.0
    overlap: bool = True
    shard: Literal["none", "node", "all"] = "none"
    reduction: Literal["scatter", "all_reduce"] = "scatter"
    grad_predivide: Annotated[float, Divisor] = 1.0
    implementation: str = "auto"
    masters: Literal["fp32", "remainder"] = "fp32"
    gradients: Literal["same", "fp32"] = "same"

    def arguments(self) -> dict[str, Any]:
        """Arguments of :class:`common.optim.optimizer.Optimizer`."""
        others = dataclasses.asdict(self)
        del others["grad_predivide"]  # the loss scale's
        return {"bucket_bytes": int(others.pop("bucket_mb") * 2**20), **others}


@dataclass(frozen=True)
class BenchConfig:
    """What ``bench`` measures.

    Attributes:
        steps, warmup_steps: iterations timed, and before them.
        profile_steps: iterations under the profiler, for the breakdown.
        seconds: that the timed iterations of step and run take at most, each: where iterations are long, fewer are
            timed, at least one, and fewer run before them and under the profiler; None: all of them.
        accumulate: keep the recipe's accumulation; False measures one micro-batch and one update an iteration, as a
            rank of a larger system runs.
        only: ``step``: the step on a synthetic batch; ``reader``: the reader of the prepared data; ``run``: training
            through the reader, with evaluations; ``evaluation``: predicting and scoring; without prepared data,
            predicting synthetic samples, which are not scored; ``ops``: the workload's operations, each implementation
            alone; ``tiles``: better tiles for their kernels; ``peer``: the step, and the same training with other
            software; None: the step and, if there are prepared data, the run.
        operations: with ``ops`` and ``tiles``, parts of the names of operations, or ``all`` for those of all workloads;
            empty: those that the workload uses.
        pause_ms: after each step of the reader alone, for what training would compute meanwhile.
        report: file for the figures as JSON, beside what is printed; None writes none.
        repetitions: how often ``steps`` iterations of the step are timed, which share ``seconds``; with ``evaluation``,
            how many evaluations are timed after the first one. The median counts.
        traffic: whether ranks send each other gradients and weights: ``False`` leaves only what couples them, ``both``
            measures the step with, and then again without them.
    """

    steps: Annotated[int, AtLeast(1, "at least 1 step is measured")] = 200
    warmup_steps: Annotated[int, AtLeast(0, "0 or more steps")] = 50
    profile_steps: Annotated[int, AtLeast(1, "at least 1 step is profiled")] = 10
    seconds: Annotated[float, Positive] | None = None
    accumulate: bool = False
    only: Literal["step", "reader", "run", "evaluation", "ops", "tiles", "peer"] | None = None
    operations: tuple[str, ...] = ()
    pause_ms: Annotated[float, AtLeast(0, "0 or more milliseconds")] = 0.0
    report: Path | None = None
    repetitions: Annotated[int, AtLeast(1, "at least 1 repetition is timed")] = 1
    traffic: Literal[True, False, "both"] = True

    def within(self, iteration: float) -> BenchConfig:
        """The same with as many iterations as ``seconds`` allows, where one takes ``iteration`` seconds."""
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
    """What a workload says of a configuration, before it is built and on machines without its devices.

    Attributes:
        schedule_options: options of the benchmark's evaluation schedule that follow from the configuration;
            ``benchmark.schedule`` overrides them.
        micro_batch_multiple: samples that cannot be separated: ``micro_batch`` is a multiple of it.
        largest_micro_batch: beyond which ``micro_batch=auto`` does not look: with most networks larger ones gain
            nothing on any GPU that we know.
        initialised_tensors: names under which the log says that weights were initialised, for rounds that ask for it.
        derived_values: what the benchmark's table of log keys needs beyond the configuration.
        lowest_precision: of linear layers, of attention and of communication, in the words of the rules, where it is
            not ``precision``.
        forbidden: what the closed division forbids on real data beyond the logged hyperparameters: plain sentences,
            one for each value, ``key=value: the rule``.
        train_samples: of an epoch, where the rules let a run leave some out, such as those that fill no batch; None for
            all of the benchmark's.
        sample_tokens: tokens of a sample, where the rules count progress in tokens.
        chunk_graphs: whether the passes of a micro-batch can have graphs of their own (``cuda_graphs=chunks``).
        data_format: name and version of the prepared data's format, as their manifest has it; None where training
            needs no folder of data.
        reads_unprepared: returns whether training reads a data folder although it has no manifest, because another
            tool laid it out in a known way; None where training reads prepared data alone.
        order_of_data: gives what decides the order of samples beyond seed and batch sizes, such as the reader; for
            checkpoints. Asked on the training ranks alone, since it may depend on what is installed there.
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
    """What a workload sees.

    Attributes:
        micro_batch: samples of one forward and backward pass on one rank.
        global_batch: samples of one optimizer step over all ranks and micro-batches.
        grad_accumulation_steps: micro-batches of one optimizer step on one rank; derived.
        precision: of weights, activations and gradients; masters and statistics stay fp32.
        layout: axes of the training ranks, complete.
        workload: the workload's own configuration, of its ``config_type``.
        declaration: what the workload says of all the others.
        evaluation: who predicts and who scores.
        cuda_graphs: capture what repeats in CUDA graphs, in training and in evaluation.
        chunk_graphs: in training these are one for each pass of each chunk, not one of a whole iteration.
        config_file: the recipe, as the log names it: its path in the repository.
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
    cuda_graphs: bool = True
    chunk_graphs: bool = False
    config_file: str = "configs/train.yaml"
    declaration: Declaration = field(default_factory=Declaration)

    @property
    def world_size(self) -> int:
        """Ranks over all nodes."""
        return self.scale.nodes * self.scale.gpus_per_node

    @property
    def training_ranks(self) -> int:
        """Ranks over all nodes that train."""
        return self.world_size - self.evaluation.ranks

    @property
    def train_samples(self) -> int:
        """Training samples of an epoch."""
        declared = self.declaration.train_samples
        return self.benchmark.train_samples if declared is None else declared


@dataclass(frozen=True)
class SessionConfig:
    """What the trainer alone sees: folders, the log, faults, observation."""

    data_dir: Path
    output_dir: Path
    device: Literal["auto", "cpu", "cuda"]
    seed: Annotated[int, AtLeast(0, "seeds are 0 or more")] | None
    ruleset: str | None
    submission: SubmissionConfig
    cache_cleared: bool
    resume: Path | None
    checkpoint_every: Annotated[int, AtLeast(0, "0 or more steps")]
    keep_checkpoints: Annotated[int, AtLeast(1, "at least 1 is kept")]
    timeout_seconds: float
    steps_ahead: Annotated[int, AtLeast(1, "the host runs at least 1 step ahead")]
    profile: str | None
    tensorboard: bool
    bench: BenchConfig
    stand_in: tuple[str, ...]
