"""The DALI reader's CPU pipeline: the promises of the other reader, where they hold for both."""

import sys

import numpy as np
import pytest
import torch

pytest.importorskip("nvidia.dali")

from common.data.batches import Block
from common.distributed.layout import Layout
from common.errors import DataError
from tests.benchmarks.resnet.small_records import encoded, settings, write_data

SAMPLES = 61
BLOCKS = [Block(i, i + 1, 1, i * SAMPLES, SAMPLES) for i in range(3)]


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    """61 pictures whose label is their number; shorter sides of 72 px, so that both readers resize to whole sizes."""
    random = np.random.default_rng(0)
    pictures = []
    for number in range(SAMPLES):
        shape = (72, 96, 3) if number % 2 else (108, 72, 3)
        y, x = np.mgrid[: shape[0], : shape[1]]
        wave = 127 + 100 * np.sin(x / 9 + y / 7 + number)[..., None] * random.uniform(0.3, 1, 3)
        pictures.append(encoded(wave.astype(np.uint8)))
    return write_data(tmp_path_factory.mktemp("dali") / "data", pictures, range(SAMPLES))


def labels_of(root, start=0, block=0, replicas=1, rank=0, **changes):
    source = settings(reader="dali", **changes).open_train(root, Layout({"dp": replicas}, rank, seed=1), 4)
    batches = [batch for b in BLOCKS[block:] for batch in source.batches(b, start if b is BLOCKS[block] else 0)]
    source.close()
    return batches


