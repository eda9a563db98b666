"""Preparation of OpenFold's data: synthetic chains, limits of both sets, identical chains, and missing files."""

from __future__ import annotations

import datetime
import gzip
import hashlib
import json
import pickle
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import small_chains
import yaml

from benchmarks.openfold import prepare as prepare_module
from benchmarks.openfold import raw as raw_module
from benchmarks.openfold.prepare import COMMANDS, prepare
from benchmarks.openfold.raw import CAMEO, CLUSTERS, DUPLICATES, MMCIF, MSAS, OBSOLETE
from benchmarks.openfold.samples import (
    ALIGNMENTS,
    CHAINS,
    DAYS,
    DICTS,
    INDEX,
    KALIGN,
    Chain,
    Structures,
    decode_name,
    encode_name,
    read_alignments,
    read_obsolete,
)
from benchmarks.openfold.samples import MSAS as MSA_FILES
from benchmarks.openfold.synthetic import SyntheticChains, encode_structure, generate
from common.errors import DataError
from common.formats.alignments import read_a3m
from tests.conftest import ROOT


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return small_chains.raw(tmp_path_factory.mktemp("openfold") / "raw")


@pytest.fixture
def raw(written: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(written, tmp_path / "raw"))


def names(data: Path, split: str) -> list[str]:
    """Return the names of the chains of a set."""
    table = np.load(data / f"{split}.npy")
    return ["_".join(map(decode_name, row)) for row in table[:, :2].tolist()]


def test_prepared_data_are_the_raw_ones(raw: Path, tmp_path: Path) -> None:
    data = tmp_path / "data"
    made = prepare(raw, data)
    assert made.synthetic
    assert made.counts["train_samples"] == small_chains.TRAIN
    assert made.counts["eval_samples"] == small_chains.EVAL
    assert COMMANDS.verify(data, workers=2) == made
    chains, index = small_chains.rows(data), json.loads((data / INDEX).read_text())
    assert len(chains) == small_chains.TRAIN + 2 * small_chains.EVAL
    assert chains.keys() == index.keys()
    for name, chain in chains.items():
        assert (chain["resolution"], chain["sequence_length"]) == ("2", str(len(chain["sequence"])))
        owner = f"{chain['pdb_id']}_A"  # B is a copy
        digest = hashlib.sha256(owner.encode()).digest()
        assert index[name]["db"] == f"{int.from_bytes(digest[:8], 'little') % 10}.db"
        database = (data / ALIGNMENTS / index[name]["db"]).read_bytes()
        contents = {file: database[start : start + size] for file, start, size in index[name]["files"]}
        files = ["a3m/uniref90_hits.a3m", "a3m/bfd_uniclust_hits.a3m", "a3m/mgnify_hits.a3m", "hhr/pdb70_hits.hhr"]
        assert contents == {Path(file).name: (raw / MSAS / owner / file).read_bytes() for file in files}
        sequence, position, mask, _ = Structures(data).chain(chain["pdb_id"], chain["author_chain_id"])
        assert sequence == chain["sequence"] == bytes(read_a3m(contents[MSA_FILES[0]]).letters[0]).decode()
        assert mask.any(1).all()
        assert np.linalg.norm(np.diff(position[:, 1], axis=0), axis=1) == pytest.approx(3.8, abs=0.02)
    for split in ("train", "eval"):
        table = np.load(data / f"{split}.npy").tolist()
        for name, (_, _, day, residues, cluster, database, *spans) in zip(names(data, split), table, strict=True):
            chain = chains[name]
            assert datetime.date.fromordinal(day).isoformat() == chain["release_date"]
            assert (residues, cluster) == (len(chain["sequence"]), int(chain["pdb_cluster_id"]))
            assert f"{database}.db" == index[name]["db"]
            assert spans == [number for _, *span in index[name]["files"] for number in span]
            assert [len(content) for content in read_alignments(data, database, [(0, 3), (2, 0)])] == [3, 0]
    days = {
        f"{decode_name(pdb_id)}_{decode_name(author)}": day for pdb_id, author, day in np.load(data / DAYS).tolist()
    }
    assert days == {n: datetime.date.fromisoformat(c["release_date"]).toordinal() for n, c in chains.items()}
    assert read_obsolete(data / OBSOLETE.replace("pdb_mmcif", "pdb_mmcif/processed")) == {"9zzz": "1000"}
    pickled = pickle.loads((data / DICTS / "00").read_bytes())["1000"]
    assert set(pickled) == {
        "pdb_id", "exptl_method", "release_date", "resolution", "author_chain_ids", "entity_id_to_mmcif_chain_ids",
        "mmcif_chain_id_to_author_chain_id", "sequences", "atoms",
    }  # fmt: skip
    assert not (data / "records").exists()


