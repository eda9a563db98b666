"""Preparation of OpenCatalyst's data: trajectories, graphs of the official preprocessing, and synthetic slabs."""

from __future__ import annotations

import lzma
import os
import re
from pathlib import Path

import lmdb
import numpy as np
import pytest
import small_slabs
import torch

from benchmarks.oc20 import prepare as prepare_module
from benchmarks.oc20.graph import CUTOFF
from benchmarks.oc20.prepare import COMMANDS, prepare
from benchmarks.oc20.samples import Split, Structure
from benchmarks.oc20.synthetic import SyntheticSlabs, draw, generate, potential
from common.errors import DataError


def structures(root: Path, folder: str = "train") -> list[Structure]:
    split = Split(root, folder)
    try:
        return [split.read(number) for number in range(len(split.counts_S4))]
    finally:
        split.close()


def contents(folder: Path) -> dict[str, bytes]:
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.glob("*/*")}


def assert_first(found: Structure) -> None:
    """Compare a structure with the first one of the trajectories, as they say in text."""
    assert found.pos.tolist() == [[0, 0, 0], [0.5, 4, 1], [0.5, 4, -1.5]]
    assert found.atomic_numbers.tolist() == [29, 29, 1]
    assert found.cell.tolist() == [[4, 0, 0], [0, 8, 0], [0, 0, 30]]
    assert found.force.tolist() == [[0.5, -0.25, 0.125], [-1.5, 0, 2], [1, 0.25, -2.125]]
    assert found.fixed.tolist() == [1, 0, 0]
    assert found.tags.tolist() == [0, 1, 2]
    assert (float(found.y), int(found.sid), int(found.fid)) == (3.25, 2447361, 12)
    edges = small_slabs.neighbours_by_loops(found.pos.astype(np.float64), found.cell.astype(np.float64), 2)
    (source, target), offsets = found.edge_index, found.cell_offsets
    assert list(zip(target.tolist(), source.tolist(), map(tuple, offsets.tolist()), strict=True)) == edges


def test_trajectories_become_graphs_with_referenced_energies(tmp_path: Path) -> None:
    made = prepare(small_slabs.write_trajectories(tmp_path / "raw"), tmp_path / "data")
    for folder in ("train", "val_id"):
        first, second = structures(tmp_path / "data", folder)
        assert_first(first)
        assert (second.atomic_numbers.tolist(), float(second.y), int(second.fid)) == ([78], 2.25, 0)
        assert second.edge_index.tolist() == [[0] * 6] * 2
    edges = first.edge_index.shape[1]
    triplets = len(small_slabs.triplets_by_loops(small_slabs.neighbours_by_loops(first.pos, first.cell, 2)))
    assert made.counts == {
        "train_samples": 2, "eval_samples": 2, "train_atoms": 4, "train_edges": edges + 6,
        "train_triplets": triplets + 30, "train_free": 3,
    }  # fmt: skip
    assert np.load(tmp_path / "data" / "train" / "data.0000.npy").tolist() == [[3, edges, triplets, 2], [1, 6, 30, 1]]
    COMMANDS.verify(tmp_path / "data")


def test_prepare_prints_the_mean_counts(tmp_path: Path, capsys) -> None:
    """Three atoms and one, of which two and one are free."""
    raw = small_slabs.write_trajectories(tmp_path / "raw")
    COMMANDS.run("prepare", ["--raw-dir", str(raw), "--data-dir", str(tmp_path / "data"), "--workers", "1"])
    line = r"data: mean counts of a training structure: 2\.0 atoms, [\d.]+ edges, [\d.]+ triplets$"
    assert re.search(line, capsys.readouterr().out, re.MULTILINE)


def test_packed_trajectories_give_the_same_files(tmp_path: Path) -> None:
    raw = small_slabs.write_trajectories(tmp_path / "raw")
    prepare(raw, tmp_path / "plain")
    for path in [*raw.rglob("0.*")]:
        path.with_name(f"{path.name}.xz").write_bytes(lzma.compress(path.read_bytes()))
        path.unlink()
    prepare(raw, tmp_path / "packed")
    assert contents(tmp_path / "packed") == contents(tmp_path / "plain")


def test_partly_unpacked_trajectories_are_all_used(tmp_path: Path) -> None:
    """Some are packed, some unpacked, and one is unpacked in part beside the packed one."""
    raw = small_slabs.write_trajectories(tmp_path / "raw")
    for path in [*raw.rglob("0.*")]:
        path.with_name(f"1{path.suffix}").write_bytes(path.read_bytes())
    prepare(raw, tmp_path / "plain")
    for path in [*raw.rglob("0.*")]:
        path.with_name(f"{path.name}.xz").write_bytes(lzma.compress(path.read_bytes()))
        path.write_bytes(path.read_bytes()[:10])
    prepare(raw, tmp_path / "packed")
    assert contents(tmp_path / "packed") == contents(tmp_path / "plain")


