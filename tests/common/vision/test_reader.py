"""The reader of pictures in both forms, on a small description: order, positions, replicas, shards and errors."""

from __future__ import annotations

import io
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor

from common.data.batches import Block, HostBatch
from common.data.order import EpochStream
from common.distributed.layout import Layout
from common.errors import DataError
from common.formats.recordio import ImageRecord
from common.vision.dali import DALI, normalized
from common.vision.pictures import (
    Columns,
    EvaluationSplit,
    Normalizer,
    Pictures,
    ReaderConfig,
    Sample,
    TrainingSplit,
    Transform,
    mirrored,
)
from common.vision.reader import CachedSource, PictureData, epoch_stream, eval_shard

SAMPLES, SIDE, SEED = 13, 16, 3
MEAN, STD = (123.675, 116.28, 103.53), (58.395, 57.12, 57.375)
BLOCKS = [Block(i, i + 1, 1, i * SAMPLES, SAMPLES) for i in range(3)]
absent = pytest.mark.skipif(DALI.unavailable() is not None, reason="needs DALI")
both = pytest.mark.parametrize("reader", ["torchvision", pytest.param("dali", marks=absent)])


def jpeg(pixels: np.ndarray) -> bytes:
    buffer = io.BytesIO()
    Image.fromarray(pixels.astype(np.uint8)).save(buffer, "JPEG", quality=95)
    return buffer.getvalue()


def ramp(number: int) -> np.ndarray:
    """Grey pixels that become lighter to the right, from a level of their own."""
    return np.broadcast_to(5 * number + 10 * np.arange(SIDE)[None, :, None], (SIDE, SIDE, 3))


class Ramps(Pictures):
    """Pictures of :func:`ramp`; those of ``changed`` have other bytes."""

    path = Path("ramps")

    def __init__(self, changed: dict[int, bytes]) -> None:
        self.changed, self.closed = changed, False

    def record(self, index: int) -> ImageRecord:
        return ImageRecord(index, (), self.changed.get(index, jpeg(ramp(index))))

    def describe(self, index: int) -> str:
        return f"ramps: picture {index}"

    def size(self, index: int) -> tuple[int, int]:
        return SIDE, SIDE

    def close(self) -> None:
        self.closed = True


class Numbers(Columns):
    """The indices of the pictures; with a seed, half of the pictures are mirrored."""

    def __init__(self, seed: int | None = None) -> None:
        self.seed = seed

    def empty(self, samples: Sequence[Sample], slots: int, pin_memory: bool) -> dict[str, Tensor]:
        return {"number": torch.full((slots,), -1)}

    def put(self, tensors: dict[str, Tensor], slot: int, sample: Sample, record: ImageRecord) -> bool | None:
        tensors["number"][slot] = sample[1]
        return None if self.seed is None else mirrored(0.5, self.seed, sample[0], sample[1])


class Mirrored(Transform):
    """Mirrors and normalises."""

    shape, neutral, largest, padding_bytes = (SIDE, SIDE, 3), (0.0,), (32, 32), 1 << 20

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype, self._normalizer = dtype, Normalizer(MEAN, STD, dtype)

    def write(self, picture: Image.Image, augmentation: bool | None, out_HWC: Tensor) -> None:
        pixels = np.asarray(picture)
        self._normalizer.write(pixels[:, ::-1] if augmentation else pixels, out_HWC)

    def numbers(self, augmentation: bool, width: int, height: int) -> Sequence[float]:
        assert (width, height) == (SIDE, SIDE)
        return (float(augmentation),)

    def graph(self, dali: Any, picture: Any, numbers: Any) -> Any:
        mirror = 0 if numbers is None else dali.fn.cast(numbers[0], dtype=dali.types.INT32)
        return normalized(picture, SIDE, MEAN, STD, self.dtype, mirror)


