"""Runs that are written down as an engine would, blobs and all."""

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from types import MappingProxyType

from sqlalchemy.orm import Session

from storage.blob_directory import DirectoryStore
from storage.database import Database
from storage.models import Assignment, Client, Evaluation, Input, Model, Phase, Reply, Round, Run
from storage.states import AssignmentState, ClientState, PhaseState, RoundState
from tests.storage.scene import NOON, date_back, run_row, stored

OLD = (NOON - timedelta(days=1)).timestamp()


@dataclass(frozen=True)
class Federation:
    """Runs written down as an engine would, blobs and all; `store` gives the digest of a blob by its contents."""

    database: Database
    blobs: DirectoryStore

    def store(self, contents: str, *, at: float = OLD) -> str:
        digest = self.blobs.put(contents.encode())
        date_back(self.blobs, digest, at)
        return digest

    def model(self, session: Session, contents: str, *, at: float = OLD) -> str:
        digest = self.store(contents, at=at)
        if session.get(Model, digest) is None:
            session.add(Model(digest=digest, size=len(contents), parameters=1, created=NOON))
            session.flush()
        return digest

    def run(self, run_id: str, rounds: int = 0, **state: object) -> None:
        with self.database.begin() as session:
            if session.get(Client, "c") is None:
                session.add(Client(client_id="c", state=ClientState.ACTIVE, signing_key=b"", key_id="", enrolled=NOON))
            session.add(run_row(run_id, self.model(session, f"{run_id} model 0"), state_data=state))
        for number in range(rounds):
            self.round(run_id, number)

    def round(
        self,
        run_id: str,
        number: int,
        state: RoundState = RoundState.COMPLETED,
        *,
        at: float = OLD,
        kind: str = "train",
        update: str = "",
        metrics: Mapping[str, float] = MappingProxyType({}),
    ) -> None:
        with self.database.begin() as session:
            run = session.get_one(Run, run_id, with_for_update=True)
            result = self.model(session, f"{run_id} model {number + 1}", at=at)
            made = Round(
                run_id=run_id,
                number=number,
                state=state,
                base_model=run.model,
                result_model=result,
                deployed_model=self.model(session, f"{run_id} mean {number + 1}", at=at),
                gram=self.store(f"{run_id} gram {number}", at=at),
                wanted=2,
                metrics=dict(metrics),
                started=NOON,
                ended=datetime.fromtimestamp(at, UTC) if state is RoundState.COMPLETED else None,
            )
            phase = Phase(
                round=made, number=0, kind=kind, state=PhaseState.CLOSED, wanted=2, started=NOON, deadline=NOON
            )
            assignment = Assignment(
                assignment_id=f"{run_id}-{number}",
                client_id="c",
                state=AssignmentState.FULFILLED,
                base_model=run.model,
                envelope=b"",
                created=NOON,
            )
            phase.assignments = [assignment]
            if kind != "train":
                sent = self.store(f"{run_id} input {number}", at=at)
                assignment.inputs = [Input(name="replies", digest=sent, size=1)]
            assignment.replies = [
                Reply(
                    client_id="c",
                    accepted=accepted,
                    envelope=b"",
                    envelope_digest="",
                    receipt=b"",
                    payload=self.store(update or f"{run_id} {word} {number}", at=at),
                    received=NOON,
                )
                for accepted, word in ((True, "update"), (False, "refused"))
            ]
            session.add(phase)
            session.flush()
            session.add(Evaluation(round_id=made.round_id, client_id="c", model=result, split="test", samples=1))
            run.model = result

    def contents(self) -> set[str]:
        return {self.blobs.read(digest).decode() for digest in stored(self.blobs)}


def of_round(run_id: str, number: int) -> set[str]:
    return {
        f"{run_id} model {number}",
        f"{run_id} model {number + 1}",
        f"{run_id} mean {number + 1}",
        f"{run_id} gram {number}",
        f"{run_id} update {number}",
    }
