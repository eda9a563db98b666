"""Plans as YAML: the number of ranks, and for each table the ranks of its shards, or that it is replicated."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

from common.errors import ConfigError
from common.recommendation.placement import Plan
from common.recommendation.tables import Tables

REPLICATED = "replicated"


def to_text(plan: Plan) -> str:
    """The plan in YAML, a line for each table."""
    lines = [f"ranks: {plan.ranks}", "tables:"]
    for table, ranks in zip(plan.tables.tables, plan.holders, strict=True):
        where = yaml.safe_dump(list(ranks), default_flow_style=True, width=2**30).strip() if ranks else REPLICATED
        lines.append(f"  {table.name}: {where}")
    return "\n".join(lines) + "\n"


def from_text(text: str, origin: str, tables: Tables, ranks: int) -> Plan:
    """The plan that YAML holds.

    Args:
        text: the YAML.
        origin: what an error calls it.
        tables: of this run.
        ranks: of this run.

    Raises:
        ConfigError: it is no plan, or one of other tables or ranks.
    """
    try:
        content: Any = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ConfigError(f"{origin}: no YAML ({str(error).splitlines()[0]})") from error
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
    return Plan(tables, ranks, tuple(_holders(placed[name], name, origin) for name in names))


def read(path: Path, tables: Tables, ranks: int) -> Plan:
    """The plan in a file; see :func:`from_text`.

    Raises:
        ConfigError: there is no such file, or no plan for these tables and ranks in it.
    """
    try:
        text = path.read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"plan={path}: use auto, hier_auto, table_wise, row_wise or a plan's file ({error})"
        ) from error
    return from_text(text, f"plan={path}", tables, ranks)


def write(plan: Plan, path: Path) -> None:
    """Write the plan to a file that :func:`read` reads."""
    path.write_text(to_text(plan))


def _holders(where: Any, name: str, origin: str) -> tuple[int, ...]:
    if where == REPLICATED:
        return ()
    if isinstance(where, list) and where and all(type(rank) is int for rank in where):
        return tuple(where)
    raise ConfigError(f"{origin}: table {name!r} is {REPLICATED!r} or a list of ranks, not {where!r}")
