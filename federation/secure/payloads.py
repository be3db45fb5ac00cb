"""Payloads of the phases of a session: which elements and ciphertexts follow each other (section 2a).

    DEAL, CONFIRM   ciphertexts for the other members in order
    inbox           envelopes (4-byte big-endian length, bytes) by sender, then ciphertexts for this member by sender
    OPEN 1, 2       the upper triangle by rows, F_p
    MASK            y, d words
    UNMASK          shares of sigma_b of V, of sigma_s of W without V, then, in mode `verified`, norms, degree values,
                    zero values and 32 projections by V, and 256 sums, F_q

Where an inbox holds both (UNMASK), the envelopes come first: the length of the ciphertexts is known.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from federation.secure.errors import Fault, Malformed
from federation.secure.fields import F_P, F_Q, Elements
from federation.secure.hashing import exactly
from federation.secure.member_keys import SIGMA
from federation.secure.thresholds import RANGE_TESTS, T_ROWS
from federation.secure.wire import pack, unpack


def pair_count(members: int) -> int:
    """Pairs (a, b) with a <= b."""
    return members * (members + 1) // 2


def pack_open(elements: Elements) -> bytes:
    """The payload of OPEN 1 or 2."""
    return pack(F_P, elements)


def unpack_open(payload: bytes, members: int) -> Elements:
    """The elements of OPEN 1 or 2 over |W| members, (|W| (|W| + 1) / 2,).

    Raises:
        Malformed: a wrong length, or an element at or above the modulus.
    """
    return unpack(F_P, payload, pair_count(members))


@dataclass(frozen=True, eq=False)
class CheckAnswers:
    """The answers of a member about the shares of CONFIRM, in mode `verified`; all in F_q.

    Attributes:
        norms: ||x_h||^2 + z_h for each h of V, (|V|,).
        degrees: <rho, x_h> + b_h, (|V|,).
        zeros: s z_h + b'_h, (|V|,).
        projections: E x_h + y_h, (|V|, 32).
        sums: sum_h a_h x_h, (256,).
    """

    norms: Elements
    degrees: Elements
    zeros: Elements
    projections: Elements
    sums: Elements


@dataclass(frozen=True, eq=False)
class Unmasking:
    """A member's answer to UNMASK; all in F_q.

    Attributes:
        sigma_b: its shares of the first mask secret of each member of V, (|V|, 5).
        sigma_s: its shares of the second one of each member of W without V, (|W| - |V|, 5).
        answers: about the shares of CONFIRM, or None unless the mode is `verified`.
    """

    sigma_b: Elements
    sigma_s: Elements
    answers: CheckAnswers | None = None

    def to_bytes(self) -> bytes:
        """The payload."""
        parts = [self.sigma_b, self.sigma_s]
        if self.answers:
            checks = self.answers
            parts += [checks.norms, checks.degrees, checks.zeros, checks.projections, checks.sums]
        return b"".join(pack(F_Q, part) for part in parts)

    @classmethod
    def from_bytes(cls, payload: bytes, survivors: int, lost: int, *, verified: bool) -> "Unmasking":
        """Reads a payload for |V| survivors and |W| - |V| lost members.

        Raises:
            Malformed: a wrong length, or an element at or above the modulus.
        """
        sizes = [SIGMA * survivors, SIGMA * lost, *([survivors] * 3 + [RANGE_TESTS * survivors, T_ROWS]) * verified]
        ends = np.cumsum(sizes)
        # Section 2a: all at once and exactly. A payload that is longer or shorter would move shares from one secret to
        # another.
        elements = unpack(F_Q, payload, int(ends[-1]))
        sigma_b, sigma_s, *checks = np.split(elements, ends[:-1])
        answers = None
        if verified:
            norms, degrees, zeros, projections, sums = checks
            answers = CheckAnswers(norms, degrees, zeros, projections.reshape(survivors, RANGE_TESTS), sums)
        return cls(sigma_b.reshape(survivors, SIGMA), sigma_s.reshape(lost, SIGMA), answers)


def split_ciphertexts(payload: bytes, count: int, length: int) -> list[bytes]:
    """Ciphertexts of equal length.

    Raises:
        Malformed: the payload does not hold this many.
    """
    # Section 2a: cut elsewhere, the ciphertext of one dealer would be read as that of the next one, who would be
    # accused.
    exactly(payload, count * length, f"a message of {count} ciphertexts")
    return [payload[start : start + length] for start in range(0, len(payload), length)] if length else []


def join_envelopes(envelopes: Sequence[bytes]) -> bytes:
    """Envelopes, each after its length."""
    return b"".join(len(envelope).to_bytes(4, "big") + envelope for envelope in envelopes)


def split_envelopes(inbox: bytes, ciphertexts: int = 0) -> tuple[list[bytes], bytes]:
    """The envelopes of an inbox, and the rest, which has this many bytes.

    Raises:
        Malformed: an envelope ends beyond the inbox, or in the rest.
    """
    envelopes, at, end = [], 0, len(inbox) - ciphertexts
    while at < end:
        length = int.from_bytes(inbox[at : min(at + 4, end)], "big")
        # The length is a claim. Beyond `end` it would take ciphertexts, or other members' envelopes, for this one.
        if at + 4 > end or at + 4 + length > end:
            raise Malformed(Fault.LENGTH, f"the envelope at byte {at} does not end within the {end} bytes of envelopes")
        envelopes.append(inbox[at + 4 : at + 4 + length])
        at += 4 + length
    # A negative end would cut the ciphertexts from the wrong side.
    if end < 0:
        raise Malformed(Fault.LENGTH, f"an inbox of {len(inbox)} bytes lacks its {ciphertexts} bytes of ciphertexts")
    return envelopes, inbox[end:]
