"""MASK, CONFIRM and UNMASK: the masked vector, the confirmation, and the shares that unmask the sum."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from federation.digests import digest, parse
from federation.secure import encryption, evaluation, hashing, masks, payloads, sketch, verified_mode
from federation.secure.blocks import Blocks, blocks
from federation.secure.derivation import confirm_key
from federation.secure.errors import Malformed
from federation.secure.fields import Elements
from federation.secure.thresholds import LARGEST, RANGE_TESTS, T_ROWS, Mode
from federation.secure.verified_mode import CheckShares, confirm_bytes
from federation.vectors import Array, payload_bytes
from federation.work.base import RowSchema, Shape, WorkError, WorkingClient, payload_layout
from federation.work.secure import limits, member_checks
from federation.work.secure.journal import Journal
from federation.work.secure.member_checks import require
from federation.work.secure.stage import CIPHERTEXTS, MAX_ENVELOPES, REPLIES, StageWork, bytes_row, channel
from federation.work.secure.terms import SessionStage, Statement
from federation.work.site import EVALUATE


@dataclass(frozen=True, kw_only=True)
class Mask(StageWork):
    """MASK: the vector times the member's coefficient, masked; `coefficients` are in units of 2^-32, one for each."""

    name: ClassVar[str] = SessionStage.MASK.value
    doing: ClassVar[str] = "masking"
    stage: ClassVar[SessionStage] = SessionStage.MASK

    members: tuple[str, ...]
    coefficients: tuple[int, ...]
    length: int

    def rows(self, shape: Shape) -> tuple[RowSchema, ...]:
        if self.length < 1 or len(self.coefficients) != len(self.members):
            raise WorkError("a sum needs coordinates, and one coefficient for each member")
        return (RowSchema("masked", self.length, "U32"),)

    def reply(self, client: WorkingClient, journal: Journal) -> tuple[dict[str, Array], Statement]:
        me, cohort, ready = client.client_id, journal.thresholds, journal.agreed(SessionStage.READY)
        require(self.length == ready["length"], "terms", f"the terms say {ready['length']} coordinates")
        last = next((facts for opening in (2, 1, 0) if (facts := journal.facts(SessionStage.OPEN, opening))), None)
        require(last is not None, "stage", "nothing was opened")
        before = (last or {})["W"]
        member_checks.check_members(self.members, before, me, cohort.n_min)
        require(
            cohort.mode is Mode.SUM
            or (list(self.members) == before and journal.facts(SessionStage.OPEN, 1) is not None),
            "members",
            "the members are not those for which elements were sent",
        )
        journal.shares(self.members)
        coefficients = dict(zip(self.members, self.coefficients, strict=True))
        member_checks.check_coefficients(client, journal, coefficients)
        limits.mask(client, self.session.hex(), work=ready["work"])
        view = hashing.view_mask(journal.view1, self.members, self.coefficients)
        publics = {name: journal.publics[name].s for name in self.members}
        keys = journal.keys
        streams = masks.member_masks(me, keys.s, publics, keys.sigma_b, view)
        vector = journal.vector() if ready["work"] != EVALUATE else _with_noise(journal, self.members, view)
        row = np.concatenate(list(masks.masked(vector, coefficients[me], streams)))
        file = payload_bytes(payload_layout(self.rows(client.shape)), {"masked": row})
        journal.agree(
            SessionStage.MASK,
            0,
            {"W": list(self.members), "a": list(self.coefficients), "digest": digest(b"".join(file))},
        )
        return {"masked": row}, self.statement(view=view)


@dataclass(frozen=True, kw_only=True)
class Confirm(StageWork):
    """CONFIRM: sign the agreed facts; in mode `verified`, share a second sketch.

    `masked` has the digest of the masked vector of each member of V, 32 bytes.
    """

    name: ClassVar[str] = SessionStage.CONFIRM.value
    doing: ClassVar[str] = "confirming"
    stage: ClassVar[SessionStage] = SessionStage.CONFIRM
    keeps_payload: ClassVar[bool] = False  # ciphertexts

    members: tuple[str, ...]
    masked: tuple[bytes, ...]
    tau1: bytes = b""
    commitment: bytes = b""

    def rows(self, shape: Shape) -> tuple[RowSchema, ...]:
        if not self.tau1:
            return ()
        return (RowSchema(CIPHERTEXTS, (len(self.members) - 1) * confirm_bytes(), "U8"),)

    def reply(self, client: WorkingClient, journal: Journal) -> tuple[dict[str, Array], Statement]:
        me, cohort, mask = client.client_id, journal.thresholds, journal.agreed(SessionStage.MASK)
        member_checks.check_members(self.members, mask["W"], me, cohort.n_min)
        require(len(self.masked) == len(self.members), "members", "there is not one digest for each member")
        own_digest = bytes.fromhex(parse(mask["digest"])[1])
        require(
            self.masked[self.members.index(me)] == own_digest, "members", "this member's own masked vector is another"
        )
        verified = cohort.mode is Mode.VERIFIED
        lengths = (32, 32) if verified else (0, 0)
        require((len(self.tau1), len(self.commitment)) == lengths, "terms", "the challenge does not fit the mode")
        coefficients = dict(zip(mask["W"], mask["a"], strict=True))
        member_checks.check_survivors(client, journal, {name: coefficients[name] for name in self.members})
        view = hashing.view_mask(journal.view1, mask["W"], mask["a"])
        final = hashing.final(view, self.members, self.masked, self.tau1, self.commitment)
        journal.agree(
            SessionStage.CONFIRM,
            0,
            {
                "V": list(self.members),
                "final": final.hex(),
                "tau1": self.tau1.hex(),
                "commitment": self.commitment.hex(),
            },
        )
        if not verified:
            return {}, self.statement(view=final)
        dealt = dict(zip(self.members, _dealt(journal), strict=True))
        journal.keep_own(self.name, dealt.pop(me).to_bytes())
        encrypted = (
            encryption.encrypt(confirm_key(channel(journal, other), final, me, other), shares.to_bytes(), final)
            for other, shares in dealt.items()
        )
        return bytes_row(CIPHERTEXTS, b"".join(encrypted)), self.statement(view=final)


