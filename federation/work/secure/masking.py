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
from federation.work.site import EVALUATE, STATISTICS
from federation.work.statistics import one_sum


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
        if self.integers:
            return (RowSchema("masked", 8 * self.length, "U8"),)  # words of 64 bits
        return (RowSchema("masked", self.length, "U32"),)

    @property
    def integers(self) -> bool:
        """True if integers are summed modulo 2^64."""
        # Section 2e: by the coefficients, which are in view_mask: one key never makes masks of both rings.
        return set(self.coefficients) == {1}

    def reply(self, client: WorkingClient, journal: Journal) -> tuple[dict[str, Array], Statement]:
        me, cohort, ready = client.client_id, journal.thresholds, journal.agreed(SessionStage.READY)
        # Section 7: with fewer coordinates, masks and vector would be cut at a place of the coordinator's choice.
        require(self.length == ready["length"], "terms", f"the terms say {ready['length']} coordinates")
        # Section 3, rule 3: the newest opening that this member answered. Its W is the one for which elements were
        # given.
        last = next((facts for opening in (2, 1, 0) if (facts := journal.facts(SessionStage.OPEN, opening))), None)
        require(last is not None, "stage", "nothing was opened")
        before = (last or {})["W"]
        # Section 3, rule 3: before a mask is made: a sum over fewer than n_min is not covered.
        member_checks.check_members(self.members, before, me, cohort.n_min)
        require(
            # Section 3, rule 3: exactly that W: a sum and a Gram matrix of different members would together show one of
            # them.
            cohort.mode is Mode.SUM
            or (list(self.members) == before and journal.facts(SessionStage.OPEN, 1) is not None),
            "members",
            "the members are not those for which elements were sent",
        )
        # Section 3, rule 3: raises for a member whose shares are missing: if it is lost, this one could not help to
        # unmask.
        journal.shares(self.members)
        coefficients = dict(zip(self.members, self.coefficients, strict=True))
        # Section 3.5: before the session counts and y exists: what is masked can be unmasked by t_mask others.
        member_checks.check_coefficients(client, journal, coefficients)
        if ready["work"] == STATISTICS:
            one_sum.mask(client, self.session.hex(), ready["question"], self.members)
        else:
            # Section 3, rule 5: on the disk before y exists: counted later, a crash lets one more sum of this model be
            # masked.
            limits.mask(client, self.session.hex(), work=ready["work"])
        view = hashing.view_mask(journal.view1, self.members, self.coefficients)
        publics = {name: journal.publics[name].s for name in self.members}
        keys = journal.keys
        streams = masks.member_masks(me, keys.s, publics, keys.sigma_b, view)
        if self.integers:
            row: Array = np.frombuffer(masks.masked_integers(journal.integers(), streams).tobytes(), np.uint8)
        else:
            # Sections 2b and 2c: blurred, or with the noise of an evaluation. A sum of exact vectors could be solved
            # for every member.
            vector = journal.vector() if ready["work"] != EVALUATE else _with_noise(journal, self.members, view)
            row = np.concatenate(list(masks.masked(vector, coefficients[me], streams)))
        # Section 3, rule 3: kept before the reply: at CONFIRM the member looks for the digest of what it sent, and
        # nothing else may stand there.
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
        # Section 3, rule 3: V is a part of the W for which the masks were made: masks of other vectors do not cancel.
        # And a sum of fewer than n_min shows too much of each.
        member_checks.check_members(self.members, mask["W"], me, cohort.n_min)
        require(len(self.masked) == len(self.members), "members", "there is not one digest for each member")
        # Section 3, rule 3: with another digest under its name, this member would confirm a sum with a vector that it
        # did not send.
        own_digest = bytes.fromhex(parse(mask["digest"])[1])
        require(
            self.masked[self.members.index(me)] == own_digest, "members", "this member's own masked vector is another"
        )
        verified = cohort.mode is Mode.VERIFIED
        # Section 2.7: tau1, and of tau2 the digest alone: who knew tau2 now could deal shares that pass its challenge.
        lengths = (32, 32) if verified else (0, 0)
        require((len(self.tau1), len(self.commitment)) == lengths, "terms", "the challenge does not fit the mode")
        coefficients = dict(zip(mask["W"], mask["a"], strict=True))
        # Section 3.5, rule 1: before this member signs: t_mask signatures unmask the sum, also without the member that
        # lost its cover.
        member_checks.check_survivors(client, journal, {name: coefficients[name] for name in self.members})
        ready = journal.agreed(SessionStage.READY)
        if ready["work"] == STATISTICS:
            # Section 3, rule 8: on the disk before the signature, with which this V can be opened.
            one_sum.confirm(client, self.session.hex(), ready["question"], self.members)
        view = hashing.view_mask(journal.view1, mask["W"], mask["a"])
        final = hashing.final(view, self.members, self.masked, self.tau1, self.commitment)
        # Section 2.7: kept before it is signed. UNMASK answers for this V alone; two lists that one member confirms
        # could both be opened.
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
        # Section 2.7: after `final` is kept, from which all shares follow: asked again, the member deals the same ones.
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
    # Section 3, rule 2: when the shares are acknowledged, everything of the session is erased, and the session is over.
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
        # Section 2.6: shares of the self masks of V, and of nobody else: that of a lost member would open its vector.
        require(list(self.members) == confirm["V"], "members", "the members are not those that were confirmed")
        # Section 2.6: W without V exactly. For a member in both lists, both its secrets would be opened, and its vector
        # with them.
        require(list(self.lost) == lost, "members", "the lost members are not those that were confirmed")
        envelopes, _ = payloads.split_envelopes(bytes(client.inputs[REPLIES]))
        replies = member_checks.peers(client, journal, envelopes, SessionStage.CONFIRM)
        # Section 3, rule 3: who is in V and has signed this member's own `final`; signatures on another list count for
        # nothing here.
        agree = [name for name, reply in replies.items() if name in confirm["V"] and reply.statement.view == final]
        require(
            # Section 1: two different lists cannot both have t_mask signatures. With fewer, one mask could be opened in
            # two ways.
            len(agree) >= cohort.t_mask,
            "quorum",
            f"{len(agree)} members confirmed what this member confirmed; {cohort.t_mask} are needed",
        )
        answers = None
        if cohort.mode is Mode.VERIFIED:
            # Section 2.7: the challenge that was fixed before the shares were dealt: a later one could be chosen
            # against a dealer.
            challenge = hashing.digest(self.tau2)
            require(
                challenge.hex() == confirm["commitment"], "terms", "the challenge is not the one that was announced"
            )
            coefficients = dict(zip(mask["W"], mask["a"], strict=True))
            # Section 2.7: raises before a share of a mask leaves: without a dealer's shares there is nothing to answer.
            held = self._held(client, journal, final)
            weights = [coefficients[name] for name in self.members]
            answers = verified_mode.check_answers(held, weights, verified_mode.challenge(self.tau2))
        else:
            require(not self.tau2, "terms", "the challenge does not fit the mode")
        sigma_b = _stacked([shares.sigma_b for shares in journal.shares(self.members)])
        sigma_s = _stacked([shares.sigma_s for shares in journal.shares(self.lost)])
        # Section 3, rule 5: last, and on the disk before the shares leave: all checks have passed, and nothing can be
        # taken back.
        work = journal.agreed(SessionStage.READY)["work"]
        if work != STATISTICS:  # section 3, rule 8: the data set has confirmed this V alone, so there is no other sum
            limits.unmask(client, self.session.hex(), work=work)
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
            # Section 2.7: a decline that names the dealer. The difference to a check sum without it would show its
            # second sketch.
            except Malformed as error:
                raise WorkError(f"the shares of {name}: {error}", reason=f"bad-share:{name}") from error
        return [held[name] for name in self.members]


