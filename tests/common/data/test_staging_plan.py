"""Plans of staging, and the folder of a node."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from common.data.staging import (
    LOCK,
    SHARDS,
    NodeOrder,
    NodeShards,
    SourceFile,
    StagingPlan,
    claimed,
    file_system_in_memory,
    open_split,
    read_shards,
    write_shards,
)
from common.errors import DataError
from common.untrusted.archives import gunzip

PLAN = StagingPlan({
    "train": [SourceFile(f"train/{number}", number) for number in range(23)],
    "eval": [SourceFile(f"eval/{number}", number) for number in range(8)],
})  # fmt: skip


@pytest.mark.parametrize("nodes", [1, 2, 3, 8])
def test_each_file_belongs_to_one_node(nodes):
    shards = [PLAN.of_node(5, node, nodes) for node in range(nodes)]
    for split, files in PLAN.shards.items():
        found = [file for shard in shards for file in shard[split]]
        assert sorted(found, key=lambda file: file.bytes) == list(files)
        sizes = {len(shard[split]) for shard in shards}
        assert max(sizes) - min(sizes) <= 1


def test_nodes_take_turns_in_one_permutation_of_the_seed():
    whole = PLAN.of_node(5, 0, 1)
    assert PLAN.of_node(5, 1, 3) == {split: files[1::3] for split, files in whole.items()}
    assert whole == PLAN.of_node(5, 0, 1)
    assert whole["train"] != list(PLAN.shards["train"])
    assert whole["train"] != PLAN.of_node(6, 0, 1)["train"]


def test_data_and_labels_of_a_sample_belong_to_the_same_node():
    kinds = {kind: [SourceFile(f"{kind}/{number}", 1) for number in range(9)] for kind in ("data", "label")}
    for node in range(2):
        found = StagingPlan(kinds).of_node(5, node, 2)
        assert [file.name.replace("data", "label") for file in found["data"]] == [file.name for file in found["label"]]


@pytest.mark.parametrize("change", ["name", "size", "split", "whole"])
def test_different_files_have_different_digests(change):
    files = [SourceFile("a", 1), SourceFile("b", 2)]
    others = {
        "name": StagingPlan({"train": [files[0], SourceFile("c", 2)]}),
        "size": StagingPlan({"train": [files[0], SourceFile("b", 3)]}),
        "split": StagingPlan({"train": files[:1], "eval": files[1:]}),
        "whole": StagingPlan({"train": files[:1]}, files[1:]),
    }
    same = StagingPlan({"train": list(files)}, decode=gunzip)
    assert StagingPlan({"train": files}).digest() == same.digest() != others[change].digest()


@pytest.mark.parametrize("name", ["/etc/passwd", "../a", "a/../../b", LOCK, SHARDS, "train/1"])
def test_names_outside_of_the_folder_or_twice_are_refused(name):
    with pytest.raises(DataError, match=f"'{name}' cannot be staged"):
        StagingPlan({"train": [SourceFile("train/1", 1)]}, [SourceFile(name, 1)])


@pytest.mark.parametrize(("split", "count"), [("train", 2), ("train", 4), ("eval", 0)])
def test_a_list_of_another_shard_is_one_error(split, count, tmp_path):
    """Node 1 of 3 has 3 of 8 samples."""
    write_shards(tmp_path, NodeShards(1, 3, {"train": [f"train/{number}" for number in range(count)]}))
    with pytest.raises(DataError, match=rf"staged\.json has {count} files of {split}, not 3; stage the data again"):
        open_split(tmp_path, split, 8, replicas=3, replica=1, seed=0)


def test_shards_are_read_as_they_were_written(tmp_path):
    assert read_shards(tmp_path) is None
    shards = NodeShards(1, 2, {"train": ["b", "a"], "eval": []})
    write_shards(tmp_path, shards)
    assert read_shards(tmp_path) == shards


def test_nodes_have_orders_of_their_own():
    """Otherwise, the samples with the same positions in all shards would share every batch of an epoch."""
    orders = [NodeOrder.of(NodeShards(node, 3, {}), 6, 2 * node + 1, 7) for node in range(3)]
    assert [(order.node, order.nodes, order.replicas, order.replica) for order in orders] == [
        (n, 3, 2, 1) for n in range(3)
    ]
    assert len({order.seed for order in orders} | {7}) == 4


@pytest.mark.parametrize("text", ["", "{", "[]", '{"node": 1, "nodes": 2}', '{"node": "x", "nodes": 2, "files": {}}'])
def test_a_damaged_list_of_shards_is_one_error(text, tmp_path):
    (tmp_path / SHARDS).write_text(text)
    with pytest.raises(DataError, match=f"{SHARDS} is damaged"):
        read_shards(tmp_path)


def names(folder: Path) -> Iterator[str]:
    return (entry.name for entry in folder.iterdir())


def test_the_files_of_an_earlier_run_are_removed(tmp_path):
    folder = tmp_path / "local" / "staged"
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "file").touch()
    with claimed(folder):
        (folder / "train").mkdir()
        (folder / "train" / "1").touch()
        (folder / SHARDS).touch()
        (folder / "link").symlink_to(tmp_path / "elsewhere")
    assert set(names(folder)) == {LOCK, "train", SHARDS, "link"}
    with claimed(folder):
        assert list(names(folder)) == [LOCK]
    assert (tmp_path / "elsewhere" / "file").exists()


def test_files_that_no_run_has_staged_are_refused_and_stay(tmp_path):
    (tmp_path / "thesis").touch()
    with pytest.raises(DataError, match=f"{tmp_path} has files that no run has staged, such as thesis"):
        claimed(tmp_path).__enter__()
    assert list(names(tmp_path)) == ["thesis"]


def test_the_folder_of_a_running_run_is_refused_and_stays(tmp_path):
    with claimed(tmp_path):
        (tmp_path / "1").touch()
        with pytest.raises(DataError, match=f"{tmp_path} is in use by another run"):
            claimed(tmp_path).__enter__()
        assert set(names(tmp_path)) == {LOCK, "1"}


def test_a_folder_that_cannot_be_made_is_one_error(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(DataError, match=r"cannot be used: Not a directory \(.*file/below\)"):
        claimed(tmp_path / "file" / "below").__enter__()


@pytest.mark.parametrize(("kind", "found"), [("ext4", ""), ("tmpfs", "tmpfs"), ("ramfs", "ramfs"), ("lustre", "")])
def test_file_systems_in_memory_are_recognised(kind, found, tmp_path):
    device = os.stat(tmp_path).st_dev
    number = f"{os.major(device)}:{os.minor(device)}"
    mounts = tmp_path / "mountinfo"
    mounts.write_text(
        "22 1 9999:9 / /other rw,relatime shared:1 - tmpfs tmpfs rw\n"
        f"23 1 {number} / /some rw,relatime shared:2 master:1 - {kind} /dev/x rw\n"
    )
    assert file_system_in_memory(tmp_path, mounts) == found
