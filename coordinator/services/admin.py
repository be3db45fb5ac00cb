"""The operators' service. Thin: `members.access` settles who may call, `services.views` shows what there is."""

import asyncio
from collections.abc import AsyncIterator, Callable
from concurrent.futures import Executor
from contextlib import closing, suppress
from datetime import datetime, timedelta
from functools import partial

from sqlalchemy.orm import Session

from coordinator import finding
from coordinator.disk import open_runs_bytes
from coordinator.members.access import Access
from coordinator.removed import removed_model
from coordinator.rounds.presence import Presence
from coordinator.rounds.submission import Submission
from coordinator.rounds.supervisor import Submitted, Supervisor
from coordinator.services import details, disk, paging, summaries, views, watching
from coordinator.services.calls import NEXT_CHUNK_SECONDS, next_message
from coordinator.services.desk import Context
from coordinator.services.member_calls import MemberCalls
from coordinator.services.model_intake import ModelIntake, must_fit
from coordinator.services.verification import Verifier
from federation.channels import CHUNK_BYTES, MAX_CHUNK_BYTES
from federation.identity import Role
from federation.refusals import Refusal
from federation.v1 import admin_pb2 as messages
from federation.v1 import admin_pb2_grpc
from federation.vectors import Layout
from storage import audit
from storage.blobs import BlobMissing, BlobStore
from storage.database import Database
from storage.models import Run, note_model

MAX_SPEC_BYTES = 64 << 10
RUNS_AT_A_TIME = 100  # of a list
SUMMARIES_AT_A_TIME = 500  # of a list of rounds
ROUNDS_AT_A_TIME = 20  # of an export: the memory that it takes
UPDATES_AT_A_TIME = 200  # of a list, with their envelopes
SIGN_OF_LIFE_SECONDS = 5.0  # how often watchers of a run get the time and the attending members


