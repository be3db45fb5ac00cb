"""The prospects of a run at its submission: which members would take part now, and why the others would not.

What members have told when they attended last is compared with what the run asks. It is advice: each worker decides for
itself. A member whose worker tells less, such as one of an earlier version, counts as one that takes part.
"""

from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from sqlalchemy import select
from sqlalchemy.orm import Session

from coordinator.rounds.fleets.known import known_clients, too_old
from coordinator.rounds.fleets.presence import Attending
from coordinator.rounds.runs.specification import needed_abilities
from coordinator.rounds.runs.submission import Submission
from federation.aggregation.base import Rule
from federation.aggregation.phase_kinds import GradientsPhase, TrainingPhase, measuring_phase
from federation.aggregation.phases import Asked
from federation.aggregation.registry import ALGORITHMS
from federation.aggregation.rules.fedcmoo import Conversation
from federation.aggregation.rules.fsmgda import FSMGDA
from federation.aggregation.rules.objectives import MeasuredRule
from federation.refusals import Refusal
from federation.secure.thresholds import LARGEST
from federation.spec.computation import CANNOT, Ability
from federation.spec.run_sections import replies_needed
from federation.spec.run_spec import SpecError
from federation.task_layout import TaskLayout
from federation.text import counted
from federation.vectors import Layout, Tensor
from federation.work.base import Shape, Work, payload_layout
from federation.work.closing import CLOSED, PAUSED
from federation.work.train.work import Train
from federation.work.work_bounds import Problem, WorkBounds
from storage.models import Client

ABSENT, OBJECTIVES, OLD = "absent", "objectives", "old"
NOT_ASKED = (ABSENT, CLOSED, PAUSED, OBJECTIVES, OLD)
NAMED = 10  # members in a warning


@dataclass(frozen=True)
class DescribedModel:
    """The initial model of a run, as its submitter describes it before the upload.

    Attributes:
        size: of the file, in bytes.
        layout: of the task's whole model; None if it is not known at the submitter.
        parameters: the number of elements that are parameters; 0 if it is not known.
        buffers: the number of elements of averaged buffers.
    """

    size: int
    layout: TaskLayout | None = None
    parameters: int = 0
    buffers: int = 0


class NotTakingPart(NamedTuple):
    """A member that would not take part.

    Attributes:
        client_id: its name.
        reason: that of its decline, or one of `NOT_ASKED` for a member that is not asked.
        message: the same as text, in the words of its worker.
    """

    client_id: str
    reason: str
    message: str


@dataclass(frozen=True, kw_only=True)
class Prospects:
    """The prospects of a run.

    Attributes:
        members: those that a round could ask now, by name.
        others: those that offer the task and would not take part now, by name: some of `members`, which would decline,
            and those that could not be asked.
        asked: the number of members that a round asks.
        needed: the number of replies that it needs.
        minimum: the number of members that can be asked below which a round does not begin.
        waits: why the run could not begin now; empty if nothing of the kind is known.
        skips: why each of its rounds would be skipped; likewise.
        warnings: for the operator, on members that would decline, or may.
    """

    members: tuple[str, ...]
    others: tuple[NotTakingPart, ...]
    asked: int
    needed: int
    minimum: int
    waits: str
    skips: str
    warnings: tuple[str, ...]


