"""Days as Criteo's parquet files: the same prepared bytes as from text, and what is refused, by name."""

from __future__ import annotations

import gzip
import json
import shutil

import pyarrow
import pytest
from criteo_logs import as_text, day_folder, parquet_table, part_name, write_days, write_parquet_days
from pyarrow import parquet

from benchmarks.dlrm.prepare import COMMANDS as DLRM
from benchmarks.dlrm_dcnv2.prepare import COMMANDS as DLRM_DCNV2
from common.data import synthetic
from common.errors import DataError
from common.recommendation.criteo.preparation.parquet_parts import read_parts

pytestmark = pytest.mark.usefixtures("no_waiting_for_the_disk")

BENCHMARKS = {"dlrm": DLRM, "dlrm_dcnv2": DLRM_DCNV2}


@pytest.fixture(scope="module")
def raw(tmp_path_factory):
    root = tmp_path_factory.mktemp("criteo")
    days = write_days(root / "text")
    write_parquet_days(root / "parquet" / "data", days)
    for form in ("text", "parquet"):
        synthetic.mark(root / form, {"kind": "test"})
    return root, days


def prepare(commands, raw_dir, data_dir):
    return commands.run("prepare", ["--raw-dir", str(raw_dir), "--data-dir", str(data_dir), "--workers", "1"])


@pytest.mark.parametrize("benchmark", BENCHMARKS)
@pytest.mark.parametrize("below", ["data", "."], ids=["as in the repository", "without its folder"])
def test_parquet_makes_the_bytes_that_text_makes(raw, tmp_path, capsys, benchmark, below):
    commands = BENCHMARKS[benchmark]
    folder = raw[0] / "parquet"
    if below == ".":
        folder = tmp_path / "raw"
        shutil.copytree(raw[0] / "parquet" / "data", folder)
        synthetic.mark(folder, {"kind": "test"})
    assert prepare(commands, folder, tmp_path / "parquet") == 0
    assert "Whether their rows are in the order of the original text is not known" in capsys.readouterr().out
    assert commands.run("verify", ["--data-dir", str(tmp_path / "parquet")]) == 0
    assert prepare(commands, raw[0] / "text", tmp_path / "text") == 0
    assert "parquet" not in capsys.readouterr().out.splitlines()[-1]
    files = [path for path in (tmp_path / "text").iterdir() if path.suffix == ".bin"]
    assert len(files) == 2
    for path in files:
        assert path.read_bytes() == (tmp_path / "parquet" / path.name).read_bytes()
    sources = [json.loads((tmp_path / form / "manifest.json").read_text())["source"] for form in ("text", "parquet")]
    assert [source["form"] for source in sources] == ["text", "parquet"]


def test_columns_may_stand_in_any_order_and_have_wider_types(raw, tmp_path):
    lines = raw[1][5]
    table = parquet_table(lines)
    wide = {pyarrow.int32(): pyarrow.int64(), pyarrow.string(): pyarrow.large_string()}
    fields = [pyarrow.field(field.name, wide[field.type]) for field in table.schema]
    other = table.cast(pyarrow.schema(fields)).select(table.column_names[::-1])
    for name, content in (("a", table), ("b", other.append_column("day", pyarrow.array(["x"] * len(lines))))):
        parquet.write_table(content, tmp_path / name)
    expected, found = (next(read_parts([tmp_path / name])) for name in ("a", "b"))
    assert found.labels.tolist() == expected.labels.tolist() == [label for label, _, _ in lines]
    assert found.counts.tolist() == expected.counts.tolist()
    assert [values.tolist() for values in found.categories] == [values.tolist() for values in expected.categories]


def rewritten(change):
    """A damage: the first part of day 3 gets another table."""

    def damage(path):
        parquet.write_table(change(parquet.read_table(path)), path)

    return damage


def with_column(name, values, kind):
    return rewritten(lambda table: table.set_column(table.column_names.index(name), name, pyarrow.array(values, kind)))


def zeroed(path):
    """The header of the first page is lost, and the end of the file, which describes the columns, is whole."""
    content = path.read_bytes()
    path.write_bytes(content[:4] + bytes(20) + content[24:])


