"""A run before it is taken: what its specification must be, and which members it would ask."""

from collections.abc import Collection
from dataclasses import dataclass
from datetime import datetime

from sqlalchemy import select
from sqlalchemy.orm import Session

from coordinator.rounds.fleets.remote import known_clients
from coordinator.rounds.selection import asked
from coordinator.rounds.specification import cautions, fitting_objectives, parse_run
from coordinator.rounds.states import RUN_ENDED
from federation.digests import digest
from federation.refusals import Refusal
from federation.runs import RunSpec, SpecError
from storage.models import Run, RunState


@dataclass(frozen=True)
class Submission:
    """A run that may be taken."""

    document: bytes  # the specification, as submitted
    spec: RunSpec  # the same, parsed
    objectives: tuple[str, ...]  # of the task, in its order
    warnings: tuple[str, ...]  # what the operator should know about the specification

    @classmethod
    def parse(cls, document: bytes, objectives: tuple[str, ...]) -> "Submission":
        """Reads a specification, a TOML document, which need not name the task's objectives.

        Raises:
            Refusal: `spec`.
        """
        try:
            spec, rule = parse_run(document)
            return cls(document, spec, fitting_objectives(spec, rule, objectives), cautions(spec, rule))
        except SpecError as error:
            raise Refusal("spec", str(error)) from error

    def must_be_new(self, session: Session) -> None:
        """Raises if a run of this name has not ended.

        Raises:
            Refusal: `run-exists`.
        """
        name = self.spec.name
        active = session.scalar(select(Run.run_id).where(Run.name == name, Run.state.not_in(list(RUN_ENDED))).limit(1))
        if active is not None:
            raise Refusal("run-exists", f"run {active} has the name {name!r} and has not ended: stop it or rename")

    def members(self, session: Session, attending: Collection[str]) -> list[str]:
        """The members that a round could ask now, by name; `attending` are those that attend."""
        known = known_clients(session, self.spec, self.objectives)
        enrolled = self.spec.selection.pool != "attending"
        return sorted(name for name in known if enrolled or name in attending)

    def asked(self, members: int) -> int:
        """How many of the available members a round asks."""
        return asked(self.spec.selection, members)


def new_run(
    document: bytes, spec: RunSpec, objectives: tuple[str, ...], *, run_id: str, model: str, by: str, created: datetime
) -> Run:
    """The row of a run that is PENDING, with the digest of its initial model and its submitter."""
    return Run(
        run_id=run_id,
        name=spec.name,
        state=RunState.PENDING,
        spec=document,
        spec_digest=digest(document),
        initial_model=model,
        model=model,
        objectives=list(objectives),
        state_data={},
        submitted_by=by,
        created=created,
    )
