"""Edits of every value in a bundle, by somebody who has all keys and signs again whatever follows.

A *value* is a field of a message: "ReceiptManifest.reason", or "evaluation ReceiptManifest.reason" in a phase that
evaluates a model, or "filling ResultManifest.round" of the statistics from which a model is filled. An *edit* is a
value and an operation on it, such as "cleared". Of each value the first place in the bundle that holds something is
edited, or else the first place at all.
"""

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from google.protobuf import json_format
from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message

from federation.digests import digest
from federation.record.bundle import CONSENTS, LOG, MANIFEST, ROTATIONS, SPECIFICATION, STATISTICS, WITHDRAWALS
from federation.trust.envelope import envelope_digest, sign
from federation.v1 import common_pb2
from federation.v1.common_pb2 import Input, SignedEnvelope
from federation.v1.record_pb2 import (
    Bundle,
    Consents,
    DescribedData,
    LoggedEntry,
    LogRecord,
    PhaseRecord,
    Rotations,
    RoundRecord,
    Withdrawals,
)
from federation.work.secure.stage import CIPHERTEXTS
from tests.verification.scene import Edited, log_signed_again

ENTRIES: dict[str, type[Message]] = {
    MANIFEST: Bundle,
    ROTATIONS: Rotations,
    CONSENTS: Consents,
    WITHDRAWALS: Withdrawals,
    STATISTICS: DescribedData,
    LOG: LogRecord,
}
MANIFESTS = {
    "Exchange.assignment": "AssignmentManifest",
    "Exchange.decline": "DeclineManifest",
    "Answer.reply": "ReplyManifest",
    "Answer.receipt": "ReceiptManifest",
    "RoundRecord.step": "StepManifest",
    "RoundRecord.result": "ResultManifest",
    "DescribedData.result": "ResultManifest",
    "LogRecord.key": "LogKeyManifest",
    "LogRecord.checkpoints": "CheckpointManifest",
    "Consents.consents": "ConsentManifest",
    "Withdrawals.withdrawals": "WithdrawalManifest",
    "KeyRotation.statement": "RotationManifest",
    "KeyRotation.receipt": "RotationReceiptManifest",
}
"""The message inside of each envelope."""
UNKNOWN = "unknown-field"
Path = tuple[str | int, ...]
Operation = Callable[[Message, Any], None]


@dataclass(frozen=True)
class Edit:
    """One change of one value.

    Attributes:
        value: such as "StepManifest.rate".
        operation: a key of OPERATIONS.
        entry: of the bundle.
        path: fields and places that lead from the entry's message to the one with the field.
        field: its name.
    """

    value: str
    operation: str
    entry: str
    path: Path
    field: str

    @property
    def name(self) -> str:
        return f"{self.value} {self.operation}"


# --- operations


def _next(value: Any) -> Any:
    """Another value of the same type."""
    match value:
        case str():
            return value[:-1] + ("0" if value.endswith("1") else "1")
        case bytes():
            return value[:-1] + bytes([value[-1] ^ 1]) if value else b"\1"
        case bool():
            return not value
        case float():
            return value * 1.01 if math.isfinite(value) and value else 0.5
        case _:
            return value + 1 if value < 2**31 - 1 else value - 1


def _another(message: Message, field: FieldDescriptor) -> None:
    setattr(message, field.name, _next(getattr(message, field.name)))


def _huge(message: Message, field: FieldDescriptor) -> None:
    largest = {field.TYPE_DOUBLE: 1e300, field.TYPE_INT32: 2**31 - 1, field.TYPE_UINT32: 2**32 - 1}
    largest |= {field.TYPE_UINT64: 2**64 - 1}
    setattr(message, field.name, largest.get(field.type, 2**63 - 1))


def _longer(message: Message, field: FieldDescriptor) -> None:
    value = getattr(message, field.name)
    setattr(message, field.name, value + ("x" if isinstance(value, str) else b"x"))


def _set(value: object) -> Operation:
    return lambda message, field: setattr(message, field.name, value)


def _added(message: Message, field: FieldDescriptor) -> None:
    values = getattr(message, field.name)
    if is_map(field):
        values["another"] = 0.5
    elif field.message_type is not None:
        values.add()
    else:
        values.append("another" if field.type == field.TYPE_STRING else b"x" if field.type == field.TYPE_BYTES else 1)


def _doubled(message: Message, field: FieldDescriptor) -> None:
    values = getattr(message, field.name)
    values.append(values[0])


