"""The calls of the Admin service that verify the audit log."""

from collections.abc import AsyncIterator, Iterator

from sqlalchemy import select

from coordinator.audit.log_verifier import log_problems
from coordinator.members.access.rpc_messages import Context
from coordinator.services.base import Service
from coordinator.services.checks.record_check import blob_problems, noise_problems, record_problems
from federation.v1 import admin_pb2 as messages
from federation.v1.common_pb2 import SignedEnvelope
from storage.models import Run


class AuditCalls(Service):
    """Verifies the audit log and the record."""

    async def VerifyAudit(
        self, request: messages.VerifyAuditRequest, context: Context
    ) -> AsyncIterator[messages.VerifyAuditResponse]:
        """Streams the problems of the audit log, the record and the blobs."""
        newest = self._sequencer.newest
        parts = {"entries": self._log_problems(newest), "rounds": self._record_problems()}
        if not request.skip_blobs:
            parts["blobs"] = self._blob_problems()
        counts = dict.fromkeys(("entries", "rounds", "blobs"), 0)
        for part, items in parts.items():
            while (item := await self._in_thread(next, items, None)) is not None:
                if isinstance(item, str):
                    yield messages.VerifyAuditResponse(problem=item)
                else:
                    counts[part] = item
                    yield messages.VerifyAuditResponse(progress=messages.AuditProgress(part=part, done=item))
        verified = messages.AuditVerified(**counts, checkpoint=SignedEnvelope.FromString(newest))
        yield messages.VerifyAuditResponse(verified=verified)

    def _log_problems(self, newest: bytes) -> Iterator[str | int]:
        with self._database.read() as session:
            yield from log_problems(session, self._home.log_key, newest)

    def _record_problems(self) -> Iterator[str | int]:
        with self._database.read() as session:
            yield from record_problems(session, self._checks, self._home.log_key.entry_key, self._blobs)

    def _blob_problems(self) -> Iterator[str | int]:
        with self._database.read() as session:
            needed = {*session.scalars(select(Run.model)), *session.scalars(select(Run.initial_model))}
            yield from noise_problems(session, self._blobs)
        yield from blob_problems(self._blobs, needed)