def _with_noise(journal: Journal, members: Sequence[str], view_mask: bytes) -> Blocks:
    """The metrics that all members of W compute, with this member's noise; 0 elsewhere."""
    ready, measured = journal.agreed(SessionStage.READY), journal.agreed(SessionStage.DEAL)["measured"]
    # Section 2b: from signed bytes that all members of W have: if they disagreed, an entry would be summed over some of
    # them.
    summed = np.frombuffer(evaluation.common([bytes.fromhex(measured[name]) for name in members]), np.uint8)
    # Section 2b: the noise that was checked at READY, in the unit of the clipped vector: no later message can lower it.
    size = evaluation.deviation(ready["noise"], journal.thresholds) / ready["clip"]
    metrics = np.concatenate(list(journal.own_vector()))
    return blocks(summed * (metrics + size * evaluation.noise(journal.secret, view_mask, len(metrics))))


def _dealt(journal: Journal) -> tuple[CheckShares, ...]:
    """The shares that this member deals at CONFIRM, one for each member of V."""
    confirm, points = journal.agreed(SessionStage.CONFIRM), journal.points
    # Section 2c: of v, as it was masked. Of u, the check of T R would fail for every honest member.
    elements = sketch.second_elements(bytes.fromhex(confirm["tau1"]), journal.vector())
    # Section 2.7: over V alone, on the points of U1, so the coordinator decodes with the points that all know.
    at, final = [points[name] for name in confirm["V"]], bytes.fromhex(confirm["final"])
    return verified_mode.check_shares(elements, at, journal.thresholds.t, journal.secret, final)


def _stacked(shares: Sequence[Elements]) -> Elements:
    return np.stack(shares) if shares else np.empty((0, 5), np.uint64)
