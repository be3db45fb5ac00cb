"""The roster: the members of a federation with their signing keys, which the owner of each worker pins by hand.

A member's card is its entry in the roster, so that the cards of all members, one after the other, are a roster:

    [[member]]
    federation_id = "north"
    client_id = "hospital-a"
    key = "..."

In a private round, a member trusts messages that are signed with these keys. A coordinator that could change the roster
could pose as all other members. So the worker takes the roster only from its owner, and a new key needs the signature
of the old one.
"""

import tomllib
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from types import MappingProxyType

import tomli_w
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from pydantic import ValidationError

from federation.errors import Error
from federation.refusals import Refusal
from federation.secure.hashing import hash_parts, integer
from federation.secure.thresholds import SMALLEST
from federation.spec.problems import Format, Section, explain
from federation.text_files import FORMAT, read_text
from federation.trust.identity import check_name
from federation.trust.key_chain import MAX_ROTATIONS, open_rotation, parse_rotations, rotations_text
from federation.trust.keys import IdentityError, replace_private
from federation.trust.member_files import MemberFiles
from federation.trust.proofs import signing_public_key
from federation.v1.common_pb2 import KeyRotation

KEY_BYTES, SIGNATURE_BYTES = 32, 64
_CONTEXT = b"fedpareto/v1/roster-key"
_GROUPS, _DIGITS = 12, 5
_KEYS = "an entry has federation_id, client_id and key; that of a new key also what leads there from the old one"


class RosterError(Error, ValueError):
    """A roster that cannot be used; the message says why and what to do."""


class _Entry(Section):
    federation_id: str
    client_id: str
    key: str
    signature: str | None = None
    rotations: list[str] | None = None


class _Document(Section):
    format: Format = FORMAT
    member: list[_Entry]


@dataclass(frozen=True)
class Card:
    """A member's entry in a roster.

    Attributes:
        key: its raw Ed25519 public signing key, 32 bytes.
        signature: by the key that this one replaces, in a federation that was made anew, 64 bytes; empty otherwise.
        rotations: of the member's keys in this federation, the oldest first.
    """

    federation_id: str
    client_id: str
    key: bytes
    signature: bytes = b""
    rotations: tuple[KeyRotation, ...] = ()

    @classmethod
    def of(
        cls, member: MemberFiles, rotations: Sequence[KeyRotation] = (), old_key: Ed25519PrivateKey | None = None
    ) -> "Card":
        """The card of a member; `old_key` is the key that it had in a federation before this one."""
        key = member.signing_key.public_key().public_bytes_raw()
        signed = tuple(
            KeyRotation(statement=rotation.statement, possession=rotation.possession) for rotation in rotations
        )
        card = cls(member.federation_id, member.client_id, key, rotations=signed)
        return card if old_key is None else replace(card, signature=old_key.sign(card._signed()))

    def succeeds(self, old: bytes) -> bool:
        """True if the `old` key has signed that this key replaces it."""
        present = Ed25519PublicKey.from_public_bytes(old)
        try:
            present.verify(self.signature, self._signed())
            return True
        except InvalidSignature:
            pass
        # Section 3, rule 0: step by step, each signed by the key before. A gap could lead to a key of the
        # coordinator's.
        for rotation in self.rotations:
            with suppress(Refusal):  # one of another key comes before
                _, present = open_rotation(
                    rotation, present, federation_id=self.federation_id, client_id=self.client_id
                )
        # Section 3, rule 0: the chain has to end at this key, and to have moved: rotations to another key sign nothing
        # for this one.
        return present.public_bytes_raw() == self.key != old

    def _signed(self) -> bytes:
        return _CONTEXT + b"\0" + hash_parts(self.federation_id.encode(), self.client_id.encode(), self.key)

    def text(self) -> str:
        """The entry as TOML; bytes are hexadecimal."""
        entry: dict[str, str | list[str]] = {
            "federation_id": self.federation_id,
            "client_id": self.client_id,
            "key": self.key.hex(),
        }
        if self.signature:
            entry["signature"] = self.signature.hex()
        if self.rotations:
            entry["rotations"] = rotations_text(self.rotations).split()
        return "[[member]]\n" + tomli_w.dumps(entry)


