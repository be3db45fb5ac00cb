"""Verifies the new model of a step: recomputes it from the rows and vectors that the step combines."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

import numpy as np

from federation.aggregation.phases import Step
from federation.aggregation.qp import STATIONARY_TOLERANCE
from federation.aggregation.server_optimizers import OPTIMIZERS, Optimizer, Sgd
from federation.digests import digest
from federation.record.bundle import BlobAbsent, has_unknown_fields
from federation.record.exchange import Signers
from federation.record.noise_rows import noise_defect
from federation.refusals import Refusal
from federation.spec.run_sections import AUTO
from federation.spec.sharing import BUFFERS, SharingError
from federation.statistics.scale import ScaleError, check_scale, scale_of
from federation.trust.envelope import envelope_digest
from federation.v1.common_pb2 import ResultManifest, StepManifest
from federation.vectors import Layout, RowFile
from verification.arithmetic import (
    Matrix,
    StepVectors,
    check_average,
    check_follows,
    check_unchanged,
    gram,
    gram_and_squares,
    products_along,
)
from verification.errors import VerificationError
from verification.recorded_run import RecordedBlobs, RecordedRun
from verification.replay import BundleRunFacts, check_document
from verification.signed import SignedRound

CHOSEN = "the coordinator chose the noise; the model is not verified"
AVERAGE = "average"  # the vector that is the mean of all models


@dataclass(frozen=True, kw_only=True)
class ReplayState:
    """The state of a run before a round.

    Attributes:
        model: the digest of the model that the round starts from.
        memory: the remembered state of the run, as the column of its record.
        previous_step: the digest of the envelope of the newest step; empty before the first.
    """

    model: str
    memory: Mapping[str, Any] = field(default_factory=dict)
    previous_step: str = ""

    @property
    def vectors(self) -> dict[str, str]:
        """The digests of the optimiser's vectors and of the mean of models, by name."""
        vectors: dict[str, str] = self.memory.get("vectors", {})
        return vectors

    @property
    def evaluated(self) -> str:
        """The digest of the model that members measure: the mean of the models, or the newest one."""
        return self.vectors.get(AVERAGE, self.model)


