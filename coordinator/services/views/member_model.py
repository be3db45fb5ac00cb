"""A run's model as a member gets it: who may have it, which model is meant, and what the run discloses of it."""

import math
from collections.abc import Iterator
from typing import NamedTuple

from sqlalchemy import func, select
from sqlalchemy.orm import Session

from coordinator.lookup import model_after, own_run
from coordinator.rounds.export import newest_step
from coordinator.rounds.runs.disclosure import concealed, parsed_spec
from coordinator.rounds.runs.scores import best_round
from coordinator.services.views.conversion import like
from federation.aggregation.metrics.model_metrics import summary
from federation.record.metric_definitions import OWN, SCORED
from federation.refusals import Refusal
from federation.spec.run_spec import RunSpec
from federation.spec.task_metrics import kind_of
from federation.v1.common_pb2 import ModelManifest, ModelScore, OwnShare
from federation.v1.federation_pb2 import GetModelRequest
from storage.models import Assignment, Client, Evaluation, Model, Phase, Reply, Round, Run
from storage.states import ClientState

LEAST_MEMBERS = 5  # that measured a model, before a member learns the mean and the worst of them
MOST_SHARES = 500
MOST_SCORES = 200
MOST_TEXT = 200  # characters of a metric or a split in a request


class MemberModel(NamedTuple):
    """What a member is told of a model; `manifest` is not signed yet, and has neither nonce nor time."""

    run: Run
    manifest: ModelManifest


def member_model(session: Session, client_id: str, wanted: GetModelRequest) -> MemberModel:
    """The model that a member asks for.

    Raises:
        Refusal: `argument`, `client-state`, `run-unknown`, `run-ambiguous`, `not-contributed`, `results`,
            `metric-unknown`, `model-missing`.
    """
    if max(len(wanted.best), len(wanted.split)) > MOST_TEXT:
        raise Refusal("argument", f"the name of a metric or a split has more than {MOST_TEXT} characters")
    if session.get_one(Client, client_id).state is not ClientState.ACTIVE:
        raise Refusal("client-state", f"{client_id} waits for its approval: ask a security officer of the federation")
    run = own_run(session, client_id, wanted.run)
    spec = parsed_spec(run.spec)
    if not _contributed(session, client_id, run):
        raise Refusal(
            "not-contributed", f"run {run.run_id} has no accepted reply of {client_id}; its models are for contributors"
        )
    if not spec.trains:
        raise Refusal("model-missing", f"run {run.run_id} only measures models or describes data, and makes none")
    if spec.results == "admins":
        raise Refusal(
            "results",
            f'the specification of run {run.run_id} says results = "admins": ask its operator for the model',
        )
    number = best_round(session, run, wanted.best, "mean", wanted.split).number if wanted.best else None
    model, made = model_after(session, run, number)
    if made is None:
        raise Refusal("model-missing", f"run {run.run_id} has made no model yet: it is {run.state}")
    round_ = session.scalars(select(Round).where(Round.run_id == run.run_id, Round.number == made)).one()
    manifest = like(
        ModelManifest,
        run,
        client_id=client_id,
        spec=run.spec_digest,
        task=spec.task,
        created=None,
        round=made,
        step=newest_step(session, run.run_id, before=made + 1),
        result_model=round_.result_model,
        model=model,
        model_bytes=session.get_one(Model, model).size,
        members=_members(session, round_),
        shares=_shares(session, client_id, round_),
        scores=_scores(session, client_id, round_, spec),
        numbers={name: round_.metrics[name] for name in ("epsilon/clients",) if name in round_.metrics},
    )
    return MemberModel(run, manifest)


def _contributed(session: Session, client_id: str, run: Run) -> bool:
    mine = select(Reply.reply_id).join(Assignment).join(Phase).join(Round)
    mine = mine.where(Round.run_id == run.run_id, Reply.client_id == client_id, Reply.accepted)
    return session.scalar(mine.limit(1)) is not None


