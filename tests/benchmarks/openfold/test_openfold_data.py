"""Batches of chains: shapes, crops, passes, order, resuming, replicas, evaluation, and damaged files."""

from __future__ import annotations

import os
import re
import shutil
from collections import Counter
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import small_chains
import torch
from small_chains import EVAL, SIZES, TRAIN

from benchmarks.openfold import data as data_module
from benchmarks.openfold.data import OpenFoldReaderConfig, TrainSource, open_eval, open_train, staging_plan
from benchmarks.openfold.features import feature_shapes
from benchmarks.openfold.msa import tokens_of
from benchmarks.openfold.pipeline import Pipeline, Sample, Sizes
from benchmarks.openfold.residues import CA
from benchmarks.openfold.samples import ALIGNMENTS
from common.data.batches import Block, HostBatch
from common.distributed.layout import Layout
from common.errors import DataError

FIRST, SECOND = Block(0, 1, 0, 0, 12), Block(1, 1, 0, 12, 12)
READER = OpenFoldReaderConfig(workers=1, prefetch=3, window=100, eval_multiple=8)


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return small_chains.prepared(tmp_path_factory.mktemp("openfold"))


@pytest.fixture(scope="module")
def chains(root: Path) -> dict[str, str]:
    """Return the sequence of each chain by its name."""
    return {name: row["sequence"] for name, row in small_chains.rows(root).items()}


def source_of(root: Path, micro_batch: int = 1, accumulation: int = 1, replicas: int = 1, rank: int = 0) -> TrainSource:
    layout = Layout({"dp": replicas}, rank, seed=7)
    source = open_train(root, READER, SIZES, layout, micro_batch, accumulation, deterministic=True)
    assert isinstance(source, TrainSource)
    return source


def trained(root: Path, block: Block, start: int = 0, **options: int) -> list[HostBatch]:
    source = source_of(root, **options)
    try:
        return list(source.batches(block, start))
    finally:
        source.close()


@pytest.fixture(scope="module")
def both_blocks(root: Path) -> list[HostBatch]:
    """Return the micro-batches of two chains of both blocks, from one source."""
    source = source_of(root, micro_batch=2)
    try:
        return [*source.batches(FIRST), *source.batches(SECOND)]
    finally:
        source.close()


def equal(one: HostBatch, other: HostBatch) -> bool:
    assert one.tensors.keys() == other.tensors.keys()
    return one.key == other.key and all(torch.equal(one.tensors[name], other.tensors[name]) for name in one.tensors)


def test_batches_have_the_features_of_the_model(both_blocks: list[HostBatch]) -> None:
    assert sorted(batch.key for batch in both_blocks[:4]) == [1, 2, 3, 4]
    assert [batch.position for batch in both_blocks] == [*range(6), *range(6)]
    assert {batch.samples for batch in both_blocks} == {2}
    for batch in both_blocks:
        assert isinstance(batch.key, int)
        expected = feature_shapes(SIZES, 2, batch.key, SIZES.crop_size)
        assert {name: (tuple(t.shape), t.dtype) for name, t in batch.tensors.items()} == expected
        assert all(tensor.is_contiguous() for tensor in batch.tensors.values())
    seeds = [int(batch.tensors["dropout_seed"]) for batch in both_blocks]
    assert len(set(seeds)) == len(seeds)


def test_a_crop_is_a_window_of_its_chain(both_blocks: list[HostBatch], chains: dict[str, str]) -> None:
    known = {tuple(tokens_of(sequence)) for sequence in chains.values()}
    starts = set()
    for batch in both_blocks:
        for slot in range(2):
            tensors = {name: tensor[slot].numpy() for name, tensor in batch.tensors.items() if tensor.dim()}
            length, real = int(tensors["seq_length"]), int(tensors["seq_mask"].sum())
            assert real == min(length, SIZES.crop_size)
            first = int(tensors["residue_index"][0])
            starts.add(first)
            assert tensors["residue_index"][:real].tolist() == list(range(first, first + real))
            tokens = tuple(tensors["aatype"][:real])
            whole = [row for row in known if row[first : first + real] == tokens and len(row) == length]
            assert len(whole) == 1
            assert (tensors["aatype"][real:] == 20).all()
            assert tensors["true_msa"][:, 0, :real].tolist() == [list(tokens)] * int(batch.key)  # type: ignore[call-overload]
            assert tensors["resolution"] == 2
            assert tensors["msa_mask"][..., :real].all()
            assert tensors["extra_msa_mask"].sum() == batch.key * real * tensors["extra_msa_mask"][0, :, 0].sum()
            for name in ("msa_mask", "extra_msa_mask", "msa_feat", "bert_mask", "true_msa", "extra_msa"):
                assert not tensors[name][:, :, real:].any()
            steps = np.diff(tensors["all_atom_positions"][:real, CA], axis=0)
            assert np.linalg.norm(steps, axis=1) == pytest.approx(3.8, abs=0.02)
            assert not tensors["all_atom_mask"][real:].any()
    assert len(starts) > 5


