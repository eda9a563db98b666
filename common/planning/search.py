"""Search for the best layout, micro-batch and number of evaluation ranks of each number of GPUs and global batch."""

from __future__ import annotations

import copy
import dataclasses
import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from common.config.composition import compose
from common.config.schema import RunConfig
from common.config.system import Hardware
from common.errors import ConfigError
from common.mlperf.admission import evaluation_schedule
from common.mlperf.rules import newest_ruleset, rules_for
from common.mlperf.schedules import Schedule
from common.planning.collectives import require_links
from common.planning.compute import ComputeCurve, decoder_of, update_seconds
from common.planning.estimates import Convergence, RunEstimate, RunLayout
from common.planning.input_model import NOTHING_MEASURED, MeasuredReader
from common.planning.measured_curves import curve_for
from common.planning.memory import memory_of, micro_batches
from common.planning.points import Load, MeasuredPoint
from common.planning.recipes import (
    PlannedSettings,
    StartingRecipe,
    batches_of_sets,
    nearest_recipe,
    planned_settings,
    starting_recipes,
)
from common.planning.run_model import estimate_run, evaluation_cost
from common.planning.step_model import step_times

Axes = tuple[int, int, int]

MOST_EVALUATION_SHARE = 4
"""At most 1/4 of the GPUs evaluate."""

MOST_TRIED = 20
"""Plans of one batch for which the configuration is composed, until one is valid."""


@dataclass(frozen=True)
class Plan:
    """An estimate with the settings of its run."""

    estimate: RunEstimate
    settings: PlannedSettings


@dataclass(frozen=True)
class FixedChoices:
    """What the user has chosen; None is searched.

    Attributes:
        axes: sizes of pp, cp and tp.
    """

    micro_batch: int | None = None
    axes: Axes | None = None


