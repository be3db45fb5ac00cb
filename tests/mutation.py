"""Messages with extreme fields, and bytes that are no message any more. Seeded, so that a failure comes back."""

import math
import random
import struct
from typing import Any

from google.protobuf.descriptor import FieldDescriptor as F
from google.protobuf.message import Message

TEXTS = (
    "", "\0", "a\0b", "\n\r\t", "../../../etc/passwd", "' or 1=1 --", "%s%n{0}{x}", "\u202eevil", "\U0001f600" * 300,
    "x" * 70_000, "blake3:" + "0" * 64, "blake3:../" + "0" * 61, "nan", "-1", "9" * 5000, "digits", "\x1b[2J", "\ufeff",
)  # fmt: skip
INTEGERS = (0, 1, 63, 64, 2**31 - 1, 2**31, 2**32 - 1, 2**53 + 1, 2**63 - 1, 2**63, 2**64 - 1, -1, -(2**31), -(2**63))
NUMBERS = (0.0, -0.0, 1.0, -1.0, 5e-324, 1e308, -1e308, math.nan, math.inf, -math.inf, 2.0**64, 1e-300)
JUNK = (
    b"",
    b"\x00",
    b"\xff" * 10,  # no end of a varint
    b"\x08" + b"\xff" * 9 + b"\x01",  # the largest
    b"\x08" + b"\xff" * 10 + b"\x01",  # one byte too long
    b"\x0a\xff\xff\xff\xff\x0f" + b"short",  # 4 GiB announced
    b"\x0a\x02\xc3\x28",  # no UTF-8
    b"\x0a\x01\x00",  # NUL
    b"\x0b" * 500,  # groups that are opened and never closed
    b"\x0c",  # a group that is closed and was never opened
    b"\x0e\x0f",  # wire types that do not exist
    b"\xfa\xff\xff\xff\x0f\x01x",  # the largest field number
    b"\x00\x01",  # field number 0
)


def nested(depth: int) -> bytes:
    """A message in a message in a message."""
    data = b""
    for _ in range(depth):
        length, size = len(data), b""
        while length > 127:
            size, length = size + bytes([length & 127 | 128]), length >> 7
        data = b"\x0a" + size + bytes([length]) + data
    return data


def value(of: F, rng: random.Random) -> Any:
    """Something that a field can hold and hardly anybody expects in it."""
    if of.cpp_type in (F.CPPTYPE_DOUBLE, F.CPPTYPE_FLOAT):
        return rng.choice(NUMBERS)
    if of.type == F.TYPE_STRING:
        return rng.choice(TEXTS)
    if of.type == F.TYPE_BYTES:
        return rng.choice(JUNK) if rng.random() < 0.5 else rng.randbytes(rng.randrange(100))
    if of.cpp_type == F.CPPTYPE_BOOL:
        return rng.random() < 0.5
    bits = 32 if of.cpp_type in (F.CPPTYPE_INT32, F.CPPTYPE_UINT32, F.CPPTYPE_ENUM) else 64
    signed = of.cpp_type in (F.CPPTYPE_INT32, F.CPPTYPE_INT64, F.CPPTYPE_ENUM)
    low, high = (-(2 ** (bits - 1)), 2 ** (bits - 1) - 1) if signed else (0, 2**bits - 1)
    return rng.choice([number for number in INTEGERS if low <= number <= high])


def warp(message: Message, rng: random.Random, most: int = 500) -> None:
    """Changes one field of a message, somewhere in its depth, to something extreme.

    `most` is how many values may be added to a repeated field; inside of added messages, few.
    """
    fields: list[Any] = list(message.DESCRIPTOR.fields)
    if not fields:
        return
    chosen = rng.choice(fields)
    many = getattr(message, chosen.name) if chosen.is_repeated else None
    if chosen.message_type is not None and chosen.message_type.GetOptions().map_entry:
        number = chosen.message_type.fields_by_name["value"]
        for _ in range(rng.choice((1, 1, 1, min(most, 300)))):
            many[rng.choice((*TEXTS, f"key {rng.random()}"))[:2000]] = value(number, rng)  # type: ignore[index]
    elif chosen.message_type is not None:
        if many is not None:
            for _ in range(rng.choice((1, 1, 2, most))):
                warp(many.add(), rng, most=2)
        elif rng.random() < 0.2:
            message.ClearField(chosen.name)
        else:
            part = getattr(message, chosen.name)
            part.SetInParent()
            warp(part, rng, most)
    elif many is not None:
        many.extend(value(chosen, rng) for _ in range(rng.choice((0, 1, min(most, 100)))))
    else:
        setattr(message, chosen.name, value(chosen, rng))


def spoil(data: bytes, rng: random.Random) -> bytes:
    """Changes the bytes of a message without regard to what they mean."""
    kind = rng.randrange(8)
    at = rng.randrange(len(data) + 1)
    if kind == 0:
        return rng.randbytes(rng.choice((0, 1, 2, 5, 50, 50, 500, 20_000)))
    if kind == 1:
        return data[:at]
    if kind == 2:
        return data + data
    if kind == 3:
        return data[:at] + rng.choice(JUNK) + data[at:]
    if kind == 4:
        return data + rng.choice(JUNK)
    if kind == 5:
        tag = rng.randrange(1, 16) << 3 | rng.randrange(8)
        return data + bytes([tag]) + rng.choice((rng.randbytes(8), b"\xff" * 9 + b"\x01", struct.pack("<d", math.nan)))
    if kind == 6:
        return data + nested(rng.choice((5, 99, 101, 2000)))
    spoiled = bytearray(data)
    for _ in range(rng.choice((1, 1, 3, 20)) if data else 0):
        spoiled[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
    return bytes(spoiled)


def mutated(message: Message, rng: random.Random) -> bytes:
    """A message as it should be, or warped, or spoiled, or both."""
    copy = type(message)()
    copy.CopyFrom(message)
    kind = rng.random()
    if 0.1 < kind < 0.7:
        for _ in range(rng.choice((1, 1, 2, 5))):
            warp(copy, rng)
    data = copy.SerializeToString()
    return spoil(data, rng) if kind > 0.55 else data
