"""Random edits of a bundle: of values, messages, envelopes, texts, blobs, entries and bytes, alone and together.

`every_value` edits each value once, at one place; here any place takes any hostile value, messages move between rounds,
other keys sign, and several edits meet. `bundle_differences` tells afterwards which values have changed.
"""

import json
import math
import random
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import DecodeError, Message

from federation.digests import digest
from federation.record.bundle import LOG, SPECIFICATION
from federation.trust.envelope import sign
from federation.v1.record_pb2 import Bundle, RoundRecord
from tests.verification import every_value
from tests.verification.bundle_differences import differences
from tests.verification.every_value import Edit, Path, at, is_map, opened, places, signed_anew
from tests.verification.scene import Edited

FORGED = "FORGED: everything was verified"
"""No line of output begins with this text, which edits put behind line breaks."""
_TEXTS = (
    "",
    "\x1b[2J\x9b31m",
    f"x\n{FORGED}\r{FORGED}\u2028{FORGED}",
    "\u202everified",
    "x" * 100_000,
    "../../x",
    f"blake3:{64 * '0'}",
    "COMPLETED",
)
_BYTES = (b"", b"\xff" * 9, bytes(32), bytes(100_000), b"\x08\xff\xff\xff\xff\xff\xff\xff\xff\xff\x01")
_REALS = (0.0, -0.0, 1.0, -1.0, 5e-324, 1e16, 1e308, -1e308, math.inf, -math.inf, math.nan)
_WHOLE = (0, 1, 2, -1, 1000, 10**9, 2**31 - 1, 2**31, 2**32 - 1, 2**63 - 1, 2**64 - 1)
_LITERALS = (
    "0",
    "-1",
    "3.5",
    "1e308",
    "inf",
    "nan",
    "9" * 30,
    '""',
    f'"{"x" * 9000}"',
    "[]",
    "{}",
    "true",
    "0x7fffffff",
)
_NUMBER = re.compile(r"-?\d+(\.\d+)?([eE][-+]?\d+)?")
_NESTED = "[" * 5000


def _hostile(kind: FieldDescriptor) -> Sequence[Any]:
    if kind.type == kind.TYPE_STRING:
        return _TEXTS
    if kind.type == kind.TYPE_BYTES:
        return _BYTES
    return _REALS if kind.type == kind.TYPE_DOUBLE else _WHOLE


@dataclass
class Editor:
    """Draws edits of one bundle.

    Attributes:
        bundle: as it was written.
        holders: the signing keys of the federation, by key id.
        log: the key of its log.
    """

    bundle: Edited
    holders: Mapping[bytes, Ed25519PrivateKey]
    log: Ed25519PrivateKey
    _values: dict[str, list[tuple[str, Path, str]]] = field(default_factory=dict)
    _fields: dict[str, list[tuple[str, Path, str]]] = field(default_factory=dict)  # of messages, by type of the message

    def __post_init__(self) -> None:
        for entry, root in every_value.messages(self.bundle).items():
            for context, path, message in places(root):
                for kind in message.DESCRIPTOR.fields:
                    where = (entry, path, kind.name)
                    self._values.setdefault(f"{context}{message.DESCRIPTOR.name}.{kind.name}", []).append(where)
                    if kind.message_type is not None and not is_map(kind):
                        self._fields.setdefault(kind.message_type.name, []).append(where)

    def draw(self, chance: random.Random) -> "Draft":
        """A bundle after one to three edits, by somebody with all keys or with none."""
        draft = Draft(self, chance, every_value.messages(self.bundle), dict(self.bundle.entries))
        kinds: list[Callable[[], str]] = [*[draft.value] * 5, *[draft.move] * 3, *[draft.key] * 2]
        kinds += [draft.specification, draft.state, draft.blob, draft.entry]
        for _ in range(chance.choice((1, 1, 1, 2, 3))):
            with suppress(
                LookupError, ValueError, TypeError, OverflowError, DecodeError
            ):  # not at this place, not of this type
                draft.words.append(chance.choice(kinds)())
        return draft


