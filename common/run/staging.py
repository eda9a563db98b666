"""Staging as a part of a run: claim the node's folder, copy this rank's files, and log when it started and stopped."""

from __future__ import annotations

import contextlib
import os
import time
from datetime import timedelta
from itertools import chain
from pathlib import Path

from common.config.schema import RunConfig, SessionConfig
from common.contract.workload import Workload
from common.data.staging import STAGED, NodeShards, claimed, file_system_in_memory, write_shards
from common.distributed import job_store
from common.distributed.rank_info import RankInfo
from common.distributed.staging import Instances, Stager
from common.errors import ConfigError
from common.mlperf.events import RunEvents
from common.mlperf.rules import Rules

TIMED_LIMIT = timedelta(days=1)
"""Time limit of staging in rulesets that count it as a part of the measured time, and so need none."""


def order_of_data(run: RunConfig, session: SessionConfig) -> str:
    """Return the description of the order of the data, for checkpoints."""
    order = run.declaration.order_of_data()
    return order if session.staging_dir is None else f"{order}, staged on {_nodes(run)} nodes"


def staged(
    workload: Workload,
    session: SessionConfig,
    rank_info: RankInfo,
    rules: Rules,
    events: RunEvents,
    stack: contextlib.ExitStack,
) -> Path:
    """Return the folder that training reads: ``data_dir``, or ``staging_dir`` after all ranks have staged. Collective.

    Args:
        stack: keeps the folder reserved for this run.

    Raises:
        ConfigError: the workload has no files to stage, the folder is in memory although the rules require a disk, or
            the variables of the instances are wrong.
        DataError: a file or the folder cannot be used.
        RankFailure: another instance failed.
    """
    run, ranks = workload.cfg, workload.cfg.ranks_per_node
    if session.staging_dir is None:
        return session.data_dir
    node, local = divmod(rank_info.rank, ranks)
    # Nodes that share a machine, in tests, have a folder each.
    folder = session.staging_dir / (f"{STAGED}-node{node}" if run.machines > 1 else STAGED)
    _require_apart(folder, session, run)
    plan = workload.staging(session.data_dir)
    if plan is None:
        raise ConfigError(f"staging_dir: {workload.title} reads its data in place; leave staging_dir out")
    limit, began = time_limit(rules), time.monotonic()
    events.staging_start()
    if local == 0:
        stack.enter_context(claimed(folder))
        memory = file_system_in_memory(folder)
        if memory and not rules.staging_timed and not run.benchmark.synthetic:
            raise ConfigError(
                f"staging_dir={folder} is in memory ({memory}): the rules allow any storage but memory for data at the "
                "start of a run; give a folder on a local disk"
            )
    instances = Instances.from_environment(os.environ)
    group = None
    if instances is not None:
        timeout = timedelta(seconds=session.timeout_seconds)
        group = instances.group(rank_info.rank, run.world_size, limit, timeout)
    job_store.meet("staging folders claimed", limit)
    stager = Stager(session.data_dir, folder, group)
    own_seed = workload.layout.shared_generator("staging").initial_seed() & (2**63 - 1)
    seed = stager.agree(plan, own_seed, _nodes(run), run.world_size)
    shards = plan.of_node(seed, node, _nodes(run))
    stager.stage(list(chain(*shards.values()))[local::ranks], plan)
    if local == 0:
        stager.stage(plan.whole)
    job_store.meet("staged", limit)
    if local == 0:
        names = {split: [file.name for file in files] for split, files in shards.items()}
        write_shards(folder, NodeShards(node, _nodes(run), names))
    job_store.meet("staged and listed", limit)
    events.staging_stop(time.monotonic() - began)
    return folder


def time_limit(rules: Rules) -> timedelta:
    """Return the longest time that staging may take, from the start of the first rank's."""
    return TIMED_LIMIT if rules.staging_timed else timedelta(minutes=rules.init_minutes)


def _require_apart(folder: Path, session: SessionConfig, run: RunConfig) -> None:
    """Raise ConfigError if ``folder``, which staging empties, has something that the run reads or writes."""
    others = {"data_dir": session.data_dir, "output_dir": session.output_dir, "resume": session.resume}
    for name, path in {**others, "assets_dir": run.assets_dir}.items():
        if path is not None and path.resolve().is_relative_to(folder.resolve()):
            raise ConfigError(f"{name}={path}: staging empties {folder}; give another folder")


def _nodes(run: RunConfig) -> int:
    return run.world_size // run.ranks_per_node
