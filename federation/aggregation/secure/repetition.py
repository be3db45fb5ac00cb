"""Verifies private rounds: an outsider repeats the conversation with the signed replies on record.

The replay recomputes the lists of members, the Gram matrix from the openings, the direction from the Gram matrix, the
mask secrets from the shares against commitments and keys, the sum, and the checks of section 4; of a rule over
objectives also their Gram matrix and their weights. Everything else uses the coefficients as they were signed. It opens
no update, and does not prove that an update was honest. It cannot know that the coordinator had all masked vectors
before it drew the challenges.
"""

from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from federation.aggregation.base import Algorithm
from federation.aggregation.interface import TooFewUpdatesError
from federation.aggregation.phases import (
    AlgorithmPhase,
    Asked,
    PhaseReply,
    PrivateSetting,
    Record,
    Replies,
    RoundContext,
    Selected,
    Setting,
    Step,
    Voided,
)
from federation.aggregation.qp import UnsolvedError
from federation.aggregation.secure.described import description
from federation.aggregation.secure.evaluation import Means, evaluation
from federation.aggregation.secure.phases import ReadyPhase
from federation.aggregation.secure.settled import Sum
from federation.aggregation.streaming import one_thread
from federation.digests import digest
from federation.plugins import PluginError
from federation.secure import hashing
from federation.secure.errors import Malformed
from federation.sketches.base import SketchError
from federation.statistics.result import StatisticsResult
from federation.vectors import DTYPES, Array, RowFile, payload_bytes, update_layout
from federation.work.base import Shape, Work, WorkError, payload_layout
from federation.work.evaluate.work import Evaluate
from federation.work.secure.ready import Ready
from federation.work.secure.stage import CIPHERTEXTS
from federation.work.secure.terms import SessionStage, SessionTerms
from federation.work.statistics.work import Statistics

if TYPE_CHECKING:
    from federation.spec.run_spec import RunSpec

Ending = TypeVar("Ending")
_FACTOR = 1e-6  # by which another processor's factor of a sum, or weights of a step that was not made, may differ


class UnverifiedSession(Exception):
    """The record does not follow from what was signed; the message names the difference."""


@dataclass(frozen=True, eq=False)
class SecureEvidence:
    """The record of the step of a private round.

    Attributes:
        sessions: the results of each in the signed step.
        replies: those that the step names, with their statements; their signatures have been verified. Of a reply whose
            payload is not on record, there are no rows.
        asked: the work that members were asked for, at READY and at the later phases that are to be compared, by the
            envelope of the reply.
        inputs: the digests and sizes of the inputs of this work, by the envelope of the reply and by name; none are
            compared of replies that are not named here.
        combined: the vector of the step, (d,).
        weights: of the members whose vectors are in the sum, (|V|,); None where they are not on record.
    """

    sessions: Sequence[Record]
    replies: Sequence[PhaseReply]
    asked: Mapping[str, Work]
    combined: NDArray[np.float32]
    weights: NDArray[np.float64] | None = None
    inputs: Mapping[str, Mapping[str, tuple[str, int]]] = field(default_factory=dict)


def verify_secure_step(rule: Algorithm, spec: "RunSpec", context: RoundContext, evidence: SecureEvidence) -> Step:
    """The step that follows from the signed replies.

    Args:
        rule: of the run.
        spec: of the run.
        context: of the round, as the coordinator had it: the state before, the rates, `private` with the keys of all
            members that are known. Who was invited is read from the record.
        evidence: the record.

    Raises:
        UnverifiedSession: the step on record does not follow.
        ValueError: the context is not of a private round.
    """
    # Protocol, Private rounds: without a session, the step would follow from nothing that members have signed.
    if not evidence.sessions:
        raise UnverifiedSession("the signed step names no session")
    settings = [_recorded(record) for record in evidence.sessions]
    answers = _Answers(spec, context, evidence.replies, evidence.asked, evidence.inputs)
    step = _replayed(rule.round, context, settings, answers)
    _check_same(step, evidence)
    return step


def verify_evaluation(
    spec: "RunSpec",
    wanted: Evaluate,
    context: RoundContext,
    replies: Sequence[PhaseReply],
    asked: Mapping[str, Work],
    inputs: Mapping[str, Mapping[str, tuple[str, int]]] = MappingProxyType({}),
) -> Means:
    """The means that follow from the signed replies of an evaluation, whose terms are in the work of READY.

    Args:
        spec: of the run.
        wanted: the evaluation that the run asks for.
        context: of the evaluation, as of `verify_secure_step`; `private.origin` has the model that was evaluated.
        replies: all that were accepted; their signatures have been verified.
        asked: as of `SecureEvidence`.
        inputs: as of `SecureEvidence`.

    Raises:
        UnverifiedSession: no means follow.
        ValueError: the context is not of a private round.
    """
    ids, setting = _of_ready(wanted.name, asked)
    answers = _Answers(spec, context, replies, asked, inputs)
    return _replayed(lambda again: evaluation(again, wanted, ids), context, [setting], answers)


