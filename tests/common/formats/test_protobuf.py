"""Protocol Buffers' wire format, compared with the examples of its documentation."""

import pytest

from common.formats.protobuf import Malformed, encode_field, encode_varint, fields, messages, varint

# https://protobuf.dev/programming-guides/encoding
NUMBERS = {1: "01", 127: "7f", 128: "8001", 150: "9601", 300: "ac02", 2**64 - 1: "ffffffffffffffffff01"}


@pytest.mark.parametrize(("number", "encoded"), NUMBERS.items())
def test_a_number_is_groups_of_seven_bits(number, encoded):
    assert encode_varint(number).hex() == encoded
    assert varint(bytes.fromhex(f"00{encoded}ff"), 1) == (number, 1 + len(encoded) // 2)


def test_a_text_has_its_field_number_and_length():
    assert encode_field(2, b"testing").hex() == "120774657374696e67"


def test_fields_are_found_by_number_in_order():
    """Field 1 is 150, field 2 a text that occurs twice, field 3 has 8 bytes and field 4 has 4 bytes."""
    message = bytes.fromhex("08960112036162631901000000000000802502000000120164")
    assert fields(message) == {1: [150], 2: [b"abc", b"d"], 3: [2**63 + 1], 4: [2]}


def test_texts_of_a_view_are_views():
    """The content of a large field is not copied."""
    message = bytearray(encode_field(1, b"abc"))
    (text,) = messages(fields(memoryview(message)), 1)
    message[2:] = b"xyz"
    assert bytes(text) == b"xyz"


@pytest.mark.parametrize(
    ("message", "complaint"),
    [
        ("08", "a number is cut off"),
        ("08" + 11 * "ff", "a number is cut off"),
        ("1205616263", "it ends 2 bytes early"),
        ("0b", "unknown kind 3"),
    ],
)
def test_a_damaged_message_is_refused(message, complaint):
    with pytest.raises(Malformed, match=complaint):
        fields(bytes.fromhex(message))


def test_a_number_is_no_message():
    with pytest.raises(Malformed, match="field 1 is not a message"):
        messages(fields(bytes.fromhex("089601")), 1)
