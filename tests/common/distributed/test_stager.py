"""Staging by several instances: each file is read once and arrives everywhere, and a failure ends all of them."""

from __future__ import annotations

import gzip
import itertools
import os
import random
import re
import resource
import signal
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from common.data.aligned_buffers import ALIGNMENT
from common.data.staging import SourceFile, StagingPlan
from common.distributed import staging
from common.distributed.groups import HostGroup
from common.distributed.staging import ADDRESS, INSTANCE, INSTANCES, Instances, Stager
from common.errors import ConfigError, DataError, RankFailure
from common.untrusted.archives import gunzip
from tests.forked import FORKS
from tests.gloo_ranks import on_ranks

RANKS = 2
"""Ranks of each of the two instances."""
FILES = 11
PATIENCE = timedelta(seconds=3)
"""Timeout of groups whose other member dies or stops."""


def content(number: int) -> bytes:
    return random.Random(number).randbytes(1000 + 700 * (number % 5))


def write_sources(folder: Path) -> StagingPlan:
    """Write gzip files of different sizes; return their plan."""
    (folder / "source" / "train").mkdir(parents=True)
    files = []
    for number in range(FILES):
        packed = gzip.compress(content(number), mtime=0)
        (folder / "source" / f"train/{number}").write_bytes(packed)
        files.append(SourceFile(f"train/{number}", len(packed)))
    return StagingPlan({"train": files}, decode=gunzip)


@contextmanager
def reading_recorded() -> Iterator[list[str]]:
    """Record the names of the files that this process reads."""
    found: list[str] = []
    read_file = staging.read_file

    def recorded(path: Path, *rest: Any) -> Any:
        found.append(f"{path.parent.name}/{path.name}")
        return read_file(path, *rest)

    staging.read_file = recorded
    try:
        yield found
    finally:
        staging.read_file = read_file


def staged_by(plan: StagingPlan, rank: int, world: int, folder: str) -> tuple[list[str], list[str], str]:
    """Stage as one of two instances of :data:`RANKS` ranks, with the seeds 0 and 1.

    Returns:
        names of the files that this rank has read, names of those that it needs, and its error.
    """
    root, (instance, own) = Path(folder), divmod(rank, RANKS)
    group = Instances(f"{folder}/meeting", instance, 2).group(own, RANKS, PATIENCE, PATIENCE)
    stager = Stager(root / "source", root / f"instance{instance}", group, gathered_bytes=1500)
    files = plan.of_node(stager.agree(plan, instance, 1, RANKS), 0, 1)["train"][own::RANKS]
    error = ""
    with reading_recorded() as read:
        try:
            stager.stage(files, plan)
        except (DataError, RankFailure) as failure:
            error = f"{type(failure).__name__}: {failure}"
    return read, [file.name for file in files], error


def test_two_instances_of_two_ranks_read_each_file_once_and_get_all(tmp_path):
    plan = write_sources(tmp_path)
    reads, wanted, errors = zip(*on_ranks(partial(staged_by, plan), 2 * RANKS, tmp_path), strict=True)
    assert errors == ("",) * 4
    assert sorted(name for read in reads for name in read) == sorted(file.name for file in plan.shards["train"])
    assert all(len(read) in (2, 3) for read in reads)
    for instance in range(2):
        for number in range(FILES):
            assert (tmp_path / f"instance{instance}" / f"train/{number}").read_bytes() == content(number)
    order = [file.name for file in plan.of_node(0, 0, 1)["train"]]  # the seed of instance 0
    assert list(wanted) == 2 * [order[0::2], order[1::2]]


def test_a_source_file_of_another_size_is_named_where_it_is_read(tmp_path):
    plan = write_sources(tmp_path)
    file = plan.of_node(0, 0, 1)["train"][2]  # the second of rank 0, which instance 1 reads
    path = tmp_path / "source" / file.name
    os.truncate(path, file.bytes - 1)
    _, _, errors = zip(*on_ranks(partial(staged_by, plan), 2 * RANKS, tmp_path), strict=True)
    assert errors[0] == "RankFailure: staging: instance 1 failed and says why; no instance can go on"
    assert errors[1] == errors[3] == ""
    assert errors[2].startswith(f"DataError: {path} has {file.bytes - 1:,} bytes and not {file.bytes:,}")