def test_trajectories_and_graphs_in_one_folder_are_refused(tmp_path: Path) -> None:
    raw = small_slabs.write_trajectories(tmp_path / "raw")
    next(raw.rglob("0.extxyz")).with_name("0.lmdb").touch()
    with pytest.raises(DataError, match=r"has both \*\.lmdb and \*\.extxyz, such as 0\.lmdb; move one of the two away"):
        prepare(raw, tmp_path / "data")


@pytest.mark.parametrize("edges", [{}, {"edge_index": ..., "cell_offsets": ...}], ids=["with edges", "without"])
def test_official_graphs_give_the_structures_of_their_trajectories(edges: dict, tmp_path: Path) -> None:
    raw = small_slabs.write_graphs(tmp_path / "raw", small_slabs.pickled(small_slabs.graph(**edges)))
    prepare(raw, tmp_path / "data")
    (found,) = structures(tmp_path / "data")
    assert_first(found)


def test_official_edges_of_length_zero_are_dropped(tmp_path: Path) -> None:
    fields = small_slabs.graph()
    fields["edge_index"] = torch.cat([torch.tensor([[1], [1]]), fields["edge_index"]], 1)
    fields["cell_offsets"] = torch.cat([torch.zeros(1, 3, dtype=torch.long), fields["cell_offsets"]])
    prepare(small_slabs.write_graphs(tmp_path / "raw", small_slabs.pickled(fields)), tmp_path / "data")
    (found,) = structures(tmp_path / "data")
    assert_first(found)


@pytest.mark.parametrize(
    ("frames", "systems", "complaint"),
    [
        ((" 0.25 -2.125\n1\n", "\n1\n"), None, r"0\.extxyz: structure 1: an atom has not 9 columns"),
        (("Pt 0.25 0.5 0.75 T 1 0.0 0.0 0.0\n", ""), None, "structure 2: it has 0 of its 1 atoms: the file is truncat"),
        (("5.0 0 0 0 5.0 0 0 0 5.0", "7 0 0 0 7 0 0 0 7"), None, "structure 2: no atom has a neighbour within 6 angst"),
        (("0.25 0.5 0.75", "nan 0.5 0.75"), None, "structure 2: a position or a vector of the cell is not finite"),
        (("T 1 0.0", "T 1 inf"), None, "structure 2: force is not finite"),
        (("T 1 0.0", "T 300 0.0"), None, "structure 2: tags has numbers that are no uint8"),
        (("energy=3.5 ", ""), None, "structure 2 has no energy"),
        (("Lattice=", "Cell="), None, "structure 1 has no Lattice"),
        (None, ("random7,frame0,1.25\n", ""), r"structure 2: 0\.txt has no line random<sid>,frame<fid>,<energy>"),
        (None, ("frame12", "frame"), r"structure 1: 0\.txt has no line random<sid>,frame<fid>,<energy> for it"),
        (None, ("random7", "random6,frame0,1\nrandom7"), r"0\.txt has more lines than 0\.extxyz structures"),
        (None, ("1.25", "1.2.5"), "structure 2: could not convert"),
    ],
)
def test_a_damaged_trajectory_is_named(frames, systems, complaint: str, tmp_path: Path) -> None:
    texts = [small_slabs.TWO, small_slabs.SYSTEMS]
    for number, change in enumerate((frames, systems)):
        assert change is None or change[0] in texts[number]
        texts[number] = texts[number] if change is None else texts[number].replace(*change)
    raw = small_slabs.write_trajectories(tmp_path / "raw", *texts)
    with pytest.raises(DataError, match=rf"^{raw}/.*{complaint}.*; fetch the file again$"):
        prepare(raw, tmp_path / "data")
    assert not (tmp_path / "data" / "manifest.json").exists()


def test_a_cut_archive_is_named(tmp_path: Path) -> None:
    raw = small_slabs.write_trajectories(tmp_path / "raw")
    for path in [*raw.rglob("0.*")]:
        path.with_name(f"{path.name}.xz").write_bytes(lzma.compress(path.read_bytes())[:-20])
        path.unlink()
    with pytest.raises(DataError, match=r"0\.extxyz\.xz: structure 3: Compressed file ended"):
        prepare(raw, tmp_path / "data")


