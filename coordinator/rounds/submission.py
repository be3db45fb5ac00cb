"""A run before it is taken: what its specification must be, and which members it would ask."""

from collections.abc import Collection
from dataclasses import dataclass

from sqlalchemy import select
from sqlalchemy.orm import Session

from coordinator.aggregation.base import Algorithm
from coordinator.rounds.fleets.remote import known_clients
from coordinator.rounds.selection import asked
from coordinator.rounds.specification import cautions, fitting_objectives, parse_run
from coordinator.rounds.states import RUN_ENDED
from federation.refusals import Refusal
from federation.runs import RunSpec, SpecError
from storage.models import Run


@dataclass(frozen=True)
class Submission:
    """A run that may be taken.

    Attributes:
        spec: what was asked for.
        rule: the algorithm that it names.
        objectives: of the task, in its order.
        warnings: what the operator should know about the specification.
    """

    spec: RunSpec
    rule: Algorithm
    objectives: tuple[str, ...]
    warnings: tuple[str, ...]

    @classmethod
    def parse(cls, document: bytes, objectives: tuple[str, ...]) -> "Submission":
        """Reads a specification.

        Args:
            document: TOML.
            objectives: of the task, as whoever submits knows them, where the specification does not name them.

        Raises:
            Refusal: `spec`.
        """
        try:
            spec, rule = parse_run(document)
            return cls(spec, rule, fitting_objectives(spec, rule, objectives), cautions(spec, rule))
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
        """The members that a round could ask now, by name.

        Args:
            session: reads.
            attending: the members that attend.
        """
        known = known_clients(session, self.spec, self.objectives)
        everybody = self.spec.selection.pool != "attending"
        return sorted(name for name in known if everybody or name in attending)

    def asked(self, members: int) -> int:
        """How many of the available members a round asks."""
        return asked(self.spec.selection, members)
