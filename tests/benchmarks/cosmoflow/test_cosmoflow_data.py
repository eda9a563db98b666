"""Batches of cubes: formats, order, resuming, ranks, padding, and damaged files."""

from __future__ import annotations

import dataclasses
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import small_cubes
import torch

from benchmarks.cosmoflow.data import CubeReaderConfig, open_eval, open_train, staging_plan
from benchmarks.cosmoflow.samples import FORMAT, LIST, Split, encode
from common.data import manifest
from common.data.batches import Block, HostBatch
from common.distributed.layout import Layout
from common.errors import DataError
from common.formats.tfrecord import deflate

TRAIN = small_cubes.COUNTS["train"]
EPOCH = Block(0, 1, 1, 0, TRAIN)
THIRD_EPOCH = Block(2, 3, 1, 2 * TRAIN, TRAIN)


def reader(**changes: object) -> CubeReaderConfig:
    return CubeReaderConfig(
        **{"threads": 2, "prefetch": 2, "reads": "auto", "checksums": True, "eval_batch": 2} | changes
    )


def trained(
    root: Path, block: Block = EPOCH, start: int = 0, micro_batch: int = 2, accumulation: int = 1, replicas: int = 1,
    rank: int = 0, seed: int = 7, size: int = small_cubes.SIZE, **changes: object,
) -> list[HostBatch]:  # fmt: skip
    layout = Layout({"dp": replicas}, rank, seed=seed)
    source = open_train(root, size, reader(**changes), layout, micro_batch, accumulation)
    try:
        return list(source.batches(block, start))
    finally:
        source.close()


def evaluated(root: Path, replicas: int = 1, rank: int = 0, **changes: object) -> list[HostBatch]:
    source = open_eval(root, small_cubes.SIZE, reader(**changes), Layout({"dp": replicas}, rank))
    try:
        assert source.eval_samples == small_cubes.COUNTS["validation"]
        batches = list(source)
        assert len(source) == len(batches)
        return batches
    finally:
        source.close()


def numbers(batches: list[HostBatch]) -> list[int]:
    """Return the number of each cube, which its first target is."""
    return [int(y) for batch in batches for y in batch.tensors["y"][:, 0]]


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return small_cubes.prepared(tmp_path_factory.mktemp("cosmoflow") / "data", "plain")


@pytest.mark.parametrize("reads", ["auto", "buffered"])
@pytest.mark.parametrize("kind", ["plain", "gzip", "npy"])
def test_every_format_gives_the_same_cubes(kind, reads, tmp_path):
    batches = trained(small_cubes.prepared(tmp_path / kind, kind), reads=reads)
    for batch in batches:
        x_BDHWC, y_BP = batch.tensors["x"], batch.tensors["y"]
        assert (x_BDHWC.dtype, y_BP.dtype) == (torch.int16, torch.float32)
        for x_DHWC, y_P in zip(x_BDHWC.numpy(), y_BP.numpy(), strict=True):
            x, y = small_cubes.cube(int(y_P[0]))
            assert np.array_equal(x_DHWC, x)
            assert np.array_equal(y_P, y)


def test_an_epoch_has_every_cube_once_in_an_order_of_its_own(root):
    orders = [numbers(trained(root, block)) for block in (EPOCH, THIRD_EPOCH)]
    assert [sorted(order) for order in orders] == [list(range(TRAIN))] * 2
    assert orders[0] != orders[1]
    assert numbers(trained(root, EPOCH, seed=8)) not in orders


def test_the_order_does_not_depend_on_threads(root):
    assert numbers(trained(root, threads=1, prefetch=1)) == numbers(trained(root, threads=4, prefetch=4))


def test_a_resumed_block_continues_exactly(root):
    whole, rest = trained(root, THIRD_EPOCH), trained(root, THIRD_EPOCH, start=3)
    assert [batch.position for batch in rest] == [3]
    for name, tensor in whole[3].tensors.items():
        assert torch.equal(rest[0].tensors[name], tensor)


