"""Test the micro-batches of prepared tars: contents, order, ranks, resuming, and damaged files."""

from __future__ import annotations

import dataclasses
import gzip
import itertools
import os
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from benchmarks.stable_diffusion.data import open_train
from benchmarks.stable_diffusion.workload import StableDiffusion
from common.data.batches import Block, HostBatch
from common.distributed.layout import Layout
from common.errors import ConfigError, DataError
from tests.benchmarks.stable_diffusion.small_prepared import (
    SAMPLES,
    caption_of,
    captions_of,
    change_manifest,
    configuration,
    members_of,
    moments_of,
    recipe,
    write_prepared,
    write_tar,
)


@pytest.fixture(scope="module", params=["pyd", "safetensors"])
def with_captions(request, tmp_path_factory) -> Path:
    return write_prepared(tmp_path_factory.mktemp(request.param) / "data", request.param)


@pytest.fixture(scope="module")
def encoded(tmp_path_factory) -> Path:
    return write_prepared(tmp_path_factory.mktemp("encoded") / "data")


def read(
    root: Path,
    block: Block,
    start: int = 0,
    replicas: int = 1,
    rank: int = 0,
    accumulation: int = 1,
    seed: int = 3,
    **reader: object,
) -> list[HostBatch]:
    """Return one rank's micro-batches of two samples."""
    own = configuration(**{"shuffle_buffer": 4, **reader})
    source = open_train(root, own, Layout({"dp": replicas}, rank, seed=seed), 2, accumulation, None)
    try:
        return list(source.batches(block, start))
    finally:
        source.close()


def block(samples: int, start: int = 0) -> Block:
    return Block(0, 1, 0, start, samples)


def names_of(batches: list[HostBatch]) -> Iterator[tuple[int, int]]:
    """Yield tar and row of every sample, which its moments identify."""
    known = {moments_of(tar, row).tobytes(): (tar, row) for tar, of_it in enumerate(SAMPLES) for row in range(of_it)}
    for batch in batches:
        for moments in batch.tensors["moments"].float():
            yield known[moments.numpy().tobytes()]


def ids_of(batches: list[HostBatch]) -> list[list[int]]:
    return [batch.tensors["sample_ids"].tolist() for batch in batches]


def same(one: list[HostBatch], other: list[HostBatch]) -> bool:
    return len(one) == len(other) and all(
        set(a.tensors) == set(b.tensors) and all(torch.equal(a.tensors[name], b.tensors[name]) for name in a.tensors)
        for a, b in zip(one, other, strict=True)
    )


def test_batches_have_moments_and_captions_of_the_members(with_captions):
    batches = read(with_captions, block(40))

    dtype = torch.float32 if "pyd" in with_captions.parent.name else torch.bfloat16
    names = list(names_of(batches))
    assert set(names) > {(0, 0), (2, 7)}
    contexts = [context for batch in batches for context in batch.tensors["context"]]
    for (tar, row), context in zip(names, contexts, strict=True):
        np.testing.assert_array_equal(context.float().numpy(), captions_of(tar, row))
    for batch in batches:
        assert {name: (tensor.dtype, tuple(tensor.shape)) for name, tensor in batch.tensors.items()} == {
            "moments": (dtype, (2, 8, 4, 4)),
            "context": (dtype, (2, 77, 16)),
            "sample_ids": (torch.int64, (2,)),
        }


def test_the_workload_prepares_batches_of_every_kind(with_captions):
    workload = StableDiffusion(recipe(), Layout(seed=3))
    source = workload.open_data(with_captions)
    read_first = next(source.batches(block(8)))
    batch = workload.prepare(read_first)
    source.close()
    losses = workload.loss(batch)
    losses.total.backward()

    example = next(iter(workload.example_batches()))
    assert {name: (tensor.dtype, tensor.shape) for name, tensor in batch.tensors.items()} == {
        name: (tensor.dtype, tensor.shape) for name, tensor in example.tensors.items()
    }
    [tar, row] = next(names_of([read_first]))
    np.testing.assert_array_equal(batch.tensors["moments"][0].numpy(), moments_of(tar, row))
    # The untrained network predicts zero: the loss is that of the targets, whose variance is about 1.
    assert torch.isfinite(losses.total)
    assert losses.total > 0.1


def test_the_order_does_not_depend_on_the_kind_of_member(with_captions, encoded):
    assert list(names_of(read(with_captions, block(60)))) == list(names_of(read(encoded, block(60))))


