"""Writes the bundle of a run: its record as one file. It is streamed: memory holds the envelopes of one round at most.

`record.proto` describes the entries, `federation.record.bundle` reads them.
"""

import io
import json
import zipfile
from collections.abc import Callable, Collection, Generator, Iterator, Sequence
from contextlib import closing, contextmanager
from typing import Any

from cryptography import x509
from google.protobuf import json_format
from sqlalchemy import select
from sqlalchemy.orm import Session

from coordinator.audit.excerpt import excerpt, members_of
from coordinator.cluster.registry import software
from coordinator.rounds.export import recorded_phases, round_record
from coordinator.rounds.fleets.filled_models import described_data
from coordinator.rounds.runs.disclosure import parsed_spec
from coordinator.rounds.transitions import ROUND_ENDED, RUN_ENDED
from federation.record import bundle
from federation.trust.certificates import der, serial_of
from federation.trust.identity import parse_peer
from federation.v1.common_pb2 import KeyRotation, Metric, ReplyManifest, SignedEnvelope, StepManifest
from federation.v1.record_pb2 import Bundle, Consents, Rotations, RoundRecord, Withdrawals
from storage.blobs import BlobMissing, BlobStore
from storage.database import Database
from storage.models import Certificate, Client, Consent, Rotation, Round, Run, Withdrawal

_PIECE = 1 << 18  # bytes of a blob that are copied at once
_LOTS = 1 << 18  # bytes that are worth sending


class _Sink(io.RawIOBase):
    """Buffers the bytes that the archive writes. It cannot seek, so the archive writes sizes after each entry."""

    def __init__(self) -> None:
        self._data = bytearray()

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        self._data += data
        return len(data)

    def take(self, least: int = 1) -> Iterator[bytes]:
        """Yields the bytes written since the last call, if there are at least `least` of them."""
        if len(self._data) >= least:
            yield bytes(self._data)
            self._data.clear()


def write_bundle(
    database: Database,
    blobs: BlobStore,
    run_id: str,
    *,
    federation_id: str,
    certificates: tuple[x509.Certificate, x509.Certificate],
    log_key: SignedEnvelope,
    sequence: Callable[[], object],
    rotations: Sequence[KeyRotation],
    payloads: bool,
) -> Generator[bytes, None, None]:
    """The bytes of the bundle of a run, piece by piece.

    Args:
        database: has the record.
        blobs: has the Gram matrices, the updates and the models.
        run_id: the run.
        federation_id: its federation.
        certificates: that of the CA, and that of the coordinator.
        log_key: the coordinator's signed certificate of the key of the audit log.
        sequence: gives all entries of the audit log their numbers.
        rotations: of the coordinator's signing key.
        payloads: True to add the updates and the models, as far as they are kept.
    """
    sink, ca, coordinator = _Sink(), *certificates
    written: set[str] = set()
    with zipfile.ZipFile(sink, "w", zipfile.ZIP_STORED) as archive:
        with _standing(database, run_id, sequence) as (session, run, rounds):
            about = _about(run, federation_id, rounds=len(rounds), payloads=payloads)
            about.model = _newest_model(session, run, len(rounds))
            members = members_of(session, run_id, len(rounds))
            entries = {
                bundle.MANIFEST: json_format.MessageToJson(about).encode(),
                bundle.SPECIFICATION: run.spec,
                bundle.CA: der(ca),
                bundle.certificate_entry(serial_of(coordinator)): der(coordinator),
                **_certificates(session, members),
                bundle.LOG: excerpt(session, run_id, len(rounds), log_key).SerializeToString(),
            }
            consents = [SignedEnvelope.FromString(envelope) for envelope in _consents(session, run_id)]
            if consents:
                entries[bundle.CONSENTS] = Consents(consents=consents).SerializeToString()
            left = [SignedEnvelope.FromString(envelope) for envelope in _withdrawals(session, members)]
            if left:
                entries[bundle.WITHDRAWALS] = Withdrawals(withdrawals=left).SerializeToString()
            parameters = parsed_spec(run.spec).parameters
            if parameters.statistics and (described := described_data(session, parameters.statistics)) is not None:
                entries[bundle.STATISTICS] = described.SerializeToString()
            if replaced := [*rotations, *_rotations(session, members)]:
                entries[bundle.ROTATIONS] = Rotations(rotations=replaced).SerializeToString()
        for name, data in entries.items():
            with _entry(archive, name) as write:
                write(data)
        models = parsed_spec(entries[bundle.SPECIFICATION]).models
        blob_digests = [about.initial_model, *models] if payloads else []
        for round_id in rounds:
            with database.read() as session:
                record = round_record(session.get_one(Round, round_id), recorded_phases(session, round_id))
            with _entry(archive, bundle.round_entry(record.number)) as write:
                write(record.SerializeToString())
            yield from sink.take(_LOTS)
            for digest in [*blob_digests, *_named(record, payloads=payloads)]:
                if digest and digest not in written:
                    written.add(digest)
                    yield from _copied(archive, sink, blobs, digest)
            blob_digests = []
    yield from sink.take()


