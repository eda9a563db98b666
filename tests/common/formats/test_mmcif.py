"""mmCIF: quotes, texts of several lines, loops, missing values, and damaged files."""

from __future__ import annotations

import pytest

from common.formats.mmcif import encode_category, read_categories

FILE = """\
# a comment
data_1ABC
_entry.id   1ABC
_Exptl.Method  'X-RAY DIFFRACTION'   # a comment behind a value
_refine.ls_d_res_high  .
_refine.details
;first line
 'second' line # no comment
;
#
loop_
_atom_site.id
_atom_site.label_atom_id
_atom_site.x
1 "O5'" 1.5
2 C1' ?
3 'a "b" c'
'?' 4 CA#1 2.5
5
;over
lines
; 3.5
#
loop_
_other.a
1 2 3
loop_ _short.a _short.b 1 2
3 4
"""


def test_values_of_all_forms_are_read() -> None:
    found = read_categories(FILE, ("entry", "exptl", "refine", "atom_site", "short", "absent"))
    assert found == {
        "entry": {"id": ["1ABC"]},
        "exptl": {"method": ["X-RAY DIFFRACTION"]},
        "refine": {"ls_d_res_high": [""], "details": ["first line\n 'second' line # no comment"]},
        "atom_site": {
            "id": ["1", "2", "3", "4", "5"],
            "label_atom_id": ["O5'", "C1'", 'a "b" c', "CA#1", "over\nlines"],
            "x": ["1.5", "", "?", "2.5", "3.5"],
        },
        "short": {"a": ["1", "3"], "b": ["2", "4"]},
    }


def test_only_the_first_block_counts() -> None:
    assert read_categories("data_a\n_entry.id 1\ndata_b\n_entry.id 2\n", ["entry"]) == {"entry": {"id": ["1"]}}


def test_lines_may_end_with_a_carriage_return() -> None:
    assert read_categories(FILE.replace("\n", "\r\n"), ["atom_site", "refine"]) == read_categories(
        FILE, ["atom_site", "refine"]
    )


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("nothing", "no data block"),
        ("data_a\nloop_\n_b.c\n_b.d\n1 2 3\n", "ends within a row"),
        ("data_a\n_b.c\n;text\n", "line 3: the text that starts here has no end"),
        ("data_a\n_b.c 'text\n", "line 2: a quoted text has no end"),
        ("data_a\n_b.c\n_b.d 1\n", "_b.c has no value"),
        ("data_a\n_b.c 1 2\n", "'2' belongs to no name"),
        ("data_a\n_b.c 1\n_b.c 2\n", "a second _b.c"),
        ("data_a\nloop_\n1 2\n", "a loop of 0 categories"),
    ],
)
def test_a_damaged_file_is_an_error(text: str, complaint: str) -> None:
    with pytest.raises(ValueError, match=complaint):
        read_categories(text, ["b"])


def test_written_values_are_read_back() -> None:
    columns = {"a": ["1", "O5'", 'say "x"', "", "loop_", "two words"], "b": ["_x", "#c", ";d", "?", ".", "a#b"]}
    assert read_categories("data_x\n" + encode_category("c", columns), ["c"]) == {"c": columns}
