"""TFRecord files and their Examples, compared with TensorBoard's reader and writer and with Google's protobuf."""

from __future__ import annotations

import gzip
import struct

import numpy as np
import pytest

from common.formats.protobuf import Malformed, encode_field, encode_varint
from common.formats.tfrecord import (
    check_index,
    deflate,
    extents,
    frame,
    index_text,
    inflate,
    pack_example,
    records,
    unpack_example,
)

PAYLOADS = [b"", b"one", bytes(range(256)) * 300]
X, Y = bytes(range(200)), np.array([0.5, -1.0, 3.0e-5, 2.0], np.float32)


def payloads(data: bytes, checksums: bool = True) -> list[bytes]:
    return [bytes(payload) for _, payload in records(memoryview(data), checksums)]


def test_tensorboard_reads_our_records(tmp_path):
    stub = pytest.importorskip("tensorboard.compat.tensorflow_stub.pywrap_tensorflow")
    (tmp_path / "a").write_bytes(b"".join(map(frame, PAYLOADS)))
    reader = stub.PyRecordReader_New(str(tmp_path / "a"))
    assert [(reader.GetNext(), reader.record())[1] for _ in PAYLOADS] == PAYLOADS


def test_we_read_the_records_of_tensorboard(tmp_path):
    writer = pytest.importorskip("tensorboard.summary.writer.record_writer")
    with open(tmp_path / "a", "wb") as file:
        for payload in PAYLOADS:
            writer.RecordWriter(file).write(payload)
    assert payloads((tmp_path / "a").read_bytes()) == PAYLOADS


def example_class():
    """Return tf.train.Example, made from the published declaration of its messages."""
    pytest.importorskip("google.protobuf")
    from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

    kinds = descriptor_pb2.FieldDescriptorProto
    file = descriptor_pb2.FileDescriptorProto(name="example.proto", package="tensorflow", syntax="proto3")

    def declare(name: str, *declared: tuple[str, int, int, int, str | None]) -> descriptor_pb2.DescriptorProto:
        message = file.message_type.add(name=name)
        for field, number, label, kind, of in declared:
            message.field.add(name=field, number=number, label=label, type=kind, type_name=of and f".tensorflow.{of}")
        return message

    one, many, message = kinds.LABEL_OPTIONAL, kinds.LABEL_REPEATED, kinds.TYPE_MESSAGE
    declare("BytesList", ("value", 1, many, kinds.TYPE_BYTES, None))
    declare("FloatList", ("value", 1, many, kinds.TYPE_FLOAT, None))
    declare("Int64List", ("value", 1, many, kinds.TYPE_INT64, None))
    lists = [("bytes_list", 1, "BytesList"), ("float_list", 2, "FloatList"), ("int64_list", 3, "Int64List")]
    declare("Feature", *((name, number, one, message, of) for name, number, of in lists))
    features = declare("Features", ("feature", 1, many, message, "Features.FeatureEntry"))
    entry = features.nested_type.add(name="FeatureEntry")
    entry.options.map_entry = True
    entry.field.add(name="key", number=1, label=one, type=kinds.TYPE_STRING)
    entry.field.add(name="value", number=2, label=one, type=message, type_name=".tensorflow.Feature")
    declare("Example", ("features", 1, one, message, "Features"))
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return message_factory.GetMessageClass(pool.FindMessageTypeByName("tensorflow.Example"))


def test_an_example_is_four_nested_messages():
    """Computed by hand: Example, Features, the entry of y, and its Feature, with a FloatList of 1.0."""
    example = "0a0f0a0d0a0179120812060a040000803f"
    assert pack_example({"y": np.ones(1, np.float32)}).hex() == example


def test_protobuf_reads_our_example():
    example = example_class().FromString(pack_example({"x": X, "y": Y}))
    assert example.features.feature["x"].bytes_list.value == [X]
    assert np.array_equal(np.array(example.features.feature["y"].float_list.value, np.float32), Y)


def test_we_read_the_example_of_protobuf():
    example = example_class()()
    example.features.feature["x"].bytes_list.value.append(X)
    example.features.feature["y"].float_list.value.extend(Y.tolist())
    example.features.feature["z"].int64_list.value.append(5)
    found = unpack_example(memoryview(example.SerializeToString()))
    assert sorted(found) == ["x", "y"]
    assert bytes(found["x"]) == X
    assert np.array_equal(found["y"], Y)


