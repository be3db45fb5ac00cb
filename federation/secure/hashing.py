"""H, and the digests of all that was agreed so far (section 2a).

    H(parts)  = BLAKE3 of, for each part, its length (8 bytes, big-endian) and its bytes
    session   = H("session", terms)
    view1     = H("view1", session, list of ids, then c, s of each)
    view_open = H("open", view1, opening, list W)
    view_mask = H("mask", view1, list W, list a)
    final     = H("final", view_mask, list V, list of digests of y, tau1, BLAKE3(tau2))

A list is one part for its count, then one part for each element; c and s of the members follow as 2 m parts without a
count, since the list of ids has given it. Text is UTF-8, integers are 8 bytes, big-endian, two's complement. The order
of ids is that of their UTF-8 bytes, which is also the order of Python's strings.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from blake3 import blake3

from federation.secure.errors import Fault, Malformed

DIGEST = 32
KEY = 32


@dataclass(frozen=True)
class PublicKeys:
    """The public keys of a member at READY: its X25519 public keys c (channels) and s (masks), 32 bytes each."""

    c: bytes
    s: bytes


def hash_parts(*parts: bytes) -> bytes:
    """H(parts), 32 bytes."""
    state = blake3()
    for part in parts:
        # Section 2a: the length before each part. Without it, two different lists could be the same bytes, and have one
        # view.
        state.update(len(part).to_bytes(8, "big"))
        state.update(part)
    return state.digest()


def integer(value: int) -> bytes:
    """The part for an integer of at most 64 bits.

    Raises:
        Malformed: it does not fit into a sint64.
    """
    if not -(2**63) <= value < 2**63:
        raise Malformed(Fault.RANGE, f"{value} is not a sint64")
    return value.to_bytes(8, "big", signed=True)


def listed(elements: Sequence[bytes]) -> tuple[bytes, ...]:
    """The parts for a list."""
    return (integer(len(elements)), *elements)


def members(ids: Sequence[str]) -> tuple[bytes, ...]:
    """The parts for a list of members.

    Raises:
        Malformed: the ids are not sorted, or one occurs twice.
    """
    # Section 2a: one order, or equal lists would give different views. Twice the same name would count as two members.
    for before, after in pairwise(ids):
        if before >= after:
            raise Malformed(Fault.ORDER, f"{after!r} comes after {before!r} in a list of members")
    return listed([name.encode() for name in ids])


def digests(values: Sequence[bytes]) -> tuple[bytes, ...]:
    """The parts for a list of digests of 32 bytes.

    Raises:
        Malformed: one has another length.
    """
    for value in values:
        # Section 2a: raw bytes. The same digest spelt as text would give another view.
        exactly(value, DIGEST, "a digest")
    return listed(values)


def session(terms: bytes) -> bytes:
    """The session's digest; `terms` are the bytes that the coordinator sent."""
    return hash_parts(b"session", terms)


def view1(session: bytes, keys: Mapping[str, PublicKeys]) -> bytes:
    """The view after READY.

    Args:
        session: the session's digest.
        keys: the public keys of the members that finished READY, by id.
    """
    # Section 2.1: ids and keys as this member saw them. Who is shown other keys has another view1, and can open nothing
    # of the others.
    ids = sorted(keys)
    shown = [key for name in ids for key in (exactly(keys[name].c, KEY, "a key"), exactly(keys[name].s, KEY, "a key"))]
    return hash_parts(b"view1", session, *members(ids), *shown)


def view_open(view1: bytes, opening: int, W: Sequence[str]) -> bytes:
    """The view of an opening, 0 to 2, over the members W.

    Raises:
        Malformed: W is not sorted.
    """
    # Section 2.4: the number of the opening is in it, so that openings 1 and 2 have different noise and masks.
    return hash_parts(b"open", view1, integer(opening), *members(W))


def view_mask(view1: bytes, W: Sequence[str], coefficients: Sequence[int]) -> bytes:
    """The view of MASK; coefficients are integers 2^32 a, in the order of W.

    Raises:
        Malformed: W is not sorted, not one coefficient for each member, or one that is not a sint64.
    """
    # Section 2.1: one for each member of W. With more or fewer, nobody could say whose coefficient is whose.
    one_each(W, coefficients, "coefficient")
    return hash_parts(b"mask", view1, *members(W), *listed([integer(a) for a in coefficients]))


def final(
    view_mask: bytes, V: Sequence[str], inputs: Sequence[bytes], tau1: bytes = b"", tau2_digest: bytes = b""
) -> bytes:
    """The last view, which members sign at CONFIRM.

    Args:
        view_mask: the view of MASK.
        V: the members whose masked updates arrived.
        inputs: the digests of these masked updates, 32 bytes each, in the order of V.
        tau1: the seed of the second sketch, 32 bytes; empty unless the mode is `verified`.
        tau2_digest: BLAKE3(tau2); empty unless the mode is `verified`.

    Raises:
        Malformed: V is not sorted, not one digest for each member, or a digest of another length.
    """
    # Section 2.7: final names each masked vector, so the coordinator cannot exchange one after the members have
    # confirmed.
    one_each(V, inputs, "digest")
    return hash_parts(b"final", view_mask, *members(V), *digests(inputs), tau1, tau2_digest)


def digest(data: bytes) -> bytes:
    """BLAKE3(data), 32 bytes: of tau2, for instance."""
    return blake3(data).digest()


def commitment(sigma_b: bytes) -> bytes:
    """The commitment of a member to its mask secret at DEAL: BLAKE3("fedpareto/v1/secure/commit" sigma_b)."""
    # Section 2a: a prefix of its own, so no other digest of a session passes as a commitment.
    return blake3(b"fedpareto/v1/secure/commit" + sigma_b).digest()


def exactly(value: bytes, length: int, what: str) -> bytes:
    """The value, if it has this many bytes.

    Raises:
        Malformed: it has another length.
    """
    if len(value) != length:
        raise Malformed(Fault.LENGTH, f"{what} has {length} bytes, not {len(value)}")
    return value


def one_each(ids: Sequence[str], values: Sequence[object], what: str) -> None:
    """Checks that a list of members and a list of their values are equally long.

    Raises:
        Malformed: they are not.
    """
    if len(ids) != len(values):
        raise Malformed(Fault.LENGTH, f"{len(ids)} members have one {what} each, not {len(values)}")