def prospects(
    submission: Submission, session: Session, attending: Mapping[str, Attending], model: DescribedModel
) -> Prospects:
    """The prospects of a run with this model; `attending` are the members that attend, by name.

    Raises:
        Refusal: `spec`: the rule's own code raised an exception.
    """
    spec = submission.spec
    known = known_clients(session, spec, submission.objectives)
    away = dict(_away(known, attending, enrolled=spec.selection.pool != "attending"))
    members = tuple(sorted(known.keys() - away.keys()))
    asked, minimum = spec.selection.asked(len(members)), submission.least(session)
    question = _Question.of(submission, model, asked)
    rows = session.scalars(select(Client).where(Client.client_id.in_(known)).order_by(Client.client_id)).all()
    others = {}
    for row in rows:
        problem = question.problem(row, known[row.client_id].objectives) or away.get(row.client_id)
        if problem is not None:
            others[row.client_id] = NotTakingPart(row.client_id, *problem)
    others |= {name: NotTakingPart(name, OLD, why) for name, why in too_old(session, spec).items()}
    needed = submission.cohort(session) or replies_needed(
        spec.selection.quorum, min(asked, spec.selection.wanted(len(members)))
    )
    waits = skips = ""
    willing = [name for name in members if name not in others]
    missing = [name for name in spec.selection.required if name not in willing]
    if len(members) < minimum:
        waits = (
            f"the run could not begin: {counted(len(members), 'member')} could be asked, and a round needs {minimum}"
        )
    elif missing and missing[0] not in members:
        why = others[missing[0]].message if missing[0] in others else "it does not offer the task"
        waits = f"the run could not begin: selection.required names {missing[0]}: {why}"
    elif missing:
        skips = f"each round would be skipped: selection.required names {missing[0]}: {others[missing[0]].message}"
    elif min(asked, len(willing)) < needed:
        skips = (
            f"each round would be skipped: {len(willing)} of the {counted(len(members), 'member')} that could be asked "
            f"would take part, and a round needs {counted(needed, 'reply', 'replies')}"
        )
    warnings = [*_declines(list(others.values()), len(known)), *_answering(rows, willing)]
    declining = len(members) - len(willing)
    if declining and not (waits or skips) and asked - declining < needed:
        warnings.append(
            f"a round asks {asked} of the {counted(len(members), 'member')} and needs {needed} replies. It is skipped "
            "if it asks too many members that decline: leave these out with selection.exclude"
        )
    return Prospects(
        members=members,
        others=tuple(others[name] for name in sorted(others)),
        asked=asked,
        needed=needed,
        minimum=minimum,
        waits=waits,
        skips=skips,
        warnings=tuple(warnings),
    )


def _away(
    names: Collection[str], attending: Mapping[str, Attending], *, enrolled: bool
) -> Iterator[tuple[str, Problem]]:
    """The members of these names that could not be asked now, each with the reason."""
    for name in names:
        stream = attending.get(name)
        if stream is not None and stream.closing is not None:
            yield name, (stream.closing.reason, f"it is {stream.closing}")
        elif stream is None and not enrolled:
            yield name, (ABSENT, "it does not attend")


def _declines(others: Sequence[NotTakingPart], known: int) -> Iterator[str]:
    """A warning for the members of each decline."""
    names = defaultdict(list)
    for other in others:
        if other.reason not in NOT_ASKED:
            names[other.reason, other.message].append(other.client_id)
    for (reason, message), who in names.items():
        yield f"{_named(who, known)} will decline work of this run: {message} [{reason}]"


def _answering(rows: Sequence[Client], willing: Collection[str]) -> Iterator[str]:
    """A warning that names the members that answer each run before they work for it."""
    if names := [row.client_id for row in rows if row.consents and row.client_id in willing]:
        yield f"{_named(names, len(willing))} must accept the run first, by policy or by decision of the owner"


def _named(names: Sequence[str], total: int) -> str:
    others = " and others" if len(names) > NAMED else ""
    return f"{', '.join(names[:NAMED])}{others} ({len(names)} of {counted(total, 'member')})"


