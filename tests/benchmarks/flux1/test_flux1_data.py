"""Batches of encodings: formats, order, resuming, ranks, dropout, validation rows, and damaged files."""

from __future__ import annotations

import re
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import small_encodings
import torch

from benchmarks.flux1.config import ReaderConfig
from benchmarks.flux1.data import is_dropped, open_eval, open_train
from common.data.batches import Block, HostBatch
from common.data.contiguous_shares import ContiguousShares
from common.data.order import MicroBatches
from common.distributed.layout import Layout
from common.errors import ConfigError, DataError

TRAIN, EVAL = small_encodings.COUNTS["train"], small_encodings.COUNTS["eval"]
BLOCK = Block(0, 0, 0, 0, 24)
LATER = Block(1, 0, 0, 24, 48)


def own(dropout: float = 0.0, **sizes: int) -> SimpleNamespace:
    facts = SimpleNamespace(**{**small_encodings.SIZES, "eval_timesteps": 8, **sizes}, text_dropout=dropout)
    return SimpleNamespace(facts=facts, reader=ReaderConfig(threads=2, prefetch=2, eval_batch=4))


def trained(
    root: Path, block: Block = BLOCK, start: int = 0, micro_batch: int = 2, accumulation: int = 1, replicas: int = 1,
    rank: int = 0, dropout: float = 0.0, seed: int = 7,
) -> list[HostBatch]:  # fmt: skip
    layout = Layout({"dp": replicas}, rank, seed=seed)
    source = open_train(root, own(dropout), layout, micro_batch, accumulation)
    try:
        assert (source.train_samples, source.eval_samples, source.synthetic) == (TRAIN, EVAL, True)
        return list(source.batches(block, start))
    finally:
        source.close()


def evaluated(root: Path, replicas: int = 1, rank: int = 0) -> list[HostBatch]:
    source = open_eval(root, own(0.9), Layout({"dp": replicas}, rank))
    try:
        batches = list(source)
        assert (source.eval_samples, len(source)) == (EVAL, len(batches))
        return batches
    finally:
        source.close()


def numbers(batches: list[HostBatch]) -> list[list[int]]:
    """Return the numbers of the samples of each batch, which the latents begin with."""
    return [(batch.tensors["mean"][:, 0, 0, 0].float() - 0.5).int().tolist() for batch in batches]


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return small_encodings.prepared(tmp_path_factory.mktemp("flux1"))


@pytest.mark.parametrize("form", small_encodings.FORMS)
def test_every_form_gives_the_arrays_bit_by_bit(form, tmp_path):
    root = small_encodings.prepared(tmp_path, form)
    samples = [number for batch in numbers(trained(root, Block(0, 0, 0, 0, TRAIN))) for number in batch]
    assert samples == list(range(TRAIN))
    for batch in trained(root):
        for name, shape in small_encodings.SHAPES.items():
            assert batch.tensors[name].dtype == torch.bfloat16
            expected = torch.stack([small_encodings.array(name, number) for number in numbers([batch])[0]])
            assert batch.tensors[name].shape == (2, *shape)
            assert torch.equal(batch.tensors[name], expected)


@pytest.mark.parametrize(("micro_batch", "replicas"), [(2, 1), (2, 3), (3, 4), (5, 2)])
def test_every_rank_repeats_its_contiguous_share_in_order(micro_batch, replicas, root):
    shares = np.array_split(np.arange(TRAIN), replicas)
    for rank, share in enumerate(shares):
        block = Block(0, 0, 0, 0, 12 * micro_batch * replicas)
        found = numbers(trained(root, block, micro_batch=micro_batch, replicas=replicas, rank=rank))
        endless = [int(share[position % len(share)]) for position in range(12 * micro_batch)]
        assert found == [endless[first : first + micro_batch] for first in range(0, 12 * micro_batch, micro_batch)]


def test_replicas_see_the_global_batches_of_one_that_accumulates(root):
    for block in (BLOCK, LATER):
        alone = trained(root, block, accumulation=4, dropout=0.5)
        both = [trained(root, block, accumulation=2, replicas=2, rank=rank, dropout=0.5) for rank in range(2)]
        merged = [batch for pair in zip(*both, strict=True) for batch in pair]
        assert len(alone) == len(merged) == block.samples // 2
        for one, other in zip(alone, merged, strict=True):
            assert all(torch.equal(one.tensors[name], other.tensors[name]) for name in one.tensors)


def test_resuming_at_any_position_gives_the_rest(root):
    whole = trained(root, LATER, accumulation=3, dropout=0.5)
    assert [batch.position for batch in whole] == list(range(len(whole)))
    rest = trained(root, LATER, start=7, accumulation=3, dropout=0.5)
    assert [batch.position for batch in rest] == list(range(7, len(whole)))
    for one, other in zip(whole[7:], rest, strict=True):
        assert all(torch.equal(one.tensors[name], other.tensors[name]) for name in one.tensors)


def test_ids_count_the_samples_of_all_ranks_and_passes(root):
    ids = [
        number
        for block in (BLOCK, LATER)
        for rank in range(3)
        for batch in trained(root, block, accumulation=2, replicas=3, rank=rank)
        for number in batch.tensors["sample_ids"].tolist()
    ]
    assert sorted(ids) == list(range(BLOCK.samples + LATER.samples))