def limited(**changes: object) -> Chain:
    usual = Chain("1abc_A", "1abc", "A", "A", "2021-09-16", 8.99, 4, "MKTAYIAKQR")
    return usual._replace(**changes)


@pytest.mark.parametrize(
    ("chain", "expected"),
    [
        (limited(), True),
        (limited(release_date="2021-09-17"), False),
        (limited(resolution=9.0), False),
        (limited(resolution=None), True),
        (limited(pdb_cluster_id=-1), False),
        (limited(pdb_cluster_id=0), True),
        (limited(sequence="AAAAAAAAGG"), True),
        (limited(sequence="AAAAAAAAAG"), False),
    ],
    ids=["last day", "later", "resolution", "none", "no cluster", "first cluster", "80 %", "90 %"],
)
def test_limits_of_the_training_set(chain: Chain, expected: bool) -> None:
    assert prepare_module.in_training_set(chain) is expected


def test_chains_without_alignments_are_not_trained(raw: Path, tmp_path: Path) -> None:
    shutil.rmtree(raw / MSAS / "1000_A")
    made = prepare(raw, tmp_path / "data")
    assert made.counts["train_samples"] == small_chains.TRAIN - 1
    assert "1000_A" not in names(tmp_path / "data", "train")


def test_evaluation_chains_without_alignments_are_counted(raw: Path, tmp_path: Path) -> None:
    (raw / DUPLICATES).write_text("")  # otherwise the chain has the alignments of an identical one
    target, _ = (raw / CAMEO).read_text().splitlines()[1].split(",")
    shutil.rmtree(raw / MSAS / target)
    made = prepare(raw, tmp_path / "data")
    assert (made.counts["eval_samples"], made.counts["eval_without_alignments"]) == (small_chains.EVAL, 1)


def test_limits_of_the_evaluation(raw: Path, tmp_path: Path) -> None:
    evaluated = names(small_chains.prepared(tmp_path / "whole"), "eval")
    days = ["2021-09-16", "2021-12-11", "2021-12-12"]
    lines = [f"{name},{day}\n" for name, day in zip(evaluated, days, strict=True)]
    (raw / CAMEO).write_text("target,submission_date\n" + "".join(lines))
    assert prepare(raw, tmp_path / "data").counts["eval_samples"] == 1
    assert names(tmp_path / "data", "eval") == evaluated[1:2]


def test_targets_name_mmcif_chains_before_chains_of_the_authors(raw: Path, tmp_path: Path) -> None:
    """The mmcif chains A and B of a structure are chains B and A of its authors, and Q is a chain of the authors."""
    for name, authors in (("8000", "BA"), ("8001", "QR")):
        text = encode_structure(name, "AG" * 20, np.zeros((40, 14, 3)), datetime.date(2021, 10, 1), "AB")
        for molecule, author in zip("AB", authors, strict=True):
            text = re.sub(rf"(?m) {molecule} 1$", f" {author}  1", text)  # two spaces, so that the next turn keeps it
        (raw / MMCIF / "00" / f"{name}.cif.gz").write_bytes(gzip.compress(text.encode()))
    targets = ["8000_A", "7qqq_A", "8001_Q", "8001_A", "8001_C"]
    lines = [f"{target},2021-10-01\n" for target in targets]
    (raw / CAMEO).write_text("target,submission_date\n" + "".join(lines))
    made = prepare(raw, tmp_path / "data")
    assert names(tmp_path / "data", "eval") == ["8000_B", "8001_Q"]
    assert (made.counts["eval_samples"], made.counts["unknown_targets"]) == (2, 2)


def test_long_chains_are_not_evaluated(raw: Path, tmp_path: Path) -> None:
    for name, length in (("8000", 700), ("8001", 701)):
        sequence = "AG" * 400
        text = encode_structure(name, sequence[:length], np.zeros((length, 14, 3)), datetime.date(2021, 10, 1))
        (raw / MMCIF / "00" / f"{name}.cif.gz").write_bytes(gzip.compress(text.encode()))
    prepare(raw, tmp_path / "data")
    assert np.load(tmp_path / "data" / "eval.npy")[:, 3].max() == 700


