"""The members' replies and failures in the rounds of a run, and the warnings for an operator.

`Participation` is computed from the rounds that have ended; `read_rounds` reads these rounds from the record.
"""

import logging
import math
from collections import Counter, deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from itertools import pairwise
from statistics import median
from types import MappingProxyType

from sqlalchemy import and_, select
from sqlalchemy.orm import Session

from coordinator.rounds.transitions import EVALUATES
from federation.spec.run_spec import RunSpec
from federation.text import escaped
from federation.work.train.work import Train
from storage.database import Database
from storage.models import Assignment, Phase, Reply, Round, Run
from storage.states import AssignmentState, RoundState

log = logging.getLogger(__name__)

WARN_AFTER = 3  # rounds in a row
WARN_AFTER_RISES = 2  # rounds among the last `LOOK_BACK`: a loss that zigzags falls in every other round
LOOK_BACK = 6  # evaluated rounds
LONG_STEP = 1.5  # times the median of the updates
OPPOSING = -0.5  # the cosine with the step below which a member's update counts as against it
_NOT_NEEDED = frozenset(
    {"not-needed", "round-ended", "run-ended"}
)  # reasons of cancellations that are no failure of the member


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


class WarningKind(StrEnum):
    """The subject of a warning."""

    MEMBER_FAILS = "MEMBER_FAILS"
    NOBODY_IMPROVES = "NOBODY_IMPROVES"
    MEMBER_OPPOSES = "MEMBER_OPPOSES"
    STEP_TOO_LONG = "STEP_TOO_LONG"

    @property
    def after(self) -> int:
        """The rounds after which it is given."""
        return WARN_AFTER_RISES if self is WarningKind.STEP_TOO_LONG else WARN_AFTER


_OUTCOMES: Mapping[AssignmentState, RoundOutcome] = MappingProxyType(
    {
        AssignmentState.FULFILLED: RoundOutcome.REPLIED,
        AssignmentState.DECLINED: RoundOutcome.DECLINED,
        AssignmentState.REFUSED: RoundOutcome.REFUSED,
    }
)


@dataclass(frozen=True)
class MemberRound:
    """One member in one round that has ended; it was asked for training, for an evaluation, or for both."""

    client_id: str
    training: RoundOutcome | None = None  # or the phase before it in which the member stopped
    evaluation: RoundOutcome | None = None  # of the new model
    reason: str = ""  # why it failed
    cosine: float = math.nan  # between its update and the step; NaN where there is none
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


@dataclass(frozen=True)
class RunWarning:
    """Something that an operator should look at."""

    kind: WarningKind
    client_id: str  # the member; empty for a warning about all of them
    rounds: int  # in a row
    last_round: int  # of these
    message: str  # with the numbers and the remedy


@dataclass
class MemberSummary:
    """One member over the rounds that have ended."""

    client_id: str
    outcomes: Counter[RoundOutcome] = field(default_factory=Counter)  # rounds, by how the member's training ended
    evaluations_missed: int = 0  # evaluations that it was asked for and did not give
    training_failures: int = 0  # consecutive failures of its training, up to the last round that asked it
    evaluation_failures: int = 0  # consecutive evaluations that it did not send, up to the last one
    opposing: int = 0  # the last steps, in a row, with which its update had a cosine below `OPPOSING`
    cosine: float = math.nan  # of its last update with the step
    cosine_round: int = 0  # the round of `cosine`
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
        if math.isfinite(member.cosine):
            self.cosine, self.cosine_round = member.cosine, number
            self.opposing = self.opposing + 1 if member.cosine < OPPOSING else 0

    def warnings(self) -> Iterator[RunWarning]:
        """The warnings about it after the last round."""
        name, failed, failed_in = self.client_id, self.failed_in_a_row, self.last_reason_round
        if failed >= WARN_AFTER and failed_in is not None:
            message = (
                f"{name} failed in {failed} rounds in a row, last in round {failed_in}: "
                f"{self.last_reason.rstrip('.')}. See its log"
            )
            yield RunWarning(WarningKind.MEMBER_FAILS, name, failed, failed_in, message)
        if self.opposing >= WARN_AFTER:
            message = (
                f"{name} worked against the step in {self.opposing} rounds in a row: in round {self.cosine_round} the "
                f"cosine between its update and the step was {self.cosine:.2f}. It attacks, or its data or labels "
                "differ from the others'"
            )
            yield RunWarning(WarningKind.MEMBER_OPPOSES, name, self.opposing, self.cosine_round, message)


