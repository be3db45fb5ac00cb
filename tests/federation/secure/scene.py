"""A session of the private round, played with the functions of `federation.secure` alone: no messages, no refusals."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property
from itertools import combinations

import numpy as np
import pytest
from numpy.typing import NDArray

from federation.secure import blur, encryption, hashing, masks, openings, sketch, verified_mode
from federation.secure.blocks import blocks, norm, scaled
from federation.secure.dealing import DealShares, deal_bytes, deal_shares
from federation.secure.derivation import confirm_key, deal_key
from federation.secure.errors import Fault, Malformed
from federation.secure.fields import Elements, Reals
from federation.secure.member_keys import MemberKeys, check_keys, member_keys, pair_private_key, shared_secret
from federation.secure.payloads import CheckAnswers, Unmasking, split_ciphertexts
from federation.secure.thresholds import Mode, Thresholds
from federation.secure.unmasking import Check, Recovered, commits, gives_key, recover
from federation.secure.verified_mode import CheckShares
from federation.secure.wire import Words


@dataclass(frozen=True)
class Session:
    """The updates of all members that finished READY, and what they agreed on.

    Attributes:
        updates: u of each member, (d,), by id.
        secrets: 32 bytes of each member, by id.
        mode: of the session.
        terms: bytes.
        rows: k of the sketch S, or None for that of the protocol.
        blur: c.
    """

    updates: Mapping[str, NDArray[np.float64]]
    secrets: Mapping[str, bytes]
    mode: Mode
    terms: bytes = b"terms"
    rows: int | None = None
    blur: float = 0.0

    @property
    def ids(self) -> list[str]:
        return sorted(self.updates)

    @property
    def thresholds(self) -> Thresholds:
        return Thresholds(len(self.updates), self.mode)

    @property
    def k(self) -> int:
        return self.thresholds.k if self.rows is None else self.rows

    @property
    def points(self) -> dict[str, int]:
        return {name: i + 1 for i, name in enumerate(self.ids)}

    @cached_property
    def digest(self) -> bytes:
        return hashing.session(self.terms)

    @cached_property
    def keys(self) -> dict[str, MemberKeys]:
        keys = {name: member_keys(self.secrets[name], self.digest) for name in self.ids}
        check_keys(key.public for key in keys.values())
        return keys

    @cached_property
    def view1(self) -> bytes:
        return hashing.view1(self.digest, {name: key.public for name, key in self.keys.items()})

    # --- DEAL

    @cached_property
    def blurred(self) -> dict[str, NDArray[np.float64]]:
        """b of each member."""
        size = blur.deviation(self.blur, self.thresholds)
        return {
            name: np.concatenate(list(blur.blurred(blocks(u), self.secrets[name], self.view1, size)))
            for name, u in self.updates.items()
        }

    @cached_property
    def vectors(self) -> dict[str, NDArray[np.float64]]:
        """v of each member."""
        lengths = {name: (norm(blocks(self.updates[name])), norm(blocks(b))) for name, b in self.blurred.items()}
        factors = {name: before / after for name, (before, after) in lengths.items()}
        return {name: np.concatenate(list(scaled(blocks(b), factors[name]))) for name, b in self.blurred.items()}

    @cached_property
    def directions(self) -> dict[str, NDArray[np.float64]]:
        """v of each member with length 1."""
        return {name: b / norm(blocks(b)) for name, b in self.blurred.items()}

    @cached_property
    def sketches(self) -> dict[str, Elements]:
        if not self.k:
            return dict.fromkeys(self.ids, np.empty(0, np.uint64))
        return {name: sketch.first_sketch(self.digest, blocks(self.directions[name]), self.k) for name in self.ids}

    @cached_property
    def dealt(self) -> dict[str, bytes]:
        """The payload of DEAL of each member."""
        payload = {}
        for name in self.ids:
            shares = deal_shares(self.keys[name], self.sketches[name], self.thresholds, self.secrets[name], self.view1)
            payload[name] = b"".join(
                encryption.encrypt(
                    deal_key(self.channel(name, other), self.view1, name, other), held.to_bytes(), self.view1
                )
                for other, held in zip(self.ids, shares, strict=True)
                if other != name
            )
        return payload

    @cached_property
    def held(self) -> dict[str, dict[str, DealShares]]:
        """What each member holds of each dealer, [member][dealer]."""
        cut: dict[str, dict[str, bytes]] = {name: {} for name in self.ids}
        for dealer in self.ids:
            others = [name for name in self.ids if name != dealer]
            ciphertexts = split_ciphertexts(self.dealt[dealer], len(others), deal_bytes(self.k))
            for name, ciphertext in zip(others, ciphertexts, strict=True):
                cut[name][dealer] = ciphertext
        held: dict[str, dict[str, DealShares]] = {}
        for i, name in enumerate(self.ids):
            own = deal_shares(self.keys[name], self.sketches[name], self.thresholds, self.secrets[name], self.view1)[i]
            held[name] = {name: own}
            for dealer, ciphertext in cut[name].items():
                key = deal_key(self.channel(name, dealer), self.view1, dealer, name)
                held[name][dealer] = DealShares.from_bytes(encryption.decrypt(key, ciphertext, self.view1), self.k)
        return held

    def channel(self, name: str, other: str) -> bytes:
        return shared_secret(self.keys[name].c, self.keys[other].public.c)

    # --- OPEN

    def opening(self, name: str, W: Sequence[str], opening: int) -> Elements:
        view = hashing.view_open(self.view1, opening, W)
        return openings.opening(
            np.stack([self.held[name][dealer].sketch for dealer in W]),
            {other: self.points[other] for other in W},
            name,
            openings.noise(self.secrets[name], view, self.k, len(W)),
            openings.open_masks(name, self.keys[name].c, {other: self.keys[other].public.c for other in W}, view),
        )

    def gram(self, W: Sequence[str], opening: int = 1) -> Reals:
        return openings.gram((self.opening(name, W, opening) for name in W), len(W))

    # --- MASK

    def view_mask(self, a: Mapping[str, int]) -> bytes:
        return hashing.view_mask(self.view1, sorted(a), [a[name] for name in sorted(a)])

    def masked(self, name: str, a: Mapping[str, int], vector: NDArray[np.float64] | None = None) -> Words:
        """y of a member; `a` are the coefficients of W."""
        publics = {other: self.keys[other].public.s for other in a}
        own = masks.member_masks(name, self.keys[name].s, publics, self.keys[name].sigma_b, self.view_mask(a))
        v = self.vectors[name] if vector is None else vector
        return np.concatenate(list(masks.masked(blocks(v), a[name], own)))

    # --- UNMASK

    def unmasking(self, name: str, V: Sequence[str], lost: Sequence[str], answers: CheckAnswers | None) -> Unmasking:
        held = self.held[name]
        return Unmasking(
            np.array([held[dealer].sigma_b for dealer in V]).reshape(-1, 5),
            np.array([held[dealer].sigma_s for dealer in lost], np.uint64).reshape(-1, 5),
            answers,
        )

    def checks(self, V: Sequence[str], lost: Sequence[str]) -> list[Check]:
        commitments = [commits(hashing.commitment(self.keys[name].sigma_b)) for name in V]
        return commitments + [gives_key(self.keys[name].public.s, self.digest) for name in lost]

    def recovered(self, replies: Mapping[str, bytes], V: Sequence[str], lost: Sequence[str]) -> Recovered | None:
        """The mask secrets from the payloads of UNMASK, by id."""
        verified = self.mode is Mode.VERIFIED and len(next(iter(replies.values()))) > 40 * (len(V) + len(lost))
        answers = [
            Unmasking.from_bytes(replies[name], len(V), len(lost), verified=verified) for name in sorted(replies)
        ]
        shares = np.stack([np.concatenate([answer.sigma_b, answer.sigma_s]) for answer in answers])
        points = [self.points[name] for name in sorted(replies)]
        t = self.thresholds
        return recover(points, shares, self.checks(V, lost), t_mask=t.t_mask, t=t.t)

    def sum(
        self, inputs: Mapping[str, Words], a: Mapping[str, int], replies: Mapping[str, bytes] | None = None
    ) -> Words:
        """The unmasked words of the sum of the y of V."""
        V, lost = sorted(inputs), sorted(set(a) - set(inputs))
        if replies is None:
            replies = {name: self.unmasking(name, V, lost, None).to_bytes() for name in V}
        found = self.recovered(replies, V, lost)
        assert found
        total = np.zeros(len(next(iter(inputs.values()))), np.uint32)
        for y in inputs.values():
            total += y
        sigma_b = dict(zip(V, found.secrets, strict=False))
        private = {
            name: pair_private_key(sigma, self.digest)
            for name, sigma in zip(lost, found.secrets[len(V) :], strict=True)
        }
        publics = {name: self.keys[name].public.s for name in V}
        masks.unmask(total, masks.masks_of_sum(V, sigma_b, private, publics, self.view_mask(a)))
        return total

    # --- verified

    def check_shares(self, name: str, V: Sequence[str], tau1: bytes, final: bytes) -> tuple[CheckShares, ...]:
        points = [self.points[other] for other in V]
        values = sketch.second_elements(tau1, blocks(self.vectors[name]))
        return verified_mode.check_shares(values, points, self.thresholds.t, self.secrets[name], final)

    def confirm_ciphertext(self, name: str, other: str, held: CheckShares, final: bytes) -> bytes:
        return encryption.encrypt(confirm_key(self.channel(name, other), final, name, other), held.to_bytes(), final)


def session(m: int, mode: Mode, d: int = 40, *, rows: int | None = None, seed: int = 0) -> Session:
    """Members whose unit updates agree in part."""
    rng = np.random.default_rng(seed)
    common = rng.standard_normal(d)
    updates = {}
    for i in range(m):
        update = common + 2 * rng.standard_normal(d)
        updates[f"silo-{i:02}"] = update / np.linalg.norm(update)
    return Session(updates, {name: rng.bytes(32) for name in updates}, mode, rows=rows)


def triangle(G: Reals) -> list[int]:
    """The upper triangle by rows, in units of 2^-28."""
    return [int(value) for value in np.ldexp(G[np.triu_indices(len(G))], 28)]


def refused(fault: Fault) -> "pytest.RaisesExc[Malformed]":
    """What is inside must be refused for this fault."""
    return pytest.raises(Malformed, check=lambda error: error.fault is fault)


def by_definition(coefficients: Mapping[str, int], me: str, t: int) -> Fraction | float:
    """1 + the sum of A_j^2 / A_i^2 over the others, without the t others whose absence leaves the least."""
    own = coefficients[me] ** 2
    others = [a * a for name, a in coefficients.items() if name != me]
    rests = [sum(others) - sum(gone) for gone in combinations(others, min(t, len(others)))]
    return 1 + Fraction(min(rests), own) if own else math.inf
