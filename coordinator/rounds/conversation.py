"""A round's conversation: the algorithm's generator yields phases, the fleet answers, until there is a step."""

from collections.abc import Generator, Mapping, Sequence
from functools import partial
from typing import Any, TypeVar

from sqlalchemy import func, select
from sqlalchemy.orm import Session

from coordinator.rounds import selection
from coordinator.rounds.fleets.base import Fleet, Question, Skipped
from coordinator.rounds.replies.revoked import gone_clients, revoked_clients
from coordinator.rounds.runs.private import private_facts
from coordinator.rounds.step import recall
from federation.aggregation.base import Algorithm
from federation.aggregation.interface import TooFewUpdatesError
from federation.aggregation.metrics.step_rate import scheduled_rate
from federation.aggregation.phase_kinds import measuring_phase
from federation.aggregation.phases import AlgorithmPhase, Replies, RoundContext, Selected, Step
from federation.aggregation.qp import UnsolvedError
from federation.aggregation.secure.described import description
from federation.aggregation.secure.evaluation import Means, evaluation
from federation.aggregation.secure.settled import Sum
from federation.aggregation.streaming import one_thread
from federation.sketches.base import SketchError
from federation.spec.objective_names import encoder_columns
from federation.spec.run_sections import AUTO, replies_needed
from federation.statistics.result import StatisticsResult
from federation.vectors import Layout, model_layout
from federation.work.base import Shows
from federation.work.statistics.work import Statistics
from federation.work.train.work import Train
from storage import models
from storage.models import Round
from storage.records import ConversationFacts

Ending = TypeVar("Ending")


def run_phases(fleet: Fleet, algorithm: Algorithm, current: Round) -> tuple[Step, int]:
    """Runs phase after phase, until the algorithm ends the round.

    The replies come from the clients, or from the record if the phase was closed before a crash.

    Returns:
        The step, and the number of the phase that follows.

    Raises:
        Held: the run is not RUNNING.
        Skipped: there is no step: too few replies, or a rule that cannot use them.
        Voided: the algorithm gave up this attempt.
    """
    required = _required(fleet, current)
    layout = _layout(fleet, current)
    before = (models.Phase.round_id == current.round_id, models.Phase.attempt < current.attempt)
    with fleet.context.database.read() as session:
        number = session.scalar(select(func.count()).select_from(models.Phase).where(*before)) or 0
        facts = _facts(session, fleet, current, number, current.selected)
        context = _context(session, fleet, current, current.base_model, facts, layout)
    conversation = algorithm.round(context)
    return _converse(fleet, current, conversation, number, current.base_model, facts, required)


def measure(fleet: Fleet, current: Round) -> Replies:
    """The measurements of a model, or of data, in a round that makes no step, by the members that were selected for it.

    When these have answered, members are asked once that were away when the round began and attend now, or that were
    lost while they were asked.

    Raises:
        Held, Skipped: as `run_phases`.
    """
    phase = measuring_phase(fleet.run.spec, fleet.run.metrics)
    required, model = _required(fleet, current), current.base_model
    first = fleet.question(current, 0, phase, list(current.selected), current.wanted, model)
    replies = fleet.ask(first)
    fleet.settled_pool()  # after a restart, members connect again
    if back := fleet.back(first):
        replies = _of_both(fleet, first, fleet.question(current, 1, phase, back, len(back), model))
    _check_enough(fleet, first, replies, required)
    return replies


def _of_both(fleet: Fleet, first: Question, second: Question) -> Replies:
    """The replies to both questions, without those of members that were revoked before the last look at either."""
    told: set[str] | None = None
    while True:
        later = fleet.ask(second)
        # On record: read once more, since members may have been revoked while others were asked.
        replies = fleet.ask(first)
        found = Replies([*replies, *later], declines={**replies.declines, **later.declines})
        names = {reply.client_id for reply in found}
        if names == told:
            return found
        told = names


def _required(fleet: Fleet, current: Round) -> tuple[str, ...]:
    """The clients without whose replies a round is skipped. Raises Skipped if one of them was not selected."""
    required = fleet.run.spec.selection.required
    if missing := [name for name in required if name not in current.selected]:
        reasons = ", ".join(f"{name} {current.not_asked.get(name, '')}".rstrip() for name in missing)
        raise Skipped(f"required: {reasons}", missing)
    return required


