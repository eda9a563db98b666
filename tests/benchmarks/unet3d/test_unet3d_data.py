"""Test the order of volumes, shares, ranks, resuming, caches and damaged files."""

from __future__ import annotations

import threading
from collections import Counter
from pathlib import Path

import numpy as np
import psutil
import pytest
import torch
from torch import Tensor

from benchmarks.unet3d import cache as cache_module
from benchmarks.unet3d.data import VolumeDataSettings, VolumeSource, open_train, order_of_data, warm_up
from benchmarks.unet3d.volume_order import ReplicaOrder, VolumeOrder, shares_for
from benchmarks.unet3d.volumes import Volumes
from common.data.batches import Block
from common.data.order import MicroBatches
from common.distributed.layout import Layout
from common.distributed.spatial.split import VolumeSplit
from common.errors import ConfigError, DataError
from common.mlperf.schedules import unet3d
from tests.benchmarks.unet3d.small_volumes import PERIOD, SHAPES, SIZE, numbered, settings, with_objects, write_volumes

CALM = {"brightness_probability": 0.0, "noise_probability": 0.0}


@pytest.fixture(scope="module")
def root(tmp_path_factory) -> Path:
    """Return a folder of six volumes with objects."""
    volumes = [with_objects(shape, number) for number, shape in enumerate(SHAPES)]
    return write_volumes(tmp_path_factory.mktemp("unet3d") / "data", volumes)


@pytest.fixture
def counted(tmp_path) -> Path:
    """Return a folder of six volumes with a different value in every voxel."""
    return write_volumes(tmp_path / "counted", [numbered(shape, number) for number, shape in enumerate(SHAPES)])


def epochs(count: int, samples_of_epoch: int, first: int = 1) -> Block:
    return Block(0, first, count, (first - 1) * samples_of_epoch, count * samples_of_epoch)


def opened(
    root: Path,
    chosen: VolumeDataSettings,
    micro_batch: int,
    accumulation: int = 1,
    replicas: int = 1,
    rank: int = 0,
    **more,
) -> VolumeSource:
    return open_train(root, chosen, Layout({"dp": replicas}, rank, seed=3), micro_batch, accumulation, **more)


def crops_of(source: VolumeSource, block: Block, start: int = 0) -> list[dict[str, Tensor]]:
    """Return all micro-batches of a block, and close the source."""
    try:
        return [source.prepare(batch) for batch in source.batches(block, start)]
    finally:
        source.close()


