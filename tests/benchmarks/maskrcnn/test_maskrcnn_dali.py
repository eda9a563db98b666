"""The DALI reader's CPU pipeline against the reader that runs anywhere."""

import pytest
import torch

pytest.importorskip("nvidia.dali")

from small_coco import BLOCK, MICRO_BATCH, settings

from common.distributed.layout import Layout


def train(root, kind, start, **changes):
    source = settings(reader=kind, **changes).open_train(root, Layout(seed=5), MICRO_BATCH)
    found = list(source.batches(BLOCK, start))
    source.close()
    return found


def evaluation(root, kind, replicas, rank):
    source = settings(reader=kind).open_eval(root, Layout({"dp": replicas}, rank), 2)
    found = [batch for _ in range(2) for batch in source]
    source.close()
    return found


def assert_alike(found, expected):
    assert [(batch.key, batch.samples, batch.position) for batch in found] == [
        (batch.key, batch.samples, batch.position) for batch in expected
    ]
    for mine, other in zip(found, expected, strict=True):
        assert mine.tensors.keys() == other.tensors.keys()
        for name in mine.tensors.keys() - {"pixels"}:
            assert torch.equal(mine.tensors[name], other.tensors[name]), name
        assert mine.tensors["pixels"].dtype == torch.uint8
        for slot, (height, width) in enumerate(mine.tensors["decoded_size"].tolist()):
            if mine.tensors.get("picture", torch.zeros(9))[slot] < 0:
                continue
            one, two = (tensors["pixels"][slot, :height, :width].float() for tensors in (mine.tensors, other.tensors))
            assert (one - two).abs().mean() < 1.5, "levels of 255, between two decoders"


@pytest.mark.parametrize("multiplier", [1, 3])
def test_batches_are_those_of_the_other_reader_from_any_position(prepared, multiplier):
    for start in (0, 4):
        assert_alike(
            train(prepared, "dali", start, input_batch_multiplier=multiplier), train(prepared, "torchvision", start)
        )


@pytest.mark.parametrize("replicas", [1, 2])
def test_evaluations_are_those_of_the_other_reader(prepared, replicas):
    for rank in range(replicas):
        assert_alike(evaluation(prepared, "dali", replicas, rank), evaluation(prepared, "torchvision", replicas, rank))


def test_warm_up_runs_before_there_are_data():
    settings(reader="dali").warm_up(Layout(), MICRO_BATCH)
