"""The members' replies and failures in the rounds of a run.

`Participation` is computed from the rounds that have ended; `read_rounds` reads these rounds from the record.
"""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from enum import StrEnum
from statistics import fmean, median
from types import MappingProxyType

from sqlalchemy import and_, select
from sqlalchemy.orm import Session

from coordinator.rounds.runs.disclosure import concealed, parsed_spec
from coordinator.rounds.transitions import COUNTS
from federation.spec.objective_names import JOINT
from federation.work.train.work import Train
from storage.models import Assignment, Phase, Reply, Round, Run
from storage.states import AssignmentState, RoundState

LONG_STEP = 1.5  # times the median of the updates
_EPOCH = datetime.fromtimestamp(0, UTC)
# Reasons of cancellations that are no failure of the member.
_NOT_NEEDED = frozenset({"not-needed", "round-ended", "run-ended"})


class RoundOutcome(StrEnum):
    """The outcome of a round for a member."""

    REPLIED = "REPLIED"
    DECLINED = "DECLINED"
    REFUSED = "REFUSED"
    MISSING = "MISSING"
    NOT_NEEDED = "NOT_NEEDED"

    @property
    def failed(self) -> bool:
        """True if a needed reply did not come or does not count."""
        return self in (RoundOutcome.DECLINED, RoundOutcome.REFUSED, RoundOutcome.MISSING)


_OUTCOMES: Mapping[AssignmentState, RoundOutcome] = MappingProxyType(
    {
        AssignmentState.FULFILLED: RoundOutcome.REPLIED,
        AssignmentState.DECLINED: RoundOutcome.DECLINED,
        AssignmentState.REFUSED: RoundOutcome.REFUSED,
    }
)


@dataclass(frozen=True)
class MemberRound:
    """One member in one round that has ended; it was asked for training, for an evaluation, or for both.

    The measurement of a model in a round that does nothing else counts as its training.
    """

    client_id: str
    training: RoundOutcome | None = None  # or the phase before it in which the member stopped
    evaluation: RoundOutcome | None = None  # of the new model
    reason: str = ""  # why it failed
    norm: float = math.nan  # of its update; NaN where there is none or privacy hides it, and likewise:
    loss: float = math.nan  # of the model before the round on its training samples, as it states
    weight: float = math.nan  # lambda
    cosine: float = math.nan  # between its update and the step
    samples: int = 0  # on which it trained, as it states
    epsilon: float | None = None  # that its data set had spent by its update, as it states; None without noise

    @property
    def outcome(self) -> RoundOutcome:
        """The outcome that failed first, or else its training, or else its evaluation."""
        outcomes = [outcome for outcome in (self.training, self.evaluation) if outcome is not None]
        return next((outcome for outcome in outcomes if outcome.failed), outcomes[0])


@dataclass(frozen=True)
class StepLength:
    """The length of a step along the direction, at the server's rate, and the median length of the updates."""

    length: float
    median: float
    rate: float

    @property
    def ratio(self) -> float:
        """The length over the median."""
        return self.length / self.median

    @property
    def long(self) -> bool:
        """True if it was much longer than the members' own steps."""
        return self.ratio >= LONG_STEP


@dataclass(frozen=True)
class EndedRound:
    """A round that has ended."""

    number: int  # from 0
    members: tuple[MemberRound, ...]  # that were asked for something
    improved: float = math.nan  # the share of participants whose training loss did not rise; NaN if unknown
    loss: float = math.nan  # the mean training loss after it; NaN if it was not measured
    step: StepLength | None = None  # None where the lengths of step and updates do not compare
    started: datetime = _EPOCH
    ended: datetime = _EPOCH


@dataclass
class MemberSummary:
    """One member over the rounds that have ended."""

    client_id: str
    outcomes: Counter[RoundOutcome] = field(default_factory=Counter)  # rounds, by how the member's training ended
    evaluations_missed: int = 0  # evaluations that it was asked for and did not give
    training_failures: int = 0  # consecutive failures of its training, up to the last round that asked it
    evaluation_failures: int = 0  # consecutive evaluations that it did not send, up to the last one
    epsilon: float | None = None  # that its data set had spent by its last update, as it states; None without noise
    last_round: int = 0  # the last round that asked it for anything
    last_outcome: RoundOutcome = RoundOutcome.NOT_NEEDED  # how that round ended for it
    last_reason: str = ""  # why a reply last failed to come or to count; empty when none did
    last_reason_round: int | None = None  # the round of `last_reason`

    @property
    def asked(self) -> int:
        """Rounds that asked it to train, or for the gradients before that."""
        return self.outcomes.total()

    @property
    def failed_in_a_row(self) -> int:
        """The last rounds, in a row, in which its training failed, or its evaluation."""
        return max(self.training_failures, self.evaluation_failures)

    def add(self, number: int, member: MemberRound) -> None:
        """Adds the next round that asked it for something."""
        self.last_round, self.last_outcome = number, member.outcome
        if member.outcome.failed:
            self.last_reason, self.last_reason_round = member.reason, number
        if member.training is not None:
            self.outcomes[member.training] += 1
            if member.training is not RoundOutcome.NOT_NEEDED:
                self.training_failures = self.training_failures + 1 if member.training.failed else 0
        if member.evaluation is not None and member.evaluation is not RoundOutcome.NOT_NEEDED:
            self.evaluations_missed += member.evaluation.failed
            self.evaluation_failures = self.evaluation_failures + 1 if member.evaluation.failed else 0
        if member.epsilon is not None:
            self.epsilon = member.epsilon