def test_other_layouts_of_the_raw_files(raw: Path, written: Path, tmp_path: Path) -> None:
    """Structures in one folder and not packed, alignments without subfolders, and one of them in Stockholm."""
    for packed in list((raw / MMCIF).rglob("*.cif.gz")):
        (raw / MMCIF / packed.stem).write_bytes(gzip.decompress(packed.read_bytes()))
        packed.unlink()
    for path in list((raw / MSAS).glob("*/*/*")):
        path.rename(path.parents[1] / path.name)
    changed = raw / MSAS / "1000_A" / "mgnify_hits.a3m"
    changed.with_suffix(".sto").write_text("# STOCKHOLM 1.0\nq MK\na mk\n//\n")
    changed.unlink()
    prepare(tmp_path, tmp_path / "data")
    prepare(written, tmp_path / "usual")
    same = [CHAINS, DAYS, *(f"{ALIGNMENTS}/{number}.db" for number in range(10))]
    different = [
        name for name in same if (tmp_path / "data" / name).read_bytes() != (tmp_path / "usual" / name).read_bytes()
    ]
    assert len(different) == 1
    assert b">q\nMK\n>a\nMK\n" in (tmp_path / "data" / different[0]).read_bytes()


def test_raw_files_of_other_systems_are_the_same_data(raw: Path, written: Path, tmp_path: Path) -> None:
    """The list is saved by a spreadsheet, structures are on another disk, and a file manager has visited."""
    text = (raw / CAMEO).read_text()
    (raw / CAMEO).write_bytes(b"\xef\xbb\xbf" + text.replace("\n", "\r\n").encode() + b"\r\n")
    (raw / MMCIF).rename(tmp_path / "disk")
    (raw / MMCIF).mkdir()
    for folder in (tmp_path / "disk").iterdir():
        (raw / MMCIF / folder.name).symlink_to(folder)
    (raw / MSAS / "@eaDir").mkdir()
    found, expected = raw_module.open_raw(raw), raw_module.open_raw(written)
    assert found.evaluated() == expected.evaluated()
    assert list(found.structures) == list(expected.structures)
    assert found.chains == expected.chains


def test_alignments_that_are_still_packed_are_named(raw: Path, tmp_path: Path) -> None:
    for path in list((raw / MSAS / "1000_A").rglob("*_hits.*")):
        path.rename(path.with_name(f"{path.name}.gz"))
    with pytest.raises(DataError, match=r"1000_A has a3m, but no .* or other alignment; unpack its files, or fetch"):
        prepare(raw, tmp_path / "data")