@dataclass(frozen=True)
class _Question:
    """What a run asks in its first round, as far as it is known.

    Attributes:
        submission: of the run.
        model: its initial model.
        members: the number of clients that get an assignment.
        needs: the abilities that trainers need.
        known: True if the phases of the algorithm are those of this project.
    """

    submission: Submission
    model: DescribedModel
    members: int
    needs: frozenset[Ability]
    known: bool

    @classmethod
    def of(cls, submission: Submission, model: DescribedModel, members: int) -> "_Question":
        """The question of a run to this number of members. Errors as of `prospects`."""
        spec, rule = submission.spec, submission.rule
        try:
            needs = needed_abilities(spec, rule, submission.objectives)
        except SpecError as error:
            raise Refusal("spec", str(error)) from error
        known = spec.algorithm.name in ALGORITHMS or (isinstance(rule, Rule) and type(rule).round is Rule.round)
        return cls(submission, model, members if spec.privacy.secure == "off" else min(members, LARGEST), needs, known)

    @property
    def private(self) -> bool:
        """True if rounds are private."""
        return self.submission.spec.privacy.secure != "off"

    def problem(self, client: Client, serves: tuple[str, ...]) -> Problem | None:
        """Why a client that serves these objectives of the run would not take part; None if nothing of it is known.

        A worker makes these checks, most of them in this order.
        """
        return next(self._problems(client, serves), None)

    def _problems(self, client: Client, serves: tuple[str, ...]) -> Iterator[Problem]:
        task, run = self.submission.spec.task, self.submission
        if self.private and serves != run.objectives:
            yield OBJECTIVES, f"private rounds ask for all objectives; this member serves {', '.join(serves)}"
        bounds = WorkBounds(**client.limits)
        yield from _some(bounds.problem_of_members(self.members))
        if task in client.layouts:
            yield from self._other_layout(TaskLayout(**client.layouts[task]))
        if not (self.private or self.submission.spec.describes) and task in client.private_only:
            yield "policy:required", "the owner requires private rounds"
        declared = client.objectives.get(task) or run.objectives
        for work in self._works(serves):
            yield from _some(bounds.problem_of_work(work, samples=int(client.tasks[task]), objectives=len(declared)))
            yield from _some(bounds.problem_of_bytes(self._moved(work, serves)))
        able = client.abilities.get(task, ())
        if missing := [ability for ability in sorted(self._needs(serves)) if ability not in able]:
            inability = ", and ".join(CANNOT[ability] for ability in missing)
            yield f"ability:{missing[0]}", f"the trainer of this worker {inability}"
        kind = "training" if run.spec.trains else "evaluation"
        counts = not run.spec.describes
        if self.private and counts and client.sessions_left.get(task, {}).get(kind) == 0:
            yield "sessions", f"this data set has been in all sessions of {kind} that its owner allows"
        if run.spec.evaluates_privately and not (run.spec.trains or client.consents):
            if run.spec.describes:
                yield (
                    "statistics:approval",
                    "its owner approves no runs, and statistics are summed in approved runs alone",
                )
            else:
                yield (
                    "evaluations",
                    "its owner approves no runs, and models are measured privately in approved runs alone",
                )

    def _other_layout(self, theirs: TaskLayout) -> Iterator[Problem]:
        ours = self.model.layout
        if ours is None or ours.digest == theirs.digest:
            return
        alike = (ours.tensors, ours.elements) == (theirs.tensors, theirs.elements)
        difference = (
            "tensors with other names, shapes or places than the submitted one"
            if alike
            else f"{theirs}, the submitted one {ours}"
        )
        yield "layout", f"the model of this worker's task has {difference}: compare the versions of the task"

    def _works(self, serves: tuple[str, ...]) -> Iterator[Work]:
        """The work of the first round that bounds count for; none of an algorithm that may ask for anything."""
        run = self.submission
        spec, rule = run.spec, run.rule
        if not self.known:
            return
        asked = Asked("", serves, spec, 0)
        if not spec.trains:
            yield measuring_phase(spec, run.metrics).work(asked)
            return
        if isinstance(rule, Conversation):
            yield GradientsPhase(sketch=rule.sketch, budget=rule.budget).work(asked)
        yield TrainingPhase(separate=isinstance(rule, FSMGDA)).work(asked)

    def _moved(self, work: Work, serves: tuple[str, ...]) -> int:
        """The bytes that an assignment moves at least: the model, and an update or the specification."""
        model, run = self.model, self.submission
        if self.private:
            return model.size + len(run.document)
        if not model.parameters or not isinstance(work, Train):
            return model.size
        layout = Layout((Tensor("model", (model.parameters + model.buffers,)),))
        return model.size + payload_layout(work.rows(Shape(layout, run.objectives, serves, model.buffers))).file_bytes

    def _needs(self, serves: tuple[str, ...]) -> frozenset[Ability]:
        """The abilities that the trainer of a client needs: none for weights where it trains on one objective alone."""
        alone = self.known and len(serves) == 1 and not isinstance(self.submission.rule, MeasuredRule)
        return self.needs - {Ability.WEIGHTS} if alone else self.needs


def _some(problem: Problem | None) -> Iterator[Problem]:
    if problem is not None:
        yield problem