def all_to_one(count: int) -> dict[str, torch.Tensor]:
    """Return ``count`` edges into atom 0."""
    offsets = torch.stack([torch.arange(1, count + 1), torch.zeros(count).long(), torch.zeros(count).long()], 1)
    return {"edge_index": torch.zeros(2, count, dtype=torch.long), "cell_offsets": offsets}


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"force": ...}, "the graph has no force"),
        ({"cell_offsets": ...}, r"edge_index and cell_offsets are not int64 of shape \(2, E\) and \(E, 3\)"),
        (
            {"edge_index": torch.zeros(2, 2)},
            r"edge_index and cell_offsets are not int64 of shape \(2, E\) and \(E, 3\)",
        ),
        ({**all_to_one(1), "edge_index": torch.tensor([[3], [0]])}, "an edge has an atom outside of 0 to 2"),
        ({**all_to_one(1), "edge_index": torch.tensor([[0], [-1]])}, "an edge has an atom outside of 0 to 2"),
        (all_to_one(51), "an atom has 51 neighbours, and at most 50 are expected"),
        (all_to_one(0), "it has no neighbours: no edge is longer than 0"),
        ({"pos": torch.zeros(4, 3)}, r"pos has the shape \(4, 3\), not \(3, 3\)"),
        ({"fixed": torch.zeros(2)}, r"fixed has the shape \(2,\), not \(3,\)"),
        ({"fixed": torch.full((3,), 0.5)}, "fixed has numbers that are no uint8"),
        ({"atomic_numbers": torch.tensor([29.0, 95, 1])}, "an atomic number is not in 1 to 94"),
    ],
)
def test_a_damaged_graph_is_named(changes: dict, complaint: str, tmp_path: Path) -> None:
    raw = small_slabs.write_graphs(tmp_path / "raw", small_slabs.pickled(small_slabs.graph(**changes)))
    with pytest.raises(DataError, match=rf"^{raw}/.*data\.0000\.lmdb: structure 1: {complaint}; fetch the file again$"):
        prepare(raw, tmp_path / "data")


class _Evil:
    def __reduce__(self) -> tuple:
        return os.mkdir, ("hurt",)