def _removed(message: Message, field: FieldDescriptor) -> None:
    values = getattr(message, field.name)
    del values[sorted(values)[0] if is_map(field) else 0]


def _exchanged(message: Message, field: FieldDescriptor) -> None:
    values = list(getattr(message, field.name))
    values[0], values[-1] = values[-1], values[0]
    del getattr(message, field.name)[:]
    getattr(message, field.name).extend(values)


def _first(value: object) -> Operation:
    def edit(message: Message, field: FieldDescriptor) -> None:
        values = getattr(message, field.name)
        key = sorted(values)[0] if is_map(field) else 0
        before = values[key]
        values[key] = value(before) if callable(value) else value

    return edit


def _later(hours: int) -> Operation:
    def edit(message: Message, field: FieldDescriptor) -> None:
        getattr(message, field.name).seconds += 3600 * hours

    return edit


def _of_key(key: str, factor: float) -> Operation:
    def edit(message: Message, field: FieldDescriptor) -> None:
        values = getattr(message, field.name)
        values[key] = values[key] * factor + 1e-3

    return edit


def _cleared(message: Message, field: FieldDescriptor) -> None:
    message.ClearField(field.name)  # a field of this type


def _made(message: Message, field: FieldDescriptor) -> None:
    inner = getattr(message, field.name)
    inner.SetInParent()
    if isinstance(inner, SignedEnvelope):
        return
    first = inner.DESCRIPTOR.fields[0]
    OPERATIONS["one added" if first.is_repeated else "made" if first.message_type else "another"](inner, first)


OPERATIONS: dict[str, Operation] = {
    "another": _another,
    "huge": _huge,
    "longer": _longer,
    "NaN": _set(math.nan),
    "infinite": _set(math.inf),
    "negative": _set(-1),
    "a billion": _set(10**9),
    "cleared": _cleared,
    "made": _made,
    "an hour earlier": _later(-1),
    "an hour later": _later(1),
    "one added": _added,
    "one doubled": _doubled,
    "one removed": _removed,
    "two exchanged": _exchanged,
    "another inside": _first(_next),
    "NaN inside": _first(math.nan),
}
_SIGNED = ("another", "huge", "negative", "a billion")
OF_NUMBERS = {
    FieldDescriptor.TYPE_DOUBLE: ("another", "huge", "NaN", "infinite", "negative"),
    FieldDescriptor.TYPE_INT32: _SIGNED,
    FieldDescriptor.TYPE_INT64: _SIGNED,
    FieldDescriptor.TYPE_UINT32: ("another", "huge", "a billion"),
    FieldDescriptor.TYPE_UINT64: ("another", "huge", "a billion"),
}


def operation(name: str) -> Operation:
    """The operation with a name; "another KEY" and "NaN KEY" change the number of a key of a map."""
    change, _, key = name.partition(" ")
    return OPERATIONS.get(name) or _of_key(key, math.nan if change == "NaN" else 1.01)


def operations(message: Message, field: Any) -> Iterator[str]:
    """The operations that change this field of a message."""
    value = getattr(message, field.name)
    if field.is_repeated:
        yield "one added"
        if not value:
            return
        yield "one removed"
        if message.DESCRIPTOR.name == "RoundRecord" and is_map(field):
            yield from (f"{change} {key}" for key in sorted(value) for change in ("another", "NaN"))
        elif is_map(field) or field.message_type is None:
            yield "another inside"
            if isinstance(value[sorted(value)[0] if is_map(field) else 0], float):
                yield "NaN inside"
        if is_map(field):
            return
        yield "one doubled"
        if len(value) > 1 and value[0] != value[-1]:
            yield "two exchanged"
    elif field.message_type is not None:
        yield "cleared" if message.HasField(field.name) else "made"  # a field of this type
        if field.message_type.name == "Timestamp" and message.HasField(field.name):
            yield from ("an hour earlier", "an hour later")
    else:
        text = field.type in (field.TYPE_STRING, field.TYPE_BYTES)
        yield from OF_NUMBERS.get(field.type, ("another", "longer") if text else ("another",))
        if value and field.type != field.TYPE_BOOL:
            yield "cleared"


def other(message: Message, name: str) -> None:
    """Gives a field of a message another value."""
    field = message.DESCRIPTOR.fields_by_name[name]
    operation(next(operations(message, field)))(message, field)


def is_map(field: Any) -> bool:
    """True if a field, by its descriptor, is a map."""
    return field.message_type is not None and field.message_type.GetOptions().map_entry