def test_two_ranks_read_what_one_rank_accumulates(root):
    """This includes the seeds of the dropout, which differ between micro-batches."""
    one = trained(root, accumulation=2)
    two = [trained(root, replicas=2, rank=rank) for rank in range(2)]
    both = [batch for pair in zip(*two, strict=True) for batch in pair]
    assert numbers(both) == numbers(one)
    seeds = [int(batch.tensors["seed"]) for batch in one]
    assert [int(batch.tensors["seed"]) for batch in both] == seeds
    assert len(set(seeds)) == len(seeds) == TRAIN // 2
    assert [batch.samples for batch in both] == [4] * 4


@pytest.mark.parametrize("replicas", [1, 2, 3])
def test_the_weights_of_an_evaluation_select_every_cube_once(replicas, root):
    found = Counter()
    for rank in range(replicas):
        for batch in evaluated(root, replicas, rank):
            x_BDHWC, weight_B = batch.tensors["x"], batch.tensors["weight"]
            assert x_BDHWC.shape == (2, 4, 4, 4, 4)
            for slot, number in enumerate(numbers([batch])):
                expected = small_cubes.cube(number)[0] if weight_B[slot] else np.zeros_like(x_BDHWC[slot])
                assert np.array_equal(x_BDHWC[slot], expected)
                found[number] += int(weight_B[slot])
    assert {number: count for number, count in found.items() if count} == dict.fromkeys(range(100, 105), 1)


def test_cubes_of_another_recipe_are_refused(root):
    with pytest.raises(DataError, match=rf"^{root} has cubes of 4\^3 voxels where benchmark\.facts\.size=8: these are"):
        trained(root, size=8)


def replaced(root: Path, name: str, content: bytes) -> None:
    """Replace a sample, its size in the list, and the list in the manifest, so that only reading the sample fails."""
    (root / "train" / name).write_bytes(content)
    lines = (root / "train" / LIST).read_text().splitlines()
    changed = [f"{name} {len(content)}" if line.startswith(f"{name} ") else line for line in lines]
    (root / "train" / LIST).write_text("\n".join(changed) + "\n")
    found = manifest.read_alone(root, FORMAT, "")
    manifest.write(root, dataclasses.replace(found, files=manifest.describe_files(root, found.files)))


WHOLE = encode(*small_cubes.cube(3))
DAMAGES = {
    "truncated record": (WHOLE[:-9], r"the record at byte 0 is truncated: it has 573 bytes, 564 are left"),
    "wrong checksum": (WHOLE[:99] + b"?" + WHOLE[100:], "the checksum of the record at byte 0 is wrong"),
    "another file": (b"JFIF" + WHOLE[4:], "the checksum of the length at byte 0 is wrong: the file is damaged or no"),
    "truncated gzip": (deflate(WHOLE)[:-99], "the gzip data end early"),
    "two records": (WHOLE * 2, "it has 2 records, and a file of a sample has one"),
    "cube of another size": (
        encode(*small_cubes.cube(3, 2)), r"a cube of 64 bytes; cubes of 4\^3 voxels at 4 redshifts have 512"
    ),
    "three parameters": (
        encode(small_cubes.cube(3)[0], np.zeros(3, np.float32)), "its Example is no sample, with bytes x and 4 values y"
    ),
    "parameter without a value": (
        encode(small_cubes.cube(3)[0], np.full(4, np.nan, np.float32)), "the parameters .* are not finite"
    ),
}  # fmt: skip


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_sample_is_one_message_with_its_path(damage, tmp_path):
    root = small_cubes.prepared(tmp_path / "data", "plain")
    content, complaint = DAMAGES[damage]
    replaced(root, "s3.tfrecord", content)
    with pytest.raises(DataError, match=rf"^{root}/train/s3\.tfrecord: {complaint}.*; fetch or prepare it again$"):
        trained(root)


def test_a_sample_that_lost_bytes_since_the_preparation_is_refused(tmp_path):
    root = small_cubes.prepared(tmp_path / "data", "plain")
    (root / "train" / "s3.tfrecord").write_bytes(WHOLE[:-9])
    with pytest.raises(DataError, match=rf"^{root}/train/s3\.tfrecord has 564 bytes and not 573; "):
        trained(root)


