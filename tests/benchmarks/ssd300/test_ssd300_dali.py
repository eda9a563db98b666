"""The DALI reader's CPU pipeline against the reader that runs anywhere."""

from __future__ import annotations

import dataclasses

import pytest
import torch

pytest.importorskip("nvidia.dali")

from small_ssd300 import SMALL, SYNTHETIC, reader

from benchmarks.ssd300.data import Ssd300Data
from common.data.batches import Block
from common.distributed.layout import Layout

# Colours that do not change, so that pixels can be compared: DALI changes them in an order of its own.
PLAIN = dataclasses.replace(SMALL, brightness=0.0, contrast=0.0, saturation=0.0, hue=0.0)
BLOCK = Block(0, 1, 2, 0, 2 * SYNTHETIC.train)


def settings(kind: str, facts=PLAIN, dtype=torch.float32, **changes) -> Ssd300Data:
    return Ssd300Data(facts, reader(reader=kind, **changes), dtype, crop_attempts=1)


def train(root, kind, **changes):
    source = settings(kind, **changes).open_train(root, Layout(seed=5), 2)
    found = [batch.tensors for batch in source.batches(BLOCK)]
    source.close()
    return found


def assert_alike(found, expected):
    assert len(found) == len(expected) > 0
    for mine, other in zip(found, expected, strict=True):
        assert mine.keys() == other.keys()
        for name in mine.keys() - {"image"}:
            assert torch.equal(mine[name], other[name])
        difference = (mine["image"] - other["image"]).abs() * 58
        assert difference.mean() < 1.5, "levels of 255, between two decoders and resizes"


def test_batches_are_those_of_the_other_reader(prepared):
    assert_alike(train(prepared, "dali"), train(prepared, "torchvision"))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_pictures_have_the_form_that_the_network_takes(prepared, dtype):
    image = train(prepared, "dali", dtype=dtype)[0]["image"]
    assert (image.shape, image.dtype) == ((2, 4, 64, 64), dtype)
    assert image.is_contiguous(memory_format=torch.channels_last)
    assert not image[:, 3].any()


def test_colours_change_as_they_are_drawn(prepared):
    plain, changed = train(prepared, "dali"), train(prepared, "dali", facts=SMALL)
    expected = train(prepared, "torchvision", facts=SMALL)
    for name in ("boxes", "label", "count"):
        assert torch.equal(changed[0][name], plain[0][name])
    assert not torch.equal(changed[0]["image"], plain[0]["image"])
    means = [
        torch.stack([batch["image"][:, :3].mean((1, 2, 3)) for batch in batches]).flatten()
        for batches in (changed, expected, plain)
    ]
    closer = (means[0] - means[1]).abs().mean() / (means[2] - means[1]).abs().mean()
    assert closer < 0.7, "pictures are as bright and as contrasted as the other reader's"


def test_an_evaluation_is_that_of_the_other_reader(prepared):
    sources = {kind: settings(kind).open_eval(prepared, Layout(), batch=2) for kind in ("dali", "torchvision")}
    for _ in range(2):
        found, expected = ([batch.tensors for batch in source] for source in sources.values())
        for mine, other in zip(found, expected, strict=True):
            real = other["picture"] >= 0
            assert torch.equal(mine["picture"], other["picture"])
            assert torch.equal(mine["size"], other["size"])
            assert ((mine["image"] - other["image"])[real].abs() * 58).mean() < 1.5
    for source in sources.values():
        source.close()


def test_everything_is_warmed_up_without_data():
    settings("dali", facts=SMALL).warm_up(Layout(), 2)
