"""Validate the configuration once, before the run starts.

Hydra composes ``configs/`` and the command line; :func:`load` converts the result into the frozen dataclasses of
:mod:`common.config.schema` and the workload's own one. No other module handles a DictConfig.
"""

from __future__ import annotations

import dataclasses
import math
import types
import typing
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, Protocol, get_args, get_origin, get_type_hints

from common.config.override import as_typed, did_you_mean
from common.config.ranges import Range
from common.config.schema import (
    BenchmarkConfig,
    Declaration,
    EvaluationConfig,
    OptimizerConfig,
    Precision,
    RunConfig,
    ScaleConfig,
    SelfPlayConfig,
    SessionConfig,
)
from common.config.system import SystemConfig
from common.errors import ConfigError


class Configurable(Protocol):
    """Interface that the loader needs of a workload class."""

    config_type: ClassVar[type[Any]]

    @classmethod
    def declare(cls, cfg: RunConfig) -> Declaration:
        """Return settings that follow from the configuration."""


_OF_A_RUN = {"benchmark", "scale", "system", "layout", "micro_batch", "precision", "optimizer", "deterministic"}
_OF_A_RUN |= {"assets_dir", "evaluation", "selfplay", "cuda_graphs", "recipe"}
_SHARED = _OF_A_RUN | {"hparams", "launch"} | {item.name for item in dataclasses.fields(SessionConfig)}


def load(
    tree: Mapping[str, Any], workload_type: Callable[[str], type[Configurable]], micro_batch: int | None = None
) -> tuple[RunConfig, SessionConfig]:
    """Validate the composed configuration ``tree`` and build the dataclasses.

    Args:
        tree: plain containers, with interpolations resolved.
        workload_type: maps the benchmark's name to its workload class.
        micro_batch: overrides ``micro_batch``; used for ``auto`` once the free memory is known. Without it, ``auto``
            is 1.

    Raises:
        ConfigError: unknown key, wrong type, impossible layout, or a global batch that is not a multiple of
            micro-batch x data-parallel ranks.
    """
    tree = dict(tree)
    benchmark = build(BenchmarkConfig, tree.get("benchmark"), "benchmark")
    cls = workload_type(benchmark.name)
    own = {item.name for item in dataclasses.fields(cls.config_type)}
    unknown = sorted(set(tree) - _SHARED - own)
    if unknown:
        near = did_you_mean(unknown[0], _SHARED | own)
        raise ConfigError(f"{unknown[0]}: unknown configuration key{near or '; see `mlperf-suite train --cfg job`'}")
    kinds = get_type_hints(cls.config_type)
    sections = {name: convert(kinds[name], tree.get(name), name) for name in sorted(own - {"facts"})}
    if "facts" in own:
        sections["facts"] = convert(kinds["facts"], benchmark.facts, "benchmark.facts")
    workload = cls.config_type(**sections)

    scale = build(ScaleConfig, tree.get("scale"), "scale")
    evaluation = _evaluation(tree.get("evaluation", {}), scale)
    selfplay = _self_play(tree.get("selfplay", {}), scale, evaluation.ranks)
    training_ranks = scale.nodes * scale.gpus_per_node - evaluation.ranks - selfplay.ranks
    sizes = convert(dict[str, int], tree.get("layout"), "layout")
    machines = _machines(sizes.pop("machines", 1), scale)
    layout = factor(training_ranks, sizes)
    global_batch = convert(int, (tree.get("hparams") or {}).get("global_batch_size"), "hparams.global_batch_size")
    size = micro_batch or tree.get("micro_batch")
    if size == "auto":
        size = 1
    size = convert(int, size, "micro_batch")
    steps = accumulation(global_batch, size, layout["dp"])
    graphs = tree.get("cuda_graphs")
    if graphs != "chunks" and not isinstance(graphs, bool):
        raise ConfigError(f"cuda_graphs={graphs}: expected true, false or chunks")
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
        selfplay=selfplay,
        cuda_graphs=bool(graphs),
        chunk_graphs=graphs == "chunks",
        machines=machines,
        recipe=convert(str, tree.get("recipe", RunConfig.recipe), "recipe"),
    )
    values = {item.name: tree.get(item.name) for item in dataclasses.fields(SessionConfig)}
    if isinstance(values["ruleset"], int | float):  # YAML reads 4.0 as a number; code that knows the rulesets checks it
        values["ruleset"] = str(values["ruleset"])
    session = build(SessionConfig, values, "")
    run = dataclasses.replace(run, declaration=cls.declare(run))
    if run.chunk_graphs and not run.declaration.chunk_graphs:
        raise ConfigError(
            f"cuda_graphs=chunks: {benchmark.name} has no passes of chunks to capture, its step is one graph: use true "
            "or false"
        )
    if tree.get("micro_batch") != "auto":
        _check_whole_rows(size, run.declaration.micro_batch_multiple)
    return run, session


