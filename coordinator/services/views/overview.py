"""Views for operators: the record of runs, rounds, replies and clients, as the messages of the Admin service.

Plain functions of a session, which only read. An unknown number is NaN. Rounds in numbers are in `summaries`,
one round with every client's part in `details`.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from datetime import datetime

from sqlalchemy import func, select
from sqlalchemy.orm import Session, contains_eager

from coordinator.lookup import check_client
from coordinator.rounds.export import parsed
from coordinator.rounds.fleets.known import known_clients, serves
from coordinator.rounds.fleets.presence import Attending, announced
from coordinator.rounds.runs.client_noise import noisy_steps, spent
from coordinator.rounds.runs.disclosure import concealed
from coordinator.rounds.transitions import ROUND_ENDED, RUN_ENDED
from coordinator.services.checks.envelope_checks import EnvelopeChecks
from coordinator.services.views.conversion import like
from coordinator.services.views.summaries import summaries
from federation.spec.run_sections import PrivacySpec
from federation.spec.run_spec import RunSpec
from federation.v1 import admin_pb2 as messages
from federation.v1 import common_pb2 as messages_common
from storage import models
from storage.records import RunMemory
from storage.states import Answer, ClientState


def clients(
    session: Session, attending: Mapping[str, Attending], now: datetime, *, after: str, count: int
) -> list[messages.Client]:
    """The next clients in the order of their names, as they are at the time `now`: at most `count`, after `after`."""
    query = select(models.Client).where(models.Client.client_id > after).order_by(models.Client.client_id).limit(count)
    return _clients(session, attending, now, session.scalars(query).all())


def client(session: Session, attending: Mapping[str, Attending], now: datetime, client_id: str) -> messages.Client:
    """One client, at the time `now`.

    Raises:
        Refusal: `client-unknown`: there is none of that name.
    """
    check_client(session, client_id)
    return _clients(session, attending, now, [session.get_one(models.Client, client_id)])[0]


def _clients(
    session: Session, attending: Mapping[str, Attending], now: datetime, rows: Sequence[models.Client]
) -> list[messages.Client]:
    row = models.Certificate
    expiry = dict(
        session.execute(
            select(row.client_id, func.max(row.not_after))
            .where(row.client_id.in_([client.client_id for client in rows]), row.revoked.is_(None))
            .group_by(row.client_id)
        ).all()
    )
    undecided: dict[str, list[str]] = {}
    waiting = (
        select(models.Consent.client_id, models.Run.name)
        .join(models.Run)
        .where(models.Consent.answer == Answer.WAITING, models.Run.state.not_in(list(RUN_ENDED)))
    )
    for client_id, name in session.execute(waiting.order_by(models.Run.created)):
        undecided.setdefault(client_id, []).append(name)
    messages_by_name = []
    for client in rows:
        shown = _client(client, attending.get(client.client_id), now, expiry.get(client.client_id))
        shown.undecided.extend(undecided.get(client.client_id, ()) if client.consents else ())
        messages_by_name.append(shown)
    return messages_by_name


def _client(
    client: models.Client, attendance: Attending | None, now: datetime, expires: datetime | None
) -> messages.Client:
    closing = announced(client, now) if attendance is None else attendance.closing
    return like(
        messages.Client,
        client,
        attending=attendance is not None,
        last_seen=client.last_seen if attendance is None else attendance.last_seen,
        certificate_expires=expires,
        closed_until=None if closing is None else closing.until,
        paused=closing is not None and closing.paused,
        tasks=[
            messages.TaskSummary(
                task=task,
                samples=int(count),
                objectives=client.objectives.get(task, ()),
                abilities=client.abilities.get(task, ()),
                **{f"{kind}_sessions_left": left for kind, left in client.sessions_left.get(task, {}).items()},
            )
            for task, count in sorted(client.tasks.items())
        ],
    )


def active_runs(session: Session) -> list[str]:
    """The ids of the runs that have not ended."""
    return list(session.scalars(select(models.Run.run_id).where(models.Run.state.not_in(list(RUN_ENDED)))))


def run(session: Session, item: models.Run, *, spec: bool = False) -> messages.Run:
    """A run, with its last evaluated round; with `spec`, its specification and which client serves which objectives."""
    parsed = RunSpec.parse(item.spec)
    done = session.scalar(  # rounds end in their order
        select(models.Round.number + 1)
        .where(models.Round.run_id == item.run_id, models.Round.state.in_(ROUND_ENDED))
        .order_by(models.Round.number.desc())
        .limit(1)
    )
    evaluated = session.scalar(
        select(models.Round)
        .where(
            models.Round.run_id == item.run_id,
            models.Round.metrics["evaluated"].as_float() > 0,  # also in private rounds, without rows of Evaluation
        )
        .order_by(models.Round.number.desc())
        .limit(1)
    )
    model, memory = session.get_one(models.Model, item.model), RunMemory.decode(item.state_data)
    return like(
        messages.Run,
        item,
        algorithm=parsed.does,
        task=parsed.task,
        rounds_done=done or 0,
        rounds_total=parsed.rounds,
        model=memory.deployed(item.model),
        averaged=memory.averaged is not None,
        parameters=model.parameters,
        latest=None if evaluated is None else summaries(session, [evaluated])[0],
        spec=item.spec.decode() if spec else "",
        metrics=[messages_common.Metric(**asdict(metric)) for metric in item.metrics],
        measured=parsed.parameters.measured,
        serving=_serving(session, item, parsed) if spec else (),
        never_asked=_never_asked(session, item, parsed) if spec and done else (),
        client_privacy=_client_privacy(session, item, parsed.privacy),
    )


def consents(session: Session, checks: EnvelopeChecks, item: models.Run) -> list[messages.Consent]:
    """The answers to a run of the clients that decide on each run, by name; their envelopes are verified again."""
    rows = select(models.Consent).where(models.Consent.run_id == item.run_id).order_by(models.Consent.client_id)
    return [
        like(messages.Consent, row, answer=str(row.answer), check=checks.consent(session, row, item.spec_digest))
        for row in session.scalars(rows)
    ]


def _client_privacy(session: Session, item: models.Run, privacy: PrivacySpec) -> messages.ClientPrivacy | None:
    """The epsilon that the noise on the steps of a run has spent; None without noise."""
    if not privacy.client_noise:
        return None
    epsilon = spent(privacy, noisy_steps(session, item.run_id))
    return messages.ClientPrivacy(epsilon=epsilon, budget=privacy.client_epsilon, delta=privacy.client_delta)


def _serving(session: Session, item: models.Run, spec: RunSpec) -> list[messages.Serving]:
    """The indicator matrix: every active client that offers the run's task, with the objectives that it serves."""
    active = session.scalars(
        select(models.Client).where(models.Client.state == ClientState.ACTIVE).order_by(models.Client.client_id)
    )
    return [
        messages.Serving(
            client_id=client.client_id,
            objectives=serves(client.client_id, client.objectives, spec, tuple(item.objectives)),
        )
        for client in active
        if client.tasks.get(spec.task, 0) > 0
    ]