def cut_off(path):
    path.write_bytes(path.read_bytes()[:-100])


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (cut_off, "cut off or damaged"),
        (zeroed, "cut off or damaged"),
        (lambda path: path.write_bytes(b""), "cut off or damaged"),
        (lambda path: path.write_text("version https://git-lfs.github.com/spec/v1\n"), "cut off or damaged"),
        (rewritten(lambda table: table.drop_columns(["categorical_feature_7"])), "no column categorical_feature_7"),
        (with_column("integer_feature_2", ["1", "2"], "string"), "column integer_feature_2 is string, not int32"),
        (with_column("categorical_feature_2", [1, 2], "int64"), "column categorical_feature_2 is int64, not string"),
        (with_column("integer_feature_2", [1, 2**31], "int64"), "column integer_feature_2: Integer value 2147483648"),
        (
            with_column("categorical_feature_2", ["ff", "12345g"], "string"),
            "row 2 has '12345g' as categorical_feature_2",
        ),
        (
            with_column("categorical_feature_2", pyarrow.array([b"ff", b"\xff"]).view("string"), "string"),
            r"row 2 has '\\\\xff' as",
        ),
        (with_column("label", [0, None], "int32"), "row 2 has no label"),
        (with_column("label", [2, 0], "int32"), "row 1 has the label 2, not 0 or 1"),
        (with_column("integer_feature_4", [0, -3], "int32"), "row 2 has the count -3 as integer_feature_4"),
    ],
    ids=[
        *(
            "cut off",
            "damaged",
            "empty",
            "pointer",
            "no column",
            "integers as text",
            "categories as numbers",
            "beyond 32 bits",
        ),
        *("no hexadecimal", "no text", "no label", "label 2", "no logarithm"),
    ],
)
def test_a_wrong_part_is_named(raw, tmp_path, damage, message):
    folder = tmp_path / "raw"
    shutil.copytree(raw[0] / "parquet", folder)
    path = folder / "data" / day_folder(0) / part_name(8)
    damage(path)
    with pytest.raises(DataError, match=f"{path}.*{message}") as refused:
        prepare(DLRM_DCNV2, folder, tmp_path / "data")
    assert ("fetch it again" in str(refused.value)) == (message == "cut off or damaged")


@pytest.mark.parametrize("left", ["no folder", "no part", "an unfinished part"])
def test_a_missing_day_is_named(raw, tmp_path, left):
    shutil.copytree(raw[0] / "parquet", tmp_path / "raw")
    day = tmp_path / "raw" / "data" / "day=2015-02-28"
    shutil.rmtree(day)
    if left != "no folder":
        day.mkdir()
    if left == "an unfinished part":
        (day / f"{part_name(0)}.partial").touch()
    with pytest.raises(
        DataError, match=r"raw/data lacks day=2015-02-28; all 24 days .*, day=2015-02-15 to day=2015-03-10"
    ):
        prepare(DLRM, tmp_path / "raw", tmp_path / "data")


def write_sample(folder, days, suffix, end=None):
    folder.mkdir()
    for day, lines in enumerate(days):
        text = "".join(map(as_text, lines)).encode()
        content = gzip.compress(text)[:end] if suffix else text
        (folder / f"day_{day}{suffix}").write_bytes(content)


@pytest.mark.parametrize(
    ("form", "message"),
    [
        ("text", r"day_0 has 3 samples and not 195,841,983\. The files .* are an 11 % sample"),
        ("gzip", r"day_0\.gz has 3 samples and not 195,841,983\. The files .* are an 11 % sample"),
        ("gzip cut off", r"day_0\.gz, behind line .*the file is not whole\. The files .* are an 11 % sample"),
        ("parquet", r"day=2015-02-15 with its 3 parts has 3 samples and not 195,841,983\. Parts are missing"),
    ],
    ids=["text", "gzip", "gzip cut off", "parquet"],
)
def test_real_days_that_are_not_whole_are_refused_without_the_advice_to_fetch_the_same(raw, tmp_path, form, message):
    folder = tmp_path / "raw"
    if form == "parquet":
        shutil.copytree(raw[0] / "parquet", folder)
        (folder / synthetic.MARKER).unlink()
    else:
        write_sample(folder, raw[1], "" if form == "text" else ".gz", -20 if form == "gzip cut off" else None)
    with pytest.raises(DataError, match=message) as refused:
        prepare(DLRM_DCNV2, folder, tmp_path / "data")
    assert "fetch" not in str(refused.value)