class AdminService(MemberCalls, admin_pb2_grpc.AdminServicer):
    """Serves administrators: runs and rounds here, membership in `MemberCalls`.

    Args:
        database: where facts are kept.
        blobs: where models are kept.
        presence: who attends.
        supervisor: conducts runs.
        access: who calls.
        executor: threads for the database and the disk, so that the event loop never waits for either.
        join: makes the join string of a client id and a secret.
        join_string_lifetime: how long a join string holds unless its maker says otherwise.
        max_model_bytes: the largest model that is taken.
        keep_rounds: how many of the last rounds of each run keep their models and updates; 0 for all.
        verifier: looks at the envelopes that are shown.
        clock: the time, aware.
    """

    def __init__(
        self,
        *,
        database: Database,
        blobs: BlobStore,
        presence: Presence,
        supervisor: Supervisor,
        access: Access,
        executor: Executor,
        join: Callable[[str, bytes], str],
        join_string_lifetime: timedelta,
        max_model_bytes: int,
        keep_rounds: int,
        verifier: Verifier,
        clock: Callable[[], datetime],
    ) -> None:
        super().__init__(
            database=database,
            presence=presence,
            supervisor=supervisor,
            access=access,
            executor=executor,
            join=join,
            join_string_lifetime=join_string_lifetime,
            clock=clock,
        )
        self._blobs = blobs
        self._max_model_bytes = max_model_bytes
        self._keep_rounds = keep_rounds
        self._verifier = verifier

    # --- runs

    async def SubmitRun(  # noqa: N802
        self, request_iterator: AsyncIterator[messages.SubmitRunRequest], context: Context
    ) -> messages.SubmitRunResponse:
        """Takes a run: its specification, then its initial model."""
        by = await self._authorise(context, Role.OPERATOR)
        first = await next_message(request_iterator, NEXT_CHUNK_SECONDS)
        if first is None or first.WhichOneof("message") != "header":
            raise Refusal("argument", "a submission must begin with its header; the initial model follows in chunks")
        header = first.header
        submission = await self._in_thread(_parse, header)  # before the model is carried here in vain
        outlook = await self._read(partial(self._outlook, header, submission))
        if header.dry_run:
            return outlook
        intake = await self._in_thread(
            partial(ModelIntake, self._blobs, header.model, header.model_bytes, limit=self._max_model_bytes)
        )
        with intake:
            while (request := await next_message(request_iterator, NEXT_CHUNK_SECONDS)) is not None:
                if request.WhichOneof("message") != "chunk" or len(request.chunk) > MAX_CHUNK_BYTES:
                    raise Refusal("argument", f"only chunks of at most {MAX_CHUNK_BYTES} bytes may follow the header")
                await self._in_thread(intake.feed, request.chunk)
            digest, layout = await self._in_thread(intake.finish)
        submitted = await self._in_thread(self._submit, header, digest, layout, by)
        run = await self._read(lambda session: views.run(session, finding.find_run(session, submitted.run_id)))
        outlook.run.CopyFrom(run)
        return outlook

    def _outlook(
        self, header: messages.RunHeader, submission: Submission, session: Session
    ) -> messages.SubmitRunResponse:
        if header.dry_run:  # what would be found later otherwise
            submission.must_be_new(session)
            must_fit(header.model_bytes, self._max_model_bytes)
        return disk.outlook(
            session,
            self._blobs,
            submission,
            model_bytes=header.model_bytes,
            attending=set(self._presence.attending()),
            other=open_runs_bytes(session),
        )

    async def GetDisk(self, request: messages.GetDiskRequest, context: Context) -> messages.GetDiskResponse:  # noqa: N802
        """Says what the record takes on the disk."""
        await self._authorise(context, Role.VIEWER)
        return await self._read(lambda session: disk.get_disk(session, self._blobs, keep_rounds=self._keep_rounds))

    def _submit(self, header: messages.RunHeader, digest: str, layout: Layout, by: str) -> Submitted:
        size = self._blobs.stat(digest).size
        with self._database.begin() as session:
            note_model(session, digest, size=size, parameters=layout.size, created=self._clock())
        return self._supervisor.submit(
            header.spec, digest, by=by, paused=header.paused, objectives=tuple(header.objectives)
        )

    async def ListRuns(  # noqa: N802
        self, request: messages.ListRunsRequest, context: Context
    ) -> messages.ListRunsResponse:
        """Lists the runs."""
        await self._authorise(context, Role.VIEWER)
        size, start = paging.size_of_page(request.page_size, RUNS_AT_A_TIME), paging.number_in(request.page_token)
        shown, more = paging.page(await self._read(watching.runs, start, size + 1), size)
        return messages.ListRunsResponse(runs=shown, next_page_token=str(start + size) if more else "")

    async def GetRun(self, request: messages.GetRunRequest, context: Context) -> messages.GetRunResponse:  # noqa: N802
        """Shows one run."""
        await self._authorise(context, Role.VIEWER)

        def read(session: Session) -> messages.Run:
            return watching.run_with_members(session, finding.find_run(session, request.run), spec=True)

        return messages.GetRunResponse(run=await self._read(read))

    async def PauseRun(  # noqa: N802
        self, request: messages.PauseRunRequest, context: Context
    ) -> messages.PauseRunResponse:
        """Holds a run."""
        by = await self._authorise(context, Role.OPERATOR)
        run_id = (await self._run(request.run)).run_id
        await self._in_thread(self._supervisor.pause, run_id, by=by)
        return messages.PauseRunResponse(run=await self._run(run_id))

    async def ResumeRun(  # noqa: N802
        self, request: messages.ResumeRunRequest, context: Context
    ) -> messages.ResumeRunResponse:
        """Lets a held run go on."""
        by = await self._authorise(context, Role.OPERATOR)
        run_id = (await self._run(request.run)).run_id
        await self._in_thread(self._supervisor.resume, run_id, by=by)
        return messages.ResumeRunResponse(run=await self._run(run_id))

    async def StopRun(self, request: messages.StopRunRequest, context: Context) -> messages.StopRunResponse:  # noqa: N802
        """Ends a run."""
        by = await self._authorise(context, Role.OPERATOR)
        run_id = (await self._run(request.run)).run_id
        await self._in_thread(self._supervisor.stop_run, run_id, by=by, reason=request.reason)
        return messages.StopRunResponse(run=await self._run(run_id))

    async def _run(self, text: str) -> messages.Run:
        return await self._read(lambda session: views.run(session, finding.find_run(session, text)))

    async def WatchRun(  # noqa: N802
        self, request: messages.WatchRunRequest, context: Context
    ) -> AsyncIterator[messages.WatchRunResponse]:
        """Streams what happens in a run until it ends."""
        await self._authorise(context, Role.VIEWER)
        run_id = (await self._run(request.run)).run_id
        loop, changed = asyncio.get_running_loop(), asyncio.Event()

        def wake(changed_run: str) -> None:
            if changed_run == run_id and not loop.is_closed():
                loop.call_soon_threadsafe(changed.set)

        unwatch = self._supervisor.watch(wake)
        try:
            watcher = watching.Watching(run_id)
            while True:
                changed.clear()
                for message in await self._read(watcher.look, self._presence.attending(), self._clock()):
                    yield message
                if watcher.over:
                    return
                with suppress(TimeoutError):
                    async with asyncio.timeout(SIGN_OF_LIFE_SECONDS):
                        await changed.wait()
        finally:
            unwatch()

    # --- rounds

    async def ListRounds(  # noqa: N802
        self, request: messages.ListRoundsRequest, context: Context
    ) -> messages.ListRoundsResponse:
        """Lists the rounds of a run."""
        await self._authorise(context, Role.VIEWER)
        size, start = paging.size_of_page(request.page_size, SUMMARIES_AT_A_TIME), paging.number_in(request.page_token)

        def read(session: Session) -> messages.ListRoundsResponse:
            run = finding.find_run(session, request.run)
            shown, more = paging.page(summaries.rounds(session, run.run_id, start, size + 1), size)
            return messages.ListRoundsResponse(
                run=views.run(session, run), rounds=shown, next_page_token=str(start + size) if more else ""
            )

        return await self._read(read)

    async def GetRound(self, request: messages.GetRoundRequest, context: Context) -> messages.GetRoundResponse:  # noqa: N802
        """Shows one round with every client's part in it."""
        await self._authorise(context, Role.VIEWER)

        def read(session: Session) -> messages.GetRoundResponse:
            found = finding.find_round(session, finding.find_run(session, request.run), request.round)
            return details.round_detail(session, self._blobs, self._verifier, found)

        return await self._read(read)

    async def ExportRounds(  # noqa: N802
        self, request: messages.ExportRoundsRequest, context: Context
    ) -> AsyncIterator[messages.ExportRoundsResponse]:
        """Streams the rounds of a run with every client's part and scores."""
        await self._authorise(context, Role.VIEWER)
        run_id = await self._read(lambda session: finding.find_run(session, request.run).run_id)
        start = 0
        while found := await self._read(details.export_rounds, run_id, start, ROUNDS_AT_A_TIME):
            for message in found:
                yield message
            start += len(found)

    async def ListUpdates(  # noqa: N802
        self, request: messages.ListUpdatesRequest, context: Context
    ) -> AsyncIterator[messages.ListUpdatesResponse]:
        """Lists the updates of a run, refused ones included."""
        await self._authorise(context, Role.VIEWER)

        def find(session: Session) -> tuple[str, int | None]:
            run = finding.find_run(session, request.run)
            number = finding.find_round(session, run, request.round).number if request.HasField("round") else None
            return run.run_id, number

        run_id, number = await self._read(find)
        after = 0
        while True:
            found, after = await self._read(
                views.updates, self._verifier, run_id, number, request.client_id, after, UPDATES_AT_A_TIME
            )
            if not found:
                return
            yield messages.ListUpdatesResponse(updates=found)

    async def ExportModel(  # noqa: N802
        self, request: messages.ExportModelRequest, context: Context
    ) -> AsyncIterator[messages.ExportModelResponse]:
        """Streams a model of a run as a safetensors file."""
        by = await self._authorise(context, Role.VIEWER)
        number = request.round if request.HasField("round") else None

        def find(session: Session) -> tuple[Run, str]:
            run = finding.find_run(session, request.run)
            return run, finding.model_after(session, run, number)

        run, digest = await self._read(find)
        try:
            source = await self._in_thread(self._blobs.open_range, digest)
        except BlobMissing:
            removed = await self._read(removed_model, self._blobs, run, number, digest, self._keep_rounds)
            if removed is not None:
                raise removed from None
            raise
        with closing(source):
            size = (await self._in_thread(self._blobs.stat, digest)).size
            await self._write(
                audit.record,
                at=self._clock(),
                actor=by,
                action="model.exported",
                subject=run.run_id,
                detail=digest,
            )
            while chunk := await self._in_thread(source.read, CHUNK_BYTES):
                yield messages.ExportModelResponse(digest=digest, size=size, chunk=chunk)


def _parse(header: messages.RunHeader) -> Submission:
    if len(header.spec) > MAX_SPEC_BYTES:
        raise Refusal("limit:spec", f"a specification of {len(header.spec)} bytes; at most {MAX_SPEC_BYTES}")
    return Submission.parse(header.spec, tuple(header.objectives))
