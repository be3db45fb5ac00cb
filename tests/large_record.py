"""Makes a large record in a coordinator's database: rounds whose members replied, declined, were refused or late."""

import math
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from typing import Any

import numpy as np
from sqlalchemy import insert
from sqlalchemy.orm import Session

from federation.digests import digest
from federation.record.log_entries import SUBMITTED
from storage import audit, models
from storage.database import Database
from storage.states import AssignmentState, ClientState, PhaseState, RoundState, RunState

BEGUN = datetime(2026, 11, 1, 8, tzinfo=UTC)
ROUND = timedelta(seconds=60)
MODEL = digest(b"large record")
SHARE_OF_FAILURES = 0.04
_AT_A_TIME = 20


def member_names(members: int) -> list[str]:
    return [f"hospital-{number}" for number in range(1, members + 1)]


def add_members(database: Database, members: int) -> None:
    """Adds members; the database must have its entry key, since the log tells of each member and run."""
    with database.begin() as session:
        models.note_model(session, MODEL, size=1000, parameters=100, created=BEGUN)
        rows: list[dict[str, Any]] = [
            {
                "client_id": name,
                "state": ClientState.ACTIVE,
                "signing_key": name.encode().ljust(32, b".")[:32],
                "key_id": digest(name.encode())[7:71],
                "tasks": {"digits": 100},
                "device": "cpu",
                "software": "fedpareto 0.1.0",
                "enrolled": BEGUN,
                "last_seen": BEGUN,
            }
            for name in member_names(members)
        ]
        session.execute(insert(models.Client), rows)
        for row in rows:
            key = digest(row["signing_key"])
            audit.record(session, at=BEGUN, actor="test", action=audit.ENROLLED, subject=row["client_id"], digest=key)


def add_run(
    database: Database, name: str, *, rounds: int, done: int, members: int, state: RunState = RunState.PAUSED
) -> str:
    """A run of which `done` rounds have ended; returns its id. A paused run stays as it is."""
    run_id = digest(name.encode())[7:39]
    document = f'name = "{name}"\ntask = "digits"\nrounds = {rounds}\nalgorithm.name = "fedmgda+"\n'.encode()
    ended = BEGUN + done * ROUND if state in (RunState.COMPLETED, RunState.STOPPED) else None
    with database.begin() as session:
        session.add(
            models.Run(
                run_id=run_id, name=name, state=state, spec=document, spec_digest=digest(document), initial_model=MODEL,
                model=MODEL, submitted_by="test", created=BEGUN, started=BEGUN, ended=ended,
            )
        )  # fmt: skip
        audit.record(session, at=BEGUN, actor="test", action=SUBMITTED, subject=run_id, digest=digest(document))
    for first in range(0, done, _AT_A_TIME):
        add_rounds(database, run_id, first, min(first + _AT_A_TIME, done), members)
    return run_id


def add_rounds(database: Database, run_id: str, first: int, stop: int, members: int) -> None:
    """Adds rounds `first` to `stop - 1`, which have ended, in one transaction."""
    with database.begin() as session:
        for number in range(first, stop):
            _add_round(session, run_id, number, members)


def _add_round(session: Session, run_id: str, number: int, members: int) -> None:
    rng = np.random.default_rng([number, members])
    names = member_names(members)
    failed = rng.random(members) < SHARE_OF_FAILURES
    failed[0] = False
    accuracy = np.clip(
        0.95 - 0.6 * np.exp(-number / 60) - np.where(np.arange(members) % 11 == 8, 0.2, 0.0)
        + rng.normal(0, 0.01, members), 0, 1,
    )  # fmt: skip
    weights = rng.dirichlet(np.full(members, 5.0))
    started = BEGUN + number * ROUND
    reached = accuracy[~failed]
    metrics = {
        "evaluated": float(len(reached)),
        "accuracy/mean": float(reached.mean()), "accuracy/worst": float(reached.min()),
        "accuracy/worst5": float(np.sort(reached)[: max(1, members // 20)].mean()),
        "accuracy/std": float(reached.std()), "loss/train": 2 * math.exp(-number / 60),
        "improved": 0.9, "direction_norm": 1.0, "bytes/up": 1000.0 * members, "bytes/down": 1000.0 * members,
    }  # fmt: skip
    round_ = models.Round(
        run_id=run_id, number=number, state=RoundState.COMPLETED, base_model=MODEL, result_model=MODEL, wanted=members,
        selected=names, evaluation_phase=1, metrics=metrics, started=started, stepped=started + ROUND / 2,
        ended=started + ROUND,
    )  # fmt: skip
    session.add(round_)
    session.flush()
    phases = [
        models.Phase(
            round_id=round_.round_id, number=at, kind=kind, decides=at == 0, state=PhaseState.CLOSED, wanted=members,
            started=started + at * ROUND / 2, deadline=started + ROUND, ended=started + (at + 1) * ROUND / 2,
        )
        for at, kind in enumerate(("train", "evaluate"))
    ]  # fmt: skip
    session.add_all(phases)
    session.flush()
    assignments = list(_assignments(run_id, number, phases, names, failed.tolist()))
    session.execute(insert(models.Assignment), assignments)
    replies = [
        {
            "assignment_id": row["assignment_id"], "client_id": row["client_id"], "accepted": True, "reason": "",
            "envelope": b"e" * 600, "envelope_digest": digest(row["assignment_id"].encode()), "receipt": b"r" * 300,
            "payload": "", "payload_bytes": 1000, "samples": 100, "losses": {"loss": 1.0}, "metrics": {},
            "norm": float(1 + rng.random()), "weight": float(weights[at % members]), "coefficient": 0.1,
            "cosine": float(rng.uniform(-0.2, 0.8)), "received": started + ROUND / 3,
        }
        for at, row in enumerate(assignments) if row["state"] is AssignmentState.FULFILLED
    ]  # fmt: skip
    session.execute(insert(models.Reply), replies)
    scores = [
        {
            "round_id": round_.round_id, "client_id": name, "model": MODEL, "split": "test", "samples": 20,
            "others": {}, "loss": float(2.3 * (1 - accuracy[at])), "accuracy": float(accuracy[at]),
        }
        for at, name in enumerate(names) if not failed[at]
    ]  # fmt: skip
    session.execute(insert(models.Evaluation), scores)


def _assignments(
    run_id: str, number: int, phases: list[models.Phase], names: list[str], failed: list[bool]
) -> Iterator[dict[str, Any]]:
    states = (AssignmentState.DECLINED, AssignmentState.REFUSED, AssignmentState.EXPIRED)
    reasons = ("disk", "non-finite", "deadline")
    for phase in phases:
        for at, name in enumerate(names):
            why = (at + number) % 3
            yield {
                "assignment_id": digest(f"{run_id}/{number}/{phase.number}/{name}".encode())[7:39],
                "phase_id": phase.phase_id,
                "client_id": name,
                "state": states[why] if failed[at] else AssignmentState.FULFILLED,
                "reason": reasons[why] if failed[at] else "",
                "message": "",
                "base_model": MODEL,
                "envelope": b"a" * 400,
                "created": phase.started,
                "ended": phase.ended,
            }