def _never_asked(session: Session, item: models.Run, spec: RunSpec) -> list[str]:
    """The members that could have been asked in each round that has ended, and that none has asked, by name."""
    if spec.selection.method != "all":
        return []
    asked = (
        select(models.Assignment.assignment_id)
        .join(models.Assignment.phase)
        .join(models.Phase.round)
        .where(models.Assignment.client_id == models.Client.client_id, models.Round.run_id == item.run_id)
    )
    never = select(models.Client.client_id).where(models.Client.state == ClientState.ACTIVE, ~asked.exists())
    if item.ended is not None:
        never = never.where(models.Client.enrolled < item.ended)
    return sorted({*session.scalars(never)} & known_clients(session, spec, tuple(item.objectives)).keys())


def replies(
    session: Session, checks: EnvelopeChecks, run_id: str, number: int | None, client_id: str, after: int, count: int
) -> tuple[list[messages.Reply], int]:
    """Replies of a run as they were received, in order of arrival, refused ones included; and the last one's number.

    A `number` of None is all rounds, a `client_id` of "" all clients. `after` is the number, in the order of arrival,
    of the reply before them, 0 for the first; `count` is the most that are returned. Envelopes and digests of payloads
    are left out where noise protects the clients.

    Raises:
        Refusal: `client-unknown`.
    """
    hidden = concealed(session.get_one(models.Run, run_id))
    query = (
        select(models.Reply)
        .join(models.Reply.assignment)
        .join(models.Assignment.phase)
        .join(models.Phase.round)
        .where(models.Round.run_id == run_id, models.Reply.reply_id > after)
        .options(
            contains_eager(models.Reply.assignment)
            .contains_eager(models.Assignment.phase)
            .contains_eager(models.Phase.round)
        )
        .order_by(models.Reply.reply_id)
        .limit(count)
    )
    if number is not None:
        query = query.where(models.Round.number == number)
    if client_id:
        check_client(session, client_id)
        query = query.where(models.Reply.client_id == client_id)
    shown = []
    for reply in session.scalars(query):
        phase = reply.assignment.phase
        shown.append(
            like(
                messages.Reply,
                reply,
                round=phase.round.number,
                phase=phase.number,
                payload="" if hidden else reply.payload,
                envelope=None if hidden else parsed(reply.envelope),
                envelopes=checks.reply(session, reply),
            )
        )
        after = reply.reply_id
    return shown, after