@dataclass(frozen=True, kw_only=True)
class Unmask(StageWork):
    """UNMASK: shares of the self masks of V, and of the pair keys of the members that were lost after OPEN."""

    name: ClassVar[str] = SessionStage.UNMASK.value
    doing: ClassVar[str] = "unmasking"
    stage: ClassVar[SessionStage] = SessionStage.UNMASK
    forgets: ClassVar[bool] = True

    members: tuple[str, ...]
    lost: tuple[str, ...]
    tau2: bytes = b""

    def rows(self, shape: Shape) -> tuple[RowSchema, ...]:
        survivors = len(self.members)
        checks = (3 + RANGE_TESTS) * survivors + T_ROWS if self.tau2 else 0
        return (RowSchema("shares", 8 * (5 * (survivors + len(self.lost)) + checks), "U8"),)

    def input_sizes(self, shape: Shape) -> Mapping[str, int]:
        replies = {REPLIES: MAX_ENVELOPES}
        return {**replies, CIPHERTEXTS: LARGEST * confirm_bytes()} if self.tau2 else replies

    def reply(self, client: WorkingClient, journal: Journal) -> tuple[dict[str, Array], Statement]:
        cohort, mask, confirm = (
            journal.thresholds,
            journal.agreed(SessionStage.MASK),
            journal.agreed(SessionStage.CONFIRM),
        )
        final, lost = bytes.fromhex(confirm["final"]), sorted(set(mask["W"]) - set(confirm["V"]))
        require(list(self.members) == confirm["V"], "members", "the members are not those that were confirmed")
        require(list(self.lost) == lost, "members", "the lost members are not those that were confirmed")
        envelopes, _ = payloads.split_envelopes(bytes(client.inputs[REPLIES]))
        replies = member_checks.peers(client, journal, envelopes, SessionStage.CONFIRM)
        agree = [name for name, reply in replies.items() if name in confirm["V"] and reply.statement.view == final]
        require(
            len(agree) >= cohort.t_mask,
            "quorum",
            f"{len(agree)} members confirmed what this member confirmed; {cohort.t_mask} are needed",
        )
        answers = None
        if cohort.mode is Mode.VERIFIED:
            challenge = hashing.digest(self.tau2)
            require(
                challenge.hex() == confirm["commitment"], "terms", "the challenge is not the one that was announced"
            )
            coefficients = dict(zip(mask["W"], mask["a"], strict=True))
            held = self._held(client, journal, final)
            weights = [coefficients[name] for name in self.members]
            answers = verified_mode.check_answers(held, weights, verified_mode.challenge(self.tau2))
        else:
            require(not self.tau2, "terms", "the challenge does not fit the mode")
        sigma_b = _stacked([shares.sigma_b for shares in journal.shares(self.members)])
        sigma_s = _stacked([shares.sigma_s for shares in journal.shares(self.lost)])
        limits.unmask(client, self.session.hex(), work=journal.agreed(SessionStage.READY)["work"])
        journal.agree(SessionStage.UNMASK, 0, {})
        payload = payloads.Unmasking(sigma_b, sigma_s, answers).to_bytes()
        return bytes_row("shares", payload), self.statement(view=final)

    def _held(self, client: WorkingClient, journal: Journal, final: bytes) -> list[CheckShares]:
        """The shares of the second sketch of each member of V."""
        me, others = client.client_id, [name for name in self.members if name != client.client_id]
        encrypted = payloads.split_ciphertexts(bytes(client.inputs[CIPHERTEXTS]), len(others), confirm_bytes())
        held = {me: CheckShares.from_bytes(journal.own_share(Confirm.name))}
        for name, ciphertext in zip(others, encrypted, strict=True):
            try:
                key = confirm_key(channel(journal, name), final, name, me)
                held[name] = CheckShares.from_bytes(encryption.decrypt(key, ciphertext, final))
            except Malformed as error:
                raise WorkError(f"the shares of {name}: {error}", reason=f"bad-share:{name}") from error
        return [held[name] for name in self.members]


def _with_noise(journal: Journal, members: Sequence[str], view_mask: bytes) -> Blocks:
    """The metrics that all members of W compute, with this member's noise; 0 elsewhere."""
    ready, measured = journal.agreed(SessionStage.READY), journal.agreed(SessionStage.DEAL)["measured"]
    summed = np.frombuffer(evaluation.common([bytes.fromhex(measured[name]) for name in members]), np.uint8)
    size = evaluation.deviation(ready["noise"], journal.thresholds) / ready["clip"]
    metrics = np.concatenate(list(journal.own_vector()))
    return blocks(summed * (metrics + size * evaluation.noise(journal.secret, view_mask, len(metrics))))


def _dealt(journal: Journal) -> tuple[CheckShares, ...]:
    """The shares that this member deals at CONFIRM, one for each member of V."""
    confirm, points = journal.agreed(SessionStage.CONFIRM), journal.points
    elements = sketch.second_elements(bytes.fromhex(confirm["tau1"]), journal.vector())
    at, final = [points[name] for name in confirm["V"]], bytes.fromhex(confirm["final"])
    return verified_mode.check_shares(elements, at, journal.thresholds.t, journal.secret, final)


def _stacked(shares: Sequence[Elements]) -> Elements:
    return np.stack(shares) if shares else np.empty((0, 5), np.uint64)