@dataclass
class Draft:
    """A bundle that is being edited.

    Attributes:
        editor: has the bundle as it was.
        chance: draws.
        found: its messages, by entry.
        entries: its other entries.
        words: the edits.
        follows: digests that others name, and what they are after the edits.
    """

    editor: Editor
    chance: random.Random
    found: dict[str, Message]
    entries: dict[str, bytes]
    words: list[str] = field(default_factory=list)
    follows: dict[bytes, bytes] = field(default_factory=dict)

    # --- edits

    def value(self) -> str:
        """A value takes a hostile value, or that of another place, or one of the edits of `every_value`."""
        name = self.chance.choice(sorted(self.editor._values))
        entry, path, place = self.chance.choice(self.editor._values[name])
        kind = at(self.found[entry], path).DESCRIPTOR.fields_by_name[place]
        if self.chance.random() < 0.4 or kind.message_type is not None:
            operation = self.chance.choice([*every_value.operations(at(self.found[entry], path), kind)])
            every_value.change(self.found[entry], path, lambda message: every_value.operation(operation)(message, kind))
            return f"{name} {operation} at {entry} {path}"
        other = self.chance.choice(self.editor._values[name])
        new = self.chance.choice([*_hostile(kind), getattr(at(self.found[other[0]], other[1]), place)])
        if kind.is_repeated:
            every_value.change(self.found[entry], path, lambda message: getattr(message, place).append(_first_of(new)))
        else:
            every_value.change(self.found[entry], path, lambda message: setattr(message, place, new))
        return f"{name} = {repr(new)[:60]} at {entry} {path}"

    def move(self) -> str:
        """A message is removed, doubled, or takes the content of another one, from any round; or both exchange it."""
        kind = self.chance.choice(sorted(self.editor._fields))
        (entry, path, name), (of, there, place) = (self.chance.choice(self.editor._fields[kind]) for _ in range(2))
        given = self._one(at(self.found[of], there), place)
        act = self.chance.choice(("removed", "copied", "exchanged", "doubled", "reversed"))
        owner = at(self.found[entry], path)
        repeated = owner.DESCRIPTOR.fields_by_name[name].is_repeated
        taken = self._one(owner, name)

        def change(message: Any) -> None:
            values = getattr(message, name)
            if not repeated:
                message.ClearField(name) if act == "removed" else values.CopyFrom(given)
            elif act == "reversed":
                again = list(values)[::-1]
                del values[:]
                values.extend(again)
            elif act == "removed":
                del values[self.chance.randrange(len(values))]
            elif act == "doubled":
                values.insert(self.chance.randrange(len(values) + 1), given)
            else:
                values[list(values).index(taken)].CopyFrom(given)

        every_value.change(self.found[entry], path, change)
        if act == "exchanged":
            every_value.change(self.found[of], there, lambda message: self._one(message, place).CopyFrom(taken))
        return f"{kind} {act}: {entry} {path} {name}, {of} {there} {place}"

    def key(self) -> str:
        """An envelope is signed by another key, or has the signature of another one."""
        entry, path, name = self.chance.choice(self.editor._fields["SignedEnvelope"])
        stranger = Ed25519PrivateKey.from_private_bytes(self.chance.randbytes(32))
        other = self.chance.choice([stranger, *self.editor.holders.values()])
        _, there, place = of = self.chance.choice(self.editor._fields["SignedEnvelope"])
        given = self._one(at(self.found[of[0]], there), place)
        signs = self.chance.random() < 0.6

        def change(message: Any) -> None:
            envelope = self._one(message, name)
            if signs:
                envelope.CopyFrom(sign(opened(envelope, message, name), other))
            else:
                envelope.key_id, envelope.signature = given.key_id, given.signature

        every_value.change(self.found[entry], path, change)
        return f"{'another key signs' if signs else 'another signature at'} {entry} {path} {name}"

    def specification(self) -> str:
        """A line of the specification is removed, doubled, changed or added."""
        lines = self.entries[SPECIFICATION].decode().splitlines()
        at = self.chance.randrange(len(lines))
        line, literal = lines[at], self.chance.choice(_LITERALS)
        name = line.partition(" =")[0]
        section = self.chance.choice(
            ("train", "evaluate", "limits", "server", "selection", "privacy", "stop", "algorithm")
        )
        key = self.chance.choice(("rounds", "samples", "minimum", "quorum", "clip", "steps", "epsilon", "decay_every"))
        lines[at : at + 1] = self.chance.choice(
            (
                [],
                [line, line],
                [f"{name} = {literal}"],
                [_NUMBER.sub(literal, line)],
                [line, f"{section}.{key} = {literal}"],
            )
        )
        return f"the specification: {line} -> {self._write(SPECIFICATION, chr(10).join(lines).encode())}"

    def state(self) -> str:
        """The remembered state of a round is another one."""
        name = self.chance.choice([one for one in self.found if isinstance(self.found[one], RoundRecord)])
        record: Any = self.found[name]
        before = record.state_after
        parts = _NUMBER.split(before) if self.chance.random() < 0.3 else before.split(",")
        new = self.chance.choice(
            [
                "", "null", "{}", _NESTED, f'{{"rule":{_NESTED}', '{"rule":{},"vectors":{},"blobs":[]}',
                _NUMBER.sub("1e999", before, count=3), before.replace("{}", '{"history":{"x":7}}', 1),
                before.replace("rule", "rules", 1), ",".join(part for part in parts if part), f"{before} ",
            ]
        )  # fmt: skip
        record.state_after = new
        with suppress(ValueError, RecursionError):
            canonical = json.dumps(json.loads(new), sort_keys=True, separators=(",", ":")).encode()
            self.follows[digest(before.encode()).encode()] = digest(canonical).encode()
        return f"the state of {name}: {new[:80]}"

    def blob(self) -> str:
        """A blob has another content; those who have all keys name it by its new digest."""
        name = self.chance.choice([one for one in self.entries if one.startswith("blobs/")])
        data = bytearray(self.entries[name])
        act = self.chance.randrange(6)
        at = self.chance.randrange(len(data))
        if act == 0:
            data[at : at + 1] = b""
        elif act == 1:
            data[at] ^= 1 << self.chance.randrange(8)
        elif act == 2:
            value = self.chance.choice((b"\0\0\xc0\x7f", b"\0\0\x80\x7f", b"\xff\xff\x7f\x7f", b"\0\0\0\x80"))
            data[len(data) - len(data) % 4 - 4 :][:4] = value
        elif act == 3:
            data[:8] = self.chance.choice((0, 1, 2**20, 2**40, 2**63, 2**64 - 1)).to_bytes(8, "little")
        elif act == 4:
            header = data[:300].decode("latin-1")
            data[:300] = _NUMBER.sub(self.chance.choice(("0", "-1", "4", "9" * 25, "1e9")), header, 2).encode("latin-1")
        else:
            data += bytes(4)
        return f"blob {act} at {at} of {self._write(name, bytes(data))}"

    def entry(self) -> str:
        """An entry is removed, emptied, cut, longer, or has the bytes of another one."""
        name, other = (self.chance.choice(sorted(self.entries)) for _ in range(2))
        data = self.entries[name]
        changed = self.chance.choice((None, b"", data[: len(data) // 2], data + b"\0", self.entries[other]))
        for one in [name]:
            self.found.pop(one, None)
            self.entries.pop(one)
        if changed is not None:
            self.entries[self.chance.choice((name, name, name.replace("0", "1")))] = changed
        return f"entry {name} {'removed' if changed is None else f'of {len(changed)} bytes'} ({other})"

    # --- what comes of them

    def alone(self) -> Edited:
        """The bundle, as somebody without keys can write it."""
        return Edited(
            {**self.entries, **{name: data for name, data in every_value.entries(self.found).items() if data}}
        )

    def by_all(self) -> Edited:
        """The bundle, after those who have all keys have signed it again."""
        bundle = Edited({_following(name, self.follows, "-"): data for name, data in self.entries.items()})
        if LOG not in self.found:
            return self.alone()
        for message in self.found.values():
            if isinstance(message, RoundRecord):
                before = message.state_after
                message.state_after = _following(before, self.follows)
                self.follows.setdefault(digest(before.encode()).encode(), digest(message.state_after.encode()).encode())
            elif isinstance(message, Bundle):
                message.initial_model = _following(message.initial_model, self.follows)
                message.model = _following(message.model, self.follows)
        entries = {name: data for name, data in self.editor.bundle.entries.items() if name in self.found}
        try:
            again = signed_anew(Edited(entries), self.found, self.editor.holders, self.editor.log, self.follows)
        except DecodeError:  # an envelope has another message: nobody signs that
            return self.alone()
        return bundle.having({name: again.entries[name] for name in self.found})

    def differences(self) -> set[Edit]:
        """The values that the edits have changed, before anything is signed again; entries by their names."""
        before = every_value.messages(self.editor.bundle)
        found = {Edit(name, "changed", name, (), "") for name, data in self.editor.bundle.entries.items()
                 if name not in before and self.entries.get(name) != data}  # fmt: skip
        found |= {Edit(name, "added", name, (), "") for name in {*self.entries} - {*self.editor.bundle.entries}}
        changed = {
            name for name in {*before} - {*self.found} if self.entries.get(name) != self.editor.bundle.entries[name]
        }
        found |= {Edit(name, "changed", name, (), "") for name in changed}
        for name, message in self.found.items():
            found |= {*differences(before[name], message, name)}
        return found

    # --- parts

    def _write(self, name: str, data: bytes) -> str:
        before = digest(self.entries[name])
        self.entries[name] = data
        self.follows[before.encode()] = digest(data).encode()
        return name

    def _one(self, message: Any, name: str) -> Any:
        """The message in a field, or one of them. Raises LookupError."""
        value = getattr(message, name)
        return self.chance.choice(list(value)) if message.DESCRIPTOR.fields_by_name[name].is_repeated else value


def _first_of(value: Any) -> Any:
    return value if isinstance(value, str | bytes | float | int) else value[0]


def _following(text: str, follows: Mapping[bytes, bytes], colon: str = ":") -> str:
    for before, after in follows.items():
        text = text.replace(before.decode().replace(":", colon), after.decode().replace(":", colon))
    return text
