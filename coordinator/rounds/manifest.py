"""The signed step as a message, with the sessions of a private round; and the signed result about data."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from coordinator.rounds.fleets.base import RunFacts
from coordinator.rounds.step import Stepped
from federation.aggregation.phases import Record, Replies, Step
from federation.digests import digest
from federation.statistics.result import StatisticsResult
from federation.v1.common_pb2 import Code, ObjectiveWeight, ResultManifest, SecureSession, StepManifest
from storage.models import Round
from storage.records import canonical, memory_digest


def step_manifest(
    run: RunFacts,
    federation_id: str,
    current: Round,
    step: Step,
    stepped: Stepped,
    *,
    state_before: str,
    revoked: Sequence[str],
) -> StepManifest:
    """The manifest of a step that the coordinator signs, without its time.

    Args:
        run: the run.
        federation_id: its federation.
        current: the round.
        step: the step that the algorithm decided.
        stepped: the files and measurements of the step.
        state_before: the digest of the run's memory before the step.
        revoked: the clients whose accepted replies of the round were left out.
    """
    noise = stepped.noise
    return StepManifest(
        federation_id=federation_id,
        run_id=run.run_id,
        round=current.number,
        base_model=current.base_model,
        result_model=stepped.model,
        replies=[part.envelope for part in (*step.replies, *step.history)],
        coefficients=step.combination.coefficients.tolist(),
        rate=0.0 if stepped.stationary else stepped.rate,
        gram=stepped.gram,
        gram_rows=step.gram_rows,
        squared_norms=stepped.direction.squares.tolist() if step.gram_rows else (),
        combined=stepped.combined or "",
        noise="" if noise is None else noise.digest,
        noise_scale=0.0 if noise is None else noise.scale,
        algorithm=run.spec.algorithm.name,
        hyperparameters=canonical(run.spec.algorithm.hyperparameters),
        state_before=state_before,
        state_after=memory_digest(stepped.memory.encode()),
        consulted=[reply.envelope for reply in step.consulted],
        forgotten=step.forgotten,
        revoked=revoked,
        code=[Code(**dataclasses.asdict(origin)) for origin in stepped.code],
        weights=[ObjectiveWeight(objective=name, weight=value) for name, value in weights(step).items()],
        secure=[_message(session) for session in step.sessions],
    )


def result_manifest(
    run: RunFacts, federation_id: str, current: Round, found: StatisticsResult, replies: Replies
) -> ResultManifest:
    """The manifest of the result of a round that describes data, without its time."""
    envelopes = {reply.client_id: reply.envelope for reply in replies}
    return ResultManifest(
        federation_id=federation_id,
        run_id=run.run_id,
        round=current.number,
        spec=run.spec_digest,
        replies=[envelopes[name] for name in found.used],
        left_out=found.left_out,
        document=digest(found.document),
        document_bytes=len(found.document),
    )


def weights(step: Step) -> dict[str, float]:
    """The weights of the objectives; none where the rule does not know them."""
    weighed = step.combination.objectives
    return {} if weighed is None else dict(zip(weighed.names, weighed.weights.tolist(), strict=True))


def _message(record: Record) -> SecureSession:
    named: Mapping[str, Any] = {item.name: getattr(record, item.name) for item in dataclasses.fields(record)}
    return SecureSession(**{name: value for name, value in named.items() if name != "agreed"})
