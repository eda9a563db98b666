"""Which hits become templates, and where their atoms are."""

from __future__ import annotations

import datetime
import pickle
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks.openfold.msa import tokens_of
from benchmarks.openfold.residues import CA, GAP
from benchmarks.openfold.samples import DICTS, Structures
from benchmarks.openfold.structures import pack_atoms
from benchmarks.openfold.templates import AlignmentError, TemplateSearch, admitted, kalign, realigned
from common.errors import DataError
from common.formats.alignments import Hit, read_hhr

CHAIN = "MKTAYIAKQRQISFVKSHFS"
OLD = datetime.date(2019, 1, 1).toordinal()
NEW = datetime.date(2020, 6, 29).toordinal()
RELEASED = {"2xyz": OLD, "1abc": OLD, "9new": NEW - 60}
CHAINS = {"2xyz_A", "1abc_B", "9new_A"}


def hit(name: str, query: str, template: str, first: int = 0, own: int = 0, score: float = 5) -> Hit:
    rows = f"Q q {first + 1} {query} {first + len(query.replace('-', ''))} (99)\n"
    rows += f"T t {own + 1} {template} {own + len(template.replace('-', ''))} (99)\n"
    return read_hhr(f"Query q\nNo 1\n>{name} x\nSum_probs={score}\n{rows}")[0]


@pytest.mark.parametrize(
    ("found", "expected"),
    [
        (hit("2XYZ_A", CHAIN[:12], "MKTAYIAKQRWW"), True),
        (hit("1abc_B", CHAIN[:12], "MKTAYIAKQRWW"), False),
        (hit("3unk_A", CHAIN[:12], "MKTAYIAKQRWW"), False),
        (hit("2xyz_Q", CHAIN[:12], "MKTAYIAKQRWW"), False),
        (hit("9new_A", CHAIN[:12], "MKTAYIAKQRWW"), False),
        (hit("2xyz_A", CHAIN[:9], "MKTAYIAKW"), False),
        (hit("2xyz_A", CHAIN[:12], "MKTAYIAKQRQI"), True),
        (hit("2xyz_A", CHAIN, CHAIN), False),
        (hit("2xyz_A", CHAIN[:19], CHAIN[:19]), True),
    ],
    ids=["other", "own", "unknown", "unknown chain", "too new", "short", "part", "copy", "0.95 of a copy"],
)
def test_hits_are_filtered(found: Hit, expected: bool) -> None:
    assert admitted(found, CHAIN, "1abc", NEW, RELEASED, CHAINS) is expected


@pytest.mark.parametrize(("day", "expected"), [(OLD + 60, False), (OLD + 61, True)])
def test_templates_are_more_than_60_days_older(day: int, expected: bool) -> None:
    assert admitted(hit("2xyz_A", CHAIN[:12], "MKTAYIAKQRWW"), CHAIN, "1abc", day, RELEASED, CHAINS) is expected


def test_a_tenth_of_the_chain_is_not_enough() -> None:
    short, enough = hit("2xyz_A", CHAIN[:10], "MKTAYIAKQW"), hit("2xyz_A", CHAIN[:11], "MKTAYIAKQWW")
    assert not admitted(short, CHAIN * 5, "1abc", NEW, RELEASED, CHAINS)
    assert admitted(enough, CHAIN * 5, "1abc", NEW, RELEASED, CHAINS)


def atoms_of(length: int, missing: int | None = None) -> tuple[np.ndarray, np.ndarray]:
    """Return positions and mask of a chain whose residue i has N and CA at (i, 0, 0) and (i, 1, 0)."""
    mask = np.zeros((length, 37), np.bool_)
    mask[:, :2] = True
    if missing is not None:
        mask[missing] = False
    position = np.zeros((length, 37, 3), np.float32)
    position[..., 0], position[:, CA, 1] = np.arange(length)[:, None], 1
    return position * mask[..., None], mask


@pytest.fixture
def search(tmp_path: Path) -> Callable[..., TemplateSearch]:
    sequences = {"A": "GGMKTAYIAKQRWWGG", "B": "SSSSSSSSSSSSSSSS"}
    far = atoms_of(16)[0]
    far[8:] += 200
    entries: dict[str, Any] = {
        "2xyz": {"sequences": sequences, "atoms": {"A": pack_atoms(*atoms_of(16, 4)), "B": pack_atoms(*atoms_of(16))}},
        "5xyz": {
            "sequences": {"A": "GGMKTAYIAKXRWWGG", "B": "SSSSSSSSSSSXSSSS"},
            "atoms": dict.fromkeys("AB", pack_atoms(*atoms_of(16))),
        },
        "4xyz": {"sequences": {"A": sequences["A"]}, "atoms": {"A": pack_atoms(far, atoms_of(16)[1])}},
    }
    (tmp_path / DICTS).mkdir(parents=True)
    (tmp_path / DICTS / "xy").write_bytes(pickle.dumps(entries))
    released = dict.fromkeys(entries, OLD)
    chains = {f"{name}_{author}" for name, entry in entries.items() for author in entry["sequences"]}
    return lambda align=None: TemplateSearch(Structures(tmp_path), released, chains, {"3xyz": "2xyz"}, align)