def merges(folder: Path) -> Path:
    """Write the 32 merges of a vocabulary of 546, of letters that the captions do not have."""
    letters = [f"{a} {b}" for a, b in itertools.product("bcdfhij", "klmoptv")][:32]
    with gzip.open(folder / "bpe_simple_vocab_16e6.txt.gz", "wt") as file:
        file.write("\n".join(["#version", *letters, ""]))
    return folder


def tokens_by_hand(caption: str) -> list[int]:
    """Return the ids of a caption without merges: bytes in the vocabulary's order, plus 256 at the end of a word."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    ids = []
    pieces = caption.lower().replace(",", " ,").split()
    for piece in pieces:
        indices = [printable.index(byte) for byte in piece.encode()]
        ids += [*indices[:-1], indices[-1] + 256]
    return [544, *ids, 545]


@pytest.mark.parametrize("kind", ["npy", "safetensors"])
def test_captions_are_tokenized(kind, tmp_path):
    root = write_prepared(tmp_path / "data", kind)
    own = configuration(captions="tokens", shuffle_buffer=4, threads=3)
    source = open_train(root, own, Layout(seed=3), 2, 1, merges(tmp_path))
    batches = list(source.batches(block(40)))
    source.close()

    rows = [tokens for batch in batches for tokens in batch.tensors["tokens"]]
    for (tar, row), tokens in zip(names_of(batches), rows, strict=True):
        ids = tokens_by_hand(caption_of(tar, row))
        assert tokens.tolist() == ids + [0] * (77 - len(ids))
    assert all(set(batch.tensors) == {"moments", "tokens", "sample_ids"} for batch in batches)


@pytest.mark.parametrize("start", [0, 1, 13, 29])
def test_a_block_can_be_read_from_any_position(start, encoded):
    whole = read(encoded, block(60))

    assert len(whole) == 30
    assert same(read(encoded, block(60), start), whole[start:])
    assert [batch.position for batch in read(encoded, block(60), start)] == list(range(start, 30))


def test_a_block_continues_after_the_previous_block(encoded):
    through = read(encoded, block(60), accumulation=3)
    own = configuration(shuffle_buffer=4)
    source = open_train(encoded, own, Layout(seed=3), 2, 3, None)
    parts = [*source.batches(block(24)), *source.batches(block(36, 24))]
    source.close()

    assert same(parts, through)
    assert same(read(encoded, block(36, 24), accumulation=3), through[12:])
    assert same(read(encoded, block(36, 24), 5, accumulation=3), through[17:])


@pytest.mark.parametrize("replicas", [2, 4])
def test_several_ranks_read_the_same_as_one_rank_that_accumulates(replicas, encoded):
    alone = read(encoded, block(64), accumulation=4)
    shared = [read(encoded, block(64), 0, replicas, rank, 4 // replicas) for rank in range(replicas)]

    together = [batch for step in zip(*shared, strict=True) for batch in step]
    assert same(together, alone)
    assert {batch.samples for batch in together} == {2 * replicas}


def test_sample_ids_count_over_the_whole_training(encoded):
    ids = ids_of(read(encoded, block(24, 12), 1, replicas=3, rank=1))

    assert ids == [[6 * step + 2, 6 * step + 3] for step in range(3, 6)]


def test_ranks_and_seeds_have_different_orders(encoded):
    orders = [
        list(names_of(read(encoded, block(40), replicas=2, rank=rank, seed=seed))) for seed in (3, 4) for rank in (0, 1)
    ]
    assert all(orders[i] != orders[j] for i in range(4) for j in range(i))


@pytest.mark.parametrize("threads", [1, 4])
@pytest.mark.parametrize("prefetch", [1, 7])
def test_batches_do_not_depend_on_threads_and_prefetch(threads, prefetch, encoded):
    assert same(read(encoded, block(60), threads=threads, prefetch=prefetch), read(encoded, block(60)))


def test_files_and_threads_are_closed(tmp_path):
    root = write_prepared(tmp_path / "data", samples=(1,) * 40)
    descriptors, threads = len(os.listdir("/proc/self/fd")), threading.active_count()
    source = open_train(root, configuration(shuffle_buffer=1), Layout(), 2, 1, None)
    batches = source.batches(block(200))
    for _ in range(50):
        next(batches)
    assert len(os.listdir("/proc/self/fd")) <= descriptors + 16 + 2 * 4  # the cache, and prefetched batches
    batches.close()
    source.close()
    del batches, source

    assert len(os.listdir("/proc/self/fd")) == descriptors
    assert threading.active_count() == threads


def test_data_without_encoded_captions_are_refused(tmp_path):
    root = write_prepared(tmp_path / "data", "npy")
    with pytest.raises(ConfigError, match=r"reader\.captions=encoded: .* has \.npy members, without encoded captions"):
        open_train(root, configuration(), Layout(), 2, 1, None)


def test_tokens_without_merges_are_refused(encoded, tmp_path):
    own = configuration(captions="tokens")
    with pytest.raises(DataError, match=r"bpe_simple_vocab_16e6\.txt\.gz cannot be read"):
        open_train(encoded, own, Layout(), 2, 1, tmp_path)


def test_a_tar_truncated_while_reading_is_refused(tmp_path):
    root = write_prepared(tmp_path / "data", samples=(8,))
    source = open_train(root, configuration(shuffle_buffer=4, prefetch=1), Layout(), 2, 1, None)
    batches = source.batches(block(60))
    next(batches)
    os.truncate(root / "train/00000.tar", 5000)
    with pytest.raises(DataError, match=r"00000\.tar is cut off: sample \d ends at byte"):
        list(batches)
    source.close()


def _replace_member(root: Path, kind: str, content: bytes) -> None:
    """Replace the first sample of the only tar by ``content``, and correct the index."""
    path = root / "train/00000.tar"
    size = path.stat().st_size
    write_tar(path, members_of(0, 1, kind) | {f"000000000.{kind}": content})
    whole = path.read_bytes()
    caption = caption_of(0, 0).encode()
    index = [[whole.index(content), len(content), whole.index(caption), len(caption)]]
    np.save(root / "train/00000.index.npy", np.array(index, np.int64))
    assert path.stat().st_size <= size
    os.truncate(path, size)


@pytest.mark.parametrize(
    ("kind", "content", "message"),
    [
        ("pyd", b"cposix\nsystem\n(S'true'\ntR.", r"00000\.tar, sample 0: its pickle asks for posix\.system"),
        ("pyd", b"\x80\x04}.", r"00000\.tar, sample 0 has nothing, and image_embed is missing"),
        ("safetensors", b"\x02\0\0\0\0\0\0\0{}", r"00000\.tar, sample 0 has nothing, and moments are missing"),
    ],
    ids=["function", "empty pickle", "empty safetensors"],
)
def test_an_invalid_sample_is_an_error_with_its_position(kind, content, message, tmp_path):
    root = write_prepared(tmp_path / "data", kind, samples=(1,))
    _replace_member(root, kind, content)
    with pytest.raises(DataError, match=message):
        read(root, block(4))


def test_moments_of_another_size_are_refused(encoded):
    own = configuration()
    own = dataclasses.replace(own, facts=dataclasses.replace(own.facts, latent_size=8, image_size=32))
    source = open_train(encoded, own, Layout(), 2, 1, None)
    with pytest.raises(DataError, match=r"moments: torch.bfloat16 \(8, 4, 4\), expected torch.bfloat16 \(8, 8, 8\)"):
        next(source.batches(block(4)))
    source.close()


@pytest.mark.parametrize(
    ("index", "message"),
    [
        (np.zeros((5, 4), np.int32), r"int32 \(5, 4\), expected int64 \(5, 4\)"),
        (np.zeros((4, 4), np.int64), r"int64 \(4, 4\), expected int64 \(5, 4\)"),
        (np.full((5, 4), 10**6), r"has members outside of train/00000\.tar"),
        (np.full((5, 4), -1), r"has members outside of train/00000\.tar"),
    ],
)
def test_an_invalid_index_is_refused(index, message, tmp_path):
    root = write_prepared(tmp_path / "data")
    source = open_train(root, configuration(), Layout(), 2, 1, None)
    np.save(root / "train/00000.index.npy", index)
    with pytest.raises(DataError, match=rf"00000\.index\.npy.*{message}"):
        list(source.batches(block(200)))
    source.close()


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"members": "jpg"}, "samples of kind 'jpg'"),
        ({"members": ""}, "samples of kind ''"),
        ({"tars": 4}, "names 3 tars of 16 samples, and counts 4 of 16"),
        ({"train_samples": 17}, "names 3 tars of 16 samples, and counts 3 of 17"),
        ({"train/00001.tar": None}, "names 3 tars of 13 samples, and counts 3 of 16"),
        ({"eval_samples": 0}, "has no eval_samples"),
    ],
)
def test_an_inconsistent_manifest_is_refused(changed, message, tmp_path):
    root = write_prepared(tmp_path / "data")
    change_manifest(root, **changed)
    with pytest.raises(DataError, match=message):
        open_train(root, configuration(), Layout(), 2, 1, None)