def _evaluation(values: Any, scale: ScaleConfig) -> EvaluationConfig:
    """Build the evaluation settings, with a complete layout of the evaluation ranks."""
    given: EvaluationConfig = build(EvaluationConfig, values, "evaluation")
    world_size = scale.nodes * scale.gpus_per_node
    if not 0 <= given.ranks < world_size:
        raise ConfigError(
            f"evaluation.ranks={given.ranks}: of the {world_size} ranks of scale ({scale.nodes} nodes x "
            f"{scale.gpus_per_node}) 0 or more only evaluate, and at least 1 trains"
        )
    if given.ranks == 0:
        # The recipe's layout has no ranks if the command line sets evaluation.ranks=0.
        return dataclasses.replace(given, layout={})
    if given.scoring == "background":
        raise ConfigError(
            f"evaluation.scoring=background: with evaluation.ranks={given.ranks} these ranks score while training goes "
            "on; choose inline, or evaluation.ranks=0"
        )
    try:
        return dataclasses.replace(given, layout=factor(given.ranks, given.layout))
    except ConfigError as error:
        raise ConfigError(f"evaluation.{error} of evaluation.ranks") from error


def _self_play(values: Any, scale: ScaleConfig, evaluation_ranks: int) -> SelfPlayConfig:
    """Build the self-play settings."""
    given: SelfPlayConfig = build(SelfPlayConfig, values, "selfplay")
    left = scale.nodes * scale.gpus_per_node - evaluation_ranks
    if not 0 <= given.ranks < left:
        evaluating = " that do not only evaluate" if evaluation_ranks else ""
        raise ConfigError(
            f"selfplay.ranks={given.ranks}: of the {left} ranks of scale ({scale.nodes} nodes x {scale.gpus_per_node})"
            f"{evaluating}, 0 or more only play, and at least 1 trains"
        )
    if not given.ranks and not given.training_ranks_play:
        raise ConfigError("selfplay.training_ranks_play=false: with selfplay.ranks=0 no rank would play; give ranks")
    return given


def _machines(machines: int, scale: ScaleConfig) -> int:
    """Return the number of nodes that the ranks of one machine act as, after a check that they can."""
    if machines < 1:
        raise ConfigError(f"layout.machines={machines}: the ranks of one machine act as at least 1 node")
    if machines > 1 and (scale.nodes > 1 or scale.gpus_per_node % machines):
        raise ConfigError(
            f"layout.machines={machines}: divides the ranks of one machine into nodes, and this scale has "
            f"{scale.nodes} nodes of {scale.gpus_per_node} ranks; use a scale of one node, whose ranks it divides"
        )
    return machines


