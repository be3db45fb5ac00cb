"""Each number in a bundle takes hostile values, signed by all: no traceback, no memory that grows with the number."""

import math
import tracemalloc
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from google.protobuf.message import Message

from federation.record.bundle import BundleError, BundleReader
from federation.v1 import common_pb2
from federation.v1.common_pb2 import SignedEnvelope
from tests.verification.scene import Edited, log_signed_again, signed_again
from tests.verification.test_record_vectors import KEYS, at, vector
from tests.verification.test_signed_anew import HOLDERS
from verification.errors import Wrong
from verification.run import verify

WHOLE = (0, -1, 1_000_000_000, 2**31, 2**63 - 1, 2**64 - 1)
REAL = (0.0, -1.0, 1e9, 1e308, math.inf, math.nan)
MOST = 32 << 20  # bytes beyond what the honest bundle takes
Place = tuple[str | int, ...]
KINDS: dict[str, Any] = {
    "assignment": common_pb2.AssignmentManifest,
    "reply": common_pb2.ReplyManifest,
    "receipt": common_pb2.ReceiptManifest,
    "decline": common_pb2.DeclineManifest,
    "step": common_pb2.StepManifest,
}


def numbers(message: Message, path: Place = ()) -> Iterator[tuple[Place, str, Any]]:
    """The places of numbers in a message and in those inside it, with a hostile value each."""
    for field in message.DESCRIPTOR.fields:
        value = getattr(message, field.name)
        if field.message_type is not None and field.message_type.GetOptions().map_entry:
            yield from ((path, f"{field.name}/{key}", other) for key in value for other in REAL)
        elif field.message_type is not None:
            if field.message_type.name != "SignedEnvelope":
                inside = list(value)[:2] if field.is_repeated else [value] if message.HasField(field.name) else []
                for place, one in enumerate(inside):
                    yield from numbers(one, (*path, field.name, place) if field.is_repeated else (*path, field.name))
        elif field.cpp_type in (field.CPPTYPE_DOUBLE, field.CPPTYPE_UINT32, field.CPPTYPE_UINT64, field.CPPTYPE_INT64):
            values = REAL if field.cpp_type == field.CPPTYPE_DOUBLE else WHOLE
            if not field.is_repeated or len(value):
                yield from ((path, field.name, other) for other in values)


def put(message: Any, path: Place, name: str, value: Any) -> None:
    """Gives a number another value. Raises ValueError if its type does not have this value."""
    found, (field, _, key) = at(message, list(path)), name.partition("/")
    if key:
        getattr(found, field)[key] = value
    elif found.DESCRIPTOR.fields_by_name[field].is_repeated:
        getattr(found, field)[0] = value
    else:
        setattr(found, field, value)


def envelopes(message: Message, path: Place = ()) -> Iterator[tuple[Place, SignedEnvelope]]:
    for field, value in message.ListFields():
        if field.message_type is None or field.message_type.GetOptions().map_entry:
            continue
        for place, one in enumerate(value if field.is_repeated else [value]):
            inside = (*path, field.name, place) if field.is_repeated else (*path, field.name)
            if isinstance(one, SignedEnvelope):
                yield inside, one
            else:
                yield from envelopes(one, inside)


def edits(whole: Edited) -> Iterator[tuple[str, Callable[[], Edited]]]:
    """Bundles in which one number has a hostile value."""
    for path, name, value in numbers(whole.about):
        yield f"{path} {name} {value}", partial(whole.telling, partial(put, path=path, name=name, value=value))
    for path, name, value in numbers(whole.log):

        def logged(x: Any, p: Place = path, n: str = name, v: Any = value) -> None:
            put(x, p, n, v)
            log_signed_again(x, KEYS["log"])

        yield f"log {path} {name} {value}", partial(whole.with_log, logged)
    record = whole.round(0)
    for path, name, value in numbers(record):
        yield (
            f"round {path} {name} {value}",
            partial(whole.with_round, 0, partial(put, path=path, name=name, value=value)),
        )
    for place, envelope in envelopes(record):
        kind = KINDS[next(part for part in reversed(place) if isinstance(part, str) and part in KINDS)]
        if envelope.key_id not in HOLDERS:
            continue
        for path, name, value in numbers(kind.FromString(envelope.manifest)):

            def signed(x: Any, e: Place = place, p: Place = path, n: str = name, v: Any = value, k: Any = kind) -> None:
                found = at(x, list(e))
                signed_again(found, k, HOLDERS[found.key_id], lambda said: put(said, p, n, v))

            yield f"{kind.__name__} {path} {name} {value}", partial(whole.with_round, 0, signed)


@pytest.mark.full
@pytest.mark.parametrize("name", ["multi-gradient", "objectives"])
def test_a_hostile_number_is_refused_in_words_and_costs_nothing(tmp_path: Path, name: str) -> None:
    tried = 0
    tracemalloc.start()
    try:
        for words, make in edits(Edited.of(vector(name))):
            try:
                path = make().write(tmp_path / "edited")
            except (
                ValueError,
                TypeError,
                OverflowError,
                LookupError,
            ):  # the type of the field, or the log, has no such number
                continue
            tracemalloc.reset_peak()
            before, _ = tracemalloc.get_traced_memory()
            try:
                with BundleReader(path) as reader:
                    list(verify(reader))
            except (Wrong, BundleError):
                pass
            assert tracemalloc.get_traced_memory()[1] - before < MOST, words
            tried += 1
    finally:
        tracemalloc.stop()
    assert tried > 300
