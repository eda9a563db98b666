"""Tars of samples: numbers in their names, and texts in them."""

from __future__ import annotations

import pytest

from common.errors import DataError
from common.formats.tar_index import decode_text, numbered_tars


def test_tars_are_listed_by_number(tmp_path):
    for number in (1, 0, 2):
        (tmp_path / f"part-{number:02d}.tar").touch()
    (tmp_path / "._part-03.tar").touch()
    assert [path.name for path in numbered_tars(tmp_path, "part-{:02d}.tar")] == [
        "part-00.tar", "part-01.tar", "part-02.tar",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("names", "message"),
    [
        (["part-01.tar"], r"has part-01\.tar where part-00\.tar belongs"),
        (["part-00.tar", "part-02.tar"], r"has part-02\.tar where part-01\.tar belongs"),
        (["part-00.tar", "part-copy.tar"], r"has part-copy\.tar where part-01\.tar belongs"),
    ],
    ids=["first", "gap", "foreign"],
)
def test_a_missing_or_foreign_tar_is_named(names, message, tmp_path):
    for name in names:
        (tmp_path / name).touch()
    with pytest.raises(DataError, match=message):
        numbered_tars(tmp_path, "part-{:02d}.tar")


def test_texts_must_be_utf_8():
    assert decode_text(b"ein gr\xc3\xbcnes Quadrat", "7.txt") == "ein grünes Quadrat"
    with pytest.raises(DataError, match=r"7\.txt is no UTF-8"):
        decode_text(b"ein gr\xfcnes Quadrat", "7.txt")
