"""A3M, Stockholm and HHR against files that were written by hand."""

from __future__ import annotations

import pytest

from common.formats.alignments import read_a3m, read_hhr, stockholm_to_a3m

A3M = b""">query some words > more
MKT-
AY
>one\r
aaMK
bT-AcY
>two
--.---Ydd
"""


def test_insertions_are_counted_before_the_next_column() -> None:
    """Rows may have several lines; insertions behind the last column do not count."""
    found = read_a3m(A3M)
    assert [bytes(row).decode() for row in found.letters] == ["MKT-AY", "MKT-AY", "-----Y"]
    assert found.deletions.tolist() == [[0] * 6, [2, 0, 1, 0, 0, 1], [0] * 6]


def test_an_empty_alignment_has_no_rows() -> None:
    assert read_a3m(b"\n").letters.shape == (0, 0)


@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        (">a\nMK\n>b\nMKT\n", "row 2 has 3 columns, the first one 2"),
        (">a\nM*\n", r"has the character '\*'"),
        ("MKT\n", "no row that starts with >"),
    ],
)
def test_a_damaged_alignment_is_an_error(content: str, complaint: str) -> None:
    with pytest.raises(ValueError, match=complaint):
        read_a3m(content.encode())


STOCKHOLM = """# STOCKHOLM 1.0
#=GF ID x
query  MK.T
one    MKaT
#=GR one PP 9999
two    .-GT

query  A..
one    -cA
two    W-Y
//
"""


def test_stockholm_becomes_columns_of_the_query() -> None:
    assert stockholm_to_a3m(STOCKHOLM) == ">query\nMKTA\n>one\nMKaT-ca\n>two\n--gTWy\n"


@pytest.mark.parametrize(("text", "complaint"), [("# nothing\n", "no rows"), ("a MK\nb M\n", "row 'b' has 1 columns")])
def test_a_damaged_stockholm_file_is_an_error(text: str, complaint: str) -> None:
    with pytest.raises(ValueError, match=complaint):
        stockholm_to_a3m(text)


HHR = """Query         1abc_A
Match_columns 8

 No Hit                             Prob E-value
  1 2XYZ_B protein                  99.9 1E-30

No 1
>2XYZ_B protein; from somewhere
Probab=99.90  E-value=1E-30  Score=50.0  Aligned_cols=4  Identities=80%  Sum_probs=4.5  Template_Neff=5.0

Q ss_pred             CCCCC
Q 1abc_A            3 MK-TA    6 (8)
Q Consensus         3 mk-ta    6 (8)
                      || ||
T Consensus        11 mkg-a   14 (30)
T 2XYZ_B           11 MKG-A   14 (30)
T ss_dssp             HHH-H

Q 1abc_A            7 --Y    7 (8)
T 2XYZ_B           15 GGF   17 (30)

No 2
>3aaa_C
Probab=10  Sum_probs=1.5

Q 1abc_A            1 M    1 (8)
T 3aaa_C            1 M    1 (9)

Done!
"""


def test_hits_have_the_positions_of_their_columns() -> None:
    first, second = read_hhr(HHR)
    assert (first.name, first.sum_probs, first.query, first.template) == ("2XYZ_B", 4.5, "MK-TA--Y", "MKG-AGGF")
    assert first.query_index.tolist() == [2, 3, -1, 4, 5, -1, -1, 6]
    assert first.template_index.tolist() == [10, 11, 12, -1, 13, 14, 15, 16]
    assert first.aligned == 4
    assert (second.name, second.query_index.tolist()) == ("3aaa_C", [0])
    assert read_hhr("Query 1abc_A\n") == read_hhr("") == []


@pytest.mark.parametrize(
    ("old", "new", "complaint"),
    [
        ("Query ", "", "it does not begin with Query"),
        ("Sum_probs=1.5", "", "hit 2 has no description or no Sum_probs"),
        ("            7 --Y    7", "            8 --Y    8", "hit 1: the row .* does not go on where"),
        ("MKG-A   14", "MKGGA   14", "hit 1: the row .* does not go on where"),
        ("1 M    1 (9)", "1 MK    2 (9)", "hit 2 has 1 columns of the query and 2 of the template"),
        ("1 M    1 (9)", f"{2**64} M {2**64} (9)", "hit 2: the row .* is not within 2,147,483,648 residues"),
        ("1 M    1 (9)", "0 M    0 (9)", "hit 2: the row .* is not within 2,147,483,648 residues"),
    ],
)
def test_a_damaged_hit_is_an_error(old: str, new: str, complaint: str) -> None:
    assert old in HHR
    with pytest.raises(ValueError, match=complaint):
        read_hhr(HHR.replace(old, new))