def test_an_instance_that_cannot_write_its_last_files_ends_the_others_too(tmp_path):
    plan = StagingPlan({"train": write_sources(tmp_path).shards["train"][: 2 * RANKS]})  # one round
    (tmp_path / "instance1").touch()  # where a folder would have to be
    _, _, errors = zip(*on_ranks(partial(staged_by, plan), 2 * RANKS, tmp_path), strict=True)
    assert errors[:2] == ("RankFailure: staging: instance 1 failed and says why; no instance can go on",) * 2
    message = r"DataError: .*/instance1/train/\d cannot be staged: Not a directory; free space on this disk"
    assert all(re.match(message, error) for error in errors[2:]), errors


def different(rank: int, world: int, folder: str) -> str:
    group = Instances(f"{folder}/meeting", rank, 2).group(0, 1, PATIENCE, PATIENCE)
    plan = StagingPlan({"train": [SourceFile("a", 1 + rank)]})
    try:
        Stager(Path(folder), Path(folder), group).agree(plan, 0, 1, 1)
    except ConfigError as error:
        return str(error)
    return ""


def test_instances_with_different_files_are_refused(tmp_path):
    assert all("the instances have different files" in text for text in on_ranks(different, 2, tmp_path / "ranks"))


def meet(folder: Path, instance: int) -> HostGroup:
    return Instances(str(folder / "meeting"), instance, 2).group(0, 1, PATIENCE, PATIENCE)


def lost(folder: Path, plan: StagingPlan, last: int) -> None:
    """Stage as instance 1, and end this process, or stop it, instead of reading its third file."""
    read_file, names = staging.read_file, []

    def dying(path: Path, *rest: Any) -> Any:
        names.append(path)
        if len(names) == 3:
            os.kill(os.getpid(), last)
        return read_file(path, *rest)

    staging.read_file = dying
    staging.READERS = 1
    Stager(folder / "source", folder / "other", meet(folder, 1)).stage(plan.shards["train"], plan)


@pytest.mark.parametrize("last", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "stopped"])
def test_an_instance_that_is_lost_ends_the_others_with_a_message(last, tmp_path):
    plan = write_sources(tmp_path)
    other = FORKS.Process(target=lost, args=(tmp_path, plan, int(last)))
    other.start()
    try:
        stager = Stager(tmp_path / "source", tmp_path / "own", meet(tmp_path, 0))
        with pytest.raises(RankFailure, match="instance 0 lost the connection to another instance"):
            stager.stage(plan.shards["train"], plan)
    finally:
        other.kill()
        other.join()


def test_an_instance_that_does_not_come_is_reported(tmp_path):
    group = Instances(str(tmp_path / "meeting"), 0, 2)
    with pytest.raises(RankFailure, match=r"instance 0 did not meet the 1 others at .*/meeting within 1 s"):
        group.group(0, 1, timedelta(seconds=1), PATIENCE)


def test_instances_that_start_later_have_more_time_than_an_exchange(monkeypatch):
    waited = []

    class Store:
        def __init__(self, *given: object) -> None:
            pass

        def set(self, key: str, value: str) -> None:
            pass

        def wait(self, keys: list[str], patience: timedelta) -> None:
            waited.append((keys, patience))
            raise RuntimeError("nobody came")

    monkeypatch.setattr(dist, "FileStore", Store)
    with pytest.raises(RankFailure, match="within 1800 s: nobody came"):
        Instances("/shared/meeting", 1, 3).group(4, 8, timedelta(minutes=30), timedelta(seconds=5))
    assert waited == [(["arrived/4/0", "arrived/4/1", "arrived/4/2"], timedelta(minutes=30))]


def test_a_port_in_use_is_named():
    taken = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    message = f"another program has the port of MLPERF_STAGING_ADDRESS=127.0.0.1:{taken.port}; give another port"
    with pytest.raises(RankFailure, match=message):
        Instances(f"127.0.0.1:{taken.port}", 0, 2).group(0, 1, PATIENCE, PATIENCE)


def test_instances_meet_at_a_port():
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    store.set("arrived/5/0", "")
    with ThreadPoolExecutor(1) as pool:
        second = pool.submit(Instances(f"127.0.0.1:{store.port}", 1, 2).group, 5, 6, PATIENCE, PATIENCE)
        groups = [HostGroup("staging/5", 0, 2, store, PATIENCE), second.result()]
        gathered = [[torch.zeros(1), torch.zeros(1)] for _ in groups]
        other = pool.submit(groups[1].gather, torch.tensor([7.0]), gathered[1])
        groups[0].gather(torch.tensor([3.0]), gathered[0])
        other.result()
    assert [[float(value) for value in values] for values in gathered] == [[3, 7], [3, 7]]