HIT = hit("2xyz_A", "TAY--IAKQRQI", "MKTAYIAKQ-RW", first=2, own=30)
"""The query's residues 2 to 11, aligned to 2 to 4, 7 to 10, a gap, and 11 and 12 of the structure."""
PLACES = {2: 2, 3: 3, 4: 4, 5: 7, 6: 8, 7: 9, 8: 10, 10: 11, 11: 12}


@pytest.mark.parametrize("name", ["2xyz_A", "2XYZ_B", "3xyz_A"])
def test_atoms_are_at_the_aligned_residues(name: str, search: Callable[..., TemplateSearch]) -> None:
    """A chain that has the hit's residues is found; superseded structures are replaced; the centre is the origin."""
    mean = (sum(range(16)) - 4) / 15  # residue 4 is missing
    found = Hit(name, HIT.sum_probs, HIT.query, HIT.template, HIT.query_index, HIT.template_index)
    (template,) = search().find([found], CHAIN, "1abc", NEW, 4)
    token = np.full(len(CHAIN), GAP)
    for place, own in PLACES.items():
        token[place] = tokens_of("GGMKTAYIAKQRWWGG")[own]
        exists = own != 4
        assert template.mask_L37[place].tolist() == [exists, exists, *[False] * 35]
        assert template.position_L373[place, CA].tolist() == pytest.approx([own - mean, 0.5, 0] if exists else [0] * 3)
        assert template.position_L373[place, 0].tolist() == pytest.approx([own - mean, -0.5, 0] if exists else [0] * 3)
        assert not template.position_L373[place, 2:].any()
    assert template.token_L.tolist() == token.tolist()
    unaligned = [place for place in range(len(CHAIN)) if place not in PLACES]
    assert not template.mask_L37[unaligned].any()
    assert not template.position_L373[unaligned].any()


def test_a_structure_with_a_large_gap_is_left_out(search: Callable[..., TemplateSearch]) -> None:
    far = Hit("4xyz_A", 9.0, HIT.query, HIT.template, HIT.query_index, HIT.template_index)
    assert len(search().find([far, HIT], CHAIN, "1abc", NEW, 4)) == 1


def test_the_best_hits_come_first(search: Callable[..., TemplateSearch]) -> None:
    hits = [hit("2xyz_A", CHAIN[n : n + 12], "MKTAYIAKQRWW", first=n, score=n % 5) for n in range(5)]
    found = search().find(hits, CHAIN, "1abc", NEW, 3)
    assert [int((template.token_L < GAP).argmax()) for template in found] == [4, 3, 2]


def test_training_draws_from_the_best_twenty(search: Callable[..., TemplateSearch]) -> None:
    hits = [hit("2xyz_A", CHAIN[n % 8 : n % 8 + 12], "MKTAYIAKQRWW", n % 8, score=n) for n in range(30)]
    scores = set()
    for seed in range(40):
        marked = [
            Hit(h.name, h.sum_probs, h.query, h.template, h.query_index * (h.sum_probs >= 10), h.template_index)
            for h in hits
        ]
        found = search().find(marked, CHAIN, "1abc", NEW, 4, np.random.default_rng(seed))
        assert len(found) == 4
        assert all((template.token_L < GAP).sum() == 12 for template in found)
        scores.add(tuple(int((template.token_L < GAP).argmax()) for template in found))
    assert len(scores) > 20


def test_training_continues_after_the_best_twenty(search: Callable[..., TemplateSearch]) -> None:
    """None of the 20 best hits has a structure without a large gap; the next ones come in the order of their scores."""
    hits = [hit("4xyz_A", CHAIN[:12], "MKTAYIAKQRWW", score=9)] * 20
    hits += [hit("2xyz_A", CHAIN[n : n + 12], "MKTAYIAKQRWW", n, score=n) for n in range(6)]
    found = search().find(hits, CHAIN, "1abc", NEW, 4, np.random.default_rng(0))
    assert [int((template.token_L < GAP).argmax()) for template in found] == [5, 4, 3, 2]


