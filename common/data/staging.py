"""Staging: copy prepared files to the local disk of each node before training reads them.

A workload describes its files by a :class:`StagingPlan`. The files of a split are permuted once per run, the same way
on all ranks, and file i of the permutation goes to node ``i % nodes``. A node keeps these files, its shard, for the
whole run. :mod:`common.distributed.staging` copies them.

The folder of a node has a lock file, which a run locks for its whole life, the staged files, and, written last,
:data:`SHARDS`, the list of the shard's files. A folder that another run has left is emptied first, so that files of
two runs never mix.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import itertools
import json
import os
import re
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path, PurePosixPath

from common.data import atomic, manifest
from common.data.manifest import Manifest
from common.data.order import EpochStream, EvalShard, sample_generator
from common.errors import DataError
from common.untrusted.regular_file import read_bytes
from common.untrusted.strict_json import FILE_ENTRIES, parse

STAGED = "mlperf-staged"
"""Subfolder of ``staging_dir`` that a run fills and the next one empties."""
LOCK = "staging.lock"
SHARDS = "staged.json"
IN_MEMORY = frozenset({"tmpfs", "ramfs", "devtmpfs"})
"""File systems that hold their files in memory."""
MOUNTS = Path("/proc/self/mountinfo")
_NODE = 21
"""First number of a generator's key after the seed, for the orders of nodes; :mod:`common.data.order` uses others."""


@dataclass(frozen=True)
class SourceFile:
    """A prepared file.

    Attributes:
        name: path below the data folder, and below the staged folder.
        bytes: size in the data folder.
    """

    name: str
    bytes: int


def described_files(root: Path, found: Manifest) -> list[SourceFile]:
    """Return the manifest of ``root`` as a file, and the files that it describes."""
    entries = [SourceFile(name, entry.bytes) for name, entry in found.files.items()]
    return [SourceFile(manifest.NAME, (root / manifest.NAME).stat().st_size), *entries]


@dataclass(frozen=True)
class StagingPlan:
    """The prepared files that training reads, in the same order on all ranks.

    Attributes:
        shards: split to all its files; each node receives a shard of each split.
        whole: small files that every node receives unchanged, e.g. the manifest.
        decode: converts the content of a file of ``shards`` to pieces of the file to write, e.g.
            :func:`common.untrusted.archives.gunzip`. It runs in several threads at a time, and should release the GIL.
            Raises DataError if the content is damaged.
            None: the content is not changed.

    Raises:
        DataError: a name occurs twice, or is no path below the folder.
    """

    shards: Mapping[str, Sequence[SourceFile]]
    whole: Sequence[SourceFile] = ()
    decode: Callable[[memoryview], Iterable[bytes | memoryview]] | None = None

    def __post_init__(self) -> None:
        seen = {LOCK, SHARDS}
        for file in itertools.chain(*self.shards.values(), self.whole):
            if file.name in seen or file.name.startswith("/") or ".." in file.name.split("/"):
                raise DataError(f"{file.name!r} cannot be staged: it is listed twice or no path below the data folder")
            seen.add(file.name)

    def digest(self) -> int:
        """Return a hash of all names and sizes, from 0 to 2**63 - 1, to compare plans."""
        text = json.dumps([[*map(asdict, files)] for files in (*self.shards.values(), self.whole)])
        return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "little") >> 1

    def of_node(self, seed: int, node: int, nodes: int) -> dict[str, list[SourceFile]]:
        """Return the files of each split that ``node`` stages, in the order of the permutation.

        Splits of equal length have the same permutation, so that a node gets both file i of one and file i of another,
        such as data and labels.

        Args:
            seed: seed of the permutation, the same on all ranks.
            node: number of the node, from 0.
        """
        shards = {}
        for split, files in self.shards.items():
            order = sample_generator(seed).permutation(len(files))
            shards[split] = [files[index] for index in order[node::nodes]]
        return shards


@dataclass(frozen=True)
class NodeShards:
    """Content of :data:`SHARDS`: the staged files of a node.

    Attributes:
        node: number of the node, from 0.
        nodes: number of nodes of the run.
        files: split to the names of its files on this node, in the order of the permutation.
    """

    node: int
    nodes: int
    files: dict[str, list[str]]