@pytest.mark.parametrize("name", [CAMEO, CLUSTERS, DUPLICATES, OBSOLETE, MMCIF, MSAS])
def test_a_missing_file_is_named(name: str, raw: Path, tmp_path: Path) -> None:
    (raw / name).rename(tmp_path / "elsewhere")
    with pytest.raises(DataError, match=rf"{name} is missing$"):
        prepare(raw, tmp_path / "data")


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        (lambda raw: (raw / CAMEO).write_text("chain\n"), "its columns are not target,submission_date"),
        (
            lambda raw: (raw / CAMEO).write_text("target,submission_date\n7qqq_A,2021-10-01\n"),
            "has no chain for eval.npy",
        ),
        (
            lambda raw: (raw / CAMEO).write_text("target,submission_date\n8000_A,18.09.2021\n"),
            r"the day '18\.09\.2021' of 8000_A does not have the form YYYY-MM-DD",
        ),
        (lambda raw: (raw / CLUSTERS).write_text(""), "has no chain for train.npy"),
        (
            lambda raw: (raw / MMCIF / "1000.cif").write_text("data_1000"),
            r"00/1000\.cif\.gz and .*/1000\.cif have the same structure; remove one of them",
        ),
        (
            lambda raw: (raw / MMCIF / "00" / "1000.cif.gz").write_bytes(b"text"),
            r"1000\.cif\.gz is damaged: .*fetch it again",
        ),
    ],
    ids=["columns", "only unknown targets", "day", "no clusters", "twice", "structure"],
)
def test_damaged_raw_data_are_an_error(
    change: Callable[[Path], object], complaint: str, raw: Path, tmp_path: Path
) -> None:
    change(raw)
    with pytest.raises(DataError, match=complaint):
        prepare(raw, tmp_path / "data")


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        (lambda text: text.replace("_atom_site.occupancy", "_atom_site.o"), "KeyError: 'occupancy'"),
        (lambda text: text[: len(text) * 2 // 3], r"ValueError: line \d+: the loop of atom_site ends within a row"),
        (lambda text: text.replace("_entry.id\n1000", "_entry.id\n1001"), "it has the structure 1001"),
        (lambda text: re.sub(r"(?m)^(ATOM .*) A 1$", r"\1 AAAAAAAA 1", text), "the name 'AAAAAAAA' has more than"),
    ],
    ids=["column", "truncated", "other name", "long name"],
)
def test_structures_that_cannot_be_used_are_skipped_and_named(
    change: Callable[[str], str], complaint: str, raw: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    path = raw / MMCIF / "00" / "1000.cif.gz"
    text = gzip.decompress(path.read_bytes()).decode()
    assert change(text) != text
    path.write_bytes(gzip.compress(change(text).encode()))
    made = prepare(raw, tmp_path / "data")
    assert made.counts["train_samples"] == small_chains.TRAIN - 1
    assert (made.counts["skipped_structures"], made.source["skipped"]) == (1, "1000.cif.gz")
    assert re.search(rf"(?m)^skipped {path}: {complaint}", capfd.readouterr().err)


def test_an_interrupted_preparation_continues(raw: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*arguments: object) -> None:
        raise OSError("no space left")

    monkeypatch.setattr(prepare_module, "write_alignments", fail)
    with pytest.raises(DataError, match="no space left"):
        prepare(raw, tmp_path / "data")
    monkeypatch.undo()
    monkeypatch.setattr(prepare_module, "write_structures", fail)
    assert prepare(raw, tmp_path / "data").counts["train_samples"] == small_chains.TRAIN


@pytest.mark.parametrize(("found", "note"), [("/bin/kalign", "templates are realigned"), (None, "was not found")])
def test_the_manifest_says_whether_templates_are_realigned(
    found: str | None, note: str, raw: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prepare_module.shutil, "which", lambda name: found)
    assert prepare(raw, tmp_path / "data").source[KALIGN].startswith(note)


def test_verify_names_a_changed_file(raw: Path, tmp_path: Path) -> None:
    prepare(raw, tmp_path / "data")
    path = tmp_path / "data" / DICTS / "00"
    content = bytearray(path.read_bytes())
    content[-5] ^= 1
    path.write_bytes(content)
    with pytest.raises(DataError, match=rf"^{path}: SHA-256"):
        COMMANDS.verify(tmp_path / "data")


@pytest.mark.slow
def test_synthetic_chains_depend_on_the_seed_alone(written: Path, tmp_path: Path) -> None:
    options = SyntheticChains(train=small_chains.TRAIN, eval=small_chains.EVAL, rows=30, folds=small_chains.FOLDS)
    generate(tmp_path / "two", options, workers=2)
    files = sorted(path.relative_to(written) for path in written.rglob("*") if path.is_file())
    assert files == sorted(
        path.relative_to(tmp_path / "two") for path in (tmp_path / "two").rglob("*") if path.is_file()
    )
    assert all((written / name).read_bytes() == (tmp_path / "two" / name).read_bytes() for name in files)
    assert raw_module.open_raw(tmp_path / "two").synthetic is not None


def test_names_as_numbers() -> None:
    assert [decode_name(encode_name(name)) for name in ("1abc", "A", "", "AAAAAAA")] == ["1abc", "A", "", "AAAAAAA"]
    with pytest.raises(ValueError, match="'AAAAAAAA' has more than 7 characters"):
        encode_name("AAAAAAAA")


def test_the_limits_are_those_of_the_log() -> None:
    described = yaml.safe_load((ROOT / "configs" / "benchmark" / "openfold.yaml").read_text())
    facts = described["facts"]
    assert facts["train_released_until"] == prepare_module.RELEASED
    assert (facts["eval_submitted_from"], facts["eval_submitted_until"]) == prepare_module.SUBMITTED
    assert facts["eval_longest"] == prepare_module.MOST_RESIDUES
    published = {name: described[name] for name in ("train_samples", "eval_samples")}
    assert COMMANDS.published.counts == published