def test_rank_0_of_instance_0_opens_the_port(monkeypatch):
    hosts = {}

    def opened(host: str, port: int, world: int | None, is_master: bool, *rest: Any, **others: Any) -> None:
        hosts[instance, rank] = is_master
        raise RuntimeError("asked enough")

    monkeypatch.setattr(dist, "TCPStore", opened)
    for instance, rank in itertools.product(range(2), range(2)):
        with pytest.raises(RankFailure, match="asked enough"):
            Instances("127.0.0.1:29500", instance, 2).group(rank, 2, PATIENCE, PATIENCE)
    assert hosts == {(0, 0): True, (0, 1): False, (1, 0): False, (1, 1): False}


def stage_alone(folder: Path, plan: StagingPlan, **settings: Any) -> None:
    Stager(folder / "source", folder / "staged", **settings).stage(plan.shards["train"], plan)


def test_a_damaged_source_file_is_named(tmp_path):
    plan = write_sources(tmp_path)
    path = tmp_path / "source" / "train/7"
    path.write_bytes(path.read_bytes()[:-4] + bytes(4))
    with pytest.raises(DataError, match=r"train/7: the gzip data are damaged .*; fetch or prepare it again"):
        stage_alone(tmp_path, plan)


def test_a_full_disk_is_one_error_that_names_the_file(tmp_path):
    (tmp_path / "source").mkdir()
    (tmp_path / "source" / "large").write_bytes(bytes(5 * ALIGNMENT))
    plan = StagingPlan({"train": [SourceFile("large", 5 * ALIGNMENT)]})
    limits, handler = resource.getrlimit(resource.RLIMIT_FSIZE), signal.getsignal(signal.SIGXFSZ)
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2 * ALIGNMENT, limits[1]))
    try:
        with pytest.raises(DataError, match=r"staged/large cannot be staged: File too large; free space on this disk"):
            stage_alone(tmp_path, plan)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, handler)


def test_files_that_wait_to_be_written_are_bounded_in_bytes(tmp_path):
    plan = write_sources(tmp_path)
    limit = 2 * max(file.bytes for file in plan.shards["train"])
    lock, decoding, exceeded = threading.Lock(), 0, threading.Event()

    def measured(packed: memoryview) -> Iterator[bytes]:
        nonlocal decoding
        with lock:
            decoding += len(packed)
            if decoding > limit:
                exceeded.set()
        exceeded.wait(0.05)  # time for another file to begin
        yield bytes(packed)
        with lock:
            decoding -= len(packed)

    stage_alone(tmp_path, StagingPlan(plan.shards, decode=measured), queue_bytes=limit)
    assert not exceeded.is_set()


def test_a_file_larger_than_the_queue_is_staged(tmp_path):
    plan = write_sources(tmp_path)
    stage_alone(tmp_path, plan, queue_bytes=1)
    assert (tmp_path / "staged" / "train/3").read_bytes() == content(3)


HOST = {ADDRESS: "n1:29500", INSTANCE: "1", INSTANCES: "4"}


@pytest.mark.parametrize(
    ("environment", "found"),
    [
        ({}, None),
        ({INSTANCE: "0", INSTANCES: "1"}, None),
        (HOST, Instances("n1:29500", 1, 4)),
        ({**HOST, ADDRESS: "/shared/file"}, Instances("/shared/file", 1, 4)),
    ],
    ids=["alone", "one-instance", "port", "file"],
)
def test_instances_are_those_of_the_launcher(environment, found):
    assert Instances.from_environment(environment) == found


@pytest.mark.parametrize(
    ("environment", "message"),
    [
        ({INSTANCES: "4"}, f"{INSTANCE} is not set"),
        ({INSTANCE: "1"}, f"{INSTANCES} is not set"),
        ({**HOST, INSTANCE: "4"}, f"{INSTANCE}='4' is out of range"),
        ({**HOST, INSTANCES: "0"}, f"{INSTANCES}='0' is out of range"),
        ({INSTANCE: "1", INSTANCES: "4"}, f"{ADDRESS}='': set it to HOST:PORT"),
        ({**HOST, ADDRESS: "n1"}, f"{ADDRESS}='n1': set it to HOST:PORT"),
        ({**HOST, ADDRESS: "n1:99999"}, f"{ADDRESS}='n1:99999': set it to HOST:PORT"),
    ],
    ids=lambda value: None if isinstance(value, dict) else value.split()[0],
)
def test_wrong_variables_of_the_launcher_are_named(environment, message):
    with pytest.raises(ConfigError, match=message):
        Instances.from_environment(environment)
