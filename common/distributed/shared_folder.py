"""Check that all ranks of a job share a folder: rank 0 writes a file into it, and every rank looks for this file."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import time
from collections.abc import Iterator
from pathlib import Path

from common.config.schema import RunConfig, SessionConfig
from common.distributed import job_store
from common.distributed.environment import node_name
from common.errors import ConfigError

UNSEEN = "unseen"
LATE_SECONDS = 90.0
"""Longest wait for a file that another machine has written. NFS keeps a listing for 60 seconds by default."""
LOOK_SECONDS = 0.2
NAMED = 8
"""Maximum number of hosts that a message names."""


@contextlib.contextmanager
def marked(folder: Path) -> Iterator[Path]:
    """Create a file with a unique name in ``folder``, yield its path, and remove it even if the block fails.

    Raises:
        OSError: the file cannot be written.
    """
    marker = folder / f".seen_by_all_ranks_{secrets.token_hex(8)}"
    marker.touch(exist_ok=False)
    try:
        yield marker
    finally:
        marker.unlink(missing_ok=True)


def sees(marker: Path) -> bool:
    """Return whether this machine sees a file that another machine has just written."""
    with contextlib.suppress(OSError):
        os.scandir(marker.parent).close()  # opening a folder makes a network file system refresh it
    return os.path.exists(marker)


def appeared(path: Path) -> bool:
    """Return whether this machine sees a file within 90 seconds: network file systems show new files late."""
    deadline = time.monotonic() + LATE_SECONDS
    while not sees(path):
        if time.monotonic() >= deadline:
            return False
        time.sleep(LOOK_SECONDS)
    return True


def sharing_needed(run: RunConfig, session: SessionConfig) -> str:
    """Return the setting that requires all ranks to share ``output_dir``; empty if none does."""
    if session.checkpoint_every:
        return f"checkpoint_every={session.checkpoint_every}"
    if run.selfplay.ranks:
        return f"selfplay.ranks={run.selfplay.ranks}"
    return "evaluation.scoring=offline" if run.evaluation.offline else ""


def make_output(folder: Path, run: RunConfig, session: SessionConfig) -> str:
    """Create the ``output_dir`` of a run and check whether all ranks share it. All ranks of the job must call this.

    Returns:
        An empty text if they do; else a message for the user that names the hosts without access to rank 0's folder.

    Raises:
        ConfigError: on all ranks, if the folder cannot be created, or a setting requires a shared folder and it is not.
    """
    problem = marker = ""
    with contextlib.ExitStack() as stack:
        try:
            folder.mkdir(parents=True, exist_ok=True)
            if job_store.rank() == 0:
                marker = stack.enter_context(marked(folder)).name
        except OSError as error:
            problem = f"cannot be made or written to: {error.strerror}"
        if not job_store.joined():
            if problem:
                raise ConfigError(f"output_dir={folder} {problem}")
            return ""
        marker = job_store.from_rank_0("output_dir marker", marker)
        if not problem and marker and not sees(folder / marker):
            problem = UNSEEN
        answers = job_store.from_all_ranks("output_dir seen", json.dumps([node_name(os.environ), problem]))
    found = [tuple[str, str](json.loads(answer)) for answer in answers]
    if failed := [(host, why) for host, why in found if why not in ("", UNSEEN)]:
        raise ConfigError(f"output_dir={folder} {failed[0][1]} (on {failed[0][0]})")
    unseen: dict[str, list[int]] = {}
    for rank, (host, why) in enumerate(found):
        if why:
            unseen.setdefault(host, []).append(rank)
    if not unseen:
        return ""
    missing = (
        f"output_dir={folder} is not shared by all ranks: a file that rank 0 wrote there on {found[0][0]} is not "
        f"visible on {_named(unseen)}"
    )
    if setting := sharing_needed(run, session):
        raise ConfigError(
            f"{missing}. {setting} needs a folder that all ranks share: choose an output_dir on a file system that "
            f"every machine mounts at the same path, or leave {setting} out"
        )
    return missing


def _named(hosts: dict[str, list[int]]) -> str:
    listed = [
        f"{host} (rank {ranks[0]}{f' and {len(ranks) - 1} more' if len(ranks) > 1 else ''})"
        for host, ranks in hosts.items()
    ]
    return ", ".join(listed[:NAMED]) + (f" and {len(listed) - NAMED} more hosts" if len(listed) > NAMED else "")
