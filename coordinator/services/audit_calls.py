"""The calls of the Admin service that show and verify the audit log."""

import asyncio
from collections.abc import AsyncIterator, Iterator
from datetime import UTC

from sqlalchemy import select

from coordinator.audit.verification import log_problems
from coordinator.members.messages import Context
from coordinator.services.base import Parts, Service
from coordinator.services.messages import like
from coordinator.services.record_check import blob_problems, noise_problems, record_problems
from coordinator.services.verification import Verifier
from federation.refusals import Refusal
from federation.v1 import admin_pb2 as messages
from federation.v1.common_pb2 import SignedEnvelope
from storage import audit
from storage.models import Run

ENTRIES_AT_A_TIME = 500
FOLLOW_SECONDS = 0.5


class AuditCalls(Service):
    """Serves the audit log."""

    def __init__(self, parts: Parts) -> None:
        super().__init__(parts)
        self._verifier = Verifier(self._home.federation_id, self._home.signing.chain)

    async def ListAudit(
        self, request: messages.ListAuditRequest, context: Context
    ) -> AsyncIterator[messages.ListAuditResponse]:
        """Streams the entries of the audit log."""
        since = None
        if request.HasField("since"):
            try:
                since = request.since.ToDatetime(tzinfo=UTC)
            except (ValueError, OverflowError) as error:
                raise Refusal("argument", f"since: {error}") from None
        start = 0
        while True:
            entries = await self._read(audit.chained, start, ENTRIES_AT_A_TIME, since=since, actor=request.actor)
            if entries:
                start = entries[-1].entry.number + 1
                shown = [like(messages.AuditEntry, one.entry, leaf=one.leaf) for one in entries]
                yield messages.ListAuditResponse(entries=shown)
            elif not request.follow:
                return
            else:
                await asyncio.sleep(FOLLOW_SECONDS)

    async def VerifyAudit(
        self, request: messages.VerifyAuditRequest, context: Context
    ) -> AsyncIterator[messages.VerifyAuditResponse]:
        """Streams what is wrong with the audit log, the record and the blobs."""
        newest = self._sequencer.newest
        parts = {"entries": self._log_problems(newest), "rounds": self._record_problems()}
        if not request.skip_blobs:
            parts["blobs"] = self._blob_problems()
        counts = dict.fromkeys(("entries", "rounds", "blobs"), 0)
        for part, found in parts.items():
            while (item := await self._in_thread(next, found, None)) is not None:
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
            yield from record_problems(session, self._verifier)

    def _blob_problems(self) -> Iterator[str | int]:
        with self._database.read() as session:
            needed = {*session.scalars(select(Run.model)), *session.scalars(select(Run.initial_model))}
            yield from noise_problems(session, self._blobs)
        yield from blob_problems(self._blobs, needed)