def measure_privately(fleet: Fleet, current: Round) -> Means:
    """The means over the members that were selected for a private round that makes no step. Errors as below."""
    required = _required(fleet, current)
    return hold_evaluation(fleet, current, current.base_model, 0, current.selected, required)


def describe_privately(fleet: Fleet, current: Round) -> tuple[StatisticsResult, Sum]:
    """The result of a private sum of statistics over the members that were selected. Errors as below."""
    required, model, layout = _required(fleet, current), current.base_model, _layout(fleet, current)
    with fleet.context.database.read() as session:
        facts = _facts(session, fleet, current, 0, current.selected)
        context = _context(session, fleet, current, model, facts, layout, {})
    conversation = description(context, Statistics.of(fleet.run.spec), sorted(facts.clients))
    return _converse(fleet, current, conversation, 0, model, facts, required)[0]


def hold_evaluation(
    fleet: Fleet, current: Round, model: str, number: int, clients: Sequence[str], required: Sequence[str] = ()
) -> Means:
    """The evaluation of a model in a run with private rounds, whose first phase has this number.

    Each phase needs the replies of the `required` clients that it asks.

    Raises:
        Held, Skipped, Voided: as `run_phases`.
        RevokedMeanwhile: a member whose reply entered was revoked.
    """
    layout = _layout(fleet, current)
    with fleet.context.database.read() as session:
        facts = _facts(session, fleet, current, number, clients)
        context = _context(session, fleet, current, model, facts, layout, {})
    conversation = evaluation(context, fleet.run.evaluation, sorted(facts.clients))
    return _converse(fleet, current, conversation, number, model, facts, required)[0]


def _facts(session: Session, fleet: Fleet, current: Round, number: int, names: Sequence[str]) -> ConversationFacts:
    """What a conversation with some clients builds on, whose first phase has this number.

    Once that phase is on record they stand there: a later process of the coordinator may find another pool, other
    offers, or other keys, and members answer a private session with the terms of which they have heard first.
    """
    phase = select(models.Phase.conversation).filter_by(round_id=current.round_id, number=number)
    # Section 2: with other keys or members, a restart would make other terms, and members that are ready would be asked
    # into a new session.
    if (recorded := ConversationFacts.decode(session.scalar(phase) or {})) is not None:
        return recorded
    known = fleet.known(session)
    # Section 3, rule 1: members are invited with the key that they had at the first phase, which others have pinned.
    keys = fleet.keys(session) if fleet.run.spec.privacy.secure != "off" else {}
    return ConversationFacts(
        clients={name: (known[name].samples, known[name].objectives) for name in names if name in known},
        keys={name: key.hex() for name, key in keys.items()},
    )


def _converse(
    fleet: Fleet,
    current: Round,
    conversation: Generator[AlgorithmPhase, Replies, Ending],
    number: int,
    model: str,
    facts: ConversationFacts,
    required: Sequence[str] = (),
) -> tuple[Ending, int]:
    """Runs phases from this number on, with work on this model; returns the result and the number that follows.

    The first phase keeps the `facts`. Each phase needs the replies of the `required` clients that it asks.
    """
    replies: Replies | None = None
    begin = number
    while True:
        try:
            phase = _continued(conversation, replies)
        except StopIteration as end:
            return end.value, number
        replies = _ask(fleet, current, number, phase, model, required, facts if number == begin else None)
        number += 1


def _continued(conversation: Generator[AlgorithmPhase, Replies, Any], replies: Replies | None) -> AlgorithmPhase:
    """The next phase of a conversation, after the replies to the one before; None before the first."""
    try:
        with one_thread():
            return conversation.send(replies)  # type: ignore[arg-type] # a generator that has not begun takes None
    except (TooFewUpdatesError, UnsolvedError, SketchError) as error:
        raise Skipped(f"aggregation: {error}") from error


def _ask(
    fleet: Fleet,
    current: Round,
    number: int,
    phase: AlgorithmPhase,
    model: str,
    required: Sequence[str],
    conversation: ConversationFacts | None,
) -> Replies:
    """The replies to one phase; raises if there are too few, or if they would reveal updates of private rounds."""
    # Section 3, rule 4: members that keep no specification would answer it in the clear, so the coordinator does not
    # ask.
    if fleet.run.spec.privacy.secure != "off" and phase.kind.shows is Shows.UPDATE:
        raise Skipped(f"privacy.secure: the algorithm asks for {phase.kind.name}, which shows updates in the clear")
    clients = list(current.selected if phase.clients is None else phase.clients)
    closing = phase.closes(len(clients))
    wanted = min(current.wanted, len(clients)) if closing is None else closing.wanted
    question = fleet.question(current, number, phase, clients, wanted, model, conversation)
    replies = fleet.ask(question)
    _check_enough(fleet, question, replies, required)
    return replies