def test_a_graph_that_asks_for_other_classes_is_refused(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    raw = small_slabs.write_graphs(tmp_path / "raw", small_slabs.pickled(small_slabs.graph(y=_Evil())))
    message = rf"^{raw}/2M/train/data\.0000\.lmdb: sample 0: its pickle asks for posix\.mkdir, .*do not use this file"
    with pytest.raises(DataError, match=message):
        prepare(raw, tmp_path / "data")
    assert not (tmp_path / "hurt").exists()


@pytest.mark.parametrize(
    ("damage", "complaint"),
    [("length", "it has no length: the program that wrote it was interrupted"), ("cut", "it is truncated: ")],
)
def test_an_lmdb_file_without_a_length_or_an_end_is_named(damage: str, complaint: str, tmp_path: Path) -> None:
    raw = small_slabs.write_graphs(tmp_path / "raw", *[small_slabs.pickled(small_slabs.graph())] * 20)
    path = raw / "all" / "val_id" / "data.0000.lmdb"
    if damage == "cut":
        path.write_bytes(path.read_bytes()[:-4096])
    else:
        with lmdb.open(str(path), subdir=False, lock=False) as file, file.begin(write=True) as transaction:
            transaction.delete(b"length")
    with pytest.raises(DataError, match=rf"^{path}: structure 1: {complaint}.*; fetch the file again$"):
        prepare(raw, tmp_path / "data")


@pytest.mark.parametrize(
    ("lacking", "complaint"),
    [
        ("s2ef_val_id", r"has neither val_id nor s2ef_val_id with \*\.extxyz or \*\.lmdb$"),
        ("s2ef_train_2M", r"; .*s2ef_train_2M\.tar is still packed: unpack it there$"),
    ],
)
def test_a_missing_split_is_named(lacking: str, complaint: str, tmp_path: Path) -> None:
    raw = small_slabs.write_trajectories(tmp_path / "raw")
    (raw / lacking).rename(tmp_path / "elsewhere")
    (raw / "s2ef_train_2M.tar").touch()
    with pytest.raises(DataError, match=complaint):
        prepare(raw, tmp_path / "data")


def test_a_preparation_continues_where_it_was_interrupted(tmp_path: Path, monkeypatch) -> None:
    """The first attempt fails at the validation set, and the second one does not write the training set again."""
    raw = small_slabs.write_trajectories(tmp_path / "raw")
    done: list[str] = []
    failing_folder = "val_id"

    def failing(files: list[Path], path: Path) -> dict:
        if path.parent.name == failing_folder:
            raise OSError("no space left")
        done.append(path.parent.name)
        return write(files, path)

    write = prepare_module.write_file
    monkeypatch.setattr(prepare_module, "write_file", failing)
    with pytest.raises(DataError, match=r"no space left; when that is settled, run the command again"):
        prepare(raw, tmp_path / "data")
    monkeypatch.setattr(
        prepare_module, "write_file", lambda files, path: done.append(path.parent.name) or write(files, path)
    )
    prepare(raw, tmp_path / "data")
    assert done == ["train", "val_id"]


def test_eight_trajectories_share_a_file_in_the_order_of_their_names(tmp_path: Path) -> None:
    raw = small_slabs.write_trajectories(tmp_path / "raw")
    folder = raw / "s2ef_train_2M" / "s2ef_train_2M"
    for number in range(1, 9):
        (folder / f"{number}.extxyz").write_text(small_slabs.TWO)
        (folder / f"{number}.txt").write_text(small_slabs.SYSTEMS.replace("frame", f"frame{number}"))
    prepare(raw, tmp_path / "data", workers=2)
    split = Split(tmp_path / "data", "train")
    assert [int(split.read(sample).fid) for sample in (0, 1, 2, 3, 16, 17)] == [12, 0, 112, 10, 812, 80]
    assert len(split.counts_S4) == 18
    split.close()
    assert len([*(tmp_path / "data" / "train").glob("*.lmdb")]) == 2


@pytest.mark.parametrize("suffix", [".lmdb", ".npy"])
def test_verify_names_a_changed_file(suffix: str, tmp_path: Path) -> None:
    prepare(small_slabs.write_trajectories(tmp_path / "raw"), tmp_path / "data")
    path = tmp_path / "data" / "val_id" / f"data.0000{suffix}"
    content = bytearray(path.read_bytes())
    content[-5] ^= 1
    path.write_bytes(content)
    with pytest.raises(DataError, match=rf"^{path}: SHA-256"):
        COMMANDS.verify(tmp_path / "data")


def test_synthetic_forces_are_the_slope_of_the_energy() -> None:
    """Central differences in float64. No atom has 50 neighbours, where the set of edges could change."""
    options = SyntheticSlabs(columns=(2, 2), layers=(2, 2), spacing=4.2)
    frame, _ = draw(options, np.random.default_rng(5))
    pos, species = frame.columns["pos"], frame.columns["species"]
    _, force = potential(pos, frame.cell_33, species, options.spacing)
    for atom, axis in np.ndindex(*pos.shape):
        energies = []
        for step in (1e-5, -1e-5):
            moved = pos.copy()
            moved[atom, axis] += step
            energies.append(potential(moved, frame.cell_33, species, options.spacing)[0])
        assert (energies[1] - energies[0]) / 2e-5 == pytest.approx(force[atom, axis], rel=1e-6, abs=1e-7)


def test_synthetic_energies_fall_smoothly_to_zero_at_the_cutoff() -> None:
    """Two atoms in a large cell: neither energy nor force jumps there."""
    for distance in (CUTOFF - 1e-4, CUTOFF - 1e-6):
        pos = np.array([[0.0, 0, 0], [distance, 0, 0]])
        energy, force = potential(pos, np.eye(3) * 30, np.array([29, 1]), 4.2)
        assert abs(energy) < 1e-8
        assert abs(force).max() < 1e-4


@pytest.mark.parametrize("options", [SyntheticSlabs(train=120, eval=5, columns=(1, 2), layers=(1, 3), spacing=4.2)])
def test_synthetic_trajectories_depend_on_the_seed_alone(options: SyntheticSlabs, tmp_path: Path) -> None:
    generate(tmp_path / "one", options, workers=1)
    generate(tmp_path / "two", options, workers=2)
    assert contents(tmp_path / "one") == contents(tmp_path / "two")
    made = prepare(tmp_path / "one", tmp_path / "data")
    assert made.synthetic
    found = structures(tmp_path / "data")
    assert len(found) == 120
    assert {int(number) for structure in found for number in structure.atomic_numbers} == {13, 29, 47, 78, 1, 6, 8}
    for structure in found:
        layers = len(np.unique(structure.pos[structure.tags < 2, 2].round(0)))
        assert 1 <= layers <= 3
        assert structure.force.sum(0) == pytest.approx(0, abs=1e-4)
        assert structure.fixed[structure.tags == 2].sum() == 0
