"""The configuration, validated once before anything starts.

Hydra composes ``configs/`` and the command line; :func:`load` turns the result into the frozen dataclasses below
and a workload's own. Nothing past the command line sees a DictConfig. What a workload gets (:class:`RunConfig`) has
no data folder in it; that is in :class:`SessionConfig`, which only the trainer reads.
"""

from __future__ import annotations

import dataclasses
import importlib
import math
import types
import typing
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, get_args, get_origin, get_type_hints

from benchmarks import WORKLOADS
from common.distributed.layout import factor
from common.errors import ConfigError
from common.workload import Workload

Precision = Literal["fp64", "fp32", "bf16", "fp16"]


@dataclass(frozen=True)
class BenchmarkConfig:
    """What the rules fix of a benchmark, and the facts of its data.

    Attributes:
        name: name on the command line; also the key of ``WORKLOADS``.
        log_name: name that the log carries as ``submission_benchmark``.
        metric: the score that is compared with ``target``.
        direction: whether a larger or a smaller metric is better.
        train_samples, eval_samples: sizes of the data set.
        data_set: name of the data; ``stand-in`` for generated data, which can earn no result.
        schedule: options of the evaluation schedule that the rules leave free.
        facts: constants of the workload, checked by the workload's own dataclass.
        log_keys: section -> {key in the log: path of the value}; the section ``always`` and the one named by
            ``hparams.optimizer`` are logged.
    """

    name: str
    log_name: str
    description: str
    metric: str
    direction: Literal["higher", "lower"]
    target: float
    train_samples: int
    eval_samples: int
    data_set: str
    schedule: dict[str, Any]
    facts: dict[str, Any]
    log_keys: dict[str, dict[str, str]]

    @property
    def stand_in(self) -> bool:
        """Whether the data are generated."""
        return self.data_set == "stand-in"

    def reached(self, value: float) -> bool:
        """Whether ``value`` of the metric meets the target."""
        return value >= self.target if self.direction == "higher" else value <= self.target


@dataclass(frozen=True)
class ScaleConfig:
    """Machines.

    Attributes:
        nodes: number of them.
        gpus_per_node: ranks on each: GPUs, or processes on a CPU.
        gpu: the scale is one of GPUs, so that only ``device=cpu`` runs it on a CPU.
    """

    nodes: int
    gpus_per_node: int
    gpu: bool = False