def _members(session: Session, round_: Round) -> int:
    """How many members the step was made from; 0 if noise protects them."""
    if concealed(round_.run):
        return 0
    if "private/members" in round_.metrics:
        return int(round_.metrics["private/members"])
    count = select(func.count(Reply.client_id.distinct())).join(Assignment).join(Phase)
    of_attempt = (Phase.round_id == round_.round_id, Phase.attempt == round_.attempt, Phase.decides)
    before = (Phase.number < round_.evaluation_phase,) if round_.evaluation_phase is not None else ()
    return session.scalar(count.where(*of_attempt, *before, Reply.accepted)) or 0


def _shares(session: Session, client_id: str, round_: Round) -> list[OwnShare]:
    """The weights of the member's replies up to a round; only those that the run discloses are on record."""
    own = select(Round.number, Reply.envelope_digest, Reply.weight, Reply.coefficient)
    own = own.select_from(Reply).join(Assignment).join(Phase).join(Round)
    own = own.where(Round.run_id == round_.run_id, Round.number <= round_.number)
    own = own.where(Reply.client_id == client_id, Reply.accepted, Reply.weight.is_not(None))
    newest = session.execute(own.order_by(Round.number.desc()).limit(MOST_SHARES)).all()
    return [
        OwnShare(round=number, reply=reply, weight=_number(weight), coefficient=_number(part))
        for number, reply, weight, part in reversed(newest)
    ]


def _number(value: float | None) -> float:
    return math.nan if value is None else value


def _scores(session: Session, client_id: str, round_: Round, spec: RunSpec) -> list[ModelScore]:
    """What the member measured of a model, and the mean and the worst over all members where the run discloses them."""
    if concealed(round_.run):
        return []
    rows = session.scalars(select(Evaluation).where(Evaluation.round_id == round_.round_id)).all()
    if not rows:
        return list(_private_means(round_, spec))
    claims: dict[tuple[str, str], dict[str, float]] = {}
    for row in rows:
        for metric, value in {"loss": row.loss, "accuracy": row.accuracy, **row.others}.items():
            if value is not None:
                claims.setdefault((row.split, metric), {})[row.client_id] = value
    known = [(place, values) for place, values in claims.items() if kind_of(place[1], round_.run.metrics) is not None]
    # A member can claim any names of values: those that most members claim come first.
    known.sort(key=lambda claim: (-len(claim[1]), claim[0]))
    scores = []
    for (split, metric), values in known:
        kind, told = kind_of(metric, round_.run.metrics), len(values) >= LEAST_MEMBERS
        if kind is None or not (told or client_id in values):
            continue
        pairs = [(value, 1) for value in values.values()]
        scores.append(
            ModelScore(
                split=split,
                metric=metric,
                own=values.get(client_id, math.nan),
                members=len(values) if told else 0,
                mean=summary(pairs, "mean", higher=kind.higher) if told else math.nan,
                worst=summary(pairs, "worst", higher=kind.higher) if told else math.nan,
            )
        )
    return scores[:MOST_SCORES]


def _private_means(round_: Round, spec: RunSpec) -> Iterator[ModelScore]:
    """The means of a private evaluation, in which the coordinator sees no member's own value."""
    members = int(round_.metrics.get("evaluated", 0))
    if members < LEAST_MEMBERS:
        return
    first = next((split for split in SCORED if split in spec.evaluated), "")
    names = {("loss", split): f"loss/{split}" for split in spec.evaluated} | {("accuracy", first): "accuracy/mean"}
    names |= {(kind.name, first): f"{OWN}{kind.name}/mean" for kind in round_.run.metrics}
    for (metric, split), name in names.items():
        if name in round_.metrics:
            mean = round_.metrics[name]
            yield ModelScore(split=split, metric=metric, own=math.nan, members=members, mean=mean, worst=math.nan)
