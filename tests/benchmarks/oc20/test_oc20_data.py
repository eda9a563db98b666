"""Batches of structures: padding, edges and their reverse, shapes, order, resuming, ranks, and damaged files."""

from __future__ import annotations

import functools
import itertools
import re
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import small_slabs
import torch

from benchmarks.oc20.data import GraphShape, OcReaderConfig, open_eval, open_train, staging_plan, train_shapes
from benchmarks.oc20.samples import Split, Structure
from common.data.batches import Block, HostBatch
from common.data.manifest import NAME
from common.distributed.layout import Layout
from common.errors import DataError
from common.formats import lmdb_file

TRAIN, EVAL = small_slabs.TRAIN, small_slabs.EVAL
EPOCH = Block(0, 1, 1, 0, TRAIN)
THIRD_EPOCH = Block(2, 3, 1, 2 * TRAIN, TRAIN)


def reader(**changes: object) -> OcReaderConfig:
    usual = {"threads": 2, "prefetch": 2, "typical": (8, 60), "eval_batch": 4}
    return OcReaderConfig(**usual | changes)


def trained(
    root: Path, block: Block = EPOCH, start: int = 0, micro_batch: int = 4, accumulation: int = 1, replicas: int = 1,
    rank: int = 0, seed: int = 7, **changes: object,
) -> list[HostBatch]:  # fmt: skip
    layout = Layout({"dp": replicas}, rank, seed=seed)
    source, _ = open_train(root, reader(**changes), layout, micro_batch, accumulation)
    try:
        return list(source.batches(block, start))
    finally:
        source.close()


def evaluated(root: Path, replicas: int = 1, rank: int = 0, **changes: object) -> list[HostBatch]:
    source = open_eval(root, reader(**changes), Layout({"dp": replicas}, rank))
    try:
        assert source.eval_samples == EVAL
        batches = list(source)
        assert len(source) == len(batches)
        return batches
    finally:
        source.close()


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return small_slabs.prepared(tmp_path_factory.mktemp("oc20") / "data")


@pytest.fixture(scope="module")
def structures(root: Path) -> dict[bytes, Structure]:
    """Return all structures of both splits by their first position, which a batch shows."""
    found = {}
    for folder in ("train", "val_id"):
        split = Split(root, folder)
        found |= {structure.pos[0].tobytes(): structure for structure in map(split.read, range(len(split.counts_S4)))}
        split.close()
    assert len(found) == TRAIN + EVAL
    return found


Parts = list[tuple[int, Structure]]


def parts(batch: HostBatch, structures: dict[bytes, Structure]) -> Parts:
    """Return first atom and structure of each structure in a batch."""
    found, atom = [], 0
    while (row := batch.tensors["position"][atom].numpy().tobytes()) in structures:
        found.append((atom, structures[row]))
        atom += len(structures[row].pos)
    return found


def systems(batches: list[HostBatch], structures: dict[bytes, Structure]) -> list[int]:
    """Return the numbers of the structures of all batches."""
    return [int(structure.sid) for batch in batches for _, structure in parts(batch, structures)]


@pytest.mark.parametrize("read", [trained, evaluated])
def test_a_batch_is_its_structures_one_after_the_other_and_padding(read, root: Path, structures) -> None:
    for batch in read(root):
        tensors, shape = {name: tensor.numpy() for name, tensor in batch.tensors.items()}, batch.key
        assert isinstance(shape, GraphShape)
        atom = edge = 0
        for first, structure in parts(batch, structures):
            assert first == atom
            atoms = slice(atom, atom + len(structure.pos))
            assert np.array_equal(tensors["atomic_number"][atoms], structure.atomic_numbers)
            assert np.array_equal(tensors["position"][atoms], structure.pos)
            assert np.array_equal(tensors["force"][atoms], structure.force)
            assert np.array_equal(tensors["free"][atoms], 1 - structure.fixed.astype(np.float32))
            loops = small_slabs.neighbours_by_loops(
                structure.pos.astype(np.float64), structure.cell.astype(np.float64), 2
            )
            edges = slice(edge, edge + len(loops))
            assert tensors["edge_target"][edges].tolist() == [i + atom for i, _, _ in loops]
            assert tensors["edge_source"][edges].tolist() == [j + atom for _, j, _ in loops]
            shifts = np.array([o for _, _, o in loops]) @ structure.cell
            assert np.allclose(tensors["edge_shift"][edges], shifts, atol=1e-5)
            number = {item: index + edge for index, item in enumerate(loops)}
            opposite = [(j, i, tuple(-step for step in offset)) for i, j, offset in loops]
            assert tensors["edge_reverse"][edges].tolist() == [number.get(item, -1) for item in opposite]
            atom, edge = atoms.stop, edges.stop
        assert int(tensors["samples"]) == len(parts(batch, structures))
        assert atom < shape.atoms
        assert edge < shape.edges
        for name in ("atomic_number", "position", "force", "free"):
            assert len(tensors[name]) == shape.atoms
            assert not tensors[name][atom:].any()
        per_atom = np.bincount(tensors["edge_target"][edge:], minlength=shape.atoms)[atom:]
        assert per_atom.sum() == shape.edges - edge
        assert np.ptp(per_atom) <= 1
        assert np.array_equal(tensors["edge_source"][edge:], np.sort(tensors["edge_target"][edge:]))
        assert tensors["edge_shift"][edge:].tolist() == [[6, 0, 0]] * (shape.edges - edge)
        assert tensors["edge_reverse"][edge:].tolist() == [-1] * (shape.edges - edge)