def test_checksums_are_computed_only_on_request(tmp_path):
    root = small_cubes.prepared(tmp_path / "data", "plain")
    replaced(root, "s3.tfrecord", DAMAGES["wrong checksum"][0])
    assert sorted(numbers(trained(root, checksums=False))) == list(range(TRAIN))


def test_a_pair_without_its_parameters_is_refused(tmp_path):
    root = small_cubes.prepared(tmp_path / "data", "npy")
    (root / "train" / "s3_label.npy").unlink()
    with pytest.raises(DataError, match=r"train/s3_data\.npy: s3_label\.npy cannot be read: No such file"):
        trained(root)


@pytest.mark.parametrize(
    ("array", "complaint"),
    [
        (small_cubes.cube(3)[0].astype(np.uint16), r"uint16 of shape \(4, 4, 4, 4\), not a cube"),
        (small_cubes.cube(3)[0].reshape(2, 8, 4, 4), r"int16 of shape \(2, 8, 4, 4\), not a cube"),
        (np.asfortranarray(small_cubes.cube(3)[0]), r"int16 of shape \(4, 4, 4, 4\), not a cube of int16 in C order"),
    ],
    ids=["dtype", "shape", "order"],
)
def test_another_array_is_no_cube(array, complaint, tmp_path):
    root = small_cubes.prepared(tmp_path / "data", "npy")
    np.save(root / "train" / "s3_data.npy", array)
    with pytest.raises(DataError, match=complaint):
        trained(root)


@pytest.mark.parametrize(
    ("array", "complaint"),
    [(np.zeros(4), r"float64 of shape \(4,\)"), (np.zeros(3, np.float32), r"float32 of shape \(3,\)")],
    ids=["dtype", "shape"],
)
def test_other_parameters_are_refused(array, complaint, tmp_path):
    root = small_cubes.prepared(tmp_path / "data", "npy")
    np.save(root / "train" / "s3_label.npy", array)
    with pytest.raises(DataError, match=rf"s3_data\.npy: s3_label\.npy is {complaint}, not float32 of \(4,\)"):
        trained(root)


@pytest.mark.parametrize("line", ["s1.tfrecord 5e3", "../s1.tfrec 573", "s1.tfrecord_573"])
def test_a_list_with_another_line_is_refused(line, tmp_path):
    root = small_cubes.prepared(tmp_path / "data", "plain")
    text = (root / "train" / LIST).read_text()
    (root / "train" / LIST).write_text(text.replace("s1.tfrecord 573", line))
    with pytest.raises(DataError, match=rf"{LIST}: line 2 is '{line}', not a name and a size"):
        trained(root)


@pytest.mark.parametrize("opened", [trained, lambda root: staging_plan(root, small_cubes.SIZE)], ids=["read", "staged"])
def test_a_list_of_fewer_samples_is_refused(opened, tmp_path):
    """It has as many bytes as before, so that its size in the manifest is right."""
    root = small_cubes.prepared(tmp_path / "data", "plain")
    text = (root / "train" / LIST).read_text()
    (root / "train" / LIST).write_text(text.replace("s1.tfrecord 573\ns2.tfrecord 573", f"{'s' * 27} 573"))
    with pytest.raises(DataError, match=rf"{LIST} has 7 samples where manifest\.json says 8; run"):
        opened(root)


def test_a_thread_reads_files_of_different_sizes(tmp_path):
    """A gzipped cube of zeros fits into one page, the next cube needs nine."""
    for name, kind, x in (
        ("a", "gzip", np.zeros((16, 16, 16, 4), np.int16)),
        ("b", "plain", small_cubes.cube(1, 16)[0]),
    ):
        small_cubes.write_sample(tmp_path, kind, name, x, np.ones(4, np.float32))
    split = Split(tmp_path, [("a.tfrecord", None), ("b.tfrecord", None)], 16, "auto", checksums=True)
    found = torch.empty((2, 16, 16, 16, 4), dtype=torch.int16)
    for number in range(2):
        split.read(number, found[number], torch.empty(4))
    assert not found[0].any()
    assert np.array_equal(found[1], small_cubes.cube(1, 16)[0])
