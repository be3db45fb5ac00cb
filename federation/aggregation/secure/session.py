"""The conversation of a private round: from the invitation to the unmasked sum (sections 2 and 4 of the protocol).

A failed check raises `Voided`, which names the members that must have cheated, if it can.
"""

from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fractions import Fraction
from typing import Any

import numpy as np
from numpy.typing import NDArray

from federation.aggregation.interface import TooFewUpdatesError, Vector
from federation.aggregation.phases import AlgorithmPhase, PhaseReply, Record, Replies, Setting, Voided, Waiting
from federation.aggregation.secure.covered import Covered, covered
from federation.aggregation.secure.gram import positive
from federation.aggregation.secure.phases import ConfirmPhase, DealPhase, MaskPhase, OpenPhase, ReadyPhase, UnmaskPhase
from federation.aggregation.secure.settled import Cohort, Sum
from federation.digests import parse
from federation.secure import accusations, bounds, checks, hashing, masks, openings, sketch, unmasking, verified_mode
from federation.secure.blocks import blocks
from federation.secure.bounds import BoundKind
from federation.secure.checks import Failure
from federation.secure.dealing import deal_bytes
from federation.secure.errors import Malformed
from federation.secure.fields import Elements, Reals
from federation.secure.hashing import PublicKeys
from federation.secure.member_keys import check_keys, pair_private_key
from federation.secure.payloads import Unmasking as Shares
from federation.secure.payloads import join_envelopes, unpack_open
from federation.secure.thresholds import ONE, SMALLEST, Mode, Thresholds
from federation.secure.verified_mode import confirm_bytes
from federation.secure.wire import Words
from federation.vectors import RowFile
from federation.work.secure.allowed import least_cover

Decide = Callable[[Cohort], Vector | None]
"""The rule's coefficients of W, (|W|,), of any scale; None where there is nothing to sum.

May raise TooFewUpdatesError.
"""
TOLERANCE = 2.0**-24
"""The largest distance of two directions of unit vectors that count as the same: processors round differently."""

_SPENT = ("sessions", "model-sessions", "model-sums")  # reasons of members whose owners allow no further session

Conversation = Generator[AlgorithmPhase, Replies, Any]


def secure_sum(setting: Setting, decide: Decide) -> Generator[AlgorithmPhase, Replies, Sum]:
    """One session. Without coefficients it ends before the sum.

    Args:
        setting: the terms, and the challenges.
        decide: the coefficients of the rule; members get those of `covered`.

    Raises:
        TooFewUpdatesError: too few members are left, or not even plain averaging covers them.
        Voided: a check failed, or members were lost where the session cannot go on without them.
    """
    session = _Session(setting)
    yield from session.ready()
    yield from session.deal()
    # Section 2: openings before coefficients. With the coefficients known, a liar could shift G to suit its vector.
    yield from session.open()
    if session.decide(decide):
        yield from session.mask()
        # Section 2: between MASK and UNMASK: no share of a mask leaves before t_mask members have signed the same V and
        # vectors.
        yield from session.confirm()
        yield from session.unmask()
    return session.result()


