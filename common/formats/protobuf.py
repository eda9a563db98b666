"""Wire format of Protocol Buffers, without generated code (https://protobuf.dev/programming-guides/encoding).

A message is a sequence of fields. A field is a varint of ``number << 3 | kind``, followed by a varint (kind 0), 8 bytes
(kind 1), a length and that many bytes (kind 2), or 4 bytes (kind 5).
"""

from __future__ import annotations

from typing import TypeVar

Data = TypeVar("Data", bytes, memoryview)


class Malformed(ValueError):
    """The bytes violate their format. The caller adds the name of the file."""


def varint(data: bytes | memoryview, at: int) -> tuple[int, int]:
    """Return the number at ``at``, and the position behind it."""
    value = 0
    for shift in range(0, 70, 7):
        if at >= len(data):
            break
        value |= (data[at] & 0x7F) << shift
        at += 1
        if data[at - 1] < 0x80:
            return value, at
    raise Malformed("a number is cut off")


def piece(data: Data, at: int, size: int) -> Data:
    """Return ``size`` bytes from ``at`` on; of a memoryview, a view of them."""
    if at + size > len(data):
        raise Malformed(f"it ends {at + size - len(data)} bytes early")
    return data[at : at + size]


def fields(message: Data) -> dict[int, list[int | Data]]:
    """Return the fields of a message by number: integers, or the bytes of texts and nested messages.

    Raises:
        Malformed: the message is truncated, or has a field of an unknown kind.
    """
    found: dict[int, list[int | Data]] = {}
    at = 0
    while at < len(message):
        tag, at = varint(message, at)
        value: int | Data
        kind = tag & 7
        if kind == 0:
            value, at = varint(message, at)
        elif kind in (1, 5):
            size = 8 if kind == 1 else 4
            value = int.from_bytes(piece(message, at, size), "little")
            at += size
        elif kind == 2:
            size, at = varint(message, at)
            value = piece(message, at, size)
            at += size
        else:
            raise Malformed(f"a message has a field of the unknown kind {kind}")
        found.setdefault(tag >> 3, []).append(value)
    return found


def messages(found: dict[int, list[int | Data]], number: int) -> list[Data]:
    """Return the contents of all fields ``number``, each a text or a nested message.

    Raises:
        Malformed: one of them is a number.
    """
    nested = []
    for value in found.get(number, []):
        if isinstance(value, int):
            raise Malformed(f"field {number} is not a message")
        nested.append(value)
    return nested


def encode_varint(value: int) -> bytes:
    """Return a number that is not negative as a varint."""
    encoded = bytearray()
    while value >= 0x80:
        encoded.append(value & 0x7F | 0x80)
        value >>= 7
    encoded.append(value)
    return bytes(encoded)


def encode_field(number: int, content: bytes) -> bytes:
    """Return a text or a nested message as the field ``number``."""
    return encode_varint(number << 3 | 2) + encode_varint(len(content)) + content