@dataclass(frozen=True)
class NodeOrder:
    """How replicas share samples: all replicas those of the data folder, or those of a node the node's shard.

    Attributes:
        node, nodes: number of the shard and of shards; 0 and 1 without staging.
        replicas: replicas that share a shard; this one is ``replica``.
        seed: seed of the order; each node has its own.
    """

    node: int
    nodes: int
    replicas: int
    replica: int
    seed: int

    @staticmethod
    def of(shards: NodeShards | None, replicas: int, replica: int, seed: int) -> NodeOrder:
        """Return the order of a replica.

        Args:
            shards: what :func:`read_shards` returns.
            replicas: replicas of the run, of which each node has the same number; this one is ``replica``.
            seed: seed of the run.
        """
        if shards is None:
            return NodeOrder(0, 1, replicas, replica, seed)
        replicas //= shards.nodes
        seed = int(sample_generator(seed, _NODE, shards.node).integers(2**63))
        return NodeOrder(shards.node, shards.nodes, replicas, replica % replicas, seed)

    def stream(self, samples: int, micro_batch: int, accumulation: int) -> EpochStream:
        """Return the training stream over the ``samples`` that the replicas share."""
        return EpochStream(samples, micro_batch, accumulation, self.replicas, self.replica, self.seed)

    def eval_shard(self, eval_samples: int, batch: int) -> EvalShard:
        """Return this replica's part of an evaluation set of ``eval_samples``, as positions in the node's shard."""
        return EvalShard(eval_samples, batch, self.replicas, self.replica, self.nodes, self.node)


def read_shards(root: Path) -> NodeShards | None:
    """Return the shards that a run has staged in ``root``; None for an ordinary folder of prepared data.

    Raises:
        DataError: the list cannot be read.
    """
    path = root / SHARDS
    if not path.exists():
        return None
    try:
        found = parse(read_bytes(path).decode("utf-8"), FILE_ENTRIES)
        files = {str(split): [str(name) for name in names] for split, names in found["files"].items()}
        return NodeShards(int(found["node"]), int(found["nodes"]), files)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise DataError(f"{path} is damaged ({error}); stage the data again") from error


def open_split(
    root: Path, split: str, whole: int, replicas: int, replica: int, seed: int
) -> tuple[list[str] | None, NodeOrder]:
    """Return the staged files of a split, and how replicas share its samples.

    Args:
        root: staged folder of this node, or an ordinary folder of prepared data.
        whole: number of samples of the split on all nodes.
        replicas, replica, seed: see :meth:`NodeOrder.of`.

    Returns:
        The names without their folder, in the order of the shard; None for an ordinary folder. And the order.

    Raises:
        DataError: the list of the node's files cannot be read, or has other files than a shard of ``whole`` samples.
    """
    shards, names = read_shards(root), None
    if shards is not None:
        names = [PurePosixPath(name).name for name in shards.files.get(split, ())]
        if len(names) != (expected := len(range(shards.node, whole, shards.nodes))):
            raise DataError(f"{root / SHARDS} has {len(names)} files of {split}, not {expected}; stage the data again")
    return names, NodeOrder.of(shards, replicas, replica, seed)


def write_shards(root: Path, shards: NodeShards) -> None:
    """Write the list of a node's files, after all of them are complete."""
    atomic.write_text(root / SHARDS, json.dumps(asdict(shards)))


@contextlib.contextmanager
def claimed(folder: Path) -> Iterator[None]:
    """Reserve ``folder`` for this run until the block ends, and remove the files of an earlier run from it.

    Raises:
        DataError: another run uses the folder, it has files that no run has staged, or it cannot be used.
    """
    with contextlib.ExitStack() as stack:
        try:
            folder.mkdir(parents=True, exist_ok=True)
            others = sorted(entry.name for entry in folder.iterdir() if entry.name != LOCK)
            if others and not (folder / LOCK).exists():
                raise DataError(
                    f"{folder} has files that no run has staged, such as {others[0]}: remove them, or give another "
                    "staging_dir"
                )
            lock = stack.enter_context(open(folder / LOCK, "ab"))
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            for name in others:
                entry = folder / name
                if entry.is_dir() and not entry.is_symlink():
                    shutil.rmtree(entry)
                else:
                    entry.unlink()
        except BlockingIOError as error:
            raise DataError(
                f"{folder} is in use by another run on this node: wait for its end, or give another staging_dir"
            ) from error
        except OSError as error:
            raise DataError(f"staging_dir: {folder} cannot be used: {error.strerror} ({error.filename})") from error
        yield


def file_system_in_memory(path: Path, mounts: Path = MOUNTS) -> str:
    """Return the type of the file system of ``path`` if it is in memory, such as tmpfs; else an empty text."""
    device = os.stat(path).st_dev
    wanted = f"{os.major(device)}:{os.minor(device)}"
    for line in mounts.read_text().splitlines():
        found = re.match(r"\S+ \S+ (\S+) .* - (\S+) ", line)
        if found is not None and found[1] == wanted and found[2] in IN_MEMORY:
            return found[2]
    return ""