@dataclass(eq=False)
class _Session:
    """The state of a session so far; each method is a phase."""

    setting: Setting
    alarms: list[str] = field(default_factory=list)
    consulted: list[PhaseReply] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.digest = hashing.session(self.setting.terms_bytes)
        self.mode = self.setting.agreed.mode
        self.V: tuple[str, ...] = ()
        self.tau1 = self.tau2 = b""
        self.masked: list[PhaseReply] = []
        self.named: dict[str, str] = {}
        # Section 2e: integers are summed modulo 2^64, vectors modulo 2^32.
        self.integers = self.setting.bounds.kind is BoundKind.ONE
        self.words: Words = np.zeros(self.setting.agreed.length, np.uint64 if self.integers else np.uint32)

    # --- READY, DEAL

    def ready(self) -> Conversation:
        agreed = self.setting.agreed
        replies = yield ReadyPhase(
            agreed=agreed,
            terms_bytes=self.setting.terms_bytes,
            specification=self.setting.specification,
            clients=agreed.ids,
        )
        ready_replies: dict[str, PhaseReply] = {}
        keys: dict[str, PublicKeys] = {}
        # Section 2.2: `Replies` are in the order of ids, in which a verifier repeats it: of two equal keys, the later
        # one is left out.
        for reply in replies:
            shown = PublicKeys(reply.statement.keys[: hashing.KEY], reply.statement.keys[hashing.KEY :])
            try:
                check_keys([shown], {key for both in keys.values() for key in (both.c, both.s)})
            except Malformed as error:  # a key that another member has shown; the later one is a dropout
                self._alarm(reply.client_id, str(error))
                continue
            ready_replies[reply.client_id], keys[reply.client_id] = reply, shown
        # Section 3, rule 1: limits that are used up do not come back by themselves, so owners have to act: wait, and
        # skip no rounds.
        spent = sorted(name for name, why in replies.declines.items() if why in _SPENT)
        if len(ready_replies) < SMALLEST and spent:
            raise Waiting(
                f"{', '.join(spent)}: their data sets have been in as many private rounds as their owners allow, in "
                "all or from this model: the owners may raise the limits in policy.toml; then resume the run"
            )
        if len(ready_replies) < SMALLEST:
            raise TooFewUpdatesError(
                f"a private round needs at least {SMALLEST} members; {len(ready_replies)} are ready"
            )
        self.replies, self.keys = ready_replies, keys
        # Section 1: for the whole session, also if members are lost later: members compute the same numbers from U1.
        self.cohort = Thresholds(len(ready_replies), self.mode)
        self.ids = tuple(sorted(ready_replies))
        self.points = {name: point for point, name in enumerate(self.ids, 1)}
        self.view1 = hashing.view1(self.digest, keys)
        self.consulted += replies

    def deal(self) -> Conversation:
        replies = yield DealPhase(
            session=self.digest,
            mode=self.mode,
            members=self.ids,
            clients=self.ids,
            # Section 2: envelopes as signed: the members verify them by their own rosters.
            replies=join_envelopes([self.replies[name].signed for name in self.ids]),
            needed=self.cohort.n_min,
        )
        # Section 2.1: another view1 means other keys, so nobody could read this member's ciphertexts.
        dealt = self._agreeing(replies, self.view1)
        self.commitments = {reply.client_id: reply.statement.commitment for reply in dealt}
        self.W = tuple(reply.client_id for reply in dealt)
        self._enough(len(self.W), "have shared their secrets")
        self.dealt = dealt
        self.consulted += replies

    # --- OPEN

    def open(self) -> Conversation:
        yield from self._accept()
        self.gram: Reals | None = None
        # Section 2: opening 0 is for all modes, the Gram matrix not: members decline further openings in `sum`.
        if self.mode is Mode.SUM:
            return
        for opening in (1, 2):
            replies = yield OpenPhase(session=self.digest, opening=opening, members=self.W, clients=self.W)
            view = hashing.view_open(self.view1, opening, self.W)
            answers = self._unpacked(self._agreeing(replies, view))
            self.consulted += replies
            # Section 2.4: if one is missing, the masks do not cancel, and what is decoded is noise.
            if len(answers) == len(self.W):
                self.gram = openings.gram(answers.values(), len(self.W))
                # Section 4: before the rule reads G: a matrix that cannot be one must not choose coefficients.
                self._check(checks.failures_of_gram(self.gram, self.W, self.cohort.k))
                return
            # Section 2.4: strictly smaller, or members refuse opening 2. Who sent a malformed answer leaves, too.
            self.W = tuple(sorted(answers))
            self._enough(len(self.W), "have answered the opening")
        # Section 2.4: no third opening: each shows colluders one more linear function of the sketches.
        raise Voided("members were lost in both openings of the Gram matrix")

    def _accept(self) -> Conversation:
        """Opening 0: W is left without those whose ciphertexts were bad, or who say so of others without cause."""
        senders = self.W
        replies = yield OpenPhase(
            session=self.digest,
            opening=0,
            members=senders,
            clients=senders,
            ciphertexts=_inbox(self.dealt, self.ids, deal_bytes(self.cohort.k)),
            needed=self.cohort.n_min,
        )
        answers: dict[str, tuple[str, ...]] = {}
        agreeing = self._agreeing(replies, hashing.view_open(self.view1, 0, senders))
        for reply in agreeing:
            try:
                # Section 2.4: malformed accusations count as no answer: their sender leaves, and nobody whom it names.
                accusations.check(senders, reply.client_id, reply.statement.complaints)
                answers[reply.client_id] = reply.statement.complaints
            except Malformed as error:
                self._alarm(reply.client_id, str(error))
        # Section 2.4: before any product is opened: with a bad share, an honest member's elements would spoil G.
        left = accusations.shrink(senders, answers, self.cohort.t)
        for name in left.accused:
            self._alarm(name, f"more than {self.cohort.t} members accuse it of bad ciphertexts")
        for name in left.accusers:
            self._alarm(name, f"it accuses more than {self.cohort.t} members")
        for name, other in left.pairs:
            self._alarm(name, f"it accuses {other}; both are left out")
        self.W = left.W
        self._enough(len(self.W), "have accepted their shares")
        self.consulted += replies

    def _unpacked(self, replies: Sequence[PhaseReply]) -> dict[str, Elements]:
        elements = {}
        for reply in replies:
            try:
                elements[reply.client_id] = unpack_open(_content(reply), len(self.W))
            except Malformed as error:
                self._alarm(reply.client_id, str(error))
        return elements

    # --- MASK, CONFIRM

    def decide(self, decide: Decide) -> bool:
        """Finds the coefficients; returns False if nothing is to be summed."""
        ready = Replies([self.replies[name] for name in self.W])
        self.final_cohort = Cohort(thresholds=self.cohort, replies=ready, gram=self.gram)
        least = least_cover(self.setting.effective_members, self.cohort)
        # Section 3.5, rule 3: if one of W does not accept negative coefficients, it would decline, and be lost.
        signed = self.setting.bounds.signed and all(reply.statement.signed for reply in ready)
        self.bounds = replace(self.setting.bounds, signed=signed)
        coefficients = decide(self.final_cohort)
        accepted = Covered((), 1.0)
        if coefficients is not None and self.integers:
            accepted = Covered(self._ones(least), 1.0)
        elif coefficients is not None:
            accepted = covered(self.bounds, least, self.final_cohort, coefficients)
        self.coefficients, self.share, self.least = accepted.coefficients, accepted.share, least
        # Section 4: members answer MASK once. After a crash, other coefficients than those that were sent would get no
        # vector.
        if self.setting.asked is not None:
            self._check_suits(self.setting.asked)
            self.coefficients = self.setting.asked
        return bool(self.coefficients)

    def _ones(self, least: Fraction) -> tuple[int, ...]:
        """The coefficients of a sum of integers. Raises TooFewUpdatesError: the members would refuse them."""
        ones = dict.fromkeys(self.W, 1)
        if problem := bounds.uncovered(ones, self.cohort.t, least):
            raise TooFewUpdatesError(problem)
        return tuple(ones.values())

    def _check_suits(self, coefficients: Sequence[int]) -> None:
        """Raises unless the coefficients sent to members give the direction computed here, and suit the members."""
        zeros = (0,) * len(self.W)
        if coefficients and len(coefficients) != len(self.W):
            raise Voided(f"{len(self.W)} members were asked with {len(coefficients)} coefficients")
        off = (np.array(coefficients or zeros, float) - np.array(self.coefficients or zeros, float)) / ONE
        G = np.eye(len(self.W)) if self.gram is None else positive(self.gram)
        # Section 4: as a distance of directions: weights may be rounded otherwise, but those on record have to be the
        # rule's.
        if off @ G @ off > TOLERANCE**2:
            raise Voided("the coefficients that members were asked with make another direction than the rule")
        # Nothing is summed, so there is nothing that members could refuse.
        if not coefficients:
            return
        by_member = dict(zip(self.W, coefficients, strict=True))
        samples = {reply.client_id: reply.samples for reply in self.final_cohort.replies}
        # Section 3.5: a verifier runs this, too: coefficients that members refuse must not be in a record that
        # verifies.
        problem = bounds.problem(self.bounds, by_member, samples, self.cohort)
        if problem := problem or bounds.uncovered(by_member, self.cohort.t, self.least):
            raise Voided(f"members were asked with coefficients that they refuse: {problem}")

    def mask(self) -> Conversation:
        length = self.setting.agreed.length
        replies = yield MaskPhase(
            session=self.digest,
            members=self.W,
            coefficients=self.coefficients,
            length=length,
            clients=self.W,
            needed=self.cohort.n_min,
        )
        self.view_mask = hashing.view_mask(self.view1, self.W, self.coefficients)
        self.masked = self._agreeing(replies, self.view_mask)
        # Those with this view are the survivors; both lists together name each reply once.
        self.consulted += [reply for reply in replies if reply.statement.view != self.view_mask]
        self.V = tuple(reply.client_id for reply in self.masked)
        self._enough(len(self.V), "have sent their masked vectors")
        by_member = dict(zip(self.W, self.coefficients, strict=True))
        # Section 3.5: before CONFIRM, where every member would refuse for the one whose cover is gone.
        if problem := bounds.uncovered({name: by_member[name] for name in self.V}, self.cohort.t, self.least):
            raise Voided(f"without the members that were lost, {problem}")
        self.lost = tuple(name for name in self.W if name not in self.V)

    def confirm(self) -> Conversation:
        # Section 2.7: from the envelopes that the members signed, so each finds its own digest in the list.
        digests = tuple(bytes.fromhex(parse(reply.signed_payload)[1]) for reply in self.masked)
        verified = self.mode is Mode.VERIFIED
        if verified:
            # Section 2.7: only now, with all vectors fixed: a member that knew tau1 before could choose a vector whose
            # sketch passes.
            self.tau1, self.tau2 = self.setting.taus(self.view_mask, self.V, digests)
        # Section 2.8: tau2 is shown at UNMASK, after the shares were dealt; its digest now, so it cannot be chosen
        # then.
        commitment = hashing.digest(self.tau2) if verified else b""
        replies = yield ConfirmPhase(
            session=self.digest,
            members=self.V,
            masked=digests,
            tau1=self.tau1,
            commitment=commitment,
            clients=self.V,
            needed=self.cohort.t_mask,
        )
        final = hashing.final(self.view_mask, self.V, digests, self.tau1, commitment)
        self.final, self.confirmed = final, self._agreeing(replies, final)
        # Section 2.7: the check sum is over all dealers of V: opened without one, it would show the T u of that member.
        if verified and len(self.confirmed) < len(self.V):
            missing = sorted(set(self.V) - {reply.client_id for reply in self.confirmed})
            named = {reply.client_id: "other-view" for reply in replies if reply.statement.view != final}
            raise Voided(f"lost before the second sketch was shared: {', '.join(missing)}", named=named)
        # Section 1: with fewer signatures, members open no mask.
        if len(self.confirmed) < self.cohort.t_mask:
            raise TooFewUpdatesError(
                f"{len(self.confirmed)} members have confirmed the same lists; {self.cohort.t_mask} are needed"
            )
        self.consulted += replies

    # --- UNMASK

    def unmask(self) -> Conversation:
        members = tuple(reply.client_id for reply in self.confirmed)
        verified = self.mode is Mode.VERIFIED
        replies = yield UnmaskPhase(
            session=self.digest,
            members=self.V,
            lost=self.lost,
            tau2=self.tau2,
            replies=join_envelopes([reply.signed for reply in self.confirmed]),
            ciphertexts=_inbox(self.confirmed, self.V, confirm_bytes()) if verified else None,
            clients=members,
        )
        # Section 2.7: first: members that declined are missing below, and the dealer would go unnamed for "too few".
        self._refused_shares(replies)
        answers: dict[str, Shares] = {}
        for reply in self._agreeing(replies, self.final):
            try:
                answers[reply.client_id] = Shares.from_bytes(
                    _content(reply), len(self.V), len(self.lost), verified=verified
                )
            except Malformed as error:
                self._alarm(reply.client_id, str(error))
        self._enough(len(answers), "have sent their shares")
        self.consulted += replies
        # Section 2.6: secrets are compared with commitments and keys before the sum exists.
        self._unmask(answers)
        # Section 4: last, on the bare sum: `result`, and with it any step, is out of reach if a check fails.
        self._check_sum(answers)

    def _refused_shares(self, replies: Replies) -> None:
        """Names a dealer whose shares of the second sketch more than t members declined."""
        blamed = [reason.partition(":")[2] for reason in replies.declines.values() if reason.startswith("bad-share:")]
        # Section 2.7: more than t, so t liars cannot name an honest dealer.
        named = {name: "bad-share" for name in set(blamed) & set(self.V) if blamed.count(name) > self.cohort.t}
        if named:
            raise Voided("shares of the second sketch cannot be read", named=named)

    def _unmask(self, answers: Mapping[str, Shares]) -> None:
        """Sums the masked vectors, and removes the masks."""
        ordered = [answers[name] for name in sorted(answers)]
        shares = np.stack([np.concatenate([share.sigma_b, share.sigma_s]) for share in ordered])
        # Section 2.6: in the order of the shares, self masks of V, then pair keys of the lost: in another one, good
        # secrets fail.
        tests = [
            *(unmasking.commits(self.commitments[name]) for name in self.V),
            *(unmasking.gives_key(self.keys[name].s, self.digest) for name in self.lost),
        ]
        points, senders = [self.points[name] for name in sorted(answers)], sorted(answers)
        recovered = unmasking.recover(points, shares, tests, t_mask=self.cohort.t_mask, t=self.cohort.t)
        # Section 2.6: the record names no member here: with so many wrong answers, an honest answer could look wrong.
        if recovered is None:
            raise Voided("the shares of the masks fit no secret that was committed to", blind=True)
        self.named = {senders[index]: "wrong-shares" for index in recovered.named}
        for index, count in recovered.wrong.items():
            self._alarm(senders[index], f"wrong shares of {count} mask secrets")
        survivors = len(self.V)
        sigma_b = dict(zip(self.V, recovered.secrets[:survivors], strict=True))
        private = {
            name: pair_private_key(sigma, self.digest)
            for name, sigma in zip(self.lost, recovered.secrets[survivors:], strict=True)
        }
        for reply in self.masked:
            # Section 1: modulo 2^32: unsigned words wrap, as the masks do that have to cancel.
            self.words += _row(reply).view("<u8") if self.integers else _row(reply)
        publics = {name: self.keys[name].s for name in self.V}
        masks.unmask(self.words, masks.masks_of_sum(self.V, sigma_b, private, publics, self.view_mask))

    def _check_sum(self, answers: Mapping[str, Shares]) -> None:
        """The checks of section 4. Wrong answers that are corrected name members, and void nothing."""
        if self.integers:  # section 2e: whether data can have these totals is checked where they are read
            return
        by_member = dict(zip(self.W, self.coefficients, strict=True))
        weights = [by_member[name] / ONE for name in self.V]
        # Section 4: in every mode: a mask that did not cancel shows in each, and in `sum` nothing else bounds a vector.
        # These need the sum and the coefficients that all have signed, and nothing else.
        failures, square = checks.failures_of_sum((masks.reals(block) for block in blocks(self.words)), weights)
        if self.gram is not None:
            # Section 4: 0 for those that were lost: G is over W, and the sum over V.
            a = np.array([by_member[name] / ONE if name in self.V else 0.0 for name in self.W])
            failures += checks.failures_of_identity(
                square, self.gram, a, self.cohort.k, shorter=self.setting.agreed.clip > 0
            )
        if self.mode is Mode.VERIFIED:
            points = {name: self.points[name] for name in answers}
            answers_by_member = {name: answer.answers for name, answer in answers.items() if answer.answers is not None}
            # Section 2.8: the challenges are checked only here, in `verified`, where n_min keeps 3t + 1 answers.
            findings = verified_mode.examine(points, answers_by_member, self.V, self.cohort.t)
            failures += findings.failures
            self.named |= findings.named
            for name, dealers in findings.corrected.items():
                self._alarm(name, f"wrong answers about the shares of {len(dealers)} members")
            if findings.sums is not None:
                # Section 4: of the sum itself: compared with the sum of what was dealt, it ties y to the checked
                # sketches.
                TR = sketch.second_sketch(self.tau1, (masks.reals(block) for block in blocks(self.words)))
                size, m = len(self.words), len(self.V)
                failures += verified_mode.failures_of_second_sketch(TR, findings.sums, size, m)
        self._check(failures, self.named)

    def result(self) -> Sum:
        """The sum, after every check has passed."""
        record = Record(
            session=self.digest,
            purpose=self.setting.purpose,
            agreed=self.setting.agreed,
            terms=self.setting.terms_bytes,
            ready=self.ids,
            members=self.W,
            survivors=self.V,
            coefficients=self.coefficients,
            tau1=self.tau1,
            tau2=self.tau2,
            alarms=tuple(self.alarms),
        )
        return Sum(
            words=self.words,
            cohort=self.final_cohort,
            survivors=Replies(self.masked),
            consulted=tuple(self.consulted),
            record=record,
            named=self.named,
            share=self.share,
        )

    # --- shared by the phases

    def _agreeing(self, replies: Replies, view: bytes) -> list[PhaseReply]:
        """The replies of members with the same view; others are dropouts."""
        # Section 2.1: another view means other lists, keys or coefficients: its masks and shares do not fit the
        # others'.
        agreeing = [reply for reply in replies if reply.statement.view == view]
        for reply in replies:
            if reply.statement.view != view:
                self._alarm(reply.client_id, f"it signed another view at {reply.statement.stage.value}")
        return agreeing

    def _alarm(self, member: str, why: str) -> None:
        self.alarms.append(f"{member}: {why}")

    def _enough(self, members: int, action: str) -> None:
        # Section 1: at every phase. Members refuse a shorter list, so the next phase would only cost them the session.
        if members < self.cohort.n_min:
            raise TooFewUpdatesError(f"{members} of {self.cohort.m} members {action}; {self.cohort.n_min} are needed")

    def _check(self, failures: Sequence[Failure], named: Mapping[str, str] | None = None) -> None:
        if failures:
            text = "; ".join(dict.fromkeys(map(str, failures)))
            # Section 4: blind without a name: the next attempts leave out one group of members after the other.
            raise Voided(f"a check failed: {text[:300]}", named=named or {}, blind=not named)


def _row(reply: PhaseReply) -> NDArray[Any]:
    (row,) = reply.rows
    return row.read() if isinstance(row, RowFile) else row


def _content(reply: PhaseReply) -> bytes:
    return bytes(_row(reply).tobytes())


def _inbox(replies: Sequence[PhaseReply], receivers: Sequence[str], length: int) -> Callable[[str], bytes]:
    """The ciphertexts for a receiver, by sender; a sender made one for each other receiver, in order.

    They are cut from the replies when they are handed on: m members have m^2 of them, which need not be in memory.
    """
    rows = {reply.client_id: _row(reply) for reply in replies}
    positions = {name: position for position, name in enumerate(receivers)}

    def part(sender: str, receiver: str) -> bytes:
        # Section 2a: a sender makes none for itself, so those after its own place move up by one.
        start = length * (positions[receiver] - (positions[sender] < positions[receiver]))
        return bytes(rows[sender][start : start + length].tobytes())

    return lambda receiver: b"".join(part(sender, receiver) for sender in rows if sender != receiver)