def test_a_padding_atom_has_at_most_as_many_edges_as_a_real_one_can_have() -> None:
    """Structures of 100 atoms have 800 to 5,000 edges, so micro-batches differ in edges alone."""
    generator = np.random.default_rng(0)
    counts = np.stack([np.full(400, 100), generator.integers(800, 5001, 400), np.ones(400), np.ones(400)], 1)
    counts_S4 = counts.astype(np.int32)
    shapes, shape_of = train_shapes(counts_S4, 2, 8)
    assert len(shapes) == 5
    for _ in range(50):
        micro_batches = generator.permutation(400)[:16].reshape(8, 2)
        shape = shape_of(micro_batches.tolist())
        for used in counts_S4[micro_batches, :2].sum(1).tolist():
            assert 0 < shape.edges - used[1] <= 50 * (shape.atoms - used[0])


def test_types_of_a_batch(root: Path) -> None:
    numbers = {"atomic_number", "edge_source", "edge_target", "edge_reverse"}
    others = {"position", "force", "free", "edge_shift", "samples"}
    for batches, more in ((trained(root), {"global_free"}), (evaluated(root), set())):
        types = {name: tensor.dtype for name, tensor in batches[0].tensors.items()}
        assert types == dict.fromkeys(numbers, torch.int32) | dict.fromkeys(others | more, torch.float32)


def test_an_epoch_has_every_structure_once_in_an_order_of_its_own(root: Path, structures) -> None:
    orders = [systems(trained(root, block, micro_batch=1), structures) for block in (EPOCH, THIRD_EPOCH)]
    assert [sorted(order) for order in orders] == [list(range(TRAIN))] * 2
    assert orders[0] != orders[1]
    assert systems(trained(root, EPOCH, micro_batch=1, seed=8), structures) not in orders


def test_the_order_does_not_depend_on_threads(root: Path, structures) -> None:
    one, four = (systems(trained(root, threads=count, prefetch=count), structures) for count in (1, 4))
    assert one == four


def test_a_resumed_block_continues_exactly(root: Path) -> None:
    whole, rest = trained(root, THIRD_EPOCH, accumulation=2), trained(root, THIRD_EPOCH, start=3, accumulation=2)
    assert [batch.position for batch in rest] == list(range(3, len(whole)))
    for one, other in zip(whole[3:], rest, strict=True):
        assert one.key == other.key
        assert all(torch.equal(tensor, other.tensors[name]) for name, tensor in one.tensors.items())


@pytest.mark.parametrize("node", [0, 1])
def test_every_node_stages_all_that_a_run_reads(node: int, root: Path, tmp_path: Path) -> None:
    plan = staging_plan(root)
    for file in (*plan.whole, *itertools.chain(*plan.of_node(3, node, 2).values())):
        (tmp_path / file.name).parent.mkdir(parents=True, exist_ok=True)
        assert (tmp_path / file.name).write_bytes((root / file.name).read_bytes()) == file.bytes
    for one, other in ((trained(root), trained(tmp_path)), (evaluated(root), evaluated(tmp_path))):
        for batch, staged in zip(one, other, strict=True):
            assert all(torch.equal(tensor, staged.tensors[name]) for name, tensor in batch.tensors.items())


def test_two_ranks_read_what_one_rank_accumulates(root: Path, structures) -> None:
    one = trained(root, accumulation=2)
    two = [trained(root, replicas=2, rank=rank) for rank in range(2)]
    both = [batch for pair in zip(*two, strict=True) for batch in pair]
    assert [systems([batch], structures) for batch in both] == [systems([batch], structures) for batch in one]
    assert [batch.samples for batch in both] == [8] * len(one)


def test_every_part_of_a_global_batch_has_its_number_of_free_atoms(root: Path, structures) -> None:
    ranks = [trained(root, replicas=2, rank=rank, accumulation=2) for rank in range(2)]
    for step in range(0, len(ranks[0]), 2):
        batches = [rank[step + number] for rank in ranks for number in range(2)]
        free = sum(int(batch.tensors["free"].sum()) for batch in batches)
        assert sum(int(batch.tensors["samples"]) for batch in batches) == 16
        assert [int(batch.tensors["global_free"]) for batch in batches] == [free] * 4