@contextmanager
def _standing(
    database: Database, run_id: str, sequence: Callable[[], object]
) -> Iterator[tuple[Session, Run, Sequence[int]]]:
    """A snapshot in which the audit log covers the run and its rounds that no longer change.

    An entry recorded between the sequencing and the snapshot has no number in the log. So the run is also read before
    the sequencing, and once more if it has changed.
    """
    before = None
    while True:
        with database.read() as session:
            run = session.get_one(Run, run_id)
            rows = select(Round.round_id).where(Round.run_id == run_id).order_by(Round.number)
            if run.state not in RUN_ENDED:
                rows = rows.where(Round.state.in_(ROUND_ENDED))
            rounds = session.scalars(rows).all()
            members = members_of(session, run_id, len(rounds))
            standing = run.state, rounds, _consents(session, run_id), _withdrawals(session, members)
            if before == standing:
                yield session, run, rounds
                return
            before = standing
        sequence()


def _newest_model(session: Session, run: Run, rounds: int) -> str:
    """The newest model that the first rounds of a run have made."""
    models = select(Round.result_model).where(Round.run_id == run.run_id, Round.number < rounds)
    newest = models.where(Round.result_model.is_not(None)).order_by(Round.number.desc()).limit(1)
    return session.scalar(newest) or run.initial_model


@contextmanager
def _entry(archive: zipfile.ZipFile, name: str) -> Iterator[Callable[[bytes], int]]:
    with archive.open(zipfile.ZipInfo(name), "w", force_zip64=True) as entry:
        yield entry.write


def _copied(archive: zipfile.ZipFile, sink: _Sink, blobs: BlobStore, digest: str) -> Iterator[bytes]:
    """Adds a blob, unless retention has removed it."""
    try:
        source = blobs.open_range(digest)
    except BlobMissing:
        return
    with closing(source), _entry(archive, bundle.blob_entry(digest)) as write:
        while piece := source.read(_PIECE):
            write(piece)
            yield from sink.take(_LOTS)


def _about(run: Run, federation_id: str, *, rounds: int, payloads: bool) -> Bundle:
    return Bundle(
        format=bundle.FORMAT,
        federation_id=federation_id,
        run_id=run.run_id,
        name=run.name,
        state=run.state,
        objectives=run.objectives,
        metrics=[Metric(name=metric.name, better=metric.better, largest=metric.largest) for metric in run.metrics],
        initial_model=run.initial_model,
        model=run.model,
        rounds=rounds,
        payloads=payloads,
        software=software(),
    )


def _rotations(session: Session, members: Collection[str]) -> list[KeyRotation]:
    """The rotations of the signing keys of these clients."""
    rows = select(Rotation).where(Rotation.client_id.in_(members)).order_by(Rotation.client_id, Rotation.number)
    return [KeyRotation.FromString(row.rotation) for row in session.scalars(rows)]


def _withdrawals(session: Session, members: Collection[str]) -> Sequence[bytes]:
    """The withdrawals of these clients, from all of their joinings."""
    rows = select(Withdrawal.envelope).where(Withdrawal.client_id.in_(members))
    return session.scalars(rows.order_by(Withdrawal.client_id, Withdrawal.received)).all()


def _certificates(session: Session, members: Collection[str]) -> dict[str, bytes]:
    """The newest certificate of each of these clients, by the name of its file."""
    query = select(Certificate, Client.signing_key).join(Client).where(Client.client_id.in_(members))
    newest = {
        row.client_id: row
        for row, key in session.execute(query.order_by(Certificate.not_before))
        if parse_peer(row.certificate).signing_key == key
    }
    return {bundle.certificate_entry(row.serial): row.certificate for row in newest.values()}


def _consents(session: Session, run_id: str) -> Sequence[bytes]:
    """The newest answers of clients to a run, by client."""
    return session.scalars(select(Consent.envelope).where(Consent.run_id == run_id).order_by(Consent.client_id)).all()


def _named(record: RoundRecord, *, payloads: bool) -> Iterator[str]:
    """The digests of the blobs of a round that belong into the bundle."""
    if record.state == "SKIPPED":
        return
    if record.HasField("step"):
        step = StepManifest.FromString(record.step.manifest)
        yield step.gram
        if payloads:
            yield from (step.base_model, step.result_model, step.combined, step.noise)
            yield from json.loads(record.state_after).get("vectors", {}).values()
    if not payloads:
        return
    for phase in record.phases:
        if phase.attempt == record.attempt:
            for exchange in phase.exchanges:
                for answer in exchange.answers:
                    yield ReplyManifest.FromString(answer.reply.manifest).payload