class RampData(PictureData[dict[int, bytes], ReaderConfig]):
    """The same pictures for training and evaluation; ``facts`` are the changed ones."""

    def build_transform(self) -> Mirrored:
        self.opened: list[Ramps] = []
        return Mirrored(self.dtype)

    def _pictures(self) -> Ramps:
        self.opened.append(Ramps(self.facts))
        return self.opened[-1]

    def training(self, root: Path, layout: Layout, micro_batch: int, accumulation: int) -> TrainingSplit:
        stream = epoch_stream(SAMPLES, layout, micro_batch, accumulation)
        return TrainingSplit(self._pictures(), Numbers(layout.seed), stream, SAMPLES, True)

    def validation(self, root: Path, layout: Layout, batch: int) -> EvaluationSplit:
        return EvaluationSplit(self._pictures(), Numbers(), eval_shard(SAMPLES, layout, batch))


def data(
    reader: str, changed: dict[int, bytes] | None = None, dtype: torch.dtype = torch.float32, **options: Any
) -> RampData:
    given = {"threads": 2, "prefetch": 2, "hw_decoder_load": 0.0, "input_batch_multiplier": 1, "eval_batch": 4}
    return RampData(changed or {}, ReaderConfig(reader=reader, **given | options), dtype)


def train(described: RampData, block: int = 0, start: int = 0, micro_batch: int = 4, **layout: Any) -> list[HostBatch]:
    """All batches from a position to the end of the last block."""
    accumulation = layout.pop("accumulation", 1)
    source = described.open_train(Path(), Layout(seed=SEED, **layout), micro_batch, accumulation)
    try:
        return [batch for b in BLOCKS[block:] for batch in source.batches(b, start if b is BLOCKS[block] else 0)]
    finally:
        source.close()


def assert_equal(found: Sequence[HostBatch], expected: Sequence[HostBatch]) -> None:
    for mine, other in zip(found, expected, strict=True):
        assert (mine.position, mine.samples) == (other.position, other.samples)
        assert all(torch.equal(mine.tensors[name], other.tensors[name]) for name in ("number", "image"))


@both
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_batches_have_the_samples_of_the_stream_augmented_and_normalised(reader, dtype):
    stream, mirrors = EpochStream(SAMPLES, 4, seed=SEED), set()
    for number, batch in enumerate(train(data(reader, dtype=dtype))):
        samples = stream.samples_of(number)
        image = batch.tensors["image"]
        assert batch.tensors["number"].tolist() == [index for _, index in samples]
        assert (image.shape, image.dtype) == ((4, 3, SIDE, SIDE), dtype)
        assert image.is_contiguous(memory_format=torch.channels_last)
        for slot, (epoch, index) in enumerate(samples):
            mirror = mirrored(0.5, SEED, epoch, index)
            pixels = ramp(index)[:, ::-1] if mirror else ramp(index)
            expected = (torch.tensor(pixels.copy()) - torch.tensor(MEAN)) / torch.tensor(STD)
            assert ((image[slot].permute(1, 2, 0).double() - expected).abs() * 58).max() < 4, "levels of 255"
            mirrors.add(mirror)
    assert mirrors == {False, True}


@both
@pytest.mark.parametrize("options", [{}, {"threads": 1, "prefetch": 1}, {"input_batch_multiplier": 3}])
@pytest.mark.parametrize(("block", "start"), [(0, 0), (0, 3), (1, 0), (2, 2)])
def test_a_source_starts_at_any_position_with_any_number_of_threads(reader, options, block, start):
    whole, resumed = train(data(reader)), train(data(reader, **options), block, start)
    assert_equal(resumed, whole[-len(resumed) :])


@both
def test_a_source_goes_back_and_forth(reader):
    whole = train(data(reader))
    source = data(reader).open_train(Path(), Layout(seed=SEED), 4)
    assert_equal(list(source.batches(BLOCKS[2])), whole[-len(list(source.batches(BLOCKS[2]))) :])
    assert_equal([next(iter(source.batches(BLOCKS[0], 1)))], whole[1:2])
    source.close()