@pytest.mark.parametrize("multiplier", [1, 3])
@pytest.mark.parametrize("replicas", [1, 2, 3])
def test_every_sample_comes_once_per_epoch_of_its_shard(root, replicas, multiplier):
    for rank in range(replicas):
        batches = labels_of(root, replicas=replicas, rank=rank, input_batch_multiplier=multiplier)
        labels = torch.cat([batch.tensors["label"] for batch in batches]).tolist()
        shard = list(range(SAMPLES * rank // replicas, SAMPLES * (rank + 1) // replicas))
        for epoch in range(len(labels) // len(shard)):
            assert sorted(labels[epoch * len(shard) : (epoch + 1) * len(shard)]) == shard


def test_batches_have_the_form_that_the_model_expects(root):
    for dtype in (torch.float16, torch.bfloat16, torch.float32):
        batch = labels_of(root, dtype=dtype)[0]
        image, label = batch.tensors["image"], batch.tensors["label"]
        assert (image.shape, image.dtype, label.shape, label.dtype) == ((4, 4, 16, 16), dtype, (4,), torch.int64)
        assert image.is_contiguous(memory_format=torch.channels_last)
        assert not image[:, 3].any()


def test_epochs_are_shuffled_and_seeded(root):
    labels = torch.cat([batch.tensors["label"] for batch in labels_of(root)]).tolist()
    assert len({tuple(labels[i * SAMPLES : (i + 1) * SAMPLES]) for i in range(3)}) == 3
    assert labels == torch.cat([batch.tensors["label"] for batch in labels_of(root)]).tolist()


@pytest.mark.parametrize("multiplier", [1, 3])
@pytest.mark.parametrize(("block", "start"), [(0, 5), (1, 0), (2, 7)])
def test_resuming_continues_with_the_same_batches(root, block, start, multiplier):
    whole = labels_of(root, input_batch_multiplier=multiplier)
    resumed = labels_of(root, start, block, input_batch_multiplier=multiplier)
    for batch, other in zip(resumed, whole[-len(resumed) :], strict=True):
        assert batch.position == other.position
        assert all(torch.equal(batch.tensors[name], other.tensors[name]) for name in ("image", "label"))


def test_a_position_that_lies_behind_is_refused(root):
    source = settings(reader="dali").open_train(root, Layout(), 4)
    list(source.batches(BLOCKS[0]))
    with pytest.raises(ValueError, match="lies behind"):
        next(iter(source.batches(BLOCKS[0])))
    source.close()


@pytest.mark.parametrize("replicas", [1, 3, 7, 8])
def test_eval_shards_are_exactly_the_set_every_time(root, replicas):
    seen = [[], []]
    for rank in range(replicas):
        source = settings(reader="dali").open_eval(root, Layout({"dp": replicas}, rank), batch=5)
        for evaluation in seen:
            labels = torch.cat([batch.tensors["label"] for batch in source])
            evaluation += labels[labels >= 0].tolist()
        source.close()
    assert seen == [list(range(SAMPLES))] * 2


def test_evaluation_left_early_begins_anew(root):
    source = settings(reader="dali").open_eval(root, Layout(), batch=5)
    next(iter(source))
    labels = torch.cat([batch.tensors["label"] for batch in source])
    source.close()
    assert labels[labels >= 0].tolist() == list(range(SAMPLES))


def test_evaluation_pictures_are_those_of_the_other_reader(root):
    sources = [
        settings(reader=reader, image_size=56, eval_resize=64, dtype=torch.float32).open_eval(root, Layout(), 16)
        for reader in ("dali", "torchvision")
    ]
    for batch, other in zip(*sources, strict=True):
        real = batch.tensors["label"] >= 0
        difference = (batch.tensors["image"][real] - other.tensors["image"][real]).abs()
        assert difference.max() < 6 / 57  # levels over the standard deviation
        assert difference.mean() < 1.5 / 57
    for source in sources:
        source.close()


def test_both_readers_round_the_longer_side_of_evaluation_pictures_to_the_nearest(tmp_path):
    y, x = np.mgrid[:63, :46]  # 63 * 64 / 46 = 87.65
    waves = [127 + 100 * np.sin(x / 5 + y / 4 + phase)[..., None].repeat(3, axis=2) for phase in range(4)]
    root = write_data(tmp_path / "data", [encoded(wave.astype(np.uint8)) for wave in waves], range(4))
    images = []
    for reader in ("dali", "torchvision"):
        chosen = settings(reader=reader, image_size=56, eval_resize=64, dtype=torch.float32)
        source = chosen.open_eval(root, Layout(), 4)
        [batch] = source
        images.append(batch.tensors["image"])
        source.close()
    assert (images[0] - images[1]).abs().max() < 6 / 57  # levels over the standard deviation


def test_pictures_with_the_magic_number_inside_are_read(tmp_path):
    plain = encoded(np.full((40, 40, 3), 90, np.uint8))
    comment = b"\xff\xfe\x00\x12" + b"\x0a\x23\xd7\xce" * 4  # 24 bytes of header and 2 of SOI before it: not aligned
    shifted = b"\xff\xfe\x00\x14" + b"ab" + b"\x0a\x23\xd7\xce" * 4
    pictures = [plain[:2] + extra + plain[2:] for extra in (comment, shifted)]
    root = write_data(tmp_path / "data", [*pictures, plain], [0, 1, 2])
    batches = {}
    for reader in ("dali", "torchvision"):
        source = settings(reader=reader, dtype=torch.float32).open_eval(root, Layout(), 3)
        [batches[reader]] = source
        source.close()
    assert batches["dali"].tensors["label"].tolist() == [0, 1, 2]
    torch.testing.assert_close(
        batches["dali"].tensors["image"], batches["torchvision"].tensors["image"], atol=0.02, rtol=0
    )


def test_warm_up_opens_no_data():
    opened = []
    sys.addaudithook(lambda event, args: opened.append(str(args[0])) if event == "open" and watching else None)
    watching = True
    settings(reader="dali").warm_up(Layout(), 4)
    watching = False
    assert not [path for path in opened if path.endswith((".rec", ".idx", "manifest.json"))]


def test_corrupt_picture_is_an_error(tmp_path):
    good = encoded(np.full((40, 40, 3), 90, np.uint8))
    root = write_data(tmp_path / "data", [good, b"no picture at all", good], [0, 1, 2])
    source = settings(reader="dali").open_eval(root, Layout(), 3)
    with pytest.raises(DataError, match=r"val\.rec: DALI cannot read on"):
        list(source)
    source.close()