def verify_description(
    spec: "RunSpec",
    context: RoundContext,
    replies: Sequence[PhaseReply],
    asked: Mapping[str, Work],
    inputs: Mapping[str, Mapping[str, tuple[str, int]]] = MappingProxyType({}),
) -> tuple[StatisticsResult, Sum]:
    """The result of a private sum of statistics that follows from the signed replies. As `verify_evaluation`."""
    wanted = Statistics.of(spec)
    ids, setting = _of_ready(wanted.name, asked)
    answers = _Answers(spec, context, replies, asked, inputs)
    return _replayed(lambda again: description(again, wanted, ids), context, [setting], answers)


def _of_ready(purpose: str, asked: Mapping[str, Work]) -> tuple[tuple[str, ...], Setting]:
    """The members that were invited, and the setting of a session of the mode `sum` whose terms are in READY.

    Raises UnverifiedSession: READY is not on record.
    """
    ready = next((work for work in asked.values() if isinstance(work, Ready)), None)
    if ready is None:
        raise UnverifiedSession(f"the terms of the session for {purpose!r} are not on record")
    return ready.agreed.ids, Setting(
        purpose=purpose,
        agreed=ready.agreed,
        terms_bytes=ready.terms_bytes,
        # Section 2b: the mode is `sum`, which has no challenges.
        taus=lambda view, V, inputs: (b"", b""),
    )


def _recorded(record: Record) -> Setting:
    return Setting(
        purpose=record.purpose,
        agreed=record.agreed,
        terms_bytes=record.terms,
        # Section 2a: made with a key of the coordinator's, so an outsider takes them from the record; `final` in the
        # members' replies binds them.
        taus=lambda view, V, inputs: (record.tau1, record.tau2),
        asked=record.coefficients,  # section 4: as signed: another processor may round the rule's otherwise
    )


def _replayed(
    converse: Callable[[RoundContext], Generator[AlgorithmPhase, Replies, Ending]],
    context: RoundContext,
    settings: Sequence[Setting],
    answers: "_Answers",
) -> Ending:
    """The end of a conversation that is held again with the sessions and the replies on record."""
    if context.private is None:
        raise ValueError("the context is not of a private round")
    conversation = converse(_again(context, context.private, settings))
    replies: Any = None
    try:
        with one_thread():
            while True:
                replies = answers.to(conversation.send(replies))
    except StopIteration as end:
        ending: Ending = end.value
        return ending
    # Section 4: a session that these checks void must not have made a step.
    except (Voided, TooFewUpdatesError, UnsolvedError, SketchError, PluginError, WorkError, Malformed) as error:
        raise UnverifiedSession(f"nothing follows from the signed replies: {error}") from error


def _again(context: RoundContext, private: PrivateSetting, settings: Sequence[Setting]) -> RoundContext:
    """The context of the replay: the sessions are those on record, which must have the terms of the round."""
    invited = {member.client_id: member.key_id for setting in settings for member in setting.agreed.invited}
    for name, key_id in invited.items():
        # Protocol, Private rounds, 1: otherwise a coordinator verifies with keys of its own making, under the names of
        # members.
        if private.keys.get(name) != key_id:
            raise UnverifiedSession(f"{name} was invited with a key that is not its own")

    def settle(purpose: str, terms: SessionTerms) -> Setting:
        matching = [setting for setting in settings if setting.purpose == purpose]
        # Of two sessions for one purpose, the coordinator could choose the one whose sum it likes.
        if len(matching) != 1:
            raise UnverifiedSession(f"the record has {len(matching)} sessions for {purpose!r}")
        for item in fields(SessionTerms):
            # Section 8: each field but the nonce follows from the specification and the round.
            if item.name != "nonce" and getattr(matching[0].agreed, item.name) != getattr(terms, item.name):
                raise UnverifiedSession(
                    f"the terms of the session for {purpose!r} have another {item.name} than the round"
                )
        return matching[0]

    return replace(
        context,
        selected={name: Selected(0, context.objectives) for name in invited},
        # Who was invited is on record. Who was left out after failed attempts does not follow from these replies.
        private=replace(private, keys=invited, named=frozenset(), blind=0, settle=settle),
    )


