"""Samples on the local disks of two nodes, each with two ranks: what is staged, and which rank reads what."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import small_cubes

from benchmarks.cosmoflow.data import CubeReaderConfig, open_eval, open_train, staging_plan
from benchmarks.cosmoflow.prepare import adopt
from benchmarks.cosmoflow.samples import encode
from common.data.batches import Block, DataSource, EvalSource
from common.data.staging import NodeShards, StagingPlan, write_shards
from common.distributed.layout import Layout
from common.errors import DataError

NODES, RANKS = 2, 4
SIZE, READER = small_cubes.SIZE, CubeReaderConfig(threads=1, prefetch=1, reads="auto", checksums=True, eval_batch=2)


def stage(source: Path, target: Path, plan: StagingPlan, node: int) -> Path:
    """Copy the files of a node as staging does."""
    shards = plan.of_node(3, node, NODES)
    for file in plan.whole:
        (target / file.name).parent.mkdir(parents=True, exist_ok=True)
        (target / file.name).write_bytes((source / file.name).read_bytes())
    for file in (file for files in shards.values() for file in files):
        content = (source / file.name).read_bytes()
        assert len(content) == file.bytes
        assert plan.decode is not None
        (target / file.name).write_bytes(b"".join(plan.decode(memoryview(content))))
    write_shards(target, NodeShards(node, NODES, {split: [f.name for f in files] for split, files in shards.items()}))
    return target


@pytest.fixture(scope="module", params=["gzip", "plain", "npy"])
def nodes(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Return the staged folder of each node, from 8 + 5 samples."""
    folder = tmp_path_factory.mktemp("staged")
    root = small_cubes.prepared(folder / "data", request.param)
    plan = staging_plan(root, SIZE)
    return [stage(root, folder / f"node{node}", plan, node) for node in range(NODES)]


def layout(rank: int) -> Layout:
    return Layout({"dp": RANKS}, rank, seed=5)


def cubes(source: DataSource | EvalSource, block: Block | None = None) -> list[int]:
    """Return the numbers of all cubes with a weight that a rank reads, after a comparison of their voxels."""
    found = []
    for batch in source.batches(block) if isinstance(block, Block) else source:
        weights = batch.tensors.get("weight", np.ones(len(batch.tensors["x"])))
        for x_DHWC, y, weight in zip(batch.tensors["x"], batch.tensors["y"], weights, strict=True):
            if weight:
                assert np.array_equal(x_DHWC, small_cubes.cube(int(y[0]))[0])
                found.append(int(y[0]))
    source.close()
    return found


def number(path: Path) -> int:
    """Return the number of a cube, from the name of its file: s7.tfrecord or s7_data.npy."""
    return int(path.name[1:].partition(".")[0].partition("_")[0])


def shard_of(node: Path) -> list[Path]:
    return [*node.glob("train/*.tfrecord"), *node.glob("train/*_data.npy")]


def test_staged_records_are_inflated(nodes):
    found = [path for node in nodes for path in shard_of(node)]
    assert sorted(map(number, found)) == list(range(8))
    for path in found:
        assert path.suffix == ".npy" or path.read_bytes() == encode(*small_cubes.cube(number(path)))


def test_a_node_reads_only_its_shard_and_all_of_it_in_each_epoch(nodes):
    orders = []
    for epoch in (0, 1):
        block = Block(epoch, epoch + 1, 1, 8 * epoch, 8)
        of_ranks = [cubes(open_train(nodes[rank // 2], SIZE, READER, layout(rank), 1), block) for rank in range(RANKS)]
        for node in range(NODES):
            shard = [number(path) for path in shard_of(nodes[node])]
            assert sorted(of_ranks[2 * node] + of_ranks[2 * node + 1]) == sorted(shard)
        orders.append(of_ranks)
    assert orders[0] != orders[1]


def test_every_cube_is_evaluated_once_although_shards_differ(nodes):
    """Nodes with 3 and 2 cubes have equally many batches on each rank, and the size of the whole set."""
    sources = [open_eval(nodes[rank // 2], SIZE, READER, layout(rank)) for rank in range(RANKS)]
    assert [(len(source), source.eval_samples) for source in sources] == [(1, 5)] * RANKS
    assert Counter(number for source in sources for number in cubes(source)) == dict.fromkeys(range(100, 105), 1)


def test_labels_may_have_the_shorter_headers_of_older_numpy(tmp_path):
    root = small_cubes.write_samples(tmp_path / "raw", "npy")
    for path in root.glob("*/*_label.npy"):
        values = path.read_bytes()[-16:]
        header = b"{'descr': '<f4', 'fortran_order': False, 'shape': (4,), }"
        path.write_bytes(b"\x93NUMPY\x01\x00" + (70).to_bytes(2, "little") + header.ljust(69) + b"\n" + values)
    adopt(root, root)
    found = staging_plan(root, SIZE).shards["train labels"]
    assert [file.bytes for file in found] == [10 + 70 + 16] * small_cubes.COUNTS["train"]
    assert sorted(cubes(open_train(root, SIZE, READER, Layout({"dp": 1}, 0, seed=5), 8), Block(0, 1, 1, 0, 8))) == [
        *range(8)
    ]


def test_a_missing_label_is_no_traceback(tmp_path):
    root = small_cubes.prepared(tmp_path / "data", "npy")
    (root / "train" / "s0_label.npy").unlink()
    with pytest.raises(DataError, match=rf"^{root}/train/s0_label\.npy cannot be read: No such file or directory; "):
        staging_plan(root, SIZE)
