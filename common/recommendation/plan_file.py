"""Plans as YAML: the number of ranks, and for each table the ranks of its shards, ``replicated`` or ``hybrid``.

A hybrid table (:class:`common.recommendation.placement.Hybrid`) is ``hybrid: {frequent_rows: ..., shards: [ranks],
slots: n, samples: n}``. Its frequent rows are a list of ids, or the name of a file next to the plan with a
one-dimensional integer array in NumPy's format. :mod:`common.recommendation.hybrid_planning` measures them on
training data.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from common.config.yaml_files import load_yaml
from common.errors import ConfigError
from common.formats import npy
from common.recommendation.placement import Hybrid, Placement
from common.recommendation.tables import Tables

REPLICATED = "replicated"


HYBRID = "hybrid"
KEYS = ("frequent_rows", "shards", "slots", "samples")
"""Keys of a hybrid table's entry."""


def to_text(plan: Placement) -> str:
    """Return the plan as YAML, one line per table."""
    return _to_text(plan, {hybrid.table: list(hybrid.frequent) for hybrid in plan.hybrids})


def _to_text(plan: Placement, frequent: Mapping[int, list[int] | str]) -> str:
    hybrids = {hybrid.table: hybrid for hybrid in plan.hybrids}
    lines = [f"ranks: {plan.ranks}", "tables:"]
    for number, (table, ranks) in enumerate(zip(plan.tables.tables, plan.holders, strict=True)):
        where: Any = list(ranks) if ranks else REPLICATED
        if number in hybrids:
            hybrid = hybrids[number]
            values = (frequent[number], list(hybrid.ranks), hybrid.slots, hybrid.samples)
            where = {HYBRID: dict(zip(KEYS, values, strict=True))}
        text = where if where == REPLICATED else _one_line(where)
        lines.append(f"  {table.name}: {text}")
    return "\n".join(lines) + "\n"


def _one_line(value: Any) -> str:
    return yaml.safe_dump(value, default_flow_style=True, width=2**30, sort_keys=False).strip()


def from_text(text: str, origin: str, tables: Tables, ranks: int, folder: Path | None = None) -> Placement:
    """Return the plan from YAML.

    Args:
        origin: name of the source, for messages.
        ranks: number of ranks of this run.
        folder: folder of files with frequent rows; None if there are none.

    Raises:
        ConfigError: the text is not a plan, or is one for other tables or ranks.
    """
    content = load_yaml(text, origin)
    if (
        not isinstance(content, dict)
        or content.keys() != {"ranks", "tables"}
        or not isinstance(content["tables"], dict)
    ):
        raise ConfigError(f"{origin}: a plan has the keys 'ranks' and 'tables', a mapping of names to ranks")
    if content["ranks"] != ranks:
        raise ConfigError(f"{origin}: a plan of {content['ranks']} ranks, the tables of this run are on {ranks}")
    placed = content["tables"]
    names = [table.name for table in tables.tables]
    if missing := [name for name in names if name not in placed]:
        raise ConfigError(f"{origin}: no placement of table {missing[0]!r}")
    if unknown := [name for name in placed if name not in names]:
        raise ConfigError(f"{origin}: there is no table {unknown[0]!r}")
    hybrids = {
        number: _hybrid(placed[name][HYBRID], number, name, origin, folder)
        for number, name in enumerate(names)
        if isinstance(placed[name], dict) and placed[name].keys() == {HYBRID}
    }
    holders = tuple(
        () if number in hybrids else _holders(placed[name], name, origin) for number, name in enumerate(names)
    )
    return Placement(tables, ranks, holders, tuple(hybrids.values()))


def read(path: Path, tables: Tables, ranks: int) -> Placement:
    """Return the plan in a file; see :func:`from_text`.

    Raises:
        ConfigError: there is no such file, or it has no plan for these tables and ranks.
    """
    try:
        text = path.read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"plan={path}: use auto, balanced, hier_auto, table_wise, row_wise or a plan's file ({error})"
        ) from error
    return from_text(text, f"plan={path}", tables, ranks, path.parent)


def write(plan: Placement, path: Path) -> None:
    """Write the plan to a file for :func:`read`, and frequent rows to one file per table next to it."""
    files: dict[int, list[int] | str] = {}
    for hybrid in plan.hybrids:
        name = f"{path.stem}_{plan.tables.tables[hybrid.table].name}.npy"
        np.save(path.parent / name, np.array(hybrid.frequent, dtype=np.int32))
        files[hybrid.table] = name
    path.write_text(_to_text(plan, files))


def _holders(where: Any, name: str, origin: str) -> tuple[int, ...]:
    if where == REPLICATED:
        return ()
    if isinstance(where, list) and where and all(type(rank) is int for rank in where):
        return tuple(where)
    raise ConfigError(f"{origin}: table {name!r} is {REPLICATED!r}, a list of ranks or {HYBRID!r}, not {where!r}")


def _hybrid(entry: Any, number: int, name: str, origin: str, folder: Path | None) -> Hybrid:
    if not isinstance(entry, dict) or entry.keys() != set(KEYS):
        raise ConfigError(f"{origin}: hybrid table {name!r} has the keys {', '.join(KEYS)}")
    frequent, shards, slots, samples = (entry[key] for key in KEYS)
    if type(slots) is not int or type(samples) is not int:
        raise ConfigError(f"{origin}: slots and samples of hybrid table {name!r} are numbers")
    if isinstance(frequent, str) and folder is not None:
        frequent = _ids(folder / frequent, name, origin)
    if not isinstance(frequent, list) or not all(type(key) is int for key in frequent):
        raise ConfigError(f"{origin}: frequent_rows of hybrid table {name!r} are a list of ids, or a file of them")
    return Hybrid(number, tuple(frequent), _shards(shards, name, origin), slots, samples)


def _ids(path: Path, name: str, origin: str) -> list[int]:
    try:
        ids = npy.mapped(path)
    except (OSError, ValueError) as error:
        raise ConfigError(f"{origin}: frequent rows of table {name!r}: {path} is unreadable ({error})") from error
    if ids.ndim != 1 or ids.dtype.kind not in "iu":
        raise ConfigError(f"{origin}: frequent rows of table {name!r}: {path} has no list of integers")
    found: list[int] = ids.tolist()
    return found


def _shards(where: Any, name: str, origin: str) -> tuple[int, ...]:
    if where == REPLICATED:
        raise ConfigError(f"{origin}: shards of hybrid table {name!r} are a list of ranks")
    return _holders(where, name, origin)
