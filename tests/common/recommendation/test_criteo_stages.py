"""The steps of the preparation, each against plain loops or the published definition."""

from __future__ import annotations

import gzip
from itertools import chain

import numpy as np
import pytest
from criteo_logs import as_text, write_days

from common.errors import DataError
from common.recommendation.criteo.preparation import multi_hot, shuffle
from common.recommendation.criteo.preparation.days import Day, Samples
from common.recommendation.criteo.preparation.numbering import Numbering, number_feature
from common.recommendation.criteo.preparation.tsv import read_lines

GOOD = (1, [5] * 13, ["0000002a"] * 26)


@pytest.mark.parametrize("block_bytes", [400, 1 << 20])
@pytest.mark.parametrize("suffix", ["", ".gz"])
@pytest.mark.parametrize("end", ["\n", ""], ids=["line feed", "no line feed"])
def test_lines_are_those_of_int_and_split(tmp_path, block_bytes, suffix, end):
    days = write_days(tmp_path)
    lines = list(chain.from_iterable(days))
    lines += [(0, [-2, None, 2**31 - 1, *[0] * 10], ["80000000", "ffffffff", "FFF", "f", None, *["7fffffff"] * 21])]
    path = tmp_path / f"all{suffix}"
    with (gzip.open if suffix else open)(path, "wb") as file:
        file.write(("".join(map(as_text, lines)).removesuffix("\n") + end).encode())
    blocks = list(read_lines(path, block_bytes))
    assert (len(blocks) > 3) == (block_bytes == 400)
    assert np.concatenate([block.labels for block in blocks]).tolist() == [label for label, _, _ in lines]
    counts = np.concatenate([block.counts for block in blocks])
    assert counts.tolist() == [[value or 0 for value in integers] for _, integers, _ in lines]
    for feature in range(26):
        found = np.concatenate([block.categories[feature] for block in blocks])
        assert found.tolist() == [int(texts[feature] or "0", 16) for _, _, texts in lines]


def changed(place, text):
    fields = as_text(GOOD).rstrip("\n").split("\t")
    fields[place] = text
    return "\t".join(fields) + "\n"


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (as_text(GOOD).rsplit("\t", 3)[0] + "\n", "Expected 40 columns, got 37"),
        (as_text(GOOD)[:-10], "Row #3: Expected 40 columns, got 39"),
        (changed(4, str(2**31)), "Row #3: CSV conversion error to int32: invalid value '2147483648'"),
        (changed(0, ""), "line 3 has no label"),
        (changed(0, "2"), "line 3 has the label 2"),
        (changed(4, "seven"), "behind line 0: .*invalid value 'seven'"),
        (changed(20, "12345g"), "line 3 has '12345g' as C7"),
        (changed(20, "123456789"), "line 3 has '123456789' as C7"),
        ("\n", "line 3 has no label"),
    ],
)
def test_a_bad_line_is_one_error(tmp_path, line, message):
    path = tmp_path / "day_3"
    path.write_text(as_text(GOOD) * 2 + line)
    with pytest.raises(DataError, match=f"day_3.*{message}"):
        list(read_lines(path))


def test_a_compressed_day_that_was_cut_off_is_refused(tmp_path):
    path = tmp_path / "day_3.gz"
    content = gzip.compress("".join(map(as_text, chain.from_iterable(write_days(tmp_path)))).encode())
    path.write_bytes(content[:-100])
    with pytest.raises(DataError, match=r"day_3\.gz"):
        list(read_lines(path))


