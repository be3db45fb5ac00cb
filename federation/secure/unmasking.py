"""The mask secrets from the members' shares (section 2.6).

A secret is five elements, shared with degree t_mask - 1. What is reconstructed is checked: sigma_b against its
commitment, sigma_s against the public key s. Up to floor((n - t_mask) / 2) wrong answers of n are corrected. If there
are more, the secret is that of the first t_mask answers, if this passes the check; else there is none, the session is
void and nobody is named.

A member is named for wrong shares of more than t secrets. Only corrections of at most n - t_mask + 1 - t answers count:
t liars that know where a polynomial must go through at 0 can bend it (the difference vanishes at 0 and at t_mask - 2
honest answers), and with more corrections n - t_mask + 2 - t or more honest answers would look wrong.
"""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from federation.secure.berlekamp_welch import decode_columns
from federation.secure.fields import F_Q, Elements
from federation.secure.hashing import commitment
from federation.secure.member_keys import SIGMA, pair_private_key
from federation.secure.shamir import interpolate
from federation.secure.wire import pack

Check = Callable[[bytes], bool]


@dataclass(frozen=True)
class Recovered:
    """The mask secrets of a session.

    Attributes:
        secrets: as 40 bytes each, in the order of the shares.
        wrong: secrets for which an answer was surely wrong, by its position; those without are left out.
        named: positions of answers that were wrong for more than t secrets.
    """

    secrets: tuple[bytes, ...]
    wrong: Mapping[int, int]
    named: frozenset[int]


def commits(shown: bytes) -> Check:
    """Checks that sigma_b is the secret of this commitment."""
    # Section 2.6: against what was signed at DEAL. Unchecked, liars could bend the secret, and the "sum" would be
    # noise.
    return lambda sigma: commitment(sigma) == shown


def gives_key(public: bytes, session: bytes) -> Check:
    """Checks that sigma_s gives the private key of this s."""
    # Section 2.6: against the key that all members saw at DEAL. Another secret would remove other masks than those that
    # are in the sum.
    return lambda sigma: pair_private_key(sigma, session).public_key().public_bytes_raw() == public


def recover(
    points: Sequence[int], shares: Elements, checks: Sequence[Check], *, t_mask: int, t: int
) -> Recovered | None:
    """The secrets that the shares stand for, or None if one of them cannot be found.

    Args:
        points: x_j of those that answered, (n,).
        shares: their shares, (n, secrets, 5) in F_q.
        checks: the condition of each secret.
        t_mask: shares that open a mask, at most n.
        t: liars.
    """
    n, degree = len(points), t_mask - 1
    columns = shares.reshape(n, -1)
    # Section 2.6: more corrections leave more than one polynomial, and the wrong one would name honest members.
    corrected = decode_columns(F_Q, points, columns, degree, (n - t_mask) // 2)
    # Where too many are wrong to decode, the first answers may be right; the check of the secret decides.
    first = interpolate(F_Q, points, columns, degree, [0])[0]
    secrets, wrong = [], Counter[int]()
    for i, check in enumerate(checks):
        part = slice(SIGMA * i, SIGMA * (i + 1))
        decoded = [column for column in corrected[part] if column]
        sigma = pack(F_Q, np.array([column.secret for column in decoded], np.uint64))
        # Section 2.6: answers count as wrong only beside a secret that passes its check; beside another one, nobody is
        # blamed.
        if len(decoded) == SIGMA and check(sigma):
            wrong.update({row for c in decoded if len(c.wrong) <= n - t_mask + 1 - t for row in c.wrong})
        # Section 2.6: nothing fits. Void, and nobody is named: it cannot be told whose answers were wrong.
        elif not check(sigma := pack(F_Q, first[part])):
            return None
        secrets.append(sigma)
    # Section 2.6: more than t: each of t bad dealers can hand an honest member a wrong share, which it passes on
    # without a lie.
    return Recovered(tuple(secrets), dict(wrong), frozenset(row for row, count in wrong.items() if count > t))