@pytest.mark.parametrize("replicas", [1, 2, 3])
def test_an_evaluation_has_every_structure_once(replicas: int, root: Path, structures) -> None:
    ranks = [evaluated(root, replicas, rank) for rank in range(replicas)]
    assert len({len(batches) for batches in ranks}) == 1
    found = Counter(number for batches in ranks for number in systems(batches, structures))
    assert found == Counter(range(EVAL))
    assert {batch.key for batches in ranks for batch in batches} == {GraphShape(48, 256)}
    assert all(int(batch.tensors["samples"]) <= 4 for batches in ranks for batch in batches)


def test_a_structure_that_no_evaluation_batch_holds_is_an_error(root: Path) -> None:
    with pytest.raises(DataError, match=r"evaluation is too large \(\d+, \d+\) for .*reader\.typical"):
        evaluated(root, typical=(100, 3), eval_batch=1)


def test_all_micro_batches_of_an_iteration_have_one_of_the_shapes_of_the_data(root: Path) -> None:
    ranks = [trained(root, replicas=2, rank=rank, accumulation=2) for rank in range(2)]
    source, shapes = open_train(root, reader(), Layout({"dp": 2}), 4, 2)
    source.close()
    iterations = [
        {batch.key for rank in ranks for batch in rank[step : step + 2]} for step in range(0, len(ranks[0]), 2)
    ]
    assert [len(keys) for keys in iterations] == [1] * len(iterations)
    assert set().union(*iterations) <= set(shapes)


Change = Callable[[bytes], bytes]
HEADER, FIXED = 8, 24 + 36
"""Bytes of the counts, and of the energy, both numbers and the cell."""


def edge_to_atom_99(value: bytes) -> bytes:
    first = HEADER + FIXED + 24 * int.from_bytes(value[:4], "little")
    return value[:first] + (99).to_bytes(2, "little") + value[first + 2 :]


def reverse_9999(value: bytes) -> bytes:
    atoms, edges = (int.from_bytes(value[first : first + 4], "little") for first in (0, 4))
    first = HEADER + FIXED + 24 * atoms + 7 * edges
    return value[:first] + (9999).to_bytes(2, "little") + value[first + 2 :]


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        (lambda value: value[:-1], r"it has [\d,]+ bytes; with the sizes .* it takes"),
        (lambda value: value + b"0", r"it has [\d,]+ bytes; with the sizes .* it takes"),
        (lambda value: value[:5], "it is truncated"),
        (lambda value: bytes(HEADER + FIXED), "0 atoms and 0 edges, its counts say"),
        (edge_to_atom_99, "has an edge with an atom outside of 0 to"),
        (reverse_9999, "has a reverse edge outside of 0 to"),
    ],
    ids=["cut", "longer", "no counts", "empty", "edge", "reverse edge"],
)
def test_a_damaged_sample_is_named(change: Change, complaint: str, root: Path, tmp_path: Path) -> None:
    copied = copy_with(root, tmp_path / "data", lambda values: [change(value) for value in values])
    with pytest.raises(
        DataError, match=rf"^{copied}/train/data\.0000\.lmdb: sample \d+.*{complaint}.*prepare the data"
    ):
        trained(copied)


def test_a_file_with_fewer_samples_than_counts_is_refused(root: Path, tmp_path: Path) -> None:
    copied = copy_with(root, tmp_path / "data", lambda values: values[:-1])
    with pytest.raises(DataError, match=rf"data\.0000\.lmdb: its counts are int32 of shape \({TRAIN}, 4\); prepare"):
        trained(copied)


def copy_with(root: Path, copied: Path, change: Callable[[list[bytes]], list[bytes]]) -> Path:
    """Copy a prepared folder; its manifest has the new sizes, and the training set other values."""
    (copied / "train").mkdir(parents=True)
    (copied / "val_id").symlink_to(root / "val_id")
    source = lmdb_file.LmdbFile(root / "train" / "data.0000.lmdb")
    values = [source.read(index) for index in range(source.length)]
    source.close()
    lmdb_file.write(copied / "train" / "data.0000.lmdb", change(values))
    (copied / "train" / "data.0000.npy").write_bytes((root / "train" / "data.0000.npy").read_bytes())
    size = (copied / "train" / "data.0000.lmdb").stat().st_size
    text = (root / NAME).read_text()
    entry = functools.partial(re.sub, r'("train/data.0000.lmdb": \{\s*"bytes": )\d+', rf"\g<1>{size}")
    (copied / NAME).write_text(entry(text))
    return copied
