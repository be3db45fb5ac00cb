"""Verifies an exported model: it is a model of the run of a bundle, and carries the digest of the run's record."""

from dataclasses import dataclass
from pathlib import Path

from federation import digests
from federation.files.file_kinds import no_safetensors
from federation.record.log_entries import MEASURED, STEPPED, SUBMITTED
from federation.record.provenance import Provenance, read_exported
from federation.refusals import Refusal
from verification.errors import VerificationError
from verification.log import RunLog
from verification.run import OpenedRun


@dataclass(frozen=True)
class CheckedModel:
    """The findings about a model, as text; and the reason why a part could not be verified, empty if all was."""

    words: str
    missing: str = ""


def check_model(run: OpenedRun, path: Path) -> CheckedModel:
    """Compares an exported model with the models of a run, all of whose rounds have been verified.

    Raises:
        VerificationError: it is not a model of this run, or carries the digest of another record.
        OSError: the file cannot be read.
    """
    name = path.name
    try:
        model_digest, origin = read_exported(path, digests.parse(run.models[-1])[0])
    except Refusal as refusal:
        kind = no_safetensors(path)
        raise VerificationError(
            f"{name}: {f'it is {kind}, no safetensors file' if kind else refusal.message}"
        ) from refusal
    about = run.facts.bundle.about
    if origin is not None and (origin.federation, origin.run) != (about.federation_id, about.run_id):
        raise VerificationError(f"{name} says that it is of run {origin.run} of {origin.federation}")
    # A round without a step keeps the model of the round before, so the first round with a model has made it.
    rounds = {str(index - 1) if index else "" for index, model in enumerate(run.models) if model == model_digest}
    if not rounds:
        raise VerificationError(f"{name} is {model_digest}; no round of the run has made this model")
    if origin is None:
        number = min(rounds, key=lambda text: int(text or -1))
        return CheckedModel(f"{name} is {_model_of(number)}", f"{name} carries no digest of the record")
    if origin.round not in rounds:
        raise VerificationError(f"{name} says that it is {_model_of(origin.round)}; it is {_model_of(min(rounds))}")
    text = f"{name} is {_model_of(origin.round)}"
    if not origin.record:
        return CheckedModel(text, f"{name} carries no digest of the record")
    return CheckedModel(f"{text}, and carries the digest of {_record(run.log, origin, name)}")


def _record(log: RunLog, origin: Provenance, name: str) -> str:
    """The part of the record that the digest of a model covers, as text. Raises VerificationError."""
    entries = int(origin.entries) if origin.entries.isdecimal() and len(origin.entries) < 20 else 0
    last = log.entry(entries - 1)
    if last is None or log.digest(entries) != origin.record:
        raise VerificationError(
            f"{name} carries the digest {origin.record} of {origin.entries} entries; the bundle has another"
        )
    if last == log.end:
        return "this record"
    if origin.round and last.action in (STEPPED, MEASURED) and last.subject == f"{log.run_id}/{origin.round}":
        which = "step" if last.action == STEPPED else "measurement"
        return f"this record up to its {which}: the run had not ended when the model was exported"
    if not origin.round and (last.action, last.subject) == (SUBMITTED, log.run_id):
        return "this record up to its submission: the run had made no model when it was exported"
    raise VerificationError(f"{name} carries the digest of the audit log up to {last.action} of {last.subject}")


def _model_of(number: str) -> str:
    return f"the model of round {number}" if number else "the model that the run began with"
