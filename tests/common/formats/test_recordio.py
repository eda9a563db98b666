"""RecordIO, compared with records built by hand, and its errors."""

import os
import struct

import pytest

from common.errors import DataError
from common.formats.recordio import ImageRecord, RecordReader, RecordWriter, frame, pack_image, unpack_image

MAGIC = b"\x0a\x23\xd7\xce"


def write(tmp_path, payloads):
    rec = tmp_path / "a.rec"
    with RecordWriter(rec) as writer:
        for number, payload in enumerate(payloads):
            writer.write(10 * number, payload)
    return rec


def test_one_record_equals_bytes_put_together_by_hand(tmp_path):
    rec = tmp_path / "a.rec"
    with RecordWriter(rec) as writer:
        writer.write(7, pack_image(ImageRecord(7, (3.0,), b"JPEG!")))
    by_hand = (
        MAGIC
        + bytes([29, 0, 0, 0])  # flag 0, 24 + 5 bytes
        + bytes([0, 0, 0, 0])  # header flag: the label is in the header
        + bytes([0, 0, 0x40, 0x40])  # 3.0
        + bytes([7, 0, 0, 0, 0, 0, 0, 0])
        + bytes(8)
        + b"JPEG!"
        + bytes(3)
    )
    assert rec.read_bytes() == by_hand
    assert (tmp_path / "a.idx").read_text() == "7\t0\n"


def test_reader_understands_a_record_put_together_by_hand(tmp_path):
    (tmp_path / "b.rec").write_bytes(b"\xff" * 8 + MAGIC + struct.pack("<I", 3) + b"abc\0")
    (tmp_path / "b.idx").write_text("42\t8\n")
    with RecordReader(tmp_path / "b.rec") as reader:
        assert reader.read(0) == b"abc"
        assert reader.ids.tolist() == [42]


def test_several_labels_follow_the_header():
    payload = pack_image(ImageRecord(1, (1.5, -2.0), b"xy"))
    assert payload == struct.pack("<IfQQ2f", 2, 0.0, 1, 0, 1.5, -2.0) + b"xy"
    assert unpack_image(payload) == ImageRecord(1, (1.5, -2.0), b"xy")


def test_aligned_magic_cuts_a_payload_into_parts():
    framed = frame(b"head" + MAGIC + b"mid" + b"!" + MAGIC + b"tail5")
    assert framed == (
        MAGIC + struct.pack("<I", 1 << 29 | 4) + b"head" + MAGIC + struct.pack("<I", 2 << 29 | 4) + b"mid!"
        + MAGIC + struct.pack("<I", 3 << 29 | 5) + b"tail5" + bytes(3)
    )  # fmt: skip


def test_magic_between_alignments_stays_whole():
    payload = b"x" + MAGIC + b"yyy"
    assert frame(payload) == MAGIC + struct.pack("<I", 8) + payload


@pytest.mark.parametrize(
    "payload",
    [b"", b"a", MAGIC, MAGIC + MAGIC, b"abcd" + MAGIC, MAGIC + b"ab", b"a" + MAGIC + MAGIC, b"abc" + MAGIC * 3 + b"zz"],
    ids=[
        "empty",
        "one byte",
        "magic",
        "magic twice",
        "magic at the end",
        "magic at the start",
        "magic twice, unaligned",
        "magic three times",
    ],
)
def test_any_payload_is_read_back(tmp_path, payload):
    with RecordReader(write(tmp_path, [b"first", payload, b"last"])) as reader:
        assert [reader.read(i) for i in range(3)] == [b"first", payload, b"last"]


def test_truncated_file_names_file_record_and_offset(tmp_path):
    rec = write(tmp_path, [b"a" * 100, b"b" * 100])
    os.truncate(rec, 150)
    with RecordReader(rec) as reader, pytest.raises(DataError, match=r"a\.rec: record 10 at byte 108 .*truncated"):
        reader.read(1)


def test_bad_magic_names_file_record_and_offset(tmp_path):
    rec = write(tmp_path, [b"a" * 100, b"b" * 100])
    with open(rec, "r+b") as file:
        file.seek(108)
        file.write(b"oops")
    with RecordReader(rec) as reader, pytest.raises(DataError, match=r"a\.rec: record 10 at byte 108 .*magic"):
        reader.read(1)


def test_index_that_points_outside_is_refused(tmp_path):
    rec = write(tmp_path, [b"a" * 100, b"b" * 100])
    os.truncate(rec, 60)
    with pytest.raises(DataError, match="record 10 at byte 108 lies outside"):
        RecordReader(rec)


def test_part_out_of_order_is_refused(tmp_path):
    (tmp_path / "c.rec").write_bytes(MAGIC + struct.pack("<I", 3 << 29 | 4) + b"tail")
    (tmp_path / "c.idx").write_text("0\t0\n")
    with RecordReader(tmp_path / "c.rec") as reader, pytest.raises(DataError, match="continuation flag 3"):
        reader.read(0)


@pytest.mark.parametrize("text", ["0", "zero\t0\n", "1\t0\n2\n"])
def test_garbled_index_is_refused(tmp_path, text):
    rec = write(tmp_path, [b"a"])
    (tmp_path / "a.idx").write_text(text)
    with pytest.raises(DataError, match="is no RecordIO index"):
        RecordReader(rec)


def test_missing_files_are_named(tmp_path):
    with pytest.raises(DataError, match=r"none\.idx is missing"):
        RecordReader(tmp_path / "none.rec")


def test_files_get_their_names_when_the_writer_finishes(tmp_path):
    rec = tmp_path / "a.rec"
    writer = RecordWriter(rec)
    writer.write(0, b"abc")
    assert not rec.exists()
    writer.finish()
    assert rec.exists()


@pytest.mark.parametrize("cut", [0, 1, 20, 119, 120, 121, 300])
def test_interrupted_writer_continues_after_its_last_whole_record(tmp_path, cut):
    payloads = [bytes([i]) * 110 for i in range(4)]
    rec = write(tmp_path, payloads)
    whole = rec.read_bytes(), rec.with_suffix(".idx").read_bytes()
    rec.replace(tmp_path / "a.rec.partial")
    rec.with_suffix(".idx").replace(tmp_path / "a.idx.partial")
    os.truncate(tmp_path / "a.rec.partial", cut)
    with RecordWriter(rec, resume=True) as writer:
        assert writer.written == (cut + 2) // 120  # 118 bytes and two of padding, which may be missing
        for number in range(writer.written, 4):
            writer.write(10 * number, payloads[number])
    assert (rec.read_bytes(), rec.with_suffix(".idx").read_bytes()) == whole