@dataclass(frozen=True)
class EvaluationConfig:
    """Ranks that only evaluate.

    Attributes:
        ranks: the last of the job's ranks; with 0 the training ranks evaluate themselves and training stops meanwhile.
        layout: axes of these ranks, complete; of one rank where there are none.
    """

    ranks: int = 0
    layout: dict[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class BindingConfig:
    """Where ranks run (see :mod:`common.launch.binding`).

    Attributes:
        cpu: ``node``: the cores next to the rank's GPU; ``exclusive``: a share of them of its own; ``none``.
        memory: ``node``: the NUMA node of the rank's GPU; ``none``.
    """

    cpu: Literal["node", "exclusive", "none"] = "node"
    memory: Literal["node", "none"] = "node"


@dataclass(frozen=True)
class NetworkConfig:
    """What NCCL may use of the network; the variables behind it are in :mod:`common.launch.network`.

    Attributes:
        sharp: reduce gradients in InfiniBand's switches; the job needs Slurm's ``--network=sharp``.
        sharp_nodes: nodes from which on that pays; None for NCCL's own choice.
        user_buffers: register the buffers of captured collectives with the network; None for NCCL's own choice.
        nvls: reduce in the NVLink switches, which needs multicast; None for NCCL's own choice.
    """

    sharp: bool = False
    sharp_nodes: int | None = None
    user_buffers: bool | None = None
    nvls: bool | None = None


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
            all data-parallel ranks do.
        reduction: with shards: ``scatter``: each rank receives the sum of its shard alone (several nodes then sum
            shards); ``all_reduce``: one all-reduce over all ranks, of which each keeps its shard.
        grad_predivide: what fp16 gradients are divided by before they are summed over ranks; the update multiplies.
        implementation: of the update rule.
    """

    bucket_mb: float = 32.0
    overlap: bool = True
    shard: Literal["none", "node", "all"] = "none"
    reduction: Literal["scatter", "all_reduce"] = "scatter"
    grad_predivide: float = 1.0
    implementation: str = "auto"

    def arguments(self) -> dict[str, Any]:
        """Arguments of :class:`common.optim.optimizer.Optimizer`."""
        others = dataclasses.asdict(self)
        return {"bucket_bytes": int(others.pop("bucket_mb") * 2**20), **others}


@dataclass(frozen=True)
class BenchConfig:
    """What ``bench`` measures.

    Attributes:
        steps, warmup_steps: iterations timed, and before them.
        profile_steps: iterations under the profiler, for the breakdown.
        accumulate: keep the recipe's accumulation; False measures one micro-batch and one update an iteration, as a
            rank of a larger system runs.
        data: also measure the run through the reader of the prepared data.
    """

    steps: int = 200
    warmup_steps: int = 50
    profile_steps: int = 10
    accumulate: bool = False
    data: bool = True


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
        evaluation: the ranks that only evaluate.
        cuda_graphs: capture what repeats in CUDA graphs, in training and in evaluation.
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

    @property
    def world_size(self) -> int:
        """Ranks over all nodes."""
        return self.scale.nodes * self.scale.gpus_per_node

    @property
    def training_ranks(self) -> int:
        """Ranks over all nodes that train."""
        return self.world_size - self.evaluation.ranks


@dataclass(frozen=True)
class SessionConfig:
    """What the trainer alone sees: folders, the log, faults, observation."""

    data_dir: Path
    output_dir: Path
    device: Literal["auto", "cpu", "cuda"]
    seed: int | None
    ruleset: str | None
    submission: SubmissionConfig
    cache_cleared: bool
    resume: Path | None
    checkpoint_every: int
    keep_checkpoints: int
    timeout_seconds: float
    steps_ahead: int
    profile: str | None
    tensorboard: bool
    bench: BenchConfig
    stand_in: tuple[str, ...]


_OF_A_RUN = {"benchmark", "scale", "system", "layout", "micro_batch", "precision", "optimizer", "deterministic"}
_OF_A_RUN |= {"assets_dir", "evaluation", "cuda_graphs"}
_SHARED = _OF_A_RUN | {"hparams", "launch"} | {item.name for item in dataclasses.fields(SessionConfig)}


def workload_class(name: str) -> type[Workload]:
    """The class of workload ``name``.

    Raises:
        ConfigError: there is no such workload.
    """
    if name not in WORKLOADS:
        raise ConfigError(f"benchmark={name}: unknown; the workloads are {', '.join(sorted(WORKLOADS))}")
    module, _, attribute = WORKLOADS[name].partition(":")
    loaded: type[Workload] = getattr(importlib.import_module(module), attribute)
    return loaded


def load(tree: Mapping[str, Any], micro_batch: int | None = None) -> tuple[RunConfig, SessionConfig]:
    """Validate the composed configuration ``tree`` (plain containers) and build the dataclasses.

    Args:
        tree: what Hydra composed, resolved.
        micro_batch: replaces ``micro_batch: auto`` once the free memory is known.

    Raises:
        ConfigError: unknown key, wrong type, impossible layout, or a batch that the ranks don't divide.
    """
    tree = dict(tree)
    benchmark = build(BenchmarkConfig, tree.get("benchmark"), "benchmark")
    cls = workload_class(benchmark.name)
    own = {item.name for item in dataclasses.fields(cls.config_type)}
    unknown = sorted(set(tree) - _SHARED - own)
    if unknown:
        raise ConfigError(f"{unknown[0]}: unknown configuration key; see `mlperf-suite train --cfg job`")
    sections = {name: benchmark.facts if name == "facts" else tree.get(name) for name in own}
    workload = build(cls.config_type, sections, "")

    scale = build(ScaleConfig, tree.get("scale"), "scale")
    if scale.nodes < 1 or scale.gpus_per_node < 1:
        raise ConfigError(f"scale: {scale.nodes} nodes x {scale.gpus_per_node}: both are positive")
    evaluation = _evaluation(tree.get("evaluation", {}), scale)
    training_ranks = scale.nodes * scale.gpus_per_node - evaluation.ranks
    layout = factor(training_ranks, convert(dict[str, int], tree.get("layout"), "layout"))
    global_batch = convert(int, (tree.get("hparams") or {}).get("global_batch_size"), "hparams.global_batch_size")
    size = micro_batch or tree.get("micro_batch")
    if size == "auto":
        size = 1
    size = convert(int, size, "micro_batch")
    steps = accumulation(global_batch, size, layout["dp"])
    run = RunConfig(
        benchmark=benchmark,
        scale=scale,
        system=build(SystemConfig, tree.get("system"), "system"),
        layout=layout,
        micro_batch=size,
        global_batch=global_batch,
        grad_accumulation_steps=steps,
        precision=convert(Precision, tree.get("precision"), "precision"),
        optimizer=build(OptimizerConfig, tree.get("optimizer"), "optimizer"),
        deterministic=convert(bool, tree.get("deterministic"), "deterministic"),
        assets_dir=convert(Path | None, tree.get("assets_dir"), "assets_dir"),
        workload=workload,
        evaluation=evaluation,
        cuda_graphs=convert(bool, tree.get("cuda_graphs"), "cuda_graphs"),
    )
    if tree.get("micro_batch") != "auto":
        _check_whole_rows(size, cls.micro_batch_multiple(run))
    hints = get_type_hints(SessionConfig)
    session = SessionConfig(**{name: convert(hints[name], tree.get(name), name) for name in hints})
    _check_ranges(run, session)
    return run, session


def _evaluation(values: Any, scale: ScaleConfig) -> EvaluationConfig:
    """The ranks that only evaluate, with the axes of their layout complete."""
    given: EvaluationConfig = build(EvaluationConfig, values, "evaluation")
    world_size = scale.nodes * scale.gpus_per_node
    if not 0 <= given.ranks < world_size:
        raise ConfigError(
            f"evaluation.ranks={given.ranks}: of the {world_size} ranks of scale ({scale.nodes} nodes x "
            f"{scale.gpus_per_node}) 0 or more only evaluate, and at least 1 trains"
        )
    if given.ranks == 0:
        return EvaluationConfig()  # a recipe's layout waits for the ranks that a command line took away
    try:
        return EvaluationConfig(given.ranks, factor(given.ranks, given.layout))
    except ConfigError as error:
        raise ConfigError(f"evaluation.{error} of evaluation.ranks") from error


def _check_ranges(run: RunConfig, session: SessionConfig) -> None:
    bucket_mb, predivide, bench = run.optimizer.bucket_mb, run.optimizer.grad_predivide, session.bench
    for name, value, ok, need in (
        ("steps_ahead", session.steps_ahead, session.steps_ahead >= 1, "the host runs at least 1 step ahead"),
        ("checkpoint_every", session.checkpoint_every, session.checkpoint_every >= 0, "0 or more steps"),
        ("keep_checkpoints", session.keep_checkpoints, session.keep_checkpoints >= 1, "at least 1 is kept"),
        ("optimizer.bucket_mb", bucket_mb, 2**-20 <= bucket_mb < math.inf, "a bucket has a positive, finite size"),
        ("optimizer.grad_predivide", predivide, 0 < predivide < math.inf, "a divisor is positive and finite"),
        ("bench.steps", bench.steps, bench.steps >= 1, "at least 1 step is measured"),
        ("bench.warmup_steps", bench.warmup_steps, bench.warmup_steps >= 0, "0 or more steps"),
        ("bench.profile_steps", bench.profile_steps, bench.profile_steps >= 1, "at least 1 step is profiled"),
        ("benchmark.train_samples", run.benchmark.train_samples, run.benchmark.train_samples >= 1, "at least 1"),
        ("benchmark.eval_samples", run.benchmark.eval_samples, run.benchmark.eval_samples >= 1, "at least 1"),
    ):
        if not ok:
            raise ConfigError(f"{name}={value}: {need}")


def _check_whole_rows(micro_batch: int, unit: int) -> None:
    if micro_batch % unit:
        raise ConfigError(f"micro_batch={micro_batch}: a row counts as {unit} samples: use a multiple of {unit}")


def accumulation(global_batch: int, micro_batch: int, replicas: int) -> int:
    """Micro-batches that each replica accumulates for one global batch.

    Raises:
        ConfigError: they don't divide.
    """
    for name, value in (("micro_batch", micro_batch), ("hparams.global_batch_size", global_batch)):
        if value < 1:
            raise ConfigError(f"{name}={value}: a batch has at least one sample")
    steps, rest = divmod(global_batch, micro_batch * replicas)
    if rest or not steps:
        raise ConfigError(
            f"hparams.global_batch_size={global_batch} is not a multiple of micro_batch={micro_batch} x {replicas} "
            f"data-parallel ranks = {micro_batch * replicas}; "
            + (
                f"choose a micro_batch that divides {global_batch // replicas}"
                if global_batch % replicas == 0
                else f"{replicas} ranks do not divide it at all"
            )
        )
    return steps


def build(cls: type[Any], values: Any, path: str) -> Any:
    """An instance of dataclass ``cls`` from a mapping, with every key and type checked.

    Raises:
        ConfigError: naming key, value and what was expected.
    """
    if not isinstance(values, Mapping):
        raise ConfigError(f"{path or 'configuration'}: expected a section of keys, got {values!r}")
    hints = get_type_hints(cls)
    prefix = f"{path}." if path else ""
    for key in values:
        if key not in hints:
            raise ConfigError(f"{prefix}{key}: unknown key; {path or 'the section'} has {', '.join(hints)}")
    arguments = {}
    for item in dataclasses.fields(cls):
        if item.name in values:
            arguments[item.name] = convert(hints[item.name], values[item.name], prefix + item.name)
        elif item.default is dataclasses.MISSING and item.default_factory is dataclasses.MISSING:
            raise ConfigError(f"{prefix}{item.name}: missing")
    return cls(**arguments)


def convert(kind: Any, value: Any, path: str) -> Any:
    """``value`` as type ``kind``, without surprises: no text becomes a number, no number a truth value.

    Raises:
        ConfigError: the value does not have the type.
    """
    origin, arguments = get_origin(kind), get_args(kind)
    if kind is Any:
        return value
    if origin is Literal:
        if value not in arguments:
            raise ConfigError(f"{path}={value}: expected one of {', '.join(map(str, arguments))}")
        return value
    if origin in (typing.Union, types.UnionType):
        if value is None and type(None) in arguments:
            return None
        errors = []
        for choice in arguments:
            if choice is not type(None):
                try:
                    return convert(choice, value, path)
                except ConfigError as error:
                    errors.append(error)
        raise errors[0]
    if dataclasses.is_dataclass(kind):
        return build(typing.cast(type, kind), value, path)
    if origin is dict:
        if not isinstance(value, Mapping):
            raise ConfigError(f"{path}={value!r}: expected a section of keys")
        return {key: convert(arguments[1], entry, f"{path}.{key}") for key, entry in value.items()}
    if origin is tuple:
        if not isinstance(value, list | tuple):
            raise ConfigError(f"{path}={value!r}: expected a list")
        kinds = [arguments[0]] * len(value) if arguments[-1] is Ellipsis else list(arguments)
        if len(kinds) != len(value):
            raise ConfigError(f"{path}={value!r}: expected {len(kinds)} entries")
        return tuple(convert(k, entry, f"{path}[{i}]") for i, (k, entry) in enumerate(zip(kinds, value, strict=True)))
    if kind is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if kind is Path and isinstance(value, str | Path):
        return Path(value).expanduser()
    if isinstance(value, kind) and not (kind in (int, float) and isinstance(value, bool)):
        return value
    raise ConfigError(f"{path}={value}: expected {getattr(kind, '__name__', kind)}, got {type(value).__name__}")