# --- the values of a bundle


def messages(bundle: Edited) -> dict[str, Message]:
    """The messages of a bundle, by entry; the last round comes first."""
    found: dict[str, Message] = {}
    for name in sorted(bundle.entries, reverse=True):
        kind = RoundRecord if name.startswith("rounds/") else ENTRIES.get(name)
        if kind is Bundle:
            found[name] = bundle.about
        elif kind is not None:
            found[name] = kind.FromString(bundle.entries[name])
    return found


def opened(envelope: SignedEnvelope, owner: Message, field: str) -> Message:
    """The manifest inside of an envelope that is this field of a message."""
    kind: type[Message] = getattr(common_pb2, MANIFESTS[f"{owner.DESCRIPTOR.name}.{field}"])
    return kind.FromString(envelope.manifest)


def context_of(message: Message, context: str) -> str:
    """The context of the values in a message that is inside of another one, whose context is given."""
    if isinstance(message, PhaseRecord) and not message.decides:
        return "evaluation "
    if isinstance(message, DescribedData):
        return "filling "
    if isinstance(message, RoundRecord) and not message.HasField("step") and message.state != "COMPLETED":
        return "skipped "
    if isinstance(message, LoggedEntry):
        return f"{message.action} "
    return "ciphertexts " if isinstance(message, Input) and message.name == CIPHERTEXTS else context


def places(message: Message, path: Path = (), context: str = "") -> Iterator[tuple[str, Path, Message]]:
    """All messages inside of a message, itself first, each with its context and path."""
    context = context_of(message, context)
    yield context, path, message
    for field in message.DESCRIPTOR.fields:
        if field.message_type is None or is_map(field) or field.message_type.name == "Timestamp":
            continue
        values = getattr(message, field.name)
        if not field.is_repeated and not message.HasField(field.name):  # of this type
            continue
        for place, one in enumerate(values if field.is_repeated else [values]):
            inside: Path = (*path, field.name, place) if field.is_repeated else (*path, field.name)
            yield from places(one, inside, context)
            if isinstance(one, SignedEnvelope):
                yield from places(opened(one, message, field.name), (*inside, "manifest"), context)


def edits(bundle: Edited) -> dict[str, Edit]:
    """The edits of a bundle, by name."""
    found: dict[str, Edit] = {}
    for entry, root in messages(bundle).items():
        for context, path, message in places(root):
            kind = message.DESCRIPTOR.name
            if (unknown := Edit(f"{kind}.{UNKNOWN}", "made", entry, path, UNKNOWN)).name not in found:
                found[unknown.name] = unknown
            for field in message.DESCRIPTOR.fields:
                if (kind, field.name) in (("SignedEnvelope", "manifest"), ("SignedEnvelope", "signature")):
                    continue  # signed again
                for operation in operations(message, field):
                    edit = Edit(f"{context}{kind}.{field.name}", operation, entry, path, field.name)
                    found.setdefault(edit.name, edit)
    return found


def values() -> set[str]:
    """All values that a bundle of this version can have, without contexts."""
    kinds: list[type[Message]] = [*ENTRIES.values(), RoundRecord]
    todo, found = [kind.DESCRIPTOR for kind in kinds], set[str]()
    while todo:
        kind = todo.pop()
        for field in kind.fields:
            if (name := f"{kind.name}.{field.name}") in found:
                continue
            found.add(name)
            if name in MANIFESTS:
                todo.append(common_pb2.DESCRIPTOR.message_types_by_name[MANIFESTS[name]])
            if field.message_type is not None and not is_map(field) and field.message_type.name != "Timestamp":
                todo.append(field.message_type)
    return found


# --- edited bundles


def edited(
    bundle: Edited, edit: Edit, holders: Mapping[bytes, Ed25519PrivateKey], log: Ed25519PrivateKey | None = None
) -> Edited:
    """A bundle after an edit. With the key of the log, all is signed again with the keys of the holders, by key id."""
    found = messages(bundle)

    def make(message: Message) -> None:
        if edit.field == UNKNOWN:
            message.MergeFromString(b"\xa0\x38\x01")  # field 900 has the value 1
        else:
            operation(edit.operation)(message, message.DESCRIPTOR.fields_by_name[edit.field])

    change(found[edit.entry], edit.path, make)
    if log is not None:
        return signed_anew(bundle, found, holders, log)
    return bundle.having(entries(found))