class LayoutSearch:
    """Search for one benchmark on one system.

    Args:
        system: name of the system, for messages.
        points: measured steps on GPUs of this kind.
        axes: names of the axes that the benchmark can use besides dp.
        load: builds the configuration of a run.
        convergence: function from the global batch to the samples until the target.
        reader: measurements of the benchmark's reader.
        evaluation: measured seconds of one replica per evaluated sample; None if not measured.
    """

    def __init__(
        self,
        benchmark: str,
        system: str,
        hardware: Hardware,
        points: Sequence[MeasuredPoint],
        axes: Sequence[str],
        load: Load,
        convergence: Callable[[int], Convergence],
        reader: MeasuredReader = NOTHING_MEASURED,
        evaluation: float | None = None,
    ) -> None:
        self.benchmark, self.system, self.hardware, self.points = benchmark, system, hardware, points
        self._axes, self._load, self._convergence, self._reader = axes, load, convergence, reader
        self._evaluation = evaluation
        self.accelerator = hardware.gpu.split()[1] if " " in hardware.gpu else hardware.gpu
        self._all_recipes = starting_recipes(benchmark, self.accelerator)
        self._recipes = [recipe for recipe in self._all_recipes if not recipe.reduced]
        self._sets = batches_of_sets(benchmark)
        self._trees: dict[tuple[str, ...], dict[str, Any]] = {}
        self._offline = rules_for(benchmark, newest_ruleset(benchmark)).scored_offline
        if not self._recipes:
            raise ConfigError(f"estimate: {benchmark} has no recipe for GPUs")

    def plans(self, gpus: int, global_batch: int, fixed: FixedChoices = FixedChoices()) -> list[Plan]:
        """Return the plans of all layouts that fit, sorted by the upper limit of the time.

        So a layout whose time is well known is preferred over one that is faster only in a guess.

        Raises:
            ConfigError: a link or the convergence is unknown, or no layout fits; the message has the reason.
        """
        self._check_gpus(gpus)
        require_links(self.hardware, self.system, gpus)
        self._check_axes(fixed)
        convergence = self._convergence(global_batch)
        start = nearest_recipe(self._recipes, gpus, global_batch)
        reasons: list[str] = []
        found: list[Plan] = []
        for axes in self._axes_of(gpus, fixed):
            for ranks in self._evaluation_ranks(gpus, axes):
                try:
                    found += self._of_layout(gpus, global_batch, axes, ranks, start, convergence, fixed, reasons)
                except ConfigError as error:
                    reasons.append(str(error))
        if not found:
            why = reasons[0] if reasons else "no layout divides them"
            raise ConfigError(f"estimate: {self.benchmark}, --gpus {gpus}, --batches {global_batch}: {why}")
        return sorted(found, key=lambda plan: plan.estimate.interval()[1])

    def accepted(self, plans: Sequence[Plan]) -> Plan:
        """Return the first of the plans whose settings `train` accepts, of the :data:`MOST_TRIED` first ones.

        Raises:
            ConfigError: it accepts none of them; the message is that about the first.
        """
        refused: ConfigError | None = None
        for plan in plans[:MOST_TRIED]:
            try:
                run, _ = self._load(compose(plan.settings.overrides(None)))
                evaluation_schedule(run)
                return plan
            except ConfigError as error:
                refused = refused or error
        assert refused is not None, "there is at least one plan"
        raise refused

    def _check_gpus(self, gpus: int) -> None:
        node = self.hardware.gpus_per_node
        if gpus < 1 or (gpus > node and gpus % node):
            raise ConfigError(
                f"estimate: --gpus {gpus}: a node of {self.system} has {node} GPUs: use 1 to {node}, or a multiple of "
                f"{node}"
            )
        reduced = [recipe.scale for recipe in self._all_recipes if recipe.reduced and recipe.gpus == gpus]
        if reduced and all(recipe.gpus != gpus for recipe in self._recipes):
            raise ConfigError(
                f"estimate: {self.benchmark}, --gpus {gpus}: {reduced[0]} trains another data set or fewer layers than "
                "the rules ask for: the samples until its target are not known"
            )

    def _check_axes(self, fixed: FixedChoices) -> None:
        for axis, size in zip(("pp", "cp", "tp"), fixed.axes or (1, 1, 1), strict=True):
            if size > 1 and axis not in self._axes:
                raise ConfigError(
                    f"estimate: --layout {axis}={size}: {self.benchmark} has the axes {', '.join(('dp', *self._axes))}"
                )

    def _axes_of(self, gpus: int, fixed: FixedChoices) -> list[Axes]:
        """Return the sizes of pp, cp and tp to try: those of recipes and points, and of decoders powers of two."""
        if fixed.axes is not None:
            return [fixed.axes]
        found = {(1, 1, 1), *(point.axes for point in self.points), *(each.axes for each in self._recipes)}
        if any(decoder_of(point.run) is not None for point in self.points):
            powers = [1 << power for power in range(self.hardware.gpus_per_node.bit_length())]
            shared = {axis: powers if axis in self._axes else [1] for axis in ("cp", "tp")}
            pipelines = {1, *(each.axes[0] for each in self._recipes)} if "pp" in self._axes else {1}
            found |= {(pp, cp, tp) for pp in pipelines for cp in shared["cp"] for tp in shared["tp"]}
        return sorted(axes for axes in found if gpus % (axes[0] * axes[1] * axes[2]) == 0)

    def _evaluation_ranks(self, gpus: int, axes: Axes) -> list[int]:
        """Return the numbers of evaluation ranks to try: none, and whole nodes, or single ranks of one node."""
        if self._offline or axes[0] > 1:
            return [0]
        unit = max(axes[1] * axes[2], 1 if gpus <= self.hardware.gpus_per_node else self.hardware.gpus_per_node)
        counts, ranks = [0], unit
        while ranks <= gpus // MOST_EVALUATION_SHARE:
            counts.append(ranks)
            ranks *= 2
        return counts

    def _of_layout(
        self,
        gpus: int,
        global_batch: int,
        axes: Axes,
        ranks: int,
        start: StartingRecipe,
        convergence: Convergence,
        fixed: FixedChoices,
        reasons: list[str],
    ) -> Iterator[Plan]:
        """Yield the plans of all micro-batches; add the reasons why others do not fit to ``reasons``."""
        shared = axes[0] * axes[1] * axes[2]
        replicas, rest = divmod(gpus - ranks, shared)
        if rest:
            reasons.append(f"replicas of {shared} GPUs do not divide {gpus - ranks} GPUs")
            return
        if global_batch % replicas:
            reasons.append(f"{replicas} replicas do not divide the batch")
            return
        whole = RunLayout(gpus, global_batch, 1, global_batch // replicas, *axes, evaluation_ranks=ranks)
        run, schedule = self._configured(whole, start)
        curve = curve_for(run, axes, self.points, self.hardware)
        largest = max(run.declaration.largest_micro_batch, *(point.run.micro_batch for point in self.points))
        sizes = micro_batches(global_batch, replicas, run.declaration.micro_batch_multiple, largest)
        if fixed.micro_batch is not None:
            if fixed.micro_batch not in sizes:
                reasons.append(f"micro_batch={fixed.micro_batch}: of {replicas} replicas, each can have {sizes}")
            sizes = [size for size in sizes if size == fixed.micro_batch]
        for size in sizes:
            layout = dataclasses.replace(whole, micro_batch=size, accumulation=global_batch // (replicas * size))
            try:
                memory = memory_of(run, layout, self.points, self.hardware)
            except ConfigError as error:
                reasons.append(str(error))
                continue
            yield self._plan(run, layout, curve, schedule, start, convergence, memory)

    def _plan(
        self,
        run: RunConfig,
        layout: RunLayout,
        curve: ComputeCurve,
        schedule: Schedule,
        start: StartingRecipe,
        convergence: Convergence,
        memory: float | None,
    ) -> Plan:
        one = [point for point in self.points if point.gpus == 1]
        spread = next((point.spread for point in one if point.spread is not None), None)
        watts = [point.watts for point in self.points if point.watts is not None]
        step = step_times(run, layout, curve, self.hardware, spread, self._reader)
        estimate = estimate_run(
            run,
            layout,
            convergence,
            step,
            curve.deviation(layout.micro_batch),
            schedule,
            evaluation_cost(run, curve, layout.micro_batch, self._evaluation, self._offline),
            self.hardware,
            alone_rate(run, layout, curve, self.hardware),
            max(watts, default=None),
            memory,
            self._reader,
        )
        return Plan(estimate, planned_settings(self.benchmark, start, layout, self.hardware, self._sets))

    def _configured(self, layout: RunLayout, start: StartingRecipe) -> tuple[RunConfig, Schedule]:
        """Return the configuration and the evaluation points of a layout with micro-batches of any size."""
        planned = planned_settings(self.benchmark, start, layout, self.hardware, self._sets)
        settings = {**planned.settings, "micro_batch": "auto"}
        words = tuple(dataclasses.replace(planned, settings={}).overrides(None))
        if words not in self._trees:
            self._trees[words] = compose(words)
        tree = copy.deepcopy(self._trees[words])
        for key, value in settings.items():
            *sections, name = key.split(".")
            functools.reduce(lambda section, each: section[each], sections, tree)[name] = value
        run, _ = self._load(tree)
        return run, evaluation_schedule(run)


def alone_rate(run: RunConfig, layout: RunLayout, curve: ComputeCurve, hardware: Hardware) -> float:
    """Return the samples per second and GPU of the best step with one replica and the same global batch.

    The replica accumulates micro-batches of the measured size with the highest rate, and communicates with no other.
    """
    update = update_seconds(run, layout.pp * layout.tp, 1, hardware)
    sizes = {min(size, layout.global_batch) for size in curve.batches}
    computed = layout.global_batch * min(curve.at(size) / size for size in sizes)
    return layout.global_batch / (computed + update) / (layout.pp * layout.cp * layout.tp)