@both
def test_replicas_read_what_one_accumulates(reader):
    alone = train(data(reader), micro_batch=2, accumulation=2)
    parts = [train(data(reader), micro_batch=2, sizes={"dp": 2}, rank=rank) for rank in range(2)]
    for mine, other in zip(alone, (batch for pair in zip(*parts, strict=True) for batch in pair), strict=True):
        assert all(torch.equal(mine.tensors[name], other.tensors[name]) for name in ("number", "image"))


@both
@pytest.mark.parametrize("replicas", [1, 3, 8])
def test_every_evaluation_has_every_picture_once_also_after_one_that_ended_early(reader, replicas):
    seen = []
    for rank in range(replicas):
        source = data(reader).open_eval(Path(), Layout({"dp": replicas}, rank), 2)
        next(iter(source))
        for _ in range(2):
            batches = list(source)
            assert len(batches) == len(source)
            for batch in batches:
                real = batch.tensors["number"] >= 0
                assert batch.tensors["image"].shape == (2, 3, SIDE, SIDE)
                seen += batch.tensors["number"][real].tolist()
                expected = torch.tensor(np.stack([ramp(n) for n in batch.tensors["number"][real].tolist()] or [[]]))
                if real.any():
                    levels = batch.tensors["image"][real].permute(0, 2, 3, 1) * torch.tensor(STD) + torch.tensor(MEAN)
                    assert (levels - expected).abs().max() < 4
        source.close()
    assert sorted(seen) == sorted(2 * list(range(SAMPLES)))


@both
@pytest.mark.parametrize(
    ("changed", "message"),
    [
        (b"no picture at all", "the picture cannot be decoded: cannot identify"),
        (jpeg(ramp(1))[:-40], "the picture cannot be decoded: .*[Tt]runcated"),
        (jpeg(np.zeros((20, 21, 3))), "is 21 x 20 px, its boxes are for 16 x 16"),
    ],
    ids=["no picture", "truncated", "another size"],
)
def test_a_damaged_picture_is_named(reader, changed, message):
    described = data(reader, {5: changed})
    source = described.open_eval(Path(), Layout(), 4)
    with pytest.raises(DataError, match=f"^ramps: picture 5:? {message}"):
        list(source)
    source.close()
    with pytest.raises(DataError, match=f"^ramps: picture 5:? {message}"):
        train(described)


@absent
def test_a_picture_that_only_dali_finds_damaged_is_named():
    broken = bytearray(jpeg(ramp(5)))
    tables = broken.index(b"\xff\xc4")  # Huffman tables, without which nothing can be decoded
    broken[tables + 4 : tables + 24] = b"\xff" * 20
    with pytest.raises(DataError, match=r"^ramps: picture 5: the picture cannot be decoded"):
        train(data("dali", {5: bytes(broken)}))


@both
def test_closing_early_leaves_nothing_running_and_closes_the_pictures(reader):
    described = data(reader)
    source = described.open_train(Path(), Layout(), 4)
    batches = source.batches(BLOCKS[0])
    next(batches)
    del batches
    source.close()
    assert [pictures.closed for pictures in described.opened] == [True]
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("samples")]


@both
def test_warm_up_opens_no_pictures(reader):
    described = data(reader)
    described.warm_up(Layout(), 4)
    assert not described.opened


def test_kept_pictures_are_decoded_once():
    described = data("torchvision")
    other, opened = (described.open_eval(Path(), Layout(), 2) for _ in range(2))
    source = CachedSource(opened, torch.device("cpu"))
    partly = iter(source)
    next(partly)
    partly.close()  # an evaluation that ends early keeps nothing
    first, second = list(source), list(source)
    assert_equal(second, first)
    assert_equal(first, list(other))
    assert [pictures.closed for pictures in described.opened] == [False, True]
    assert all(
        mine.tensors["image"].data_ptr() == again.tensors["image"].data_ptr()
        for mine, again in zip(first, second, strict=True)
    )
    source.close()
    other.close()