def joined(batches: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    return {name: torch.cat([batch[name] for batch in batches]) for name in ("image", "label")}


def equal(some: dict[str, Tensor], others: dict[str, Tensor]) -> bool:
    return all(torch.equal(some[name], others[name]) for name in ("image", "label"))


def assert_equal_but_for_rounding(some: dict[str, Tensor], others: dict[str, Tensor]) -> None:
    """Allow for rounding: the noise on a CPU may depend on the shape of the batch."""
    torch.testing.assert_close(some["image"], others["image"], rtol=2.0**-22, atol=1e-6)
    assert torch.equal(some["label"], others["label"])


def volumes_of_epoch(order: VolumeOrder, epoch: int) -> list[int]:
    steps = range(epoch * order.steps_of_epoch, (epoch + 1) * order.steps_of_epoch)
    return [order.volume(step, slot) for step in steps for slot in range(order.global_batch)]


# The order


@pytest.mark.parametrize("shares", [1, 2, 7, 56])
def test_an_epoch_has_every_volume_once_if_the_batch_divides_their_number(shares):
    order = VolumeOrder(168, 56, shares, seed=1)
    for epoch in (0, 1, 999):
        assert sorted(volumes_of_epoch(order, epoch)) == list(range(168))


def test_the_last_batch_is_padded_from_the_start_of_the_permutation():
    order = VolumeOrder(168, 80, seed=2)
    for epoch in (0, 5):
        volumes = volumes_of_epoch(order, epoch)
        assert len(volumes) == 240 == unet3d(80).epoch_samples
        assert sorted(volumes[:168]) == list(range(168))
        assert volumes[168:] == volumes[:72]


def test_every_share_pads_its_own_part():
    order = VolumeOrder(12, 8, shares=4, seed=2)  # three volumes and two slots of a step for each share
    volumes = np.array(volumes_of_epoch(order, 3)).reshape(2, 4, 2)
    for share in range(4):
        positions = volumes[:, share].ravel().tolist()
        assert sorted(positions[:3]) == order.volumes_of_share(share).tolist()
        assert positions[3] == positions[0]


def test_a_batch_larger_than_the_set_repeats_the_permutation():
    order = VolumeOrder(3, 8, seed=0)
    volumes = volumes_of_epoch(order, 0)
    assert volumes == (volumes[:3] * 3)[:8]
    assert sorted(volumes[:3]) == [0, 1, 2]


def test_epochs_and_seeds_have_different_orders():
    orders = [volumes_of_epoch(VolumeOrder(168, 56, 8, seed), epoch) for seed in (0, 1) for epoch in (0, 1, 2)]
    assert len({tuple(order) for order in orders}) == 6


def test_shares_are_equal_disjoint_and_depend_on_the_seed():
    shares = [[VolumeOrder(168, 56, 8, seed).volumes_of_share(share).tolist() for share in range(8)] for seed in (0, 1)]
    assert {len(share) for share in shares[0]} == {21}
    assert sorted(volume for share in shares[0] for volume in share) == list(range(168))
    assert shares[0] != shares[1]


def test_the_volumes_of_a_replica_are_those_of_its_samples():
    for shares, replicas in ((8, 4), (2, 4), (4, 4), (1, 4), (12, 3)):
        order = VolumeOrder(24, 24, shares, seed=5)
        for replica in range(replicas):
            mine = ReplicaOrder(order, MicroBatches(24 // replicas // 2, 2, replicas, replica))
            met = {order.volume(*sample) for n in range(400) for sample in mine.samples(n)}
            assert mine.volumes == sorted(met)


def test_there_is_a_share_per_replica_if_they_divide_the_volumes():
    assert shares_for(0, 168, 56) == 56
    assert shares_for(0, 168, 64) == 1
    assert shares_for(4, 168, 64) == 4


def test_volumes_are_read_in_the_order_of_their_first_use():
    order = ReplicaOrder(VolumeOrder(24, 6, 2, seed=4), MicroBatches(3, 1, 2, 1))
    met = [order.order.volume(*sample) for number in range(5, 13) for sample in order.samples(number)]
    assert order.first_use(5) == list(dict.fromkeys(met))
    assert sorted(order.first_use(5)) == order.volumes


@pytest.mark.parametrize(("volumes", "batch", "shares"), [(168, 56, 5), (168, 80, 7), (10, 6, 4)])
def test_shares_must_divide_volumes_and_batch(volumes, batch, shares):
    with pytest.raises(ConfigError, match=f"shares={shares} does not divide"):
        VolumeOrder(volumes, batch, shares)


def test_the_order_for_checkpoints_has_shares_and_augmentation():
    reader = settings().reader
    assert order_of_data(reader, "reference", 168, 8) == "8 shares, augmentation reference"


# Crops


def test_crops_are_of_the_volumes_in_the_order_and_labels_match_images(counted):
    order = VolumeOrder(len(SHAPES), 3, seed=3)
    source = opened(counted, settings(oversampling=0.0, **CALM), 3)
    for number, batch in enumerate(crops_of(source, epochs(6, 6))):
        image, label = batch["image"][:, 0].long(), batch["label"].long()
        for slot in range(3):
            index = image[slot] - 10_000 * order.volume(number, slot)
            shape = SHAPES[order.volume(number, slot)]
            assert torch.equal(label[slot], index % PERIOD)
            d, h, w = (torch.from_numpy(axis) for axis in np.unravel_index(index.numpy(), shape))
            for axis, location in enumerate((d, h, w)):
                first = location.select(axis, 0).unique().item()
                last = location.select(axis, -1).unique().item()
                assert abs(last - first) == SIZE[axis] - 1
                steps = location.diff(dim=axis).unique().tolist()
                assert steps == [1 if last > first else -1]


def test_crops_on_objects_contain_all_of_a_small_object(tmp_path):
    pairs = [with_objects((30, 40, 40), number) for number in range(4)]
    root = write_volumes(tmp_path / "data", pairs)
    source = opened(root, settings(oversampling=1.0), 4)
    labels = joined(crops_of(source, epochs(20, 4)))["label"]
    small, large = ((labels == number).flatten(1).sum(1) for number in (1, 2))
    whole = {number: int((pairs[0][1] == number).sum()) for number in (1, 2)}
    assert ((small == whole[1]) | (large == whole[2])).all()


def test_crops_depend_on_the_seed(root):
    def crops(seed: int) -> dict[str, Tensor]:
        return joined(crops_of(open_train(root, settings(), Layout(seed=seed), 3), epochs(2, 6)))

    assert equal(crops(5), crops(5))
    assert not equal(crops(5), crops(6))


@pytest.mark.parametrize("shares", [1, 2, 6])
@pytest.mark.parametrize(("replicas", "accumulation"), [(1, 2), (2, 1), (2, 3), (3, 1), (6, 1)])
def test_crops_do_not_depend_on_the_number_of_ranks(root, shares, replicas, accumulation):
    chosen = settings(shares=shares)
    expected = joined(crops_of(opened(root, chosen, 6), epochs(3, 6)))
    per_rank = [
        crops_of(opened(root, chosen, 6 // (replicas * accumulation), accumulation, replicas, rank), epochs(3, 6))
        for rank in range(replicas)
    ]
    steps = [slice(step * accumulation, (step + 1) * accumulation) for step in range(3)]
    found = joined([batch for step in steps for mine in per_rank for batch in mine[step]])
    assert_equal_but_for_rounding(found, expected)


@pytest.mark.parametrize("ranks", [2, 4])
def test_ranks_that_share_a_crop_have_its_slabs(root, ranks):
    chosen = settings(noise_probability=0.5)
    whole = joined(crops_of(opened(root, chosen, 3), epochs(2, 6)))
    splits = [VolumeSplit(ranks, rank, group=object()) for rank in range(ranks)]
    parts = [joined(crops_of(opened(root, chosen, 3, split=split), epochs(2, 6))) for split in splits]
    assert parts[0]["image"].shape[2] == SIZE[0] // ranks
    found = {name: torch.cat([part[name] for part in parts], axis) for name, axis in (("image", 2), ("label", 1))}
    assert_equal_but_for_rounding(found, whole)


def test_positions_and_samples_of_the_batches(root):
    source = opened(root, settings(), 1, 2, replicas=3, rank=1)
    batches = list(source.batches(epochs(2, 6), start=1))
    source.close()
    assert [batch.position for batch in batches] == [1, 2, 3]
    assert {batch.samples for batch in batches} == {3}


@pytest.mark.parametrize("start", [0, 1, 5, 11, 12])
def test_a_resumed_block_has_the_same_crops(root, start):
    everything = crops_of(opened(root, settings(), 1, 2, 2, 1), epochs(4, 8, first=3))
    resumed = crops_of(opened(root, settings(), 1, 2, 2, 1), epochs(4, 8, first=3), start)
    assert len(resumed) == len(everything) - start
    assert all(equal(some, others) for some, others in zip(resumed, everything[start:], strict=True))


def test_two_blocks_equal_one_longer_block(root):
    source = opened(root, settings(), 3)
    blocks = (epochs(2, 6), epochs(3, 6, first=3))
    batches = [source.prepare(batch) for block in blocks for batch in source.batches(block)]
    source.close()
    assert equal(joined(batches), joined(crops_of(opened(root, settings(), 3), epochs(5, 6))))


def test_a_block_of_samples_starts_at_its_step(root):
    batches = crops_of(opened(root, settings(), 3), Block(1, 2, 0, 9, 6))
    assert equal(joined(batches), joined(crops_of(opened(root, settings(), 3), epochs(3, 6))[3:5]))


def test_epochs_must_be_padded_to_whole_batches(root):
    source = opened(root, settings(), 4)
    with pytest.raises(ConfigError, match=r"benchmark\.schedule: 12 samples in 2 epochs .* has 8"):
        next(source.batches(Block(0, 1, 2, 0, 12)))
    source.close()


# The cache


@pytest.mark.parametrize("split", [None, VolumeSplit(2, 1, group=object())], ids=["whole", "slab"])
def test_crops_from_host_memory_equal_those_from_the_device(root, split):
    chosen = {"dtype": torch.bfloat16, "noise_probability": 0.5}
    some, others = (
        joined(crops_of(opened(root, settings(cache=location, **chosen), 3, split=split), epochs(4, 6)))
        for location in ("device", "host")
    )
    assert equal(some, others)


def test_a_replica_reads_only_the_volumes_of_its_share_each_once(root, monkeypatch):
    read = Counter()
    original = Volumes.read
    monkeypatch.setattr(Volumes, "read", lambda self, case: read.update([case.name]) or original(self, case))
    crops_of(opened(root, settings(), 1, replicas=3, rank=2), epochs(9, 6))
    share = VolumeOrder(6, 3, 3, seed=3).volumes_of_share(2)
    assert read == {f"case_{volume:05d}": 1 for volume in share}


def test_the_first_batch_waits_only_for_its_own_volumes(root, monkeypatch):
    order, others = VolumeOrder(6, 2, seed=3), threading.Event()
    first = {f"case_{order.volume(0, slot):05d}" for slot in range(2)}
    original = Volumes.read

    def read(self, case):
        assert case.name in first or others.wait(60)
        return original(self, case)

    monkeypatch.setattr(Volumes, "read", read)
    source = opened(root, settings(), 2)
    batches = source.batches(epochs(2, 6))
    assert len(next(batches).tensors["addresses"]) == 2
    others.set()
    assert len(list(batches)) == 5
    source.close()


def test_random_crops_do_not_wait_for_objects(root, monkeypatch):
    blocked = threading.Event()

    def boxes(label):
        assert blocked.wait(60)
        return {}

    monkeypatch.setattr(cache_module, "largest_boxes", boxes)
    source = opened(root, settings(oversampling=0.0), 3)
    assert len(list(source.batches(epochs(2, 6)))) == 4
    blocked.set()
    source.close()


def test_closing_stops_the_threads_while_volumes_are_read(root, monkeypatch):
    before, others = threading.active_count(), threading.Event()
    first = f"case_{VolumeOrder(6, 1, seed=3).volume(0, 0):05d}"
    original = Volumes.read

    def read(self, case):
        assert case.name == first or others.wait(60)
        return original(self, case)

    monkeypatch.setattr(Volumes, "read", read)
    source = opened(root, settings(cache="host", threads=1), 1)
    next(source.batches(epochs(1, 6)))
    closing = threading.Thread(target=source.close)
    closing.start()
    others.set()
    closing.join(60)
    assert threading.active_count() == before


def test_a_source_can_be_closed_twice_and_without_use(root):
    source = opened(root, settings(), 2)
    source.close()
    source.close()


def test_volumes_larger_than_the_memory_are_an_error(root, monkeypatch):
    monkeypatch.setattr(psutil, "virtual_memory", lambda: type("Memory", (), {"available": 1000})())
    with pytest.raises(ConfigError, match=r"reader\.cache=device: the volumes of this rank take 0\.0 GB"):
        opened(root, settings(), 2)


# Bad input, and the rest


def test_a_volume_smaller_than_the_crop_is_a_data_error(root):
    with pytest.raises(DataError, match="case_00000 has 8x12x10 voxels"):
        opened(root, settings(size=(9, 12, 10)), 2)


@pytest.mark.parametrize("kind", ["x", "y"])
def test_the_error_for_a_damaged_volume_names_it(counted, kind):
    path = counted / f"case_00004_{kind}.npy"
    path.write_bytes(b"\0" * path.stat().st_size)
    source = opened(counted, settings(), 3)
    with pytest.raises(DataError, match=f"case_00004_{kind}.npy cannot be read"):
        list(source.batches(epochs(1, 6)))
    source.close()


def test_ranks_must_divide_the_planes_of_a_crop(root):
    with pytest.raises(ConfigError, match=r"layout\.cp=3 does not divide the 8 planes"):
        opened(root, settings(), 2, split=VolumeSplit(3, 0, group=object()))


def test_the_counts_of_the_folder(root):
    source = opened(root, settings(), 2)
    source.close()
    assert (source.train_samples, source.eval_samples, source.synthetic) == (6, 1, True)


def test_warming_up_needs_no_data():
    warm_up(settings(torch.bfloat16), Layout(), 2)


@pytest.mark.parametrize(
    ("requested", "needed", "expected"),
    [
        ("auto", 40_000_000_000, "device"),
        ("auto", 60_000_000_000, "host"),
        ("host", 1, "host"),
        ("device", 90_000_000_000, "device"),
    ],
)
def test_auto_chooses_the_gpu_if_volumes_take_at_most_half_of_its_memory(monkeypatch, requested, needed, expected):
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (100_000_000_000, 141_000_000_000))
    monkeypatch.setattr(psutil, "virtual_memory", lambda: type("Memory", (), {"available": 10**12})())
    assert cache_module.choose_location(requested, needed, torch.device("cuda", 0)) == expected


def test_volumes_larger_than_the_gpu_memory_are_an_error(monkeypatch):
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (10_000_000_000, 141_000_000_000))
    with pytest.raises(ConfigError, match=r"take 25\.0 GB, and 10\.0 GB are free; use .*, or reader\.cache=host"):
        cache_module.choose_location("device", 25_000_000_000, torch.device("cuda", 0))