def test_passes_have_an_msa_of_their_own(both_blocks: list[HostBatch]) -> None:
    for batch in both_blocks:
        if batch.key == 4:
            for name in ("true_msa", "bert_mask", "extra_msa"):
                passes = batch.tensors[name][0]
                assert len({passes[number].numpy().tobytes() for number in range(4)}) == 4


def test_templates_are_the_first_members_of_families(both_blocks: list[HostBatch], root: Path) -> None:
    """All other members have one hit; training keeps it with the probability 1/2."""
    counts = Counter(int(batch.tensors["template_mask"][slot].sum()) for batch in both_blocks for slot in range(2))
    assert set(counts) == {0, 1}
    for batch in both_blocks:
        for slot in range(2):
            mask = batch.tensors["template_all_atom_mask"][slot, 0, :, CA]
            expected = batch.tensors["seq_mask"][slot] * batch.tensors["template_mask"][slot, 0]
            assert torch.equal(mask, expected)


def test_templates_have_the_residue_before_the_crop(both_blocks: list[HostBatch]) -> None:
    found = set()
    for batch in both_blocks:
        for slot in range(2):
            tensors = {name: tensor[slot] for name, tensor in batch.tensors.items() if tensor.dim()}
            exists = bool(tensors["template_mask"][0]) and int(tensors["residue_index"][0]) > 0
            assert tensors["template_previous_mask"][0, CA] == exists
            if exists:
                first, before = tensors["template_all_atom_positions"][0, 0], tensors["template_previous_positions"][0]
                assert float((first - before)[CA].norm()) == pytest.approx(3.8, abs=0.02)
            found.add(exists)
    assert found == {True, False}


def test_a_source_that_starts_later_continues_exactly(both_blocks: list[HostBatch], root: Path) -> None:
    rest = trained(root, SECOND, start=2, micro_batch=2)
    assert len(rest) == 4
    assert all(equal(one, other) for one, other in zip(both_blocks[8:], rest, strict=True))


def test_replicas_read_what_one_rank_accumulates(root: Path) -> None:
    one = trained(root, FIRST, accumulation=2)
    two = [trained(root, FIRST, replicas=2, rank=rank) for rank in range(2)]
    both = [batch for pair in zip(*two, strict=True) for batch in pair]
    assert len(both) == 12
    assert all(equal(first, second) for first, second in zip(one, both, strict=True))
    assert {batch.samples for batch in both} == {2}
    assert [batch.key for batch in one[::2]] == [batch.key for batch in one[1::2]]


def test_late_micro_batches_come_after_resuming(root: Path) -> None:
    """A source that had delivered 0, 2 and 3 continues with 1 and 4."""
    every = [batch.tensors["aatype"] for batch in trained(root, FIRST)]
    source = source_of(root)
    try:
        source.resume([1])
        assert source.late(3) == [1]
        found = source.batches(FIRST, 3)
        for number in (1, 4, 5):
            assert torch.equal(next(found).tensors["aatype"], every[number])
        assert (source.late(3), source.late(4)) == ([1], [])
    finally:
        source.close()


def test_a_window_has_the_same_samples_in_any_order(root: Path) -> None:
    """Three processes deliver as soon as they are ready; the window ends with the block."""
    reader = replace(READER, workers=3, window=12)
    source = open_train(root, reader, SIZES, Layout(seed=7), 1)
    try:
        found = list(source.batches(FIRST))
    finally:
        source.close()
    expected = trained(root, FIRST)
    assert [batch.key for batch in found] == [batch.key for batch in expected]
    for name in ("residue_index", "template_all_atom_positions"):
        contents = [
            Counter(batch.tensors[name].numpy().tobytes() for batch in batches) for batches in (found, expected)
        ]
        assert contents[0] == contents[1]


