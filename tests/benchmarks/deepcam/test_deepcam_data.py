"""Batches of images: formats, order, resuming, ranks, padding, normalisation, and damaged files."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path

import h5py
import numpy as np
import pytest
import small_images
import torch

from benchmarks.deepcam.data import ClimateReaderConfig, open_eval, open_train, staging_plan
from benchmarks.deepcam.samples import LIST, read_range
from common.data.batches import Block, HostBatch
from common.distributed.layout import Layout
from common.errors import DataError

TRAIN = small_images.COUNTS["train"]
EPOCH = Block(0, 1, 1, 0, TRAIN)
THIRD_EPOCH = Block(2, 3, 1, 2 * TRAIN, TRAIN)


def reader(**changes: object) -> ClimateReaderConfig:
    return ClimateReaderConfig(**{"threads": 2, "prefetch": 2, "reads": "auto", "eval_batch": 2} | changes)


def trained(
    root: Path, block: Block = EPOCH, start: int = 0, micro_batch: int = 2, accumulation: int = 1, replicas: int = 1,
    rank: int = 0, seed: int = 7, size: tuple[int, int] = small_images.SIZE, **changes: object,
) -> list[HostBatch]:  # fmt: skip
    layout = Layout({"dp": replicas}, rank, seed=seed)
    source = open_train(root, size, reader(**changes), layout, micro_batch, accumulation)
    try:
        return list(source.batches(block, start))
    finally:
        source.close()


def evaluated(root: Path, replicas: int = 1, rank: int = 0) -> list[HostBatch]:
    source = open_eval(root, small_images.SIZE, reader(), Layout({"dp": replicas}, rank))
    try:
        assert source.eval_samples == small_images.COUNTS["validation"]
        batches = list(source)
        assert len(source) == len(batches)
        return batches
    finally:
        source.close()


def numbers(batches: list[HostBatch]) -> list[int]:
    """Return the number of each image, which its first value is."""
    return [int(x) for batch in batches for x in batch.tensors["x"][:, 0, 0, 0]]


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return small_images.prepared(tmp_path_factory.mktemp("deepcam") / "data")


@pytest.mark.parametrize("reads", ["auto", "buffered"])
@pytest.mark.parametrize(
    ("kind", "label"),
    [("pair", np.uint8), ("pair", np.int64), ("pair", np.float32), ("fused", np.float32)],
    ids=["uint8", "int64", "float32", "fused"],
)
def test_every_format_gives_the_same_images(kind, label, reads, tmp_path):
    batches = trained(small_images.prepared(tmp_path / "data", kind, label), reads=reads)
    for batch in batches:
        x_BHWC, y_BHW = batch.tensors["x"], batch.tensors["y"]
        assert (x_BHWC.dtype, y_BHW.dtype) == (torch.float32, torch.uint8)
        assert (x_BHWC.shape, y_BHW.shape) == ((2, 4, 6, 16), (2, 4, 6))
        for x_HWC, y_HW in zip(x_BHWC.numpy(), y_BHW.numpy(), strict=True):
            x, y = small_images.sample(int(x_HWC[0, 0, 0]))
            assert np.array_equal(x_HWC, x)
            assert np.array_equal(y_HW, y)


@pytest.mark.parametrize("read", [trained, evaluated])
def test_batches_have_shift_and_scale_of_a_normalisation_by_the_range(read, root):
    """Neither the mean nor the mean of squares in the file takes part."""
    x_HWC, low, high = small_images.sample(3)[0], small_images.LOW, small_images.HIGH
    for batch in read(root):
        found = batch.tensors["scale"] * (torch.from_numpy(x_HWC) - batch.tensors["shift"])
        expected = (x_HWC.astype(np.float64) - low) / (high.astype(np.float64) - low)
        assert found.dtype == torch.float32
        assert np.allclose(found, expected, rtol=1e-6, atol=1e-7)


def test_an_epoch_has_every_image_once_in_an_order_of_its_own(root):
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
    one = trained(root, accumulation=2)
    two = [trained(root, replicas=2, rank=rank) for rank in range(2)]
    both = [batch for pair in zip(*two, strict=True) for batch in pair]
    assert numbers(both) == numbers(one)
    assert [batch.samples for batch in both] == [4] * 4


@pytest.mark.parametrize("replicas", [1, 2, 3])
def test_the_weights_of_an_evaluation_select_every_image_once(replicas, root):
    found = Counter()
    for rank in range(replicas):
        for batch in evaluated(root, replicas, rank):
            x_BHWC, y_BHW, weight_B = (batch.tensors[name] for name in ("x", "y", "weight"))
            assert x_BHWC.shape == (2, 4, 6, 16)
            for slot, number in enumerate(numbers([batch])):
                x, y = small_images.sample(number) if weight_B[slot] else (np.zeros((4, 6, 16)), np.zeros((4, 6)))
                assert np.array_equal(x_BHWC[slot], x)
                assert np.array_equal(y_BHW[slot], y)
                found[number] += int(weight_B[slot])
    assert {number: count for number, count in found.items() if count} == dict.fromkeys(range(100, 105), 1)


def test_images_of_another_recipe_are_refused(root):
    says = rf"^{root} has images of 4 x 6 pixels where benchmark\.facts\.image_size=\[6,4\]: these are data of another"
    with pytest.raises(DataError, match=says):
        trained(root, size=(6, 4))


def labels(value: object, dtype: type) -> np.ndarray:
    y = small_images.sample(3)[1].astype(dtype)
    y[2, 1] = value
    return y


IMAGE = small_images.sample(3)[0]
DAMAGES = {
    "label 3": ("pair", IMAGE, labels(3, np.uint8), r"label-s3\.npy: a label is 3; classes are 0 to 2"),
    "label -1": ("pair", IMAGE, labels(-1, np.int32), r"label-s3\.npy: a label is -1; "),
    "label 256": ("pair", IMAGE, labels(256, np.int64), r"label-s3\.npy: a label is 256; "),
    "half a label": ("pair", IMAGE, labels(0.5, np.float32), r"label-s3\.npy: a label is 0\.5; "),
    "label without a value": ("pair", IMAGE, labels(np.nan, np.float32), r"label-s3\.npy: a label is nan; "),
    "fused label 3": ("fused", IMAGE, labels(3, np.float32), r"datalabel-s3\.npy: a label is 3\.0; "),
    "text as labels": ("pair", IMAGE, np.full((4, 6), "a"), r"label-s3\.npy: labels are <U1 of shape \(4, 6\), not "),
    "labels of another image": (
        "pair", IMAGE, labels(0, np.uint8).T, r"label-s3\.npy: labels are uint8 of shape \(6, 4\), not numbers of \(4"
    ),
    "image of another size": (
        "pair", small_images.sample(3, (4, 4))[0], labels(0, np.uint8),
        r"data-s3\.npy: float32 of shape \(4, 4, 16\); images have float32 of \(4, 6, 16\)",
    ),
    "large image": (
        "pair", small_images.sample(3, (12, 18))[0], labels(0, np.uint8),
        r"data-s3\.npy has 13,952 bytes, more than [\d,]+",
    ),
    "channels first": ("pair", IMAGE.transpose(2, 0, 1), labels(0, np.uint8), r"data-s3\.npy: .* shape \(16, 4, 6\)"),
    "double precision": ("pair", IMAGE.astype(np.float64), labels(0, np.uint8), r"data-s3\.npy: float64 of shape"),
    "fused image without labels": (
        "fused", IMAGE[..., :15], labels(0, np.float32), r"datalabel-s3\.npy: .* images have float32 of \(4, 6, 17\)"
    ),
}  # fmt: skip


@pytest.mark.parametrize("damage", DAMAGES)
def test_another_array_is_one_message_with_its_path(damage, tmp_path):
    kind, x, y, complaint = DAMAGES[damage]
    root = small_images.prepared(tmp_path / "data", kind, np.float32)
    small_images.write_sample(root / "train", kind, "s3", x, y)
    with pytest.raises(DataError, match=rf"^{root}/train/{complaint}.*; fetch or prepare it again$"):
        trained(root)


@pytest.mark.parametrize("name", ["data-s3.npy", "label-s3.npy"])
def test_a_truncated_file_is_refused(name, tmp_path):
    root = small_images.prepared(tmp_path / "data")
    path = root / "train" / name
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(DataError, match=rf"^{path}: .* takes [\d,]+ bytes, it has [\d,]+; fetch or prepare it again$"):
        trained(root)


def test_a_pair_without_its_label_is_refused(tmp_path):
    root = small_images.prepared(tmp_path / "data")
    (root / "train" / "label-s3.npy").unlink()
    with pytest.raises(DataError, match=r"train/label-s3\.npy cannot be opened: No such file"):
        trained(root)


@pytest.mark.parametrize(
    "line", ["data-s1.npy 0123abc?", "data-s1.npy-0123abcd", "../ata1.npy 0123abcd", "data-s0.npy 0123abcd"]
)
def test_a_list_with_another_line_is_refused(line, tmp_path):
    """The manifest has the size of the list, so that all these lines have 20 characters."""
    root = small_images.prepared(tmp_path / "data")
    path = root / "train" / LIST
    lines = path.read_text().splitlines()
    path.write_text("".join(f"{each}\n" for each in (lines[0], line, *lines[2:])))
    with pytest.raises(DataError, match=rf"^{path}: line 2 is '{re.escape(line)}', no new name with CRC-32; run "):
        trained(root)


@pytest.mark.parametrize(
    "opened", [trained, lambda root: staging_plan(root, small_images.SIZE)], ids=["read", "staged"]
)
def test_a_list_of_fewer_samples_is_refused(opened, tmp_path):
    """It has as many bytes as before, so that its size in the manifest is right."""
    root = small_images.prepared(tmp_path / "data")
    path = root / "train" / LIST
    first, second, *others = path.read_text().splitlines()
    path.write_text("".join(f"{each}\n" for each in (f"{'d' * (len(second) + 1)}{first}", *others)))
    counts = [small_images.COUNTS["train"] - 1, small_images.COUNTS["train"]]
    with pytest.raises(DataError, match=rf"{LIST} has {counts[0]} samples where manifest\.json says {counts[1]}; run"):
        opened(root)


def test_missing_statistics_are_refused(tmp_path):
    with pytest.raises(DataError, match=rf"^{tmp_path}/stats\.h5 is missing: it has the range of every channel; "):
        read_range(tmp_path / "stats.h5")


def changed(file: h5py.File, change: str) -> None:
    if change == "15 channels":
        del file["climate/maxval"]
        file["climate/maxval"] = small_images.HIGH[:15]
    elif change == "no maximum":
        del file["climate/maxval"]
    elif change == "no group":
        del file["climate"]
    else:
        file["climate/maxval"][5] = np.nan if change == "NaN" else small_images.LOW[5]


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ("15 channels", r"climate/maxval has the shape \(15,\), not \(16,\)"),
        ("no maximum", "maxval"),
        ("no group", "climate"),
        ("constant", r"channel 5 has the range \[2\.0, 2\.0\]"),
        ("NaN", r"channel 5 has the range \[2\.0, nan\]"),
    ],
)
def test_statistics_of_other_channels_are_refused(change, complaint, tmp_path):
    small_images.write_statistics(tmp_path)
    with h5py.File(tmp_path / "stats.h5", "r+") as file:
        changed(file, change)
    with pytest.raises(DataError, match=rf"^{tmp_path}/stats\.h5 has no range of 16 channels: .*{complaint}"):
        read_range(tmp_path / "stats.h5")


def test_a_text_file_is_no_file_of_statistics(tmp_path):
    (tmp_path / "stats.h5").write_text("minval")
    with pytest.raises(DataError, match=rf"^{tmp_path}/stats\.h5 has no range of 16 channels: "):
        read_range(tmp_path / "stats.h5")