def test_numbers_are_given_in_the_order_of_first_appearance(tmp_path):
    random = np.random.default_rng(0)
    blocks = [[random.integers(0, 2**32, 30, dtype=np.uint32)[random.integers(0, 30, rows)] for rows in (50, 1, 7)]]
    blocks += [[blocks[0][0][:20], random.integers(0, 2**32, 9, dtype=np.uint32)]]
    days = []
    for number, own in enumerate(blocks):
        folder = tmp_path / f"{number}"
        folder.mkdir()
        # Of each block 26 features; the one that is looked at is the third.
        np.concatenate([np.stack([block * 0] * 2 + [block] + [block * 0] * 23).ravel() for block in own]).tofile(
            folder / "raw"
        )
        days.append(Day(folder, tuple(map(len, own))))
    values = np.concatenate([*chain.from_iterable(blocks)])
    known: dict[int, int] = {}
    expected = [known.setdefault(value, 2 + len(known)) for value in values.tolist()]
    for chunk in (1, 10, 1000):
        samples = Samples(tuple(days), tmp_path / f"ids {chunk}")
        assert number_feature(samples, 2, 2, None, chunk) == {"categories": len(known)}
        assert np.fromfile(samples.ids_file(2), np.int32).tolist() == expected


def test_a_numbering_goes_on():
    numbering = Numbering(0)
    assert numbering.number(np.array([7, 2**31 + 5, 7], np.uint32)).tolist() == [0, 1, 0]
    assert numbering.number(np.array([3, 7, 2**32 - 1, 3, 2**31 + 5], np.uint32)).tolist() == [2, 0, 3, 2, 1]
    assert len(numbering) == 4


ROWS, HOT = (11, 1, 300, 5), (4, 3, 1, 7)


def published_tables(rows, hotness):
    """As the data set's authors define them: one draw a table, from one generator."""
    np.random.seed(0)
    tables = []
    for count, hot in zip(rows, hotness, strict=True):
        table = np.arange(count).reshape(-1, 1)
        if hot > 1:
            table = np.concatenate([table, np.random.randint(0, count, size=(count, hot - 1))], axis=1)
        tables.append(table.astype(np.int32))
    return tables


@pytest.mark.parametrize("chunk", [1, 64, 1 << 22])
def test_multi_hot_ids_are_those_of_one_draw_for_each_table(tmp_path, chunk):
    multi_hot.write_id_tables(tmp_path, ROWS, HOT, chunk)
    expand = multi_hot.MultiHot(tmp_path, ROWS, HOT)
    ids = np.random.default_rng(0).integers(0, 1000, (50, 4)).astype(np.int32)
    found = expand(ids)
    expected = [table[ids[:, k] % len(table)] for k, table in enumerate(published_tables(ROWS, HOT))]
    np.testing.assert_array_equal(found, np.concatenate(expected, axis=1), strict=True)
    assert (found[:, 0] == ids[:, 0] % 11).all()


def test_the_order_of_the_tables_decides_the_draws(tmp_path):
    tables = []
    for name, order in (("as they are", [0, 1, 2, 3]), ("turned", [3, 2, 1, 0])):
        rows, hot = [ROWS[k] for k in order], [HOT[k] for k in order]
        multi_hot.write_id_tables(tmp_path / name, rows, hot)
        expand = multi_hot.MultiHot(tmp_path / name, rows, hot)
        begin = sum(hot[: order.index(0)])
        tables.append(expand(np.repeat(np.arange(11, dtype=np.int32)[:, None], 4, 1))[:, begin : begin + 4])
    assert (tables[0][:, 0] == tables[1][:, 0]).all()
    assert (tables[0] != tables[1]).any()


@pytest.mark.parametrize("samples", [1, 2, 1000, 100_003])
def test_the_order_of_samples_is_that_of_a_shuffled_matrix(samples):
    matrix = np.repeat(np.arange(samples, dtype=np.float32)[:, None], 3, 1)
    np.random.seed(0)
    np.random.shuffle(matrix)
    assert shuffle.shuffled(samples).tolist() == matrix[:, 1].tolist()


def test_a_bucket_needs_each_of_its_rows(tmp_path):
    (tmp_path / "0").write_bytes(bytes(3 * 160))
    np.array([0, 1, 4], np.uint32).tofile(tmp_path / "0.places")
    assert shuffle.read_bucket([tmp_path / "0"], 0, 2).shape == (2, 40)
    with pytest.raises(DataError, match="has 1 of 2 rows"):
        shuffle.read_bucket([tmp_path / "0"], 3, 5)