def _check_enough(fleet: Fleet, question: Question, replies: Replies, required: Sequence[str]) -> None:
    """Raises Skipped if too few clients have replied to a question, or one that is required has not."""
    phase, clients = question.phase, question.clients
    _check_has(required, replies, clients)
    closing, quorum = phase.closes(len(clients)), phase.kind.terms(fleet.run.spec).quorum
    if closing is not None:
        needed = closing.needed
    else:
        recorded = _recorded(fleet, question.current, question.number)
        needed = 0 if quorum is None else replies_needed(quorum, recorded or question.wanted)
    if len(replies) < needed:
        where = "" if phase.kind is Train else f" ({phase.kind.name})"
        raise Skipped(f"quorum: {len(replies)} of {len(clients)} members replied{where}, {needed} are needed")


def _check_has(required: Sequence[str], replies: Replies, clients: Sequence[str]) -> None:
    """Raises Skipped if a required client was asked, and its reply does not count."""
    answered = {reply.client_id for reply in replies}
    if missing := [name for name in required if name in clients and name not in answered]:
        reasons = (
            f"{name} declined ({replies.declines[name]})" if name in replies.declines else f"{name} gave no reply"
            for name in missing
        )
        raise Skipped(f"required: {', '.join(reasons)}", missing)


def _recorded(fleet: Fleet, current: Round, number: int) -> int | None:
    """The number of replies wanted when a phase was opened: since then, a restart may have changed the pool."""
    with fleet.context.database.read() as session:
        return session.scalar(select(models.Phase.wanted).filter_by(round_id=current.round_id, number=number))


def _layout(fleet: Fleet, current: Round) -> Layout:
    """The layout of the parameters that a run trains.

    The model may be fetched from a bucket and checked first, which takes long: no transaction may be open meanwhile.
    """
    model = fleet.context.blobs.local(current.base_model)
    return fleet.run.spec.parameters.parameters_of(model_layout(model))


def _context(
    session: Session,
    fleet: Fleet,
    current: Round,
    model: str,
    facts: ConversationFacts,
    layout: Layout,
    state: Mapping[str, Any] | None = None,
) -> RoundContext:
    """The context of a conversation about this model; without a `state`, that of the run before the round.

    A client that was revoked since is left out, but not of a private round, which is voided then.
    """
    context = fleet.context
    if state is None:
        state = fleet.memory(session, current.number, current.base_model).rule
    # Its masks are in the others' vectors, so a private round is voided for a revoked member and does not go on without
    # it.
    gone = revoked_clients(session) if not facts.keys else frozenset()
    private = private_facts(session, fleet, current, model, facts.keys)
    spec = fleet.run.spec
    return RoundContext(
        number=current.number,
        attempt=current.attempt,
        total=spec.rounds,
        prior=spec.algorithm.prior,
        state=state,
        device=context.device,
        recall=partial(recall, context.blobs),
        objectives=fleet.run.objectives,
        parameters=layout.size,
        encoder=encoder_columns(layout),
        seed=spec.seed,
        local_rate=spec.train.rate(current.number, spec.rounds),
        server_rate=scheduled_rate(spec, current.number),
        selected={
            name: Selected(*facts.clients[name]) for name in current.selected if name in facts.clients.keys() - gone
        },
        draw=partial(_draw, fleet, current),
        revoked=partial(_gone, fleet, current),
        private=private,
        compares_all=spec.server.learning_rate == AUTO,
    )


def _draw(fleet: Fleet, current: Round, purpose: str) -> tuple[str, ...]:
    """Another choice of clients for the same round."""
    spec, pool = fleet.run.spec, fleet.settled_pool()
    return tuple(selection.select(spec.selection, pool, seed=spec.seed, round_number=current.number, purpose=purpose))


def _gone(fleet: Fleet, current: Round) -> frozenset[str]:
    with fleet.context.database.read() as session:
        return gone_clients(session, current.round_id)
