"""The rows of alerts: written from facts, so that a fact has one row from its beginning to its end."""

from collections.abc import Iterable, Sequence
from datetime import datetime
from typing import Any

from sqlalchemy import ColumnElement, Select, or_, select, tuple_
from sqlalchemy.orm import Session

from coordinator.alerts.facts import AlertFact, Key
from storage.columns import cleaned
from storage.models import ALERT_MESSAGE, ALERT_REMEDY, Alert, Run
from storage.states import AlertKind


def save(session: Session, run_id: str, facts: Iterable[AlertFact]) -> list[Alert]:
    """Writes facts about a run, each to the row with its beginning. Returns the rows that are new."""
    rows = {
        (row.kind, row.run_id, row.client_id, row.began): row
        for row in session.scalars(select(Alert).where(Alert.run_id == run_id))
    }
    new = []
    for fact in facts:
        row = rows.get((*fact.key, fact.began))
        if row is None:
            row = _row(fact)
            session.add(row)
            new.append(row)
        else:
            _update(row, fact)
    return new


def reconcile(
    session: Session, run_id: str | None, kinds: Iterable[AlertKind], facts: Iterable[AlertFact], now: datetime
) -> list[Alert]:
    """Makes the rows of these kinds say what holds now: each other open row has ended. Returns the rows that are new.

    A fact that has an open row keeps the beginning of that row. With a `run_id` only the rows about that run change.
    """
    open_rows = _open(session, run_id, kinds)
    new = []
    for fact in facts:
        row = open_rows.pop(fact.key, None)
        if row is None:
            same = (Alert.kind == fact.kind, Alert.run_id == fact.run_id, Alert.client_id == fact.client_id)
            row = session.scalar(select(Alert).where(*same, Alert.began == fact.began))
        if row is None:
            row = _row(fact)
            session.add(row)
            new.append(row)
        else:
            _update(row, fact)
    for row in open_rows.values():
        row.ended = max(now, row.began)
    return new


def differ(session: Session, run_id: str | None, kinds: Iterable[AlertKind], facts: Iterable[AlertFact]) -> bool:
    """True if `reconcile` would write something."""
    shown = {key: (row.severity, row.message) for key, row in _open(session, run_id, kinds).items()}
    return shown != {fact.key: (fact.severity, cleaned(fact.message, ALERT_MESSAGE)) for fact in facts}


def _open(session: Session, run_id: str | None, kinds: Iterable[AlertKind]) -> dict[Key, Alert]:
    query = select(Alert).where(Alert.kind.in_(list(kinds)), Alert.ended.is_(None))
    if run_id is not None:
        query = query.where(Alert.run_id == run_id)
    return {(row.kind, row.run_id, row.client_id): row for row in session.scalars(query)}


def end_of_run(session: Session, run_id: str, at: datetime) -> None:
    """Ends the open alerts about a run that has ended."""
    for row in session.scalars(select(Alert).where(Alert.run_id == run_id, Alert.ended.is_(None))):
        row.ended = max(at, row.began)


def complete(session: Session, run_id: str) -> bool:
    """True if all alerts about a run that has ended are on record: that of its end comes with the others."""
    query = select(Alert.alert_id).where(Alert.run_id == run_id, Alert.kind == AlertKind.RUN_ENDED)
    return session.scalar(query.limit(1)) is not None


def of_run(session: Session, run: Run, count: int) -> Sequence[Alert]:
    """The alerts about a run that last, and those that lasted at its end; at most `count`, newest first."""
    lasts: ColumnElement[bool] = Alert.ended.is_(None)
    if run.ended is not None:
        lasts = or_(lasts, Alert.ended >= run.ended)
    return session.scalars(_newest().where(Alert.run_id == run.run_id, lasts).limit(count)).all()


def listed(
    session: Session,
    *,
    every: bool,
    run_id: str | None,
    client_id: str,
    before: tuple[datetime, int] | None,
    count: int,
) -> Sequence[tuple[Alert, str | None]]:
    """Alerts with the names of their runs, newest first: at most `count` of them.

    Without `every` those that last; `run_id` None is of all runs and none, `client_id` "" likewise. With `before`, the
    beginning and the id of an alert, those that come after it in the list.
    """
    query = _newest().outerjoin(Run, Run.run_id == Alert.run_id).add_columns(Run.name)
    if not every:
        query = query.where(Alert.ended.is_(None))
    if run_id is not None:
        query = query.where(Alert.run_id == run_id)
    if client_id:
        query = query.where(Alert.client_id == client_id)
    if before is not None:
        query = query.where(tuple_(Alert.began, Alert.alert_id) < before)
    return [(row, name) for row, name in session.execute(query.limit(count))]


def _newest() -> Select[Any]:
    return select(Alert).order_by(Alert.began.desc(), Alert.alert_id.desc())


def _row(fact: AlertFact) -> Alert:
    row = Alert(kind=fact.kind, run_id=fact.run_id, client_id=fact.client_id, began=fact.began)
    _update(row, fact)
    return row


def _update(row: Alert, fact: AlertFact) -> None:
    row.severity, row.ended = fact.severity, fact.ended
    row.message, row.remedy = cleaned(fact.message, ALERT_MESSAGE), cleaned(fact.remedy, ALERT_REMEDY)
    row.first_round, row.last_round = fact.first_round, fact.last_round
