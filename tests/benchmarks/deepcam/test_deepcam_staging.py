"""Samples on the local disks of two nodes, each with two ranks: what is staged, and which rank reads what."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import small_images

from benchmarks.deepcam.data import ClimateReaderConfig, open_eval, open_train, staging_plan
from common.data.batches import Block, DataSource, EvalSource
from common.data.staging import NodeShards, write_shards
from common.distributed.layout import Layout
from common.errors import DataError

NODES, RANKS = 2, 4
SIZE, READER = small_images.SIZE, ClimateReaderConfig(threads=1, prefetch=1, reads="auto", eval_batch=2)


@pytest.fixture(scope="module", params=["pair", "fused"])
def nodes(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Return the staged folder of each node, from 8 + 5 samples."""
    folder = tmp_path_factory.mktemp("staged")
    root = small_images.prepared(folder / "data", request.param, np.float32)
    plan = staging_plan(root, SIZE)
    for node in range(NODES):
        shards, target = plan.of_node(3, node, NODES), folder / f"node{node}"
        for file in (*plan.whole, *(file for files in shards.values() for file in files)):
            content = (root / file.name).read_bytes()
            assert len(content) == file.bytes
            (target / file.name).parent.mkdir(parents=True, exist_ok=True)
            (target / file.name).write_bytes(content)
        names = {split: [file.name for file in files] for split, files in shards.items()}
        write_shards(target, NodeShards(node, NODES, names))
    return [folder / f"node{node}" for node in range(NODES)]


def layout(rank: int) -> Layout:
    return Layout({"dp": RANKS}, rank, seed=5)


def images(source: DataSource | EvalSource, block: Block | None = None) -> list[int]:
    """Return the numbers of all images with a weight that a rank reads, after a comparison of pixels and labels."""
    found = []
    for batch in source.batches(block) if isinstance(block, Block) else source:
        x_BHWC, y_BHW = batch.tensors["x"], batch.tensors["y"]
        for slot, weight in enumerate(batch.tensors.get("weight", np.ones(len(x_BHWC)))):
            if weight:
                number = int(x_BHWC[slot, 0, 0, 0])
                x, y = small_images.sample(number)
                assert np.array_equal(x_BHWC[slot], x)
                assert np.array_equal(y_BHW[slot], y)
                found.append(number)
    source.close()
    return found


def shard_of(node: Path) -> list[int]:
    """Return the numbers of the images in a node's folder."""
    return sorted(int(path.stem.rpartition("s")[2]) for path in node.glob("train/data*.npy"))


def test_a_node_reads_only_its_shard_and_all_of_it_in_each_epoch(nodes):
    assert sorted(shard_of(nodes[0]) + shard_of(nodes[1])) == list(range(8))
    orders = []
    for epoch in (0, 1):
        block = Block(epoch, epoch + 1, 1, 8 * epoch, 8)
        of_ranks = [images(open_train(nodes[rank // 2], SIZE, READER, layout(rank), 1), block) for rank in range(RANKS)]
        for node in range(NODES):
            assert sorted(of_ranks[2 * node] + of_ranks[2 * node + 1]) == shard_of(nodes[node])
        orders.append(of_ranks)
    assert orders[0] != orders[1]


def test_every_image_is_evaluated_once_although_shards_differ(nodes):
    """Nodes with 3 and 2 images have equally many batches on each rank, and the size of the whole set."""
    sources = [open_eval(nodes[rank // 2], SIZE, READER, layout(rank)) for rank in range(RANKS)]
    assert [(len(source), source.eval_samples) for source in sources] == [(1, 5)] * RANKS
    assert Counter(number for source in sources for number in images(source)) == dict.fromkeys(range(100, 105), 1)


def test_a_missing_file_is_no_traceback(tmp_path):
    root = small_images.prepared(tmp_path / "data")
    (root / "train" / "label-s0.npy").unlink()
    with pytest.raises(DataError, match=rf"^{root}/train/label-s0\.npy cannot be read: No such file or directory; "):
        staging_plan(root, SIZE)
