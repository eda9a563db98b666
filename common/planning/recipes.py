"""Settings of planned runs: the recipe that a plan starts from, overrides for `train`, and a file with recipes."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import log
from pathlib import Path
from typing import Any

import yaml

from common.config.composition import compose, scales_of
from common.config.output_files import write_file
from common.config.sections import leaves_out_layers
from common.config.system import Hardware
from common.config.yaml_files import read_small_yaml, workload_file
from common.planning.estimates import RunLayout

_SCALE = re.compile(r"(\d+)x(\w+)")


@dataclass(frozen=True)
class StartingRecipe:
    """A recipe of the suite from which a plan starts.

    Attributes:
        scale: its name.
        gpus: its number of GPUs.
        global_batch: its global batch.
        predivide: whether it divides the loss by the number of its training GPUs (`optimizer.grad_predivide`).
        evaluation_ranks: its GPUs that only evaluate.
        axes: its sizes of pp, cp and tp.
        reduced: whether it trains another data set or fewer layers than the rules ask for.
    """

    scale: str
    gpus: int
    global_batch: int
    predivide: bool
    evaluation_ranks: int
    axes: tuple[int, int, int]
    reduced: bool = False


@dataclass(frozen=True)
class PlannedSettings:
    """Settings of a planned run that differ from its starting recipe, and the name of that recipe.

    Attributes:
        settings: dotted key to value.
        hparams_set: set of hyperparameters; None: that of the starting recipe.
        other_batch: whether the set is made for another global batch.
    """

    benchmark: str
    start: StartingRecipe
    settings: Mapping[str, object]
    hparams_set: str | None
    other_batch: bool

    def overrides(self, system: str | None) -> list[str]:
        """Return the arguments of `train`; ``system``: name of the system, None to leave it out."""
        words = [f"benchmark={self.benchmark}", f"scale={self.start.scale}"]
        words += [f"system={system}"] if system else []
        words += [f"hparams={self.benchmark}/{self.hparams_set}"] if self.hparams_set else []
        return [*words, *(f"{key}={value}" for key, value in self.settings.items())]

    def recipe(self) -> dict[str, Any]:
        """Return the entry of a recipe file."""
        entry: dict[str, Any] = {"from": self.start.scale}
        if self.hparams_set:
            entry["hparams_set"] = self.hparams_set
        for key, value in self.settings.items():
            *sections, name = key.split(".")
            inner = entry
            for section in sections:
                inner = inner.setdefault(section, {})
            inner[name] = value
        return entry


def starting_recipes(benchmark: str, accelerator: str) -> list[StartingRecipe]:
    """Return the recipes of a benchmark for GPUs, those for ``accelerator`` (such as H200) first."""
    found = []
    data_set = read_small_yaml(workload_file("benchmark", benchmark), "the benchmark")["data_set"]
    for scale in scales_of(benchmark):
        named = _SCALE.fullmatch(scale)
        if named is None or named[2] == "GPU":
            continue
        tree = compose([f"benchmark={benchmark}", f"scale={scale}"])
        layout, evaluation = tree["layout"], tree["evaluation"]
        gpus = tree["scale"]["nodes"] * tree["scale"]["gpus_per_node"]
        trained = gpus - evaluation["ranks"]
        axes = (int(layout.get("pp", 1)), int(layout.get("cp", 1)), int(layout.get("tp", 1)))
        batch, predivide = tree["hparams"]["global_batch_size"], tree["optimizer"]["grad_predivide"]
        fewer = leaves_out_layers(tree["model"], tree["benchmark"]["facts"])
        reduced = tree["benchmark"]["data_set"] != data_set or fewer
        found.append(StartingRecipe(scale, gpus, batch, predivide == trained > 1, evaluation["ranks"], axes, reduced))
    return sorted(found, key=lambda each: not each.scale.lower().endswith(f"x{accelerator.lower()}"))


def nearest_recipe(recipes: Sequence[StartingRecipe], gpus: int, global_batch: int) -> StartingRecipe:
    """Return the recipe whose batch, number of GPUs and accelerator are nearest, in this order."""

    def distance(each: tuple[int, StartingRecipe]) -> tuple[float, ...]:
        index, recipe = each
        several = (gpus > 1) != (recipe.gpus > 1)
        batch = abs(log(global_batch / recipe.global_batch))
        return several, 4 * batch + abs(log(gpus / recipe.gpus)), index

    return min(enumerate(recipes), key=distance)[1]


def planned_settings(
    benchmark: str, start: StartingRecipe, layout: RunLayout, hardware: Hardware, batches: Mapping[str, int]
) -> PlannedSettings:
    """Return the settings of a run.

    Args:
        batches: global batch of each set of hyperparameters (:func:`batches_of_sets`).
    """
    node = min(layout.gpus, hardware.gpus_per_node)
    settings: dict[str, object] = {"scale.nodes": layout.gpus // node, "scale.gpus_per_node": node}
    chosen, other = None, False
    if layout.global_batch != start.global_batch:
        chosen = next((name for name, batch in batches.items() if batch == layout.global_batch), None)
        if chosen is None:
            settings["hparams.global_batch_size"], other = layout.global_batch, True
    settings["micro_batch"] = layout.micro_batch
    for axis, size, own in zip(("pp", "cp", "tp"), (layout.pp, layout.cp, layout.tp), start.axes, strict=True):
        if size != own:
            settings[f"layout.{axis}"] = size
    if layout.evaluation_ranks != start.evaluation_ranks:
        settings["evaluation.ranks"] = layout.evaluation_ranks
        if layout.evaluation_ranks:
            settings["evaluation.scoring"] = "inline"
    if start.predivide:
        settings["optimizer.grad_predivide"] = layout.training_gpus
    return PlannedSettings(benchmark, start, settings, chosen, other)


def batches_of_sets(benchmark: str) -> dict[str, int]:
    """Return the global batch of each set of hyperparameters that states one."""
    content = read_small_yaml(workload_file("hparams", benchmark), "hyperparameters")
    found = {}
    for name, values in content["sets"].items():
        if isinstance(values, dict) and "global_batch_size" in values:
            found[name] = values["global_batch_size"]
    return found


def recipe_file(folder: Path, benchmark: str) -> Path:
    """Return the file of :func:`write_recipes`."""
    return folder / "recipe" / f"{benchmark}.yaml"


def write_recipes(folder: Path, benchmark: str, accelerator: str, planned: Mapping[int, PlannedSettings]) -> list[str]:
    """Write ``recipe/<benchmark>.yaml`` below ``folder`` with one scale per number of GPUs; return their names.

    `train --config-dir FOLDER` reads it.

    Raises:
        SuiteError: the file cannot be written.
    """
    scales = {f"{gpus}x{accelerator}_planned": each.recipe() for gpus, each in planned.items()}
    head = "# Recipes of `mlperf-suite estimate`; `mlperf-suite train --config-dir` reads this folder.\n"
    write_file(recipe_file(folder, benchmark), head + yaml.safe_dump({"scales": scales}, sort_keys=False))
    return list(scales)
