"""A run at its submission: the checks of its specification against the federation's members."""

from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime

from sqlalchemy import func, select
from sqlalchemy.orm import Session

from coordinator.rounds.fleets.known import known_clients
from coordinator.rounds.runs.specification import (
    cautions,
    fitting_metrics,
    fitting_objectives,
    needed_sessions,
    parse_run,
)
from coordinator.rounds.runs.task_offers import missing_offer
from coordinator.rounds.transitions import RUN_ENDED
from federation.aggregation.base import Algorithm
from federation.aggregation.secure.covered import refusal
from federation.digests import digest
from federation.refusals import Refusal
from federation.secure.thresholds import (
    LARGEST,
    SMALLEST,
    SMALLEST_MGDA,
    Mode,
    Thresholds,
    assumed,
    smallest_cohort,
    truncated,
)
from federation.spec.run_spec import RunSpec, SpecError
from federation.spec.task_metrics import MetricKind
from federation.text import counted
from federation.work.secure.allowed import least_cover, run_bounds
from storage.models import Client, Run
from storage.records import RunMemory
from storage.states import ClientState, RunState


@dataclass(frozen=True)
class Submission:
    """A run that may be taken."""

    document: bytes  # the specification, as submitted
    spec: RunSpec  # the same, parsed
    rule: Algorithm  # of the run
    objectives: tuple[str, ...]  # of the task, in its order
    metrics: tuple[MetricKind, ...]  # of the task, beside loss and accuracy
    warnings: tuple[str, ...]  # for the operator, about the specification

    @classmethod
    def parse(cls, document: bytes, objectives: tuple[str, ...], metrics: tuple[MetricKind, ...] = ()) -> "Submission":
        """Reads a specification, a TOML document, which need not name the task's objectives and metrics.

        Raises:
            Refusal: `spec`.
        """
        try:
            spec, rule = parse_run(document)
            if spec.describes and not spec.statistics.columns:
                raise SpecError(
                    "statistics.columns: missing; `fedpareto admin submit` writes those that the task names"
                )
            if spec.measures and not spec.models:
                raise SpecError(
                    "models: missing; `fedpareto admin submit --model FILE` or `--model-of RUN` writes the digests"
                )
            fitting = fitting_objectives(spec, rule, objectives), fitting_metrics(spec, metrics)
            return cls(document, spec, rule, *fitting, cautions(spec, rule))
        except SpecError as error:
            raise Refusal("spec", str(error)) from error

    def check_new(self, session: Session) -> None:
        """Raises if a run of this name has not ended.

        Raises:
            Refusal: `run-exists`.
        """
        name = self.spec.name
        active = session.scalar(select(Run.run_id).where(Run.name == name, Run.state.not_in(list(RUN_ENDED))).limit(1))
        if active is not None:
            raise Refusal("run-exists", f"run {active} has the name {name!r} and has not ended: stop it or rename")

    def check_members_exist(self, session: Session) -> None:
        """Raises if the run's selection names clients or tags that the federation does not have.

        Raises:
            Refusal: `spec`.
        """
        selection = self.spec.selection
        active = session.scalars(select(Client).where(Client.state == ClientState.ACTIVE)).all()
        everybody = session.scalars(select(Client.client_id)).all()
        tags = {tag for client in active for tag in client.tags}
        if problem := selection.unknown(everybody):
            raise Refusal("spec", f"{problem}; `fedpareto admin clients` lists them")
        if strange := [tag for tag in selection.tags if tag not in tags]:
            have = ", ".join(sorted(tags)) or "none"
            raise Refusal("spec", f"selection.tags: no client has the tag {strange[0]!r}; the tags are: {have}")
        names = {client.client_id for client in active}
        if inactive := [name for name in selection.required if name not in names]:
            raise Refusal("spec", f"selection.required: {inactive[0]} is not an active member")

    def check_sharing(self, session: Session) -> None:
        """Raises if private rounds would weigh members by samples of which one member has too large a part.

        Raises:
            Refusal: `spec`: a round with this member would be skipped.
        """
        if self.spec.privacy.secure == "off" or self.spec.algorithm.prior != "samples":
            return
        samples = {name: client.samples for name, client in known_clients(session, self.spec, self.objectives).items()}
        if not SMALLEST <= len(samples) <= LARGEST:
            return
        total, numbers = sum(samples.values()), Thresholds(len(samples), Mode(self.spec.privacy.secure))
        parts = dict(zip(samples, truncated([count / total for count in samples.values()]), strict=True))
        least = least_cover(self.spec.privacy.effective_members, numbers)
        if why := refusal(run_bounds(self.spec), least, numbers, parts, samples):
            raise Refusal(
                "spec",
                f'algorithm.prior = "samples": {why}. Use "uniform", or a smaller limits.samples, or leave the members '
                "with the most samples out (selection.exclude)",
            )

    def sessions_caution(self, session: Session) -> str:
        """A warning that names the members with fewer private rounds left than a private run needs; empty if none.

        The last numbers from their workers are advice: the ledger of each worker decides.

        Raises:
            Refusal: `sessions-left`: the other members are too few for a round.
        """
        if self.spec.privacy.secure == "off":
            return ""
        needs = needed_sessions(self.spec, self.rule)
        active = session.scalars(select(Client).where(Client.state == ClientState.ACTIVE)).all()
        known = known_clients(session, self.spec, self.objectives)
        short = {}
        for client in active:
            left = client.sessions_left.get(self.spec.task, needs)
            missing = [f"{needs[kind] - left[kind]} of {kind}" for kind in needs if left[kind] < needs[kind]]
            if client.client_id in known and missing:
                short[client.client_id] = " and ".join(missing)
        if not short:
            return ""
        least = self.least(session)
        names = ", ".join(f"{name} ({missing})" for name, missing in sorted(short.items()))
        caution = f"the owners of these members allow too few private rounds for the whole run; missing are: {names}"
        if (able := len(known) - len(short)) < least:
            raise Refusal(
                "sessions-left",
                f"{caution}. A round needs {least} members, and {able} have enough. The owners may raise "
                "secure.sessions and secure.evaluations in policy.toml; or ask for fewer rounds or evaluations",
            )
        return f"{caution}. They drop out on the way; {able} members have enough"

    def least(self, session: Session) -> int:
        """The number of members below which a round does not begin, or, if it is private, is skipped."""
        return max(self.spec.selection.minimum, self.cohort(session))

    def cohort(self, session: Session) -> int:
        """The number of members that a private round needs; 0 if the run has none."""
        if self.spec.privacy.secure == "off":
            return 0
        active = session.scalar(select(func.count()).where(Client.state == ClientState.ACTIVE)) or 0
        cohort = smallest_cohort(Mode(self.spec.privacy.secure), assumed(active))
        return max(cohort, SMALLEST_MGDA if self.spec.trains and self.rule.private != "sum" else SMALLEST)

    def check_makes_cohort(self, session: Session) -> None:
        """Raises if too few members offer the task for a private round, and the run would not wait for more.

        Raises:
            Refusal: `cohort`: all its rounds would be skipped.
        """
        known, least = len(known_clients(session, self.spec, self.objectives)), self.cohort(session)
        if known >= least or self.spec.selection.minimum >= least:
            return
        raise Refusal(
            "cohort",
            f"a private round of this run needs {least} members, and {counted(known, 'member')} offer"
            f"{'s' if known == 1 else ''} the task: each round would be skipped. With selection.minimum = {least} the "
            'run waits for more members. Fewer members can train with privacy.secure = "off": privacy.client_noise '
            "protects a member, and privacy.sample_noise each sample, against those who see the models "
            "(docs/member/privacy.md, Three or four members)",
        )

    def unoffered(self, session: Session) -> Iterator[str]:
        """A warning if no member offers the task."""
        if problem := missing_offer(session, self.spec):
            yield f"{problem}. The run waits until a member runs `fedpareto worker run --task {self.spec.task}`"


def new_run(
    document: bytes,
    spec: RunSpec,
    objectives: tuple[str, ...],
    metrics: tuple[MetricKind, ...],
    *,
    run_id: str,
    model: str,
    by: str,
    created: datetime,
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
        metrics=metrics,
        state_data=RunMemory(blobs=spec.models).encode() if spec.models else {},
        submitted_by=by,
        created=created,
    )