def test_values_that_are_not_packed_are_read():
    """A writer may give every float32 value a field of its own: tag 0x0d and 4 bytes."""
    values = b"".join(b"\x0d" + struct.pack("<f", value) for value in Y)
    feature = encode_field(2, values)
    entry = encode_field(1, b"y") + encode_field(2, feature)
    found = unpack_example(memoryview(encode_field(1, encode_field(1, entry))))
    assert np.array_equal(found["y"], Y)


def test_an_incomplete_value_is_refused():
    entry = encode_field(1, b"y") + encode_field(2, encode_field(2, encode_field(1, b"\0" * 7)))
    with pytest.raises(Malformed, match="a list of float32 values has 7 bytes"):
        unpack_example(memoryview(encode_field(1, encode_field(1, entry))))


@pytest.mark.parametrize(
    "payload", [b"\x08\x05", encode_field(1, encode_field(1, encode_field(1, b"x")))], ids=["number", "name"]
)
def test_another_message_is_no_example(payload):
    """Its first field is a number, or an entry has a name without a feature."""
    with pytest.raises(Malformed):
        unpack_example(memoryview(payload))


def test_every_truncated_file_is_refused():
    whole = frame(b"one") + frame(b"two")
    for size in range(1, len(whole)):
        if size != len(frame(b"one")):
            with pytest.raises(Malformed, match=r"the record at byte (0|19) is truncated"):
                payloads(whole[:size])


def test_every_changed_byte_is_found():
    whole = frame(b"payload")
    for at in range(len(whole)):
        damaged = whole[:at] + bytes([whole[at] ^ 0x10]) + whole[at + 1 :]
        with pytest.raises(Malformed, match=r"the checksum of the (length|record) at byte 0 is wrong"):
            payloads(damaged)


def test_checksums_of_payloads_can_be_left_out():
    whole = frame(b"payload")
    assert payloads(whole.replace(b"pay", b"PAY"), checksums=False) == [b"PAYload"]
    with pytest.raises(Malformed, match="the checksum of the length at byte 0"):
        payloads(b"\x06" + whole[1:], checksums=False)


def test_a_number_of_more_than_32_bits_is_no_float32():
    values = encode_varint(1 << 3) + encode_varint(1 << 32)  # field 1 as a varint
    feature = encode_field(2, encode_field(2, values))
    example = encode_field(1, encode_field(1, encode_field(1, b"y") + feature))
    with pytest.raises(Malformed, match="a float32 value has the bits 0x100000000"):
        unpack_example(memoryview(example))


def test_a_gzip_stream_is_inflated_within_its_bound():
    content = bytes(1000) + b"end"
    assert inflate(memoryview(gzip.compress(content)), 1003) == content
    assert gzip.decompress(deflate(content)) == content
    with pytest.raises(Malformed, match="inflate to more than 1,002 bytes"):
        inflate(memoryview(gzip.compress(content)), 1002)


def test_a_damaged_gzip_stream_is_refused():
    packed = deflate(bytes(range(256)) * 10)
    with pytest.raises(Malformed, match="the gzip data end early"):
        inflate(memoryview(packed[:-5]), 10_000)
    with pytest.raises(Malformed, match="damaged"):
        inflate(memoryview(packed[:-8] + bytes(8)), 10_000)


def test_the_same_data_are_deflated_to_the_same_bytes():
    """The stream has neither time nor name: its header ends with 4 zero bytes, the level and the system."""
    assert deflate(b"data")[:8] == bytes.fromhex("1f8b080000000000")


def test_an_index_has_offset_and_size_of_every_record(tmp_path):
    """A payload of n bytes takes n + 16: 8 + 4 before and 4 behind it."""
    found = extents(memoryview(b"".join(map(frame, PAYLOADS))))
    assert index_text(found) == "0 16\n16 19\n35 76816\n"
    (tmp_path / "a.idx").write_text(index_text(found))
    check_index(tmp_path / "a.idx", found)


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("0 16\n16 20\n35 76816\n", "line 2 is '16 20', not '16 19'"),
        ("0 16\n", "it has 1 records, not 3"),
        ("", "it has 0 records, not 3"),
    ],
)
def test_the_index_of_another_file_is_refused(text, complaint, tmp_path):
    (tmp_path / "a.idx").write_text(text)
    with pytest.raises(Malformed, match=rf"a\.idx is the index of another file: {complaint}"):
        check_index(tmp_path / "a.idx", [(0, 16), (16, 19), (35, 76816)])