def _check_same(step: Step, evidence: SecureEvidence) -> None:
    if len(step.sessions) != len(evidence.sessions) or step.combined is None:
        raise UnverifiedSession("the number of sessions does not follow from the signed replies")
    for replayed, recorded in zip(step.sessions, evidence.sessions, strict=True):
        for item in fields(Record):
            # Verify, what it cannot show: alarms are the coordinator's notes. All else follows from signed replies.
            if item.name != "alarms" and getattr(replayed, item.name) != getattr(recorded, item.name):
                subject = f"the session for {replayed.purpose!r}"
                raise UnverifiedSession(f"the {item.name} of {subject} do not follow from the signed replies")
    entered = {reply.envelope for reply in (*step.consulted, *step.replies)}
    for reply in evidence.replies:
        # Protocol, Private rounds, 3: each named reply enters. One that does not could stand there in place of another
        # that was left out.
        if reply.envelope not in entered:
            raise UnverifiedSession(f"a reply of {reply.client_id} at {reply.statement.stage.value} entered no session")
    vector, signed = step.combined, evidence.combined
    # Section 4: 10^-6 of each element, for the rounding of the public factor; the integers of the sum are exact.
    if vector.shape != signed.shape or not np.allclose(vector, signed, rtol=_FACTOR, atol=0):
        raise UnverifiedSession("the sum does not follow from the signed replies")
    weights = evidence.weights
    if weights is not None and not np.allclose(step.combination.weights, weights, atol=_FACTOR):
        raise UnverifiedSession("the weights do not follow from the signed replies")


@dataclass(frozen=True, eq=False)
class _Answers:
    """The replies on record, as answers to the phases of a conversation."""

    spec: "RunSpec"
    context: RoundContext
    replies: Sequence[PhaseReply]
    asked: Mapping[str, Work]
    inputs: Mapping[str, Mapping[str, tuple[str, int]]]

    def to(self, phase: AlgorithmPhase) -> Replies:
        """The replies to a phase."""
        stage, opening = SessionStage(phase.kind.name), int(getattr(phase, "opening", 0))
        session = (
            hashing.session(phase.terms_bytes) if isinstance(phase, ReadyPhase) else getattr(phase, "session", b"")
        )
        replies = []
        for reply in self.replies:
            statement = reply.statement
            if (statement.session, statement.stage, statement.opening) == (session, stage, opening):
                # Section 2: only members of the list at this phase: the share of another one would change who is lost.
                if phase.clients is not None and reply.client_id not in phase.clients:
                    raise UnverifiedSession(f"{reply.client_id} replied to {stage.value}, and was not asked")
                work = phase.work(Asked(reply.client_id, reply.objectives, self.spec, self.context.number))
                asked = self.asked.get(reply.envelope)
                # Protocol, Private rounds, 2: always at READY, whose work has the terms. Of later phases, the
                # assignments on record are compared.
                if (asked is not None or isinstance(phase, ReadyPhase)) and asked != work:
                    raise UnverifiedSession(f"{reply.client_id} was asked for other work than follows from the record")
                self._check_gives(phase, reply)
                replies.append(self._with_rows(work, reply))
        return Replies(replies)

    def _check_gives(self, phase: AlgorithmPhase, reply: PhaseReply) -> None:
        """Compares the inputs of the work. Ciphertexts between members are not on record. Raises UnverifiedSession."""
        given = dict(self.inputs.get(reply.envelope, {}))
        if reply.envelope in self.inputs:
            encrypted = given.pop(CIPHERTEXTS, None) is not None
            shared = {name: (digest(content), len(content)) for name, content in phase.inputs().items()}
            # Verify, 14: the inputs follow from the phases before. Other envelopes at DEAL or UNMASK would be another
            # question.
            if given != shared or encrypted != (getattr(phase, "ciphertexts", None) is not None):
                raise UnverifiedSession(f"{reply.client_id} was given other inputs than follow from the record")

    def _with_rows(self, work: Work, reply: PhaseReply) -> PhaseReply:
        """The reply with the rows of its payload, whose digest must be the one that was signed.

        Ciphertexts between members are not on record, and nothing is computed from them.
        """
        layout = update_layout([("model", self.context.parameters)])
        rows = work.rows(Shape(layout, self.context.objectives, reply.objectives))
        if not rows:
            return reply
        # By the layout of the work, not by what is missing: a payload of shares that was removed must be named.
        if [row.name for row in rows] == [CIPHERTEXTS]:
            empty: Array = np.zeros(rows[0].length, np.uint8)
            return replace(reply, rows=(empty,))
        where = f"the payload of {reply.client_id} at {reply.statement.stage.value}"
        if len(reply.rows) != len(rows):
            raise UnverifiedSession(f"{where} is missing")
        content = {
            row.name: np.asarray(values.read() if isinstance(values, RowFile) else values, DTYPES[row.dtype])
            for row, values in zip(rows, reply.rows, strict=True)
        }
        try:
            computed = digest(b"".join(payload_bytes(payload_layout(rows), content)))
        except ValueError as error:
            raise UnverifiedSession(f"{where}: {error}") from error
        # Section 2.6: the bytes that the member signed: an exchanged share would change the sum, or who is named.
        if computed != reply.signed_payload:
            raise UnverifiedSession(f"{where} has another digest than the one that was signed")
        return replace(reply, rows=tuple(content.values()))