def test_other_ranks_of_a_group_receive_zeros(root: Path) -> None:
    layout = Layout({"cp": 2}, 1, seed=7)
    source = open_train(root, READER, SIZES, layout, 2)
    keys = []
    for batch in source.batches(FIRST):
        assert isinstance(batch.key, int)
        shapes = {name: (tuple(t.shape), t.dtype) for name, t in batch.tensors.items()}
        assert shapes == feature_shapes(SIZES, 2, batch.key, SIZES.crop_size)
        keys.append(batch.key)
    assert (source.train_samples, source.eval_samples) == (TRAIN, EVAL)
    assert keys == [batch.key for batch in trained(root, FIRST, micro_batch=2)]


@pytest.mark.parametrize("replicas", [1, 2])
def test_an_evaluation_has_every_chain_once(replicas: int, root: Path, chains: dict[str, str]) -> None:
    found: Counter[tuple[int, ...]] = Counter()
    numbers = set()
    for rank in range(replicas):
        source = open_eval(root, READER, SIZES, Layout({"dp": replicas}, rank))
        batches = list(source)
        numbers.add((len(source), len(batches)))
        for batch in batches:
            passes, residues = batch.key  # type: ignore[misc]
            expected = feature_shapes(SIZES, 1, passes, residues)
            assert {name: (tuple(t.shape), t.dtype) for name, t in batch.tensors.items()} == expected
            length = int(batch.tensors["seq_mask"].sum())
            assert (passes, residues) == (4, -(-length // 8) * 8)
            if batch.tensors["samples"]:
                found[tuple(batch.tensors["aatype"][0, :length].tolist())] += 1
        again = list(source)
        assert all(equal(one, other) for one, other in zip(batches, again, strict=True))
        assert all(
            one.tensors["msa_feat"] is other.tensors["msa_feat"] for one, other in zip(batches, again, strict=True)
        )
    assert numbers == {(-(-EVAL // replicas),) * 2}
    evaluated = [name for name in chains if name.startswith("8") and name.endswith("_A")]
    assert found == Counter(tuple(tokens_of(chains[name]).tolist()) for name in evaluated)


def test_every_node_stages_all_files(root: Path) -> None:
    plan = staging_plan(root)
    names = {path.relative_to(root).as_posix() for path in root.rglob("*") if path.is_file()}
    assert {file.name for file in plan.whole} == names - {"prepare.lock"}


def test_the_share_of_clamped_losses(root: Path) -> None:
    pipeline = Pipeline(root, Sizes(16, 1, 2, 2, 1, 1), True, {}, set(), {}, None)
    samples = [Sample("1000", "A", 0, 0, [(0, 0)] * 4, seed) for seed in range(300)]
    clamped = [float(pipeline.features(sample)["use_clamped_fape"]) for sample in samples]
    assert set(clamped) == {0, 1}
    assert sum(clamped) / 300 == pytest.approx(0.9, abs=0.09)


@pytest.fixture
def copied(root: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(root, tmp_path / "data"))


@pytest.mark.parametrize(
    ("name", "change", "complaint"),
    [
        (
            f"{ALIGNMENTS}/{{}}.db",
            lambda old: b"?" * len(old),
            r"chain 1.*: uniref90_hits\.a3m: it has no row that starts with >; prepare",
        ),
        (
            f"{ALIGNMENTS}/{{}}.db",
            lambda old: old.replace(b"Sum_probs", b"Sum_worbs"),
            r"chain 1.*: pdb70_hits\.hhr: hit 1 has no description or no Sum_probs; prepare",
        ),
        ("pdb_mmcif/processed/dicts/00", lambda old: b"c" + old[1:], r"dicts/0. is damaged"),
        (
            f"{ALIGNMENTS}/{{}}.db",
            lambda old: old.replace(b"-", b"a"),
            r"uniref90_hits\.a3m: row \d+ has \d+ columns, the",
        ),
        (
            "structures.npy",
            lambda old: old[:128] + b"\xff" * 4 + bytes(4) + old[136:],
            "is not the number of a name; prep",
        ),
        ("structures.npy", lambda old: b"." + old[1:], r"structures\.npy: the magic bytes .*; prepare the data again"),
        (
            "train.npy",
            lambda old: old[:-4] + b"\xff" * 4,
            r"train\.npy: is no table of numbers with 14 columns; prepare",
        ),
    ],
    ids=["alignments", "hits", "structures", "rows", "names", "days", "chains"],
)
def test_damaged_files_are_named(name: str, change, complaint: str, copied: Path) -> None:
    for path in copied.glob(name.replace("{}", "*").replace("dicts/00", "dicts/0?")):
        path.write_bytes(change(path.read_bytes()))
    with pytest.raises(DataError, match=complaint):
        trained(copied, FIRST)


def as_if_prepared_with_kalign(data: Path) -> None:
    path = data / "manifest.json"
    text = path.read_text()
    path.write_text(text.replace("was not found: templates of other sequences are left out", "templates are realigned"))
    assert path.read_text() != text


def with_reversed_hits(data: Path, script: str) -> None:
    """Let Kalign, which is a shell script here, realign all hits: no structure has their sequences."""
    as_if_prepared_with_kalign(data)
    for path in (data / ALIGNMENTS).glob("*.db"):
        hits = re.sub(rb"(?m)^(T \S+ +\d+ )([A-Z]+)", lambda row: row[1] + row[2][::-1], path.read_bytes())
        path.write_bytes(hits)
    program = data / "kalign"
    program.write_text(f"#!/bin/sh\n{script}\n")
    program.chmod(0o755)


def test_hits_that_no_process_could_realign_are_counted_in_one_place(
    copied: Path, chains: dict[str, str], monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Kalign fails, and no structure has the sequence of a hit. Two of three processes have more than one hit."""
    with_reversed_hits(copied, "echo no memory >&2; exit 1")
    monkeypatch.setenv("PATH", str(copied), prepend=os.pathsep)
    source = open_train(copied, replace(READER, workers=3), SIZES, Layout(seed=7), 1, deterministic=True)
    try:
        found = list(source.batches(FIRST))
    finally:
        source.close()
    assert not any(batch.tensors["template_mask"].any() for batch in found)
    of_tokens = {tuple(tokens_of(sequence)): name for name, sequence in chains.items()}
    expected = 0
    for batch in found:
        first, tokens = int(batch.tensors["residue_index"][0, 0]), tuple(batch.tensors["aatype"][0].tolist())
        names = [name for whole, name in of_tokens.items() if (*whole, *[20] * 32)[first : first + 32] == tokens]
        expected += int(names[0][2], 36) >= small_chains.FOLDS  # the first chain of a fold has no hit
    lines = [line for line in capfd.readouterr().err.splitlines() if "could not be realigned" in line]
    assert 4 <= expected <= 12
    assert lines[0].startswith("template hits of training chains that could not be realigned: 1; the last one was 10")
    assert lines[0].endswith("kalign failed with the exit code 1: no memory")
    assert lines[-1].split(";")[0] == f"template hits of training chains that could not be realigned: {expected}"
    assert len(lines) <= 5


def test_a_killed_and_a_slow_process_lose_and_repeat_no_chain(
    copied: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """The first hit kills its process, and the second one waits for the test. All other chains come before it."""
    os.mkfifo(copied / "go")
    once = (
        'cd "$0.once"; mkdir killed 2>/dev/null && kill -9 $PPID && exit; mkdir slow 2>/dev/null && cat ../go; exit 1'
    )
    with_reversed_hits(copied, once)
    (copied / "kalign.once").mkdir()
    monkeypatch.setenv("PATH", str(copied), prepend=os.pathsep)
    source = open_train(copied, replace(READER, workers=3, window=12), SIZES, Layout(seed=7), 1)
    assert isinstance(source, TrainSource)
    try:
        batches = source.batches(FIRST)
        found = [next(batches) for _ in range(11)]
        (missing,) = source.late(11) or [11]
        (copied / "go").write_bytes(b"go")
        found += batches
    finally:
        source.close()
    assert "a reader process ended with the exit code -9; 2 are left" in capfd.readouterr().err
    expected = trained(copied, FIRST)
    for name in ("aatype", "residue_index", "all_atom_positions"):
        contents = [[batch.tensors[name].numpy().tobytes() for batch in batches] for batches in (found, expected)]
        assert Counter(contents[0]) == Counter(contents[1])
        assert contents[0][-1] == contents[1][missing]


def test_data_that_kalign_prepared_need_it(copied: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    as_if_prepared_with_kalign(copied)
    monkeypatch.setattr(data_module.shutil, "which", lambda name: None)
    with pytest.raises(DataError, match="was prepared with Kalign, and kalign is not in PATH"):
        source_of(copied)