def canonical(value: Any) -> bytes:
    """JSON in the one form from which digests are made."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False).encode()


def check_begins(step: StepManifest, at: ReplayState) -> None:
    """Checks that a step begins from the state after the step before. Raises VerificationError."""
    if step.state_before != digest(canonical(at.memory)):
        raise VerificationError("the step begins from another state than the step before has left")


def combined_rows(run: RecordedRun, signed: SignedRound, step: StepManifest, at: ReplayState) -> list[RowFile]:
    """The combined rows, in the order of K: of replies, then of earlier rounds; or the combined vector.

    Raises:
        BlobAbsent: an update is not in the bundle.
        VerificationError: the step names an update that is not on record.
    """
    if step.combined:
        return list(run.blobs.rows(step.combined).values())
    entries = at.memory.get("rule", {}).get("history", {})
    earlier = {entry["envelope"]: entry["payload"] for entry in entries.values()}
    rows: list[RowFile] = []
    for name in step.replies:
        reply = signed.replies.get(name)
        payload = earlier.get(name, "") if reply is None else reply.manifest.payload
        if not payload:
            raise VerificationError(f"the update {name} of the step is not on record")
        rows += (row for name, row in run.blobs.rows(payload).items() if name != BUFFERS)
    return rows


def check_makes(
    run: BundleRunFacts, step: StepManifest, made: Step, rows: list[RowFile], at: ReplayState, after: ReplayState
) -> tuple[int, Matrix, Matrix]:
    """Checks that the new model, and the vectors that are kept with it, follow from a step.

    Args:
        run: the run.
        step: the signed step.
        made: the step that the rule gives.
        rows: the combined rows.
        at: the state of the run before the step.
        after: the state after it.

    Returns:
        The number of compared numbers; K of the rows that the step names, and the squared lengths of all of them.

    Raises:
        BlobAbsent: a model or a vector is not in the bundle.
        VerificationError: something does not follow.
    """
    bundle, rule, server, combined = run.bundle, run.rule, run.spec.server, len(rows)
    optimizer = _optimizer(run)
    coefficients = np.array(step.coefficients)
    rate, moved = step.rate, not stands_still(made, step, rows)
    if step.noise:
        rows = [*rows, *bundle.rows(step.noise).values()]
        coefficients = np.append(coefficients, step.noise_scale)
    elif not moved:
        rate, optimizer = 0.0, Sgd()
        if step.result_model != step.base_model:
            raise VerificationError("the replies give no direction, and the step changes the model")
        if step.rate:
            raise VerificationError(f"the learning rate is {step.rate!r}; the replies give no direction, so it is 0")
    # Verify, 7: with a rate that is given, 0 may only stand where the replies give no direction, or a coordinator
    # could leave a step out.
    if moved and step.rate == 0.0 and server.learning_rate != AUTO:
        raise VerificationError("the step says that there is no direction; the replies give one")
    layout = bundle.model(step.base_model)[0]
    parameters = slice(0, run.spec.parameters.parameters_of(layout).size)

    def vector(name: str, part: slice = parameters) -> RowFile:
        """Columns of a model or of a vector that belongs to one."""
        found_layout, row = bundle.model(name)
        # Verify, 7: numbers are compared by place: in another layout, each would be compared with one of another
        # tensor.
        if found_layout != layout:
            raise VerificationError(f"{name} has another layout than the model")
        return row.columns(part)

    check_keeps(run, moved, at, after)
    kept = {name: row for name, row in after.vectors.items() if moved or name == AVERAGE}
    count = at.memory.get("averaged") or 0
    compared, K, squares = check_follows(
        StepVectors(
            base=vector(step.base_model),
            result=vector(step.result_model) if moved else None,
            rate=rate,
            rows=rows,
            coefficients=None if made.combination.coordinates else coefficients,
            coordinates=made.combination.coordinates,
            optimizer=optimizer,
            before={name: vector(row) for name, row in at.vectors.items() if name in kept},
            after={name: vector(row) for name, row in kept.items()},
            average=AVERAGE,
            models=count if rule.averages else None,
            compared=tuple(step.gram_rows),
        )
    )
    trained = run.spec.parameters.trained(layout).size
    if moved and trained > parameters.stop:
        part = slice(parameters.stop, trained)
        payloads = [bundle.rows(reply.payload) for reply in made.replies if reply.payload]
        buffers = [payload[BUFFERS] for payload in payloads if BUFFERS in payload] or [vector(step.base_model, part)]
        for averaged in [step.result_model, *([kept[AVERAGE]] if rule.averages else [])]:
            compared += check_average(buffers, vector(averaged, part))
    if moved and layout.size > trained:
        part = slice(trained, layout.size)
        for made_here in [step.result_model, *([kept[AVERAGE]] if rule.averages else [])]:
            # Verify, 7: a fixed tensor stays what the initial model has.
            compared += check_unchanged(vector(step.base_model, part), vector(made_here, part))
    return compared, K if step.gram_rows else K[:combined, :combined], squares[:combined]


def check_filled(run: BundleRunFacts, signers: Signers) -> dict[str, str]:
    """Checks the result of statistics that a run names, and the models that it begins with against this result.

    Returns:
        Why a model is not compared, by its digest: the bundle does not have it. Empty for a run without statistics.

    Raises:
        VerificationError: the result is not the one that is named, or a model does not follow from it.
    """
    parameters, data = run.spec.parameters, run.bundle.statistics()
    if not parameters.statistics:
        if data.ListFields():
            raise VerificationError("the bundle has a result of statistics that its specification does not name")
        return {}
    # Verify, 5: the name in the specification is of these bytes; else the result would be one of the bundle's choice.
    if envelope_digest(data.result) != parameters.statistics:
        raise VerificationError(f"the bundle lacks the result {parameters.statistics} that its specification names")
    try:
        manifest = signers.of_coordinator(data.result, ResultManifest)
    except Refusal as refusal:
        raise VerificationError(f"the result of statistics: {refusal}") from None
    if has_unknown_fields(manifest):
        raise VerificationError("the result of statistics has a field that this release does not know")
    if manifest.federation_id != run.bundle.about.federation_id:
        raise VerificationError("the result of statistics is of another federation")
    check_document(manifest, data.document)
    try:
        scale_of(data.document, ())  # also without a model, the document has to be a result
    except ScaleError as error:
        raise VerificationError(f"the document of statistics: {error}") from None
    absent: dict[str, str] = {}
    for name in run.spec.models or (run.bundle.about.initial_model,):
        try:
            layout, row = run.bundle.model(name)
            trained = parameters.trained(layout)
            fixed = Layout(layout.tensors[len(trained.tensors) :])
            check_scale(fixed.split(row.columns(slice(trained.size, layout.size)).read()), data.document)
        except BlobAbsent as error:
            absent[name] = f"the scale of the model: {error}"
        except (ScaleError, SharingError) as error:
            raise VerificationError(f"{name} is not filled from the statistics that the run names: {error}") from None
    return absent


def check_keeps(run: BundleRunFacts, moved: bool, at: ReplayState, after: ReplayState) -> None:
    """Checks which vectors the state keeps after a step; `moved` is False if there was no direction.

    Raises VerificationError.
    """
    rule, optimizer = run.rule, _optimizer(run)
    if not moved:
        before, now = ({name: row for name, row in state.vectors.items() if name != AVERAGE} for state in (at, after))
        if now != before:
            raise VerificationError("the step changes nothing, and the state keeps other vectors after it than before")
    kept = {name for name in after.vectors if moved or name == AVERAGE}
    expected = {*(optimizer.slots if moved else ()), *([AVERAGE] if rule.averages else [])}
    if kept != expected:
        raise VerificationError(f"the state keeps the vectors {sorted(kept)}; expected {sorted(expected)}")
    models, count = after.memory.get("averaged"), at.memory.get("averaged") or 0
    if models != (count + 1 if rule.averages else None):
        raise VerificationError(f"the mean has {models} models; expected {count + 1 if rule.averages else 'none'}")


def _optimizer(run: BundleRunFacts) -> Optimizer:
    server = run.spec.server
    kind = OPTIMIZERS[server.optimizer]
    return run.rule.optimizer() or kind(**{option.name: getattr(server, option.name) for option in fields(kind)})


def stands_still(made: Step, step: StepManifest, rows: list[RowFile]) -> bool:
    """True if the replies give no direction. A step with noise always has one."""
    if step.noise:
        return False
    coordinates, coefficients = made.combination.coordinates, made.combination.coefficients
    if coordinates is None and not step.gram_rows:
        return bool(made.combination.diagnostics.get("stationary", 0.0))
    square = float(products_along(coefficients if coordinates is None else coordinates, rows)[-1])
    norms = np.sqrt(gram_and_squares(rows, step.gram_rows)[1]) if step.gram_rows else np.zeros(0)
    if coordinates is None:
        return square <= STATIONARY_TOLERANCE * float(np.abs(coefficients) @ norms) ** 2
    if step.gram_rows:  # the lengths of the averaged rows if these do not cancel
        lengths = np.sort(np.abs(coordinates.matrix) @ norms)
    else:
        squares = (coordinates.matrix @ gram(rows) * coordinates.matrix).sum(axis=1)
        lengths = np.sort(np.sqrt(np.maximum(squares, 0.0)))
    return square <= STATIONARY_TOLERANCE * float(lengths[: len(lengths) - coordinates.trim].mean()) ** 2


def check_noise_length(blobs: RecordedBlobs, noise: str) -> None:
    """Checks the length and the extremes of the noise of a step that protects clients.

    The coordinator draws it alone, so no more can be verified. The step adds `noise_scale` times this row, and
    `noise_scale` follows from the specification and the number of updates. So the row itself must have the size of
    standard normal numbers.

    Args:
        blobs: of the run.
        noise: the digest of the row.

    Raises:
        BlobAbsent: the noise is not kept.
        VerificationError: it is not a row of float32 numbers, has another length, or has larger numbers than noise has.
    """
    if defect := noise_defect(blobs.rows(noise).values()):
        raise VerificationError(f"the noise {noise}: {defect}")