def entries(found: Mapping[str, Message]) -> dict[str, bytes | None]:
    """The bytes of messages, by entry."""
    return {
        name: json_format.MessageToJson(one).encode() if name == MANIFEST else one.SerializeToString(deterministic=True)
        for name, one in found.items()
    }


def at(message: Message, path: Path) -> Any:
    """The message at a path; what is inside of an envelope is a copy."""
    found: Any = message
    owner, name = found, ""
    for part in path:
        if part == "manifest":
            found = opened(found, owner, name)
        elif isinstance(part, int):
            found = found[part]
        else:
            owner, name = found, part
            found = getattr(found, part)
    return found


def change(message: Message, path: Path, make: Callable[[Any], object]) -> None:
    """Changes the message at a path, also inside of an envelope; signatures stay as they are."""
    if "manifest" not in path:
        make(at(message, path))
        return
    place = path.index("manifest")
    manifest = at(message, path[: place + 1])
    change(manifest, path[place + 1 :], make)
    at(message, path[:place]).manifest = manifest.SerializeToString(deterministic=True)


def signed_anew(
    bundle: Edited,
    found: Mapping[str, Message],
    holders: Mapping[bytes, Ed25519PrivateKey],
    log: Ed25519PrivateKey,
    follows: Mapping[bytes, bytes] = MappingProxyType({}),
) -> Edited:
    """The bundle with these messages, after all digests and signatures fit again, as far as they follow.

    `follows` has digests of other things than envelopes that have changed, and what they are now.
    """
    replaced: dict[bytes, bytes] = {**follows}
    document = bundle.entries.get(SPECIFICATION, b"")
    old = messages(bundle)
    for owner, field, envelope, before in _envelopes(found, old):
        data = envelope.manifest
        for was, now in replaced.items():
            data = data.replace(was, now)
        manifest = getattr(common_pb2, MANIFESTS[f"{owner}.{field}"]).FromString(data)
        key = holders.get(envelope.key_id)
        if key is not None:
            envelope.CopyFrom(sign(manifest, key))
        if before is not None and (after := envelope_digest(envelope)) != envelope_digest(before):
            replaced[envelope_digest(before).encode()] = after.encode()
            if owner == "DescribedData":  # the specification names its result
                named = document.replace(envelope_digest(before).encode(), after.encode())
                replaced[digest(document).encode()] = digest(named).encode()
                document = named
    record = found[LOG]
    assert isinstance(record, LogRecord)
    for entry in record.entries:
        entry.digest = replaced.get(entry.digest.encode(), entry.digest.encode()).decode()
        for was, now in follows.items():
            entry.detail = entry.detail.replace(was.decode(), now.decode())
    log_signed_again(record, log, keep_roots=record.checkpoints != old[LOG].checkpoints)  # type: ignore[attr-defined]
    named_in = {SPECIFICATION: document} if document else {}  # an edit may have taken it out
    return bundle.having({**entries(found), **named_in})


def _envelopes(
    found: Mapping[str, Message], old: Mapping[str, Message]
) -> Iterator[tuple[str, str, SignedEnvelope, SignedEnvelope | None]]:
    """The envelopes of a bundle, each after those that it names, with what it was before the edit."""
    for name in (STATISTICS, ROTATIONS, CONSENTS, *sorted(one for one in found if one.startswith("rounds/"))):
        if name not in found:
            continue
        before = {path: (owner, one) for path, owner, one in _signed(old[name])}
        now = list(_signed(found[name]))
        steps, results = ([one for one in now if one[0] == (field,)] for field in ("step", "result"))
        evaluations = [one for one in now if _evaluates(found[name], one[0])]
        first = [one for one in now if one not in (*steps, *evaluations, *results)]
        for path, owner, envelope in (*first, *steps, *evaluations, *results):
            was = before.get(path)
            yield owner, str(next(part for part in reversed(path) if isinstance(part, str))), envelope, (was and was[1])


def _signed(message: Message) -> Iterator[tuple[Path, str, SignedEnvelope]]:
    """The envelopes in a message, with their paths and the types of their owners."""
    owners: dict[Path, str] = {}
    for _, path, inner in places(message):
        owners[path] = inner.DESCRIPTOR.name
        if isinstance(inner, SignedEnvelope):
            owner = path[:-2] if isinstance(path[-1], int) else path[:-1]
            yield path, owners[owner], inner


def _evaluates(record: Message, path: Path) -> bool:
    if not isinstance(record, RoundRecord) or path[:1] != ("phases",):
        return False
    place = path[1]
    assert isinstance(place, int)
    return not record.phases[place].decides