@dataclass(frozen=True)
class Roster:
    """The members of a federation, in the order of their ids. `parse` checks one."""

    federation_id: str
    cards: tuple[Card, ...]

    @classmethod
    def parse(cls, text: str, member: MemberFiles) -> "Roster":
        """A roster that this member can pin.

        Raises:
            RosterError: it is not one, is of another federation, names a member or a key twice, too few members, or a
                key of small order, or does not have this member with its own key.
        """
        try:
            document = _Document.model_validate(tomllib.loads(text))
        except ValidationError as error:
            raise RosterError("; ".join(explain(problem, _KEYS, _Document) for problem in error.errors()[:5])) from None
        except (ValueError, RecursionError) as error:
            raise RosterError(f"it is not a TOML document: {error}") from None
        cards = tuple(
            sorted((_card(entry, member.federation_id) for entry in document.member), key=lambda card: card.client_id)
        )
        for before, card in pairwise(cards):
            # Section 3, rule 0: of two keys for one name, replies of either would count as the member's.
            if before.client_id == card.client_id:
                raise RosterError(f"the member {card.client_id} stands in it twice")
        holders: dict[bytes, str] = {}
        for card in cards:
            # Section 1: one holder under two names would be two of the members on whom the owner relies.
            if (holder := holders.setdefault(card.key, card.client_id)) != card.client_id:
                raise RosterError(f"{holder} and {card.client_id} have the same key")
        own = next((card.key for card in cards if card.client_id == member.client_id), None)
        # Section 3, rule 1: all others would decline a session with this member, or the roster is of another
        # federation.
        if own is None:
            raise RosterError(f"this member, {member.client_id}, is not in it: add the card of `worker roster card`")
        # Section 3, rule 0: who put another key under this name can answer in it, to all who pin the same roster.
        if own != member.signing_key.public_key().public_bytes_raw():
            raise RosterError(
                f"it has another key for this member, {member.client_id}: replace its entry by the card of "
                "`worker roster card`, and ask who put the other key into it"
            )
        # Section 1: no session could ever be formed, and the owner would not know why.
        if len(cards) < SMALLEST:
            raise RosterError(f"it has {len(cards)} members; a private round needs {SMALLEST}")
        return cls(member.federation_id, cards)

    @property
    def keys(self) -> Mapping[str, bytes]:
        """The raw keys by client id."""
        return MappingProxyType({card.client_id: card.key for card in self.cards})

    @property
    def digest(self) -> str:
        """60 decimal digits in groups of five, which owners can compare by telephone.

        It takes about 10^30 attempts to find two rosters with the same digits.
        """
        parts = (part for card in self.cards for part in (card.client_id.encode(), card.key))
        value = hash_parts(b"roster", self.federation_id.encode(), integer(len(self.cards)), *parts)
        digits = f"{int.from_bytes(value, 'big') % 10 ** (_GROUPS * _DIGITS):0{_GROUPS * _DIGITS}d}"
        return " ".join(digits[start : start + _DIGITS] for start in range(0, len(digits), _DIGITS))

    @property
    def text(self) -> str:
        """The roster as TOML."""
        return "\n".join([f"format = {FORMAT}\n", *(card.text() for card in self.cards)])

    def pin(self, path: Path) -> None:
        """Makes it the roster of a worker's home, atomically and durably."""
        replace_private(path, self.text.encode())


@dataclass(frozen=True)
class Changes:
    """The differences between a roster and the pinned one: ids of members, sorted.

    Attributes:
        rotated: members whose new key is signed by the old one.
        unsigned: members whose new key is not.
    """

    added: tuple[str, ...]
    removed: tuple[str, ...]
    rotated: tuple[str, ...]
    unsigned: tuple[str, ...]

    def __bool__(self) -> bool:
        return bool(self.added or self.removed or self.rotated or self.unsigned)


def changes(pinned: Roster | None, new: Roster) -> Changes:
    """Compares a new roster with the pinned one; without a pinned one, all members are added."""
    before = {} if pinned is None else pinned.keys
    moved = [card for card in new.cards if before.get(card.client_id, card.key) != card.key]
    # Section 3, rule 0: with the old key's signature. Other new keys need the owner's word for each name.
    signed = tuple(card.client_id for card in moved if card.succeeds(before[card.client_id]))
    return Changes(
        added=tuple(name for name in new.keys if name not in before),
        removed=tuple(name for name in before if name not in new.keys),
        rotated=signed,
        unsigned=tuple(card.client_id for card in moved if card.client_id not in signed),
    )


def read_roster(path: Path, member: MemberFiles) -> Roster:
    """The roster in a file. Raises RosterError, which names the file, if it cannot be read or used."""
    try:
        return Roster.parse(read_text(path), member)
    except OSError as error:
        raise RosterError(f"{path} cannot be read: {error.strerror or error}") from None
    except ValueError as error:  # EncodingError is one
        raise RosterError(f"{path} cannot be used: {error}") from None


def pinned_roster(path: Path, member: MemberFiles) -> Roster | None:
    """The roster that is pinned in a worker's home; None without one. Raises RosterError if it is damaged."""
    if not path.exists():
        return None
    try:
        return read_roster(path, member)
    except RosterError as error:
        raise RosterError(f"{error}; it is the pinned roster: move it away, and pin one again") from None


def _card(entry: _Entry, federation_id: str) -> Card:
    try:
        name = check_name(entry.client_id, "client_id")
    except IdentityError as error:
        raise RosterError(str(error)) from None
    # Section 3, rule 0: a card of another federation is genuine, too, and its member may be somebody else here.
    if entry.federation_id != federation_id:
        raise RosterError(
            f"{name} is of the federation {entry.federation_id[:80]!r}; this worker is a member of {federation_id!r}"
        )
    signature = b""
    if entry.signature is not None:
        signature = _bytes(entry.signature, SIGNATURE_BYTES, f"the signature of {name}")
    key = _bytes(entry.key, KEY_BYTES, f"the key of {name}")
    try:
        signing_public_key(key)
    except IdentityError as error:  # under such a key, anybody could sign as this member
        raise RosterError(f"the key of {name}: {error}; ask its owner for the card again") from None
    try:
        rotations = parse_rotations("\n".join((entry.rotations or [])[:MAX_ROTATIONS]))
    except ValueError:
        raise RosterError(f"the rotations of {name} are damaged; ask its owner for the card again") from None
    return Card(federation_id, name, key, signature, rotations)


def _bytes(text: str, size: int, name: str) -> bytes:
    try:
        value = bytes.fromhex(text)
    except ValueError:
        raise RosterError(f"{name} is not hexadecimal: {text[:80]!r}") from None
    if len(value) != size:
        raise RosterError(f"{name} has {len(value)} bytes, not {size}")
    return value