class Participation:
    """The outcomes of the rounds of a run for its members; rounds are added in order."""

    def __init__(self) -> None:
        self._members: dict[str, MemberSummary] = {}
        self._worse: list[int] = []  # the last evaluated rounds, in a row, in which no client improved
        self._evaluated: deque[EndedRound] = deque(maxlen=LOOK_BACK + 1)  # the last ones, with a loss
        self.next_round = 0

    @property
    def members(self) -> list[MemberSummary]:
        """The members that were asked for something, by name."""
        return [self._members[name] for name in sorted(self._members)]

    @property
    def warnings(self) -> list[RunWarning]:
        """The warnings after the last round: about the run, then member by member."""
        return [*self._of_the_run(), *(warning for member in self.members for warning in member.warnings())]

    def add(self, round_: EndedRound) -> list[RunWarning]:
        """Adds the next round, and returns the warnings that begin with it."""
        for member in round_.members:
            self._members.setdefault(member.client_id, MemberSummary(member.client_id)).add(round_.number, member)
        if math.isfinite(round_.improved):
            self._worse = [*self._worse, round_.number] if round_.improved == 0 else []
        if math.isfinite(round_.loss):
            self._evaluated.append(round_)
        self.next_round = round_.number + 1
        fresh = [*(w for m in round_.members for w in self._members[m.client_id].warnings()), *self._of_the_run()]
        return [
            warning for warning in fresh if (warning.rounds, warning.last_round) == (warning.kind.after, round_.number)
        ]

    def _of_the_run(self) -> Iterator[RunWarning]:
        if (rounds := len(self._worse)) >= WARN_AFTER:
            message = (
                f"nobody improved in {rounds} evaluated rounds in a row, last in round {self._worse[-1]}: every "
                "participant's training loss rose. The learning rate may be too large, or a member may work against "
                "the others"
            )
            yield RunWarning(WarningKind.NOBODY_IMPROVES, "", rounds, self._worse[-1], message)
        yield from self._zigzag()

    def _zigzag(self) -> Iterator[RunWarning]:
        """A warning if steps that are too long have raised the loss again and again, up to the last step."""
        rises = [
            (after, after.step)
            for before, after in pairwise(self._evaluated)
            if after.step is not None and after.step.long and after.loss > before.loss
        ]
        newest = self._evaluated[-1].step if self._evaluated else None
        if len(rises) < WARN_AFTER_RISES or newest is None or not newest.long:
            return
        last, step = rises[-1]
        message = (
            f"the mean training loss rose in {len(rises)} of the last {len(self._evaluated) - 1} evaluated rounds, "
            f"last in round {last.number}, where the step was {step.ratio:.1f} times as long as the median of the "
            f"updates ({step.median:.3g}): the steps go too far. Set server.learning_rate to about "
            f"{step.rate / step.ratio:.2g} (it is {step.rate:.3g}), or let it decay (server.decay)"
        )
        yield RunWarning(WarningKind.STEP_TOO_LONG, "", len(rises), last.number, message)


def read_rounds(session: Session, run_id: str, first: int = 0) -> list[EndedRound]:
    """The rounds of a run that have ended, from number `first` on, in order."""
    ended = Round.state.in_([RoundState.COMPLETED, RoundState.SKIPPED])
    conditions = (Round.run_id == run_id, Round.number >= first, ended)
    # Columns, not objects: the envelopes of a long run do not fit into memory.
    rows = session.execute(
        select(
            Round.number,
            Phase.kind,
            EVALUATES,
            Assignment.client_id,
            Assignment.state,
            Assignment.reason,
            Assignment.message,
            Reply.cosine,
            Reply.norm,
            Reply.privacy,
        )
        .join(Phase, Phase.round_id == Round.round_id)
        .join(Assignment, Assignment.phase_id == Phase.phase_id)
        .outerjoin(Reply, and_(Reply.assignment_id == Assignment.assignment_id, Reply.accepted))
        .where(*conditions)
        .order_by(Round.number, Phase.number, Assignment.client_id)
    )
    members: dict[int, dict[str, MemberRound]] = {}
    norms: dict[int, list[float]] = {}
    for number, kind, evaluates, client, state, reason, message, cosine, norm, privacy in rows:
        if norm is not None:
            norms.setdefault(number, []).append(norm)
        parts = members.setdefault(number, {})
        before, outcome = parts.get(client, MemberRound(client)), _outcome(state, reason)
        why = ": ".join(text for text in ("" if kind == Train.name else kind, reason, message) if text)
        if not evaluates:  # a later phase than those before
            with_step = before.cosine if cosine is None else cosine
            spent = (privacy or {}).get("epsilon", before.epsilon)
            why = why if outcome.failed else ""
            parts[client] = replace(before, training=outcome, reason=why, cosine=with_step, epsilon=spent)
        else:
            failed = outcome.failed and not (before.training and before.training.failed)
            parts[client] = replace(before, evaluation=outcome, reason=why if failed else before.reason)
    numbers = session.execute(select(Round.number, Round.metrics).where(*conditions).order_by(Round.number))
    spec = RunSpec.parse(session.get_one(Run, run_id).spec)
    along = spec.server.optimiser == "sgd" and not spec.privacy.client_noise  # no norm is shown of protected clients
    return [
        EndedRound(
            number,
            tuple(members.get(number, {}).values()),
            metrics.get("improved", math.nan),
            metrics.get("loss/train", math.nan),
            _step_length(metrics, norms.get(number, ())) if along else None,
        )
        for number, metrics in numbers
    ]


def _step_length(metrics: Mapping[str, float], norms: Sequence[float]) -> StepLength | None:
    """The length of a round's step; None without a step, or without updates that are longer than 0."""
    rate, direction = metrics.get("step/rate", 0.0), metrics.get("direction_norm", 0.0)
    middle = median(norms) if norms else 0.0
    return StepLength(rate * direction, middle, rate) if rate > 0 and direction > 0 and middle > 0 else None


def _outcome(state: AssignmentState, reason: str) -> RoundOutcome:
    if state is AssignmentState.CANCELLED:
        return RoundOutcome.NOT_NEEDED if reason in _NOT_NEEDED else RoundOutcome.MISSING
    return _OUTCOMES.get(state, RoundOutcome.MISSING)


class WarningLog:
    """Writes each warning about a run to the log once, in the round with which it begins."""

    def __init__(self, database: Database, run_id: str) -> None:
        self._database = database
        self._run_id = run_id
        self._participation = Participation()

    def round_ended(self) -> None:
        """Reads the rounds that ended since the last call; of those before the first call only the last is new."""
        with self._database.read() as session:
            rounds = read_rounds(session, self._run_id, self._participation.next_round)
        fresh: list[RunWarning] = []
        for round_ in rounds:
            fresh = self._participation.add(round_)
        for warning in fresh:
            log.warning("run %s: %s", self._run_id, escaped(warning.message))