def test_dropout_replaces_both_encodings_of_the_dropped_samples_only(root):
    dropped = 0
    for batch in trained(root, LATER, dropout=0.5):
        for slot, (sample_id, number) in enumerate(
            zip(batch.tensors["sample_ids"].tolist(), numbers([batch])[0], strict=True)
        ):
            drop = is_dropped(7, sample_id, 0.5)
            dropped += drop
            for name, values in batch.tensors.items():
                if name in small_encodings.SHAPES:
                    kept = small_encodings.array(name, number)
                    empty = torch.full_like(kept, small_encodings.EMPTY.get(name, 0.0))
                    assert torch.equal(values[slot], empty if drop and name in small_encodings.EMPTY else kept)
    assert 0 < dropped < LATER.samples


def test_dropout_has_its_probability_and_depends_on_seed_and_id():
    drawn = {seed: [is_dropped(seed, number, 0.1) for number in range(10_000)] for seed in (1, 2)}
    for values in drawn.values():
        assert abs(sum(values) / 10_000 - 0.1) < 4 * (0.1 * 0.9 / 10_000) ** 0.5
    both = sum(one and other for one, other in zip(drawn[1], drawn[2], strict=True))
    assert abs(both / 10_000 - 0.01) < 4 * (0.01 * 0.99 / 10_000) ** 0.5
    assert not is_dropped(1, drawn[1].index(True), 0.0)


@pytest.mark.parametrize("replicas", [1, 2, 3])
def test_validation_has_every_row_once_with_its_timestep(replicas, root):
    rows = []
    for rank in range(replicas):
        for batch in evaluated(root, replicas, rank):
            tensors = batch.tensors
            assert all(len(values) == 4 for values in tensors.values())
            present = tensors["present"]
            for slot in range(4):
                row = int(tensors["sample_ids"][slot])
                for name in small_encodings.SHAPES:
                    kept = small_encodings.array(name, row)
                    assert torch.equal(tensors[name][slot], kept if present[slot] else torch.zeros_like(kept))
                assert int(tensors["timesteps"][slot]) == ((5 * row + 3) % 8 if present[slot] else 0)
            rows += tensors["sample_ids"][present].tolist()
    assert sorted(rows) == list(range(EVAL))


def test_fewer_samples_than_micro_batches_are_refused():
    with pytest.raises(ConfigError, match="train_samples=5: fewer than the 6 micro-batches of a step"):
        ContiguousShares(MicroBatches(1, 2, 3, 0), 5)


def test_encodings_of_another_recipe_are_refused(root):
    with pytest.raises(DataError, match=r"text_width of the encodings is 5, but benchmark\.facts has 6"):
        open_train(root, own(text_width=6), Layout({}, 0), 2, 1)
    with pytest.raises(DataError, match=r"latent_size of the encodings is 4, but benchmark\.facts has 8"):
        open_eval(root, own(latent_size=8), Layout({}, 0))


def test_every_timestep_of_the_facts_needs_validation_samples(root):
    with pytest.raises(DataError, match=r"validation/index\.npy has timesteps outside of 0 to 3"):
        open_eval(root, own(eval_timesteps=4), Layout({}, 0))
    with pytest.raises(DataError, match=r"validation/index\.npy: no validation sample has the timestep 8; each of 9"):
        open_eval(root, own(eval_timesteps=9), Layout({}, 0))


def test_a_file_that_becomes_shorter_is_named(tmp_path):
    root = small_encodings.prepared(tmp_path)
    source = open_train(root, own(), Layout({}, 0, seed=7), 2, 1)
    file = root / "train" / "00000.arrow"
    with open(file, "r+b") as opened:
        opened.truncate(file.stat().st_size // 2)
    try:
        with pytest.raises(
            DataError, match=rf"{re.escape(str(file))} is cut off: .* of sample \d+ ends at byte .*verify"
        ):
            list(source.batches(BLOCK))
    finally:
        source.close()


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("train/index.npy", np.full((TRAIN, 5), 10**6), "train/index.npy has positions outside of the files"),
        ("train/index.npy", np.zeros((TRAIN, 4), np.int64), r"index.npy: int64 \(22, 4\), expected int64 \(22, 5\)"),
        ("validation/index.npy", np.full((EVAL, 6), [0, 8, 8, 8, 8, 8]), "index.npy has timesteps outside of 0 to 7"),
        ("t5_empty.npy", np.zeros((1, 3, 6), np.float16), r"t5_empty.npy: float16 .*, expected float16 \(1, 3, 5\)"),
    ],
)
def test_a_changed_index_is_named(name, value, message, tmp_path):
    root = small_encodings.prepared(tmp_path)
    path, manifest = root / name, root / "manifest.json"
    before = path.stat().st_size
    path.unlink()  # the file may be a link to the raw one
    np.save(path, value)
    manifest.write_text(manifest.read_text().replace(f'"bytes": {before}', f'"bytes": {path.stat().st_size}'))
    with pytest.raises(DataError, match=message):
        trained(root) if "validation" not in name else evaluated(root)