def factor(world_size: int, sizes: Mapping[str, int]) -> dict[str, int]:
    """Return the sizes of pp, cp and tp (default 1), and of dp, which takes all remaining ranks.

    Raises:
        ConfigError: an unknown axis or size, or the product of pp, cp and tp does not divide ``world_size``.
    """
    fixed = {axis: int(sizes.get(axis, 1)) for axis in ("pp", "cp", "tp")}
    for axis, size in sizes.items():
        if axis not in fixed:
            raise ConfigError(f"layout.{axis}={size}: the axes to choose are pp, cp and tp; dp takes the other ranks")
        if size < 1:
            raise ConfigError(f"layout.{axis}={size}: an axis has a positive size")
    used = math.prod(fixed.values())
    if world_size % used:
        named = " x ".join(f"{axis}={size}" for axis, size in fixed.items())
        raise ConfigError(f"layout: {named} = {used} does not divide {world_size} ranks")
    return {**fixed, "dp": world_size // used}


def _check_whole_rows(micro_batch: int, unit: int) -> None:
    if micro_batch % unit:
        raise ConfigError(
            f"micro_batch={micro_batch}: {unit} samples are computed together, in a row or by ranks of tp: use a "
            f"multiple of {unit}"
        )


def accumulation(global_batch: int, micro_batch: int, replicas: int) -> int:
    """Return the micro-batches per rank and optimizer step, for ``replicas`` data-parallel ranks.

    Raises:
        ConfigError: the global batch is not a multiple of ``micro_batch`` x ``replicas``, or a size is below 1.
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


def settings_by_key(run: RunConfig, session: SessionConfig) -> dict[str, Any]:
    """Return all settings that may influence training as plain values, by command-line key.

    Number of ranks, layout and seed are left out, because a checkpoint stores them separately.
    """
    derived = {"recipe", "assets_dir", "scale", "layout", "workload", "declaration"}
    derived |= {"global_batch", "grad_accumulation_steps", "chunk_graphs", "machines"}
    sections = {item.name: getattr(run, item.name) for item in dataclasses.fields(run) if item.name not in derived}
    sections["system"] = dataclasses.replace(run.system, hardware=None)  # of planning only
    sections["cuda_graphs"] = "chunks" if run.chunk_graphs else run.cuda_graphs
    sections |= {item.name: getattr(run.workload, item.name) for item in dataclasses.fields(run.workload)}
    sections.pop("facts", None)  # benchmark.facts has them
    sections |= {name: getattr(session, name) for name in ("device", "ruleset", "steps_ahead", "submission")}
    return dict(_leaves(sections, ""))


def _leaves(value: Any, path: str) -> Iterator[tuple[str, Any]]:
    if dataclasses.is_dataclass(value):
        value = {item.name: getattr(value, item.name) for item in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        for key, entry in value.items():
            yield from _leaves(entry, f"{path}.{key}" if path else str(key))
    else:
        yield path, value if isinstance(value, str | int | float | None) else str(value)


def build(cls: type[Any], values: Any, path: str) -> Any:
    """Build the dataclass ``cls`` from a mapping; check every key, type and range.

    Ranges are annotations of the fields (:mod:`common.config.ranges`). ``cls`` checks combinations of fields in its
    ``__post_init__``; ``path`` is prepended to the key in its message.

    Raises:
        ConfigError: naming key, value and what was expected.
    """
    if not isinstance(values, Mapping):
        raise ConfigError(f"{path or 'configuration'}: expected a section of keys, got {values!r}")
    hints = get_type_hints(cls, include_extras=True)
    prefix = f"{path}." if path else ""
    for key in values:
        if key not in hints:
            inner = [f"{name}.{part}" for name, given in values.items() if isinstance(given, Mapping) for part in given]
            near = did_you_mean(f"{prefix}{key}", [f"{prefix}{name}" for name in (*hints, *inner)])
            raise ConfigError(f"{prefix}{key}: unknown key; {path or 'the section'} has {', '.join(hints)}{near}")
    arguments = {}
    for item in dataclasses.fields(cls):
        if item.name in values:
            arguments[item.name] = convert(hints[item.name], values[item.name], prefix + item.name)
        elif item.default is dataclasses.MISSING and item.default_factory is dataclasses.MISSING:
            raise ConfigError(f"{prefix}{item.name}: missing")
    try:
        return cls(**arguments)
    except ConfigError as error:
        raise ConfigError(f"{prefix}{error}") from error


def convert(kind: Any, value: Any, path: str) -> Any:
    """Convert ``value`` to type ``kind`` strictly: text never becomes a number, and a number never becomes a bool.

    Raises:
        ConfigError: the value has another type, or is outside the annotated range.
    """
    origin, arguments = get_origin(kind), get_args(kind)
    if kind is Any:
        return value
    if origin is Annotated:
        converted = convert(arguments[0], value, path)
        for annotation in arguments[1:]:
            if isinstance(annotation, Range):
                annotation.check(path, converted)
        return converted
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
        return _path(str(value), path)
    if isinstance(value, kind) and not (kind in (int, float) and isinstance(value, bool)):
        return value
    quotes = f"; text is quoted, in bash: '{path}=\"…\"'" if kind in (str, Path) and value is not None else ""
    expected, got = getattr(kind, "__name__", kind), "null" if value is None else type(value).__name__
    raise ConfigError(f"{path}={as_typed(value)}: expected {expected}, got {got}{quotes}")


def _path(text: str, key: str) -> Path:
    """Return the path that ``text`` names; ``~`` is the home folder.

    Raises:
        ConfigError: the text is empty, as with a shell variable that is not set, or `~` has no home folder.
    """
    if not text.strip():
        raise ConfigError(f"{key}={text}: an empty path; is a variable of the command line not set?")
    try:
        return Path(text).expanduser()
    except RuntimeError as error:
        raise ConfigError(f"{key}={text}: the home folder of this user is not known; write the path in full") from error
