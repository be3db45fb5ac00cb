"""What the coordinator sees of updates, computed with the functions of the private round.

Masks, shares and ciphertexts of a private round cancel exactly, so they are left out: the sketches, their fixed point,
the noise of an opening, the coefficients and the rounding of the sum are those of `federation.secure`.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from federation.aggregation.qp import box, min_norm
from federation.secure import openings
from federation.secure.derivation import count_key, dense_key
from federation.secure.fields import F_P
from federation.secure.streams import Stream
from federation.secure.thresholds import S_BITS, SUM_BITS, Mode, Thresholds
from leakage.federation import Reals, unit_rows

_PARTS, _BUCKETS, _INDEX = 4, 4096, 13  # of federation.secure.sketch


def sketch_matrix(session: bytes, length: int, rows: int) -> Reals:
    """The map S of a session as a matrix, (k, d): `federation.secure.sketch` for many vectors, up to its scale."""
    words = np.frombuffer(Stream(count_key(session)).read(8 * length), "<u8")
    bits = np.frombuffer(Stream(dense_key(session)).read(rows * _PARTS * _BUCKETS // 8), np.uint8)
    signs = 1 - 2 * np.unpackbits(bits).reshape(rows, _PARTS, _BUCKETS).astype(np.int8)
    S = np.zeros((rows, length), np.int8)
    for part in range(_PARTS):
        index = (words >> np.uint64(_INDEX * part)) & np.uint64(2 * _BUCKETS - 1)
        minus = (index >= _BUCKETS).astype(np.int8)
        S += signs[:, part, (index % _BUCKETS).astype(np.int64)] * (1 - 2 * minus)
    return S / math.sqrt(_PARTS * rows)


def sketches(S: Reals, units: Reals) -> Reals:
    """The sketches that members deal, (c, k): of length 1, with 14 fractional bits."""
    return np.rint(np.ldexp(unit_rows(units @ S.T), S_BITS)) * 2.0**-S_BITS


def opening_noise(secrets: Sequence[bytes], view_open: bytes, rows: int, members: int) -> Reals:
    """The noise on the Gram matrix of |W| members, (|W|, |W|), that members with these secrets add."""
    noise = (F_P.encode(openings.noise(secret, view_open, rows, members)) for secret in secrets)
    return openings.gram(noise, members)


def coefficients(gram: Reals, members: int) -> Reals:
    """The coefficients of FedMGDA+ in a private round: the shortest mean in the box and below the cap, (|W|,)."""
    thresholds = Thresholds(members, Mode.PRIVATE)
    prior = np.full(len(gram), 1 / len(gram))
    lower, upper = box(prior, thresholds.epsilon)
    values, vectors = np.linalg.eigh(gram)
    definite = (vectors * np.maximum(values, 0.0)) @ vectors.T  # noise can make an eigenvalue negative
    return min_norm(definite, prior=prior, lower=lower, upper=np.minimum(upper, thresholds.cap)).weights


def weighted_sum(units: Reals, a: Reals) -> Reals:
    """R, (d,), as the masked updates add up: each a_i u_i is rounded to 28 fractional bits."""
    return np.asarray(np.rint(units * a[:, None] * 2.0**SUM_BITS).sum(0) * 2.0**-SUM_BITS)


@dataclass(frozen=True)
class PrivateRound:
    """What the coordinator and its colluders see of one session.

    Attributes:
        gram: G of all members, with the noise that the colluders cannot subtract, (m, m).
        a: the coefficients, (m,).
        total: R without the colluders' own updates, (d,).
        probed: the inner products of each attacked member's sketch with the colluders' vectors, (targets, 2 t).
    """

    gram: Reals
    a: Reals
    total: Reals
    probed: Reals


def private_round(
    units: Reals, S: Reals, secrets: Sequence[bytes], session: bytes, targets: int, probes: Reals | None
) -> PrivateRound:
    """Plays the openings and the sum of a session.

    Args:
        units: the updates of all members, divided by their lengths, (m, d); the members after the first `targets` may
            collude.
        S: the map of the session, (k, d).
        secrets: of the members, 32 bytes each.
        session: its digest.
        targets: the members that are attacked.
        probes: the vectors that colluders deal in place of their sketches, (2 t, k), each of length 1: the first t are
            opened in opening 1, the others, by malformed shares, in opening 2. None without colluders.
    """
    m, X = len(units), sketches(S, units)
    if probes is None:
        gram = X @ X.T + opening_noise(secrets, session, len(S), m)
        a = coefficients(gram, m)
        return PrivateRound(gram, a, weighted_sum(units, a), np.empty((targets, 0)))
    opened = []
    for opening, dealt in enumerate(np.split(probes, 2)):
        members = np.vstack([X[:targets], dealt])
        noise = opening_noise(secrets[:targets], session + bytes([opening]), len(S), m)
        opened.append(members @ members.T + noise)
    a = coefficients(opened[0], m)
    probed = np.hstack([gram[:targets, targets:] for gram in opened])
    return PrivateRound(opened[0], a, weighted_sum(units[:targets], a[:targets]), probed)
