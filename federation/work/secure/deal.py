"""DEAL and OPEN: share mask secrets and sketches, and open the Gram matrix."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from federation.secure import encryption, hashing, openings, payloads, sketch
from federation.secure.dealing import DealShares, deal_bytes, deal_shares
from federation.secure.derivation import deal_key
from federation.secure.errors import Malformed
from federation.secure.hashing import PublicKeys
from federation.secure.thresholds import LARGEST, Mode, Thresholds
from federation.vectors import Array
from federation.work.base import RowSchema, Shape, WorkError, WorkingClient
from federation.work.secure import limits, member_checks
from federation.work.secure.journal import Journal
from federation.work.secure.member_checks import require
from federation.work.secure.stage import CIPHERTEXTS, MAX_ENVELOPES, REPLIES, StageWork, bytes_row, channel
from federation.work.secure.terms import SessionStage, Statement


@dataclass(frozen=True, kw_only=True)
class Deal(StageWork):
    """DEAL: share the mask secrets and the sketch with the members that replied to READY."""

    name: ClassVar[str] = SessionStage.DEAL.value
    doing: ClassVar[str] = "sharing secrets"
    stage: ClassVar[SessionStage] = SessionStage.DEAL
    keeps_payload: ClassVar[bool] = False  # ciphertexts

    mode: Mode
    members: tuple[str, ...]

    @property
    def thresholds(self) -> Thresholds:
        """The numbers of the cohort."""
        return cohort_of(len(self.members), self.mode)

    def rows(self, shape: Shape) -> tuple[RowSchema, ...]:
        return (RowSchema(CIPHERTEXTS, (len(self.members) - 1) * deal_bytes(self.thresholds.k), "U8"),)

    def input_sizes(self, shape: Shape) -> Mapping[str, int]:
        return {REPLIES: MAX_ENVELOPES}

    def reply(self, client: WorkingClient, journal: Journal) -> tuple[dict[str, Array], Statement]:
        envelopes, _ = payloads.split_envelopes(bytes(client.inputs[REPLIES]))
        # Section 3, rule 1: verified first. Everything below uses keys and numbers of these replies as the members'
        # own.
        shown = member_checks.peers(client, journal, envelopes, SessionStage.READY)
        # Section 2.1: U1 is who has signed. A name without a reply would get a share, and count for every threshold.
        require(tuple(sorted(shown)) == self.members, "members", "the members are not those of the replies")
        # Section 8: of READY. In another mode, t and all degrees would be others than those that the owner's checks
        # were about.
        require(self.mode.value == journal.agreed(SessionStage.READY)["mode"], "terms", "the terms have another mode")
        # Section 2.2: before they are cut in two: from a shorter field, c and s would be other bytes than those that
        # were signed.
        require(all(len(reply.statement.keys) == 64 for reply in shown.values()), "keys", "keys are 64 bytes")
        # Section 2c: noise is meant for n_min - t members. A worker that does not blur lowers that of all the others.
        member_checks.check_blurred(journal, shown)
        # Section 2b: at MASK, these bytes decide which entries are summed; a malformed list would fail there, after the
        # session has counted.
        member_checks.check_measured(journal, {name: reply.statement.measured for name, reply in shown.items()})
        keys = {name: PublicKeys(reply.statement.keys[:32], reply.statement.keys[32:]) for name, reply in shown.items()}
        # Section 2.2: before the first exchange with them: a secret with a key of low order is known to everybody.
        member_checks.check_public_keys(client.client_id, journal.keys.public, keys)
        # Section 1: again for U1. Many can be invited and few be ready; all thresholds follow from the few.
        member_checks.check_cohort(client, self.mode, len(keys), "are ready")
        facts = {
            "keys": {name: (key.c + key.s).hex() for name, key in keys.items()},
            "samples": {name: reply.samples for name, reply in shown.items()},
            "measured": {name: reply.statement.measured.hex() for name, reply in shown.items()},
        }
        # Kept before view1 is used: a member that is restarted in between, and told other keys, would deal twice, under
        # two views.
        journal.agree(SessionStage.DEAL, 0, facts)
        view1 = journal.view1
        dealt = dict(zip(journal.ids, _dealt(journal), strict=True))
        # Kept before the reply: nobody else has this share, and OPEN and UNMASK need it.
        journal.keep_own(self.name, dealt.pop(client.client_id).to_bytes())
        encrypted = (
            encryption.encrypt(
                deal_key(channel(journal, other), view1, client.client_id, other), shares.to_bytes(), view1
            )
            for other, shares in dealt.items()
        )
        # Section 2.6: the commitment is signed before any share can be opened: later, a wrong secret could not be told
        # from wrong shares.
        return bytes_row(CIPHERTEXTS, b"".join(encrypted)), self.statement(
            view=view1, commitment=hashing.commitment(journal.keys.sigma_b)
        )


@dataclass(frozen=True, kw_only=True)
class Open(StageWork):
    """OPEN: opening 0 names the dealers of bad ciphertexts, openings 1 and 2 open the Gram matrix of the members W."""

    name: ClassVar[str] = SessionStage.OPEN.value
    doing: ClassVar[str] = "opening the Gram matrix"
    stage: ClassVar[SessionStage] = SessionStage.OPEN

    opening: int
    members: tuple[str, ...]

    @property
    def place(self) -> int:
        return self.opening

    def rows(self, shape: Shape) -> tuple[RowSchema, ...]:
        # Section 5: each opening shows colluders another linear function of the honest sketches, so their number is
        # fixed.
        if not 0 <= self.opening <= 2:
            raise WorkError(f"{self.name} has the openings 0 to 2, and no opening {self.opening}")
        if self.opening == 0:
            return ()
        return (RowSchema("elements", 4 * payloads.pair_count(len(self.members)), "U8"),)

    def input_sizes(self, shape: Shape) -> Mapping[str, int]:
        return {} if self.opening else {CIPHERTEXTS: LARGEST * deal_bytes(32 * LARGEST)}

    def reply(self, client: WorkingClient, journal: Journal) -> tuple[dict[str, Array], Statement]:
        me, cohort = client.client_id, journal.thresholds
        if self.opening == 0:
            # Section 3, rule 3: before shares are taken from this list: OPEN 1 and MASK can only shrink it.
            member_checks.check_members(self.members, journal.ids, me, cohort.n_min)
            held, bad = self._received(client, journal)
            # The shares before the fact that they are held: in the other order, a crash leaves a member that claims
            # shares which it lacks.
            journal.keep_shares(held)
            journal.agree(SessionStage.OPEN, 0, {"W": list(self.members), "held": sorted(held)})
            return {}, self.statement(view=hashing.view_open(journal.view1, 0, self.members), complaints=tuple(bad))
        # Section 3, rule 3: in `sum` the owner allowed no Gram matrix, and no sketch was dealt.
        require(cohort.mode is not Mode.SUM, "stage", "a session of the mode sum opens no Gram matrix")
        # Section 3, rule 3: raises if the opening before was not answered, so no list can be skipped that W has to
        # shrink from.
        before = journal.agreed(SessionStage.OPEN, self.opening - 1)["W"]
        member_checks.check_members(self.members, before, me, cohort.n_min)
        require(
            # Section 3, rule 3: over the same W, the second opening would give each entry again with other noise, and
            # the mean has less.
            self.opening == 1 or len(self.members) < len(before),
            "members",
            "the second opening needs fewer members",
        )
        # Section 3, rule 3: raises for a dealer whose shares this member lacks, before the session counts.
        shares = np.stack([shares.sketch for shares in journal.shares(self.members)])
        # Section 3, rule 1: on the disk before the elements exist. Counted afterwards, a crash would give a coordinator
        # one session for nothing.
        limits.check_sessions(client, self.session.hex(), work=journal.agreed(SessionStage.READY)["work"], count=True)
        # Before the elements leave: MASK takes only the W for which elements were sent last.
        journal.agree(SessionStage.OPEN, self.opening, {"W": list(self.members)})
        view, publics, points = (
            hashing.view_open(journal.view1, self.opening, self.members),
            journal.publics,
            journal.points,
        )
        elements = openings.opening(
            shares,
            {name: points[name] for name in self.members},
            me,
            openings.noise(journal.secret, view, cohort.k, len(self.members)),
            openings.open_masks(me, journal.keys.c, {name: publics[name].c for name in self.members}, view),
        )
        return bytes_row("elements", payloads.pack_open(elements)), self.statement(view=view)

    def _received(self, client: WorkingClient, journal: Journal) -> tuple[dict[str, DealShares], list[str]]:
        """The shares of the dealers whose ciphertexts are good, this member's own among them, and the other dealers."""
        me, view1, rows = client.client_id, journal.view1, journal.thresholds.k
        others = [name for name in self.members if name != me]
        held, bad = {me: DealShares.from_bytes(journal.own_share(Deal.name), rows)}, []
        encrypted = payloads.split_ciphertexts(bytes(client.inputs[CIPHERTEXTS]), len(others), deal_bytes(rows))
        for name, ciphertext in zip(others, encrypted, strict=True):
            try:
                # Section 2a: sender first. With the ids exchanged, a member would accept its own ciphertexts, handed
                # back to it.
                key = deal_key(channel(journal, name), view1, name, me)
                held[name] = DealShares.from_bytes(encryption.decrypt(key, ciphertext, view1), rows)
            # Section 2.4: named, not refused: with a refusal, one bad dealer could stop every member.
            except Malformed:
                bad.append(name)
        return held, bad


def cohort_of(members: int, mode: Mode) -> Thresholds:
    """The thresholds of a cohort of this size. Raises WorkError if there are none."""
    try:
        return Thresholds(members, mode)
    except Malformed as error:
        raise WorkError(str(error), reason="cohort") from error


def _dealt(journal: Journal) -> tuple[DealShares, ...]:
    """The shares that this member deals, one for each member of U1."""
    cohort, elements = journal.thresholds, np.empty(0, np.uint64)
    if cohort.k:  # the Gram matrix will be opened
        # Section 2c: of the blurred direction. Of the vector before the blur, the check of the sum's length would fail
        # for honest members.
        elements = sketch.first_sketch(journal.session, journal.direction(), cohort.k)
    return deal_shares(journal.keys, elements, cohort, journal.secret, journal.view1)
