"""Verifies the opened rounds of the database with the code that verifies those of a bundle (`verification`).

What differs: each problem is named, and the next round goes on; no update is read, so that a rule is evaluated on K and
signed numbers alone; a blob that is gone is no problem; revocations are on record; rounds may be under way.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import numpy as np
from sqlalchemy import bindparam, select
from sqlalchemy.orm import Session

from coordinator.rounds.replies.revoked import REVOKED
from coordinator.services.checks.envelope_checks import CheckedRound, EnvelopeChecks
from federation.aggregation.interface import HyperparameterError
from federation.aggregation.registry import algorithm
from federation.record.bundle import BlobAbsent
from federation.refusals import Refusal
from federation.spec.run_spec import RunSpec, SpecError
from federation.trust.key_chain import KeyChain
from federation.trust.proofs import UNSIGNED
from federation.vectors import File, Layout, RowFile, model_layout, update_rows
from storage.blobs import BlobCorrupt, BlobMissing, BlobStore
from storage.models import Assignment, Client, Phase, Round, Run
from storage.states import ClientState, RoundState, RunState
from verification.assignments import check_in_order, measured_in, round_problems
from verification.errors import VerificationError
from verification.model import ReplayState, check_begins
from verification.private import check_described, refusable_orders
from verification.recorded_metrics import MeasuredRound, RecordedMetrics
from verification.recorded_run import RecordedRun
from verification.replay import compared_rows, step_from_numbers
from verification.signed import SignedRound

# The members whose measurements of a round's model were left out; built once, since each round is asked about.
_LEFT_OUT = (
    select(Assignment.client_id)
    .join(Phase)
    .join(Client, Client.client_id == Assignment.client_id)
    .where(Phase.round_id == bindparam("round"), ~Phase.decides)
    .where(Assignment.reason == REVOKED, Client.state == ClientState.REVOKED)
)


_ENDED = (RoundState.COMPLETED, RoundState.SKIPPED)


class StoredBlobs:
    """The blobs of a coordinator; those that are damaged count as absent, since they are named with the blobs."""

    def __init__(self, blobs: BlobStore) -> None:
        self._blobs = blobs
        self._newest: tuple[str, bytes] = ("", b"")  # the K of a round is asked for twice

    def has(self, digest: str, /) -> bool:
        """True if a blob is stored."""
        return self._blobs.exists(digest)

    def blob(self, digest: str, limit: int, /) -> bytes:
        """The bytes of a small blob. Raises BlobAbsent."""
        if self._newest[0] != digest:
            try:
                self._newest = digest, self._blobs.read(digest, limit)
            except (BlobMissing, BlobCorrupt, ValueError):
                raise BlobAbsent(digest) from None
        return self._newest[1]

    def size(self, digest: str, /) -> int:
        """The size of a blob in bytes. Raises BlobAbsent."""
        try:
            return self._blobs.stat(digest).size
        except BlobMissing:
            raise BlobAbsent(digest) from None

    def rows(self, digest: str, /) -> Mapping[str, RowFile]:
        """The rows of a payload. Raises BlobAbsent; VerificationError if it is malformed."""
        try:
            return update_rows(self._file(digest))
        except Refusal as refusal:
            raise VerificationError(f"the payload {digest}: {refusal.message}") from refusal

    def layout(self, digest: str, /) -> Layout:
        """The layout of a model. Raises BlobAbsent; VerificationError if it is malformed."""
        try:
            return model_layout(self._file(digest))
        except Refusal as refusal:
            raise VerificationError(f"the model {digest}: {refusal.message}") from refusal

    def _file(self, digest: str) -> File:
        try:
            return self._blobs.local(digest)
        except (BlobMissing, BlobCorrupt):
            raise BlobAbsent(digest) from None


@dataclass
class _OfRun:
    """The run whose rounds are verified, and its memory after the last one.

    `spec` is None if it cannot be read, and `run` if its algorithm cannot be loaded either. `metrics` is None if they
    cannot be compared any more: a message is wrong.
    """

    run_id: str
    spec: RunSpec | None
    problem: str
    run: RecordedRun | None
    metrics: RecordedMetrics | None
    memory: Mapping[str, Any]


@dataclass
class RoundsCheck:
    """Verifies rounds, run by run and in their order. It keeps nothing of a round but a few numbers."""

    session: Session
    checks: EnvelopeChecks
    blobs: BlobStore
    _of: _OfRun | None = None

    def problems(self, row: Round, checked: CheckedRound) -> Iterator[str]:
        """Describes each check of a round that fails, and the first wrong metric.

        Metrics are not compared from a round on whose messages are not verified: later ones may depend on it.
        """
        of, opened = self._of, checked.opened
        if of is None or of.run_id != row.run_id:
            of = self._of = self._run(row.run)
        if of.spec is None:
            yield of.problem
            return
        yield from refusable_orders(of.spec, opened)
        metrics, of.metrics = of.metrics, None  # nothing of the run is compared any more, unless this round could be
        if of.run is None or any(envelope.problem is not None for envelope in opened.envelopes):
            return
        if row.state in _ENDED:
            try:
                check_in_order(checked.record, of.spec)
            except VerificationError as error:
                yield str(error)
        yield from round_problems(of.run, opened, measured_in(of.spec, row.number, _after(row).evaluated))
        if opened.result is not None:
            with suppress(BlobAbsent):
                try:
                    gone = self.session.scalars(_LEFT_OUT, {"round": row.round_id}).all()
                    check_described(
                        of.run, SignedRound.of(opened), opened.result.manifest, checked.record.document, gone
                    )
                except VerificationError as error:
                    yield str(error)
        if metrics is None:
            return
        try:
            with np.errstate(all="ignore"):  # numbers of any size
                problem = self._compared(of, metrics, row, SignedRound.of(opened))
        except VerificationError as error:
            yield str(error)
            return
        except (ArithmeticError, ValueError) as error:
            yield f"no metrics follow from what was signed: {error}"
            return
        of.metrics = metrics
        if problem:
            yield problem

    def _compared(self, of: _OfRun, metrics: RecordedMetrics, row: Round, signed: SignedRound) -> str:
        """The first difference of the metrics of a round, as text. Raises VerificationError if none follow."""
        at = ReplayState(model=row.base_model, memory=of.memory)
        made = None
        if signed.step is not None:
            check_begins(signed.step, at)
            compared_rows(metrics.run, signed, signed.step)
            if not metrics.computed.private:
                made = step_from_numbers(metrics.run, signed, signed.step, at.memory.get("rule", {}))
        found = metrics.compare(
            MeasuredRound(
                number=row.number,
                recorded=row.metrics,
                signed=signed,
                made=made,
                at=at,
                after=_after(row),
                cut_short=row.state not in _ENDED or self._cut_short(row),
                left_out=lambda: self._left_out(row, signed, private=metrics.computed.evaluates_privately),
                measures=signed.step is not None or (row.state is RoundState.COMPLETED and row.result is None),
            )
        )
        if signed.step is not None:
            of.memory = row.state_after
        return found.problem

    def _cut_short(self, row: Round) -> bool:
        """True for the last round of a run that ended within it: then its bytes were not counted."""
        if row.run.state not in (RunState.STOPPED, RunState.FAILED) or "bytes/up" in row.metrics:
            return False
        later = select(Round.round_id).where(Round.run_id == row.run_id, Round.number > row.number)
        return self.session.scalar(later.limit(1)) is None

    def _left_out(self, row: Round, signed: SignedRound, *, private: bool) -> Sequence[frozenset[str]]:
        """The members that were left out of an evaluation because they were revoked, as it is on record.

        A private evaluation fails if one of its members is revoked meanwhile; when that was is not on record.
        """
        if private:
            names = {reply.manifest.client_id for reply in signed.evaluations.values()}
            revoked = (Client.client_id.in_(names), Client.state == ClientState.REVOKED)
            gone = self.session.scalars(select(Client.client_id).where(*revoked))
        else:
            gone = self.session.scalars(_LEFT_OUT, {"round": row.round_id})
        return [frozenset(gone)]

    def _run(self, row: Run) -> _OfRun:
        try:
            spec = RunSpec.parse(row.spec)
        except SpecError as error:
            return _OfRun(row.run_id, None, f"the specification of its run: {error}", None, None, {})
        try:
            rule = algorithm(spec.algorithm.name, spec.algorithm.hyperparameters)
        except (HyperparameterError, LookupError):
            return _OfRun(row.run_id, spec, "", None, None, {})
        run = RecordedRun(
            source="record",
            blobs=StoredBlobs(self.blobs),
            federation_id=self.checks.federation_id,
            run_id=row.run_id,
            document=row.spec,
            spec=spec,
            spec_digest=row.spec_digest,
            rule=rule,
            objectives=tuple(row.objectives),
            kinds=row.metrics,
            clients=frozenset(self.session.scalars(select(Client.client_id).where(Client.signing_key != UNSIGNED))),
            chain=self._chain,
            reads_updates=False,
        )
        return _OfRun(row.run_id, spec, "", run, RecordedMetrics(run), {})

    def _chain(self, client_id: str) -> KeyChain | None:
        """The keys of a client; None if they are not known."""
        client = self.session.get(Client, client_id)
        try:
            return None if client is None else self.checks.keys(self.session, client)
        except Refusal:
            return None


def _after(row: Round) -> ReplayState:
    """The state of the run after a round."""
    return ReplayState(model=row.result_model or row.base_model, memory=row.state_after)
