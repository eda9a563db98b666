"""Makes tables of a plan hybrid: measures frequent rows and slots for rare rows on training samples.

The most frequent categories of all these tables together are replicated, as in NVIDIA's submissions of DLRM from v1.0
on, which count them over 20 batches. The slots of a shard are the largest number of different rare rows in a
micro-batch of a rank plus ten standard deviations of this number, but at most the rows of the shard.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from common.config import loading
from common.config.composition import compose
from common.config.schema import RunConfig
from common.errors import ConfigError
from common.optim.precision import DTYPES
from common.recommendation import plan_file
from common.recommendation.click_workload import ClickPrediction, row_layout
from common.recommendation.criteo.prepared import open_prepared
from common.recommendation.criteo.row_reader import RowFile
from common.recommendation.criteo.sample_rows import IDS, SampleFormat
from common.recommendation.placement import Hybrid, Placement
from common.recommendation.planner import GIGABYTE, make_plan
from common.recommendation.tables import Tables, synthetic_ids

BATCHES = 20
"""Global batches that are counted."""
DEVIATIONS = 10


def hybrid_plan(plan: Placement, batches: Sequence[Tensor], frequent: int, names: Sequence[str] = ()) -> Placement:
    """Return a plan with hybrid tables, over all ranks.

    Args:
        plan: plan without hybrid tables.
        batches: int32 ids (B, L), each of a micro-batch of one rank; all of one size.
        frequent: number of replicated rows of all hybrid tables together; fewer if fewer occur.
        names: tables that become hybrid. If empty, those for which hybrid rows send fewer vectors than their shards
            in ``plan``.

    Raises:
        ConfigError: there is no such table, there are no batches or batches of several sizes, or the plan has hybrid
            tables.
    """
    if plan.hybrids:
        raise ConfigError("the plan has hybrid tables already; begin with one that has none")
    tables, sizes = plan.tables, {len(ids_BL) for ids_BL in batches}
    if len(sizes) != 1:
        raise ConfigError(f"batches of {sorted(sizes)} samples: slots are counted on some of one size")
    known = {table.name: number for number, table in enumerate(tables.tables)}
    if unknown := [name for name in names if name not in known]:
        raise ConfigError(f"there is no table {unknown[0]!r}")
    named = {known[name] for name in names}
    numbers = sorted(named) if named else [number for number, ranks in enumerate(plan.holders) if ranks]
    samples = sizes.pop()
    hybrids = _measured(plan, batches, samples, frequent, numbers)
    while worse := set() if named else _worse(plan, hybrids):
        # Other tables get their share of the frequent rows, and then need no more slots than before.
        numbers = [number for number in numbers if number not in worse]
        hybrids = _measured(plan, batches, samples, frequent, numbers)
    hybrid_tables = {hybrid.table for hybrid in hybrids}
    holders = tuple(() if number in hybrid_tables else ranks for number, ranks in enumerate(plan.holders))
    return Placement(tables, plan.ranks, holders, hybrids)


def most_frequent(batches: Sequence[Tensor], tables: Tables, numbers: Sequence[int], frequent: int) -> list[Tensor]:
    """Return the most frequent ids of several tables together.

    Args:
        batches: int32 ids (B, L).
        numbers: numbers of the tables that are counted.
        frequent: number of ids. Among equally frequent ids, those of earlier tables and lower ids come first.

    Returns:
        For each of ``numbers`` int64, the most frequent first.
    """
    counts = []
    for number in numbers:
        ids_I = torch.cat([_known(ids_BL, tables, number) for ids_BL in batches])
        counts.append(torch.bincount(ids_I, minlength=tables.tables[number].rows))
    ids = [total_R.nonzero().squeeze(1) for total_R in counts]
    if not ids:
        return []
    flat = torch.cat([total_R[found] for total_R, found in zip(counts, ids, strict=True)])
    chosen = flat.argsort(descending=True, stable=True)[:frequent]
    of_table = torch.repeat_interleave(torch.arange(len(ids)), torch.tensor([len(found) for found in ids]))
    every = torch.cat(ids)
    return [every[chosen[of_table[chosen] == index]] for index in range(len(ids))]


def _measured(
    plan: Placement, batches: Sequence[Tensor], samples: int, frequent: int, numbers: Sequence[int]
) -> tuple[Hybrid, ...]:
    tables, made = plan.tables, []
    for number, key_R in zip(numbers, most_frequent(batches, tables, numbers, frequent), strict=True):
        rare_R = torch.ones(tables.tables[number].rows, dtype=torch.bool)
        rare_R[key_R] = False
        most = 1
        for ids_BL in batches:
            different = _known(ids_BL, tables, number).unique()
            different = different[rare_R[different]]
            most = max(most, int(torch.bincount(different % plan.ranks, minlength=1).max()))
        slots = min(most + math.ceil(DEVIATIONS * math.sqrt(most)), -(-len(rare_R) // plan.ranks))
        made.append(Hybrid(number, tuple(key_R.tolist()), tuple(range(plan.ranks)), slots, samples))
    return tuple(made)


def _worse(plan: Placement, hybrids: Sequence[Hybrid]) -> set[int]:
    """Return the tables for which slots would send no fewer vectors than the shards of the plan."""
    return {
        hybrid.table
        for hybrid in hybrids
        if hybrid.slots * plan.ranks >= len(plan.holders[hybrid.table]) * hybrid.samples
    }


def _known(ids_BL: Tensor, tables: Tables, number: int) -> Tensor:
    """Return the ids of a table that are inside it, flat."""
    table, first = tables.tables[number], tables.columns[number]
    ids = ids_BL[:, first : first + table.hotness].flatten().long()
    return ids[(ids >= 0) & (ids < table.rows)]


def read_batches(root: Path, run: RunConfig, sample_format: SampleFormat, batches: int) -> list[Tensor]:
    """Return the ids of the first micro-batches of all ranks, in training order.

    Args:
        run: configuration with the batch sizes.
        batches: number of global batches; fewer if there are fewer.

    Raises:
        DataError: the data are incomplete, or have other tables.
        ConfigError: there is no complete global batch.
    """
    prepared = open_prepared(root, sample_format, run.workload.facts.tables)
    whole = min(batches, prepared.train_samples // run.global_batch)
    if not whole:
        raise ConfigError(f"{root} has {prepared.train_samples:,} training samples, no batch of {run.global_batch:,}")
    each = run.micro_batch
    ranges = [(first, first + each) for first in range(0, whole * run.global_batch, each)]
    file = RowFile(root / sample_format.train_file, prepared.words, prepared.train_samples, run.workload.reader)
    try:
        return [words_BW[:, IDS:].clone() for words_BW in file.read(ranges, pinned=False)]
    finally:
        file.close()


def main(benchmark: str, workload_type: type[ClickPrediction], arguments: Sequence[str]) -> None:
    """Write a plan for a recipe. Arguments that are not options are overrides of the recipe, including the scale.

    Raises:
        SuiteError: the recipe or the data are wrong, or the plan does not fit the memory.
    """
    parser = argparse.ArgumentParser(prog=f"benchmarks.{benchmark}.hybrid_plan", description=__doc__)
    parser.add_argument("--write", type=Path, required=True, help="new YAML file; frequent rows get a file beside it")
    parser.add_argument("--frequent", type=int, required=True, help="number of rows to replicate, all tables together")
    parser.add_argument("--tables", default="", help="C1,C20,...; default: those that then send fewer vectors")
    parser.add_argument("--batches", type=int, default=BATCHES, help="number of global batches to count")
    parser.add_argument("--synthetic", action="store_true", help="count synthetic ids, as in `bench`, not data")
    options, overrides = parser.parse_known_args(arguments)
    run, session = loading.load(compose([f"benchmark={benchmark}", *overrides]), lambda _: workload_type)
    tables, settings = run.workload.facts.tables, run.workload.embeddings
    if options.synthetic:
        generator, samples = torch.Generator().manual_seed(0), options.batches * run.global_batch
        # All at once, because the distribution of each table is computed once per call.
        batches = list(synthetic_ids(tables, samples, settings.example_ids, generator).split(run.micro_batch))
    else:
        batches = read_batches(session.data_dir, run, workload_type.sample_format, options.batches)
    _, row_bytes = row_layout(tables, settings, workload_type.row_rule(run), DTYPES[run.precision])
    ranks, capacity = run.training_ranks, int(settings.memory_gb * GIGABYTE)
    plan = make_plan(tables, settings.plan, ranks, run.ranks_per_node, row_bytes, settings)
    plan = hybrid_plan(plan, batches, options.frequent, [name for name in options.tables.split(",") if name])
    plan.check_memory(row_bytes, capacity)
    plan_file.write(plan, options.write)
    print(plan.text(row_bytes))