class Participation:
    """The outcomes of the rounds of a run for its members; rounds are added in order."""

    def __init__(self) -> None:
        self._members: dict[str, MemberSummary] = {}
        self.next_round = 0

    @property
    def members(self) -> list[MemberSummary]:
        """The members that were asked for something, by name."""
        return [self._members[name] for name in sorted(self._members)]

    def of(self, client_id: str) -> MemberSummary:
        """One member that was asked for something."""
        return self._members[client_id]

    def add(self, round_: EndedRound) -> None:
        """Adds the next round."""
        for member in round_.members:
            self._members.setdefault(member.client_id, MemberSummary(member.client_id)).add(round_.number, member)
        self.next_round = round_.number + 1


def read_rounds(session: Session, run_id: str, first: int = 0) -> list[EndedRound]:
    """The rounds of a run that have ended, from number `first` on, in order."""
    ended = Round.state.in_([RoundState.COMPLETED, RoundState.SKIPPED])
    conditions = (Round.run_id == run_id, Round.number >= first, ended)
    # Columns, not objects: the envelopes of a long run do not fit into memory.
    rows = session.execute(
        select(
            Round.number,
            Phase.kind,
            COUNTS,
            Assignment.client_id,
            Assignment.state,
            Assignment.reason,
            Assignment.message,
            Reply.cosine,
            Reply.norm,
            Reply.weight,
            Reply.losses,
            Reply.samples,
            Reply.privacy,
        )
        .join(Phase, Phase.round_id == Round.round_id)
        .join(Assignment, Assignment.phase_id == Phase.phase_id)
        .outerjoin(Reply, and_(Reply.assignment_id == Assignment.assignment_id, Reply.accepted))
        .where(*conditions)
        .order_by(Round.number, Phase.number, Assignment.client_id)
    )
    run = session.get_one(Run, run_id)
    spec = parsed_spec(run.spec)
    hidden = concealed(run) or spec.privacy.secure != "off"
    members: dict[int, dict[str, MemberRound]] = {}
    norms: dict[int, list[float]] = {}
    for number, kind, counts, client, state, reason, message, cosine, norm, weight, losses, samples, privacy in rows:
        if norm is not None:
            norms.setdefault(number, []).append(norm)
        parts = members.setdefault(number, {})
        before, outcome = parts.get(client, MemberRound(client)), _outcome(state, reason)
        why = ": ".join(text for text in ("" if kind == Train.name else kind, reason, message) if text)
        if counts:  # a later phase than those before
            parts[client] = replace(
                before,
                training=outcome,
                reason=why if outcome.failed else "",
                cosine=before.cosine if cosine is None else cosine,
                norm=before.norm if norm is None else norm,
                weight=before.weight if weight is None else weight,
                loss=_loss(losses, before.loss) if not hidden else math.nan,
                samples=samples or before.samples,
                epsilon=(privacy or {}).get("epsilon", before.epsilon),
            )
        else:
            failed = outcome.failed and not (before.training and before.training.failed)
            parts[client] = replace(before, evaluation=outcome, reason=why if failed else before.reason)
    numbers = session.execute(
        select(Round.number, Round.metrics, Round.started, Round.ended).where(*conditions).order_by(Round.number)
    )
    along = spec.server.optimizer == "sgd" and not spec.privacy.client_noise  # no norm is shown of protected clients
    return [
        EndedRound(
            number,
            tuple(members.get(number, {}).values()),
            metrics.get("improved", math.nan),
            metrics.get("loss/train", math.nan),
            _step_length(metrics, norms.get(number, ())) if along else None,
            started,
            ended or started,  # one that has ended has both
        )
        for number, metrics, started, ended in numbers
    ]


def _loss(losses: Mapping[str, float] | None, before: float) -> float:
    """The loss that a reply states of the model before the round; `before` if it states none."""
    return losses.get(JOINT, fmean(losses.values())) if losses else before


def _step_length(metrics: Mapping[str, float], norms: Sequence[float]) -> StepLength | None:
    """The length of a round's step; None without a step, or without updates that are longer than 0."""
    rate, direction = metrics.get("step/rate", 0.0), metrics.get("direction_norm", 0.0)
    middle = median(norms) if norms else 0.0
    return StepLength(rate * direction, middle, rate) if rate > 0 and direction > 0 and middle > 0 else None


def _outcome(state: AssignmentState, reason: str) -> RoundOutcome:
    if state is AssignmentState.CANCELLED:
        return RoundOutcome.NOT_NEEDED if reason in _NOT_NEEDED else RoundOutcome.MISSING
    return _OUTCOMES.get(state, RoundOutcome.MISSING)