@pytest.mark.parametrize(
    ("template", "first"), [("MKTXYIAKQRWW", 2), ("MKTAYIAXXRWW", 2), ("SSSSSSSSSSSS", 0)], ids=["both", "X", "other"]
)
def test_an_unknown_residue_matches_any(template: str, first: int, search: Callable[..., TemplateSearch]) -> None:
    """In the hit and in the structure, and in another chain than the hit's; the types are the hit's."""
    (found,) = search().find([hit("5xyz_A", CHAIN[:12], template)], CHAIN, "1abc", NEW, 4)
    assert found.token_L[:12].tolist() == tokens_of(template).tolist()
    assert found.position_L373[:12, CA, 0].tolist() == [first + place - 7.5 for place in range(12)]


def test_other_sequences_need_kalign(search: Callable[..., TemplateSearch]) -> None:
    other = hit("2xyz_A", "TAYIAKQRQISF", "KTAYLAKQRWWG", first=2)
    assert search().find([other], CHAIN, "1abc", NEW, 4) == []
    aligned = search(lambda first, second: (f"---{first}-", second))
    (template,) = aligned.find([other], CHAIN, "1abc", NEW, 4)
    assert template.token_L[2:14].tolist() == tokens_of("KTAYIAKQRWWG").tolist()


def test_realigned_residues() -> None:
    align = {("MKTAY", "MKTGAY"): ("MKT-AY", "MKTGAY"), ("MKTGAY", "MKTAY"): ("MKTGAY", "MKT-AY")}
    place = realigned("MKTAY", "MKTGAY", lambda *rows: align[rows])
    assert place is not None
    assert place.tolist() == [0, 1, 2, 4, 5]
    place = realigned("MKTGAY", "MKTAY", lambda *rows: align[rows])
    assert place is not None
    assert place.tolist() == [0, 1, 2, -1, 3, 4]
    assert realigned("MKTAYIAKQR", "MKTAYIAKQR", lambda first, second: (first, "MKTAYIAKWW")) is None


def test_kalign_is_called_with_both_sequences(tmp_path: Path) -> None:
    program = tmp_path / "kalign"
    program.write_text('#!/bin/sh\n[ "$1$3$5 $6" = "-i-o-f fasta" ] || exit 3\nsed "s/^MKT$/M-K\\nT/" "$2" > "$4"\n')
    program.chmod(program.stat().st_mode | stat.S_IXUSR)
    assert kalign(str(program))("MKT", "MAKT") == ("M-KT", "MAKT")
    program.write_text("#!/bin/sh\necho no memory >&2\nexit 1\n")
    with pytest.raises(AlignmentError, match="failed with the exit code 1: no memory"):
        kalign(str(program))("MKT", "MAKT")
    program.write_text('#!/bin/sh\nsed "s/^MKT$/M-KA/" "$2" > "$4"\n')
    with pytest.raises(AlignmentError, match="did not align two sequences"):
        kalign(str(program))("MKT", "MAKT")


def test_hits_that_cannot_be_realigned_are_left_out_and_listed(search: Callable[..., TemplateSearch]) -> None:
    def fail(first: str, second: str) -> tuple[str, str]:
        raise AlignmentError("no memory")

    other = hit("2xyz_A", "TAYIAKQRQISF", "KTAYLAKQRWWG", first=2)
    searching = search(fail)
    assert len(searching.find([other, other, other, HIT], CHAIN, "1abc", NEW, 4)) == 1
    assert searching.left_out == ["2xyz_A: no memory"] * 3


def test_columns_beyond_the_chain_are_left_out(search: Callable[..., TemplateSearch]) -> None:
    (template,) = search().find([hit("2xyz_A", CHAIN[:12], "MKTAYIAKQRWW", 15)], CHAIN, "1abc", NEW, 4)
    assert template.token_L.tolist() == [GAP] * 15 + tokens_of("MKTAY").tolist()


def test_a_damaged_structure_is_named(search: Callable[..., TemplateSearch], tmp_path: Path) -> None:
    searching = search()
    path = tmp_path / DICTS / "xy"
    entries = pickle.loads(path.read_bytes())
    entries["2xyz"]["atoms"]["A"]["all_atom_mask"] = b"?", (16, 37)
    path.write_bytes(pickle.dumps(entries))
    with pytest.raises(DataError, match=r"structure 2xyz: .*; prepare the data again"):
        searching.find([HIT], CHAIN, "1abc", NEW, 4)
