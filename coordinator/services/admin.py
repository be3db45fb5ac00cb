"""The service for administrators: parses requests, calls the domain, and sends what `services.views` shows."""

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import closing, suppress
from datetime import timedelta

from sqlalchemy import select
from sqlalchemy.orm import Session

from coordinator.audit.excerpt import marked
from coordinator.lookup import Choice, find_run, model_after, removed_model
from coordinator.members.access.rpc_messages import NEXT_CHUNK_SECONDS, Context, next_message
from coordinator.rounds.fleets.filled_models import check_filled, check_known
from coordinator.rounds.replies.uploads import Upload
from coordinator.rounds.runs.noise_outlook import noise_outlook
from coordinator.rounds.runs.on_record import check_unmeasured
from coordinator.rounds.runs.prospects import DescribedModel, prospects
from coordinator.rounds.runs.scores import best_round
from coordinator.rounds.runs.submission import Submission
from coordinator.run_sizes import open_runs_bytes, run_bytes
from coordinator.services.audit_calls import AuditCalls
from coordinator.services.bundles import write_bundle
from coordinator.services.member_calls import MemberCalls
from coordinator.services.record_calls import RecordCalls
from coordinator.services.views import overview
from coordinator.services.views.processes import coordinator_processes
from coordinator.services.views.watching import Watching
from coordinator.thread_pool import to_the_end
from federation import digests
from federation.refusals import Refusal
from federation.spec.run_sections import ParametersSpec
from federation.spec.sharing import SharingError
from federation.spec.task_metrics import MetricKind
from federation.task_layout import TaskLayout
from federation.text import escaped
from federation.transport.channels import CHUNK_BYTES, MAX_CHUNK_BYTES
from federation.transport.payload_check import PayloadCheck
from federation.v1 import admin_pb2 as messages
from federation.v1 import admin_pb2_grpc
from federation.vectors import MAX_ELEMENTS, Layout
from storage import audit
from storage.blobs import BlobMissing, BlobStore
from storage.models import Model, Round, Run, note_model

MAX_SPEC_BYTES = 64 << 10
SIGN_OF_LIFE_SECONDS = 5.0  # how often watchers of a run get the time and the attending members


class AdminService(MemberCalls, AuditCalls, RecordCalls, admin_pb2_grpc.AdminServicer):
    """Serves administrators: runs here, membership in `MemberCalls`, the record in `RecordCalls`."""

    # --- coordinators

    async def ListCoordinators(
        self, request: messages.ListCoordinatorsRequest, context: Context
    ) -> messages.ListCoordinatorsResponse:
        """Lists the coordinators."""

        def read(session: Session) -> messages.ListCoordinatorsResponse:
            found = coordinator_processes(
                session,
                serves_many=self._database.serves_many,
                lease=timedelta(seconds=self._settings.lease_seconds),
                here=len(self._presence.attending()),
                now=self._clock(),
            )
            return messages.ListCoordinatorsResponse(coordinators=found)

        return await self._read(read)

    # --- runs

    async def SubmitRun(
        self, request_iterator: AsyncIterator[messages.SubmitRunRequest], context: Context
    ) -> messages.SubmitRunResponse:
        """Takes a run: its specification, then its initial model."""
        by = self._access.caller().uri
        first = await next_message(request_iterator, NEXT_CHUNK_SECONDS)
        if first is None or first.WhichOneof("message") != "header":
            raise Refusal("argument", "a submission must begin with its header; the initial model follows in chunks")
        header = first.header
        submission = await self._in_thread(_parse, header)  # so that a bad specification is rejected before the upload
        outlook = await self._read(self._outlook, header, submission)
        if header.dry_run:
            return outlook
        parameters = submission.spec.parameters
        await self._take_models(header, parameters, request_iterator)
        if parameters.statistics:
            document = await self._read(check_known, parameters)
            names = [model.digest for model in _models(header)]
            await self._in_thread(check_filled, self._blobs, names, parameters, document)
        run_id = await self._begin_run(submission, header.model, by=by, paused=header.paused)
        outlook.run.CopyFrom(await self._run(run_id))
        return outlook

    @to_the_end
    async def _begin_run(self, submission: Submission, model: str, *, by: str, paused: bool) -> str:
        """Records a run, and asks the members that answer each run about it; returns its id."""
        run_id = await self._in_thread(self._commands.submit, submission, model, by=by, paused=paused)
        await self._read(self._offers.tell, self._presence.streams().values(), run_id)
        self._presence.tell_elsewhere(run_id)
        return run_id

    def _outlook(
        self, session: Session, header: messages.RunHeader, submission: Submission
    ) -> messages.SubmitRunResponse:
        """A preview of a run: the members, the disk space and the warnings; `run` stays empty."""
        submission.check_new(session)
        submission.check_members_exist(session)
        submission.check_makes_cohort(session)
        submission.check_sharing(session)
        check_unmeasured(session, submission.spec)
        check_known(session, submission.spec.parameters)
        models = _models(header)
        if submission.spec.models != (() if not submission.spec.measures else tuple(model.digest for model in models)):
            raise Refusal("argument", "the models of the header are not those that the specification names")
        if (most := max(model.size for model in models)) > (limit := self._settings.max_model_bytes):
            raise Refusal("limit:model", f"the model has {most} bytes; this federation accepts at most {limit}")
        for model in models:
            if model.stored:
                _check_stored(session, self._blobs, model, header.model_bytes)
        found = prospects(submission, session, self._presence.attending(), _described(header))
        needed = run_bytes(
            submission.spec, model=header.model_bytes, members=len(found.members), objectives=len(submission.objectives)
        )
        free = self._blobs.free_bytes()
        if free is not None:
            free -= open_runs_bytes(session)
        warnings = [*submission.warnings, *submission.unoffered(session), *found.warnings]
        if found.skips and not header.dry_run:
            warnings.append(found.skips)
        warnings += noise_outlook(submission, session)
        if caution := submission.sessions_caution(session):
            warnings.append(caution)
        if free is not None and needed > free:
            warnings.append(
                f"the run will take about {needed / 1e9:.1f} GB on the coordinator's disk, where "
                f"{max(free, 0) / 1e9:.1f} GB are free beside what other runs will still take: free some space, or set "
                "keep_rounds; see `fedpareto admin disk`"
            )
        return messages.SubmitRunResponse(
            warnings=warnings,
            members=found.members,
            asked=found.asked,
            minimum=found.minimum,
            disk_needed=needed,
            disk_free=free,
            others=[messages.NotTakingPart(**other._asdict()) for other in found.others],
            needed=found.needed,
            obstacle=found.waits or found.skips,
        )

    async def _take_models(
        self,
        header: messages.RunHeader,
        parameters: ParametersSpec,
        requests: AsyncIterator[messages.SubmitRunRequest],
    ) -> None:
        """Stores the models that follow the header, one after the other."""
        models = _models(header)
        for model in models:
            if model.stored:  # claimed, so that no collection removes it before the run refers to it
                await self._in_thread(self._blobs.claim, model.digest)
        given = [model for model in models if not model.stored]
        for model in given:
            await self._take_model(model, parameters, requests, last=model is given[-1])

    async def _take_model(
        self,
        model: messages.MeasuredModel,
        parameters: ParametersSpec,
        requests: AsyncIterator[messages.SubmitRunRequest],
        *,
        last: bool,
    ) -> None:
        """Stores a model: the next chunks of as many bytes; for the `last` one, all chunks that come."""
        try:
            digests.model_name(model.digest)
        except ValueError as error:
            raise Refusal("argument", f"model: {error}") from None
        check = PayloadCheck(None)
        writer = await self._in_thread(self._blobs.writer, hash=False)
        upload, taken = Upload(writer, check, model.digest, model.size), 0
        try:
            while last or taken < model.size:
                request = await next_message(requests, NEXT_CHUNK_SECONDS)
                if request is None:
                    break
                if request.WhichOneof("message") != "chunk" or len(request.chunk) > MAX_CHUNK_BYTES:
                    raise Refusal("argument", f"only chunks of at most {MAX_CHUNK_BYTES} bytes may follow the header")
                taken += len(request.chunk)
                await self._in_thread(upload.take, request.chunk)
            upload.finish()
            if check.problem is not None:
                raise check.problem
            if check.layout is not None:
                _check_suits(check.layout, model.size, parameters)
            await self._in_thread(upload.store)
        finally:
            await self._in_thread(upload.discard)
        count = check.layout.size if check.layout is not None else 0
        await self._write(note_model, model.digest, size=model.size, parameters=count, created=self._clock())

    async def PauseRun(self, request: messages.PauseRunRequest, context: Context) -> messages.PauseRunResponse:
        """Holds a run."""
        return messages.PauseRunResponse(run=await self._command(request.run, self._commands.pause))

    async def ResumeRun(self, request: messages.ResumeRunRequest, context: Context) -> messages.ResumeRunResponse:
        """Lets a held run go on."""
        return messages.ResumeRunResponse(run=await self._command(request.run, self._commands.resume))

    async def StopRun(self, request: messages.StopRunRequest, context: Context) -> messages.StopRunResponse:
        """Ends a run."""
        run = await self._command(request.run, self._commands.stop, reason=request.reason)
        return messages.StopRunResponse(run=run)

    async def _command(self, text: str, command: Callable[..., None], **arguments: str) -> messages.Run:
        """Gives a command to a run; shows the run afterwards."""
        run_id = await self._read(lambda session: find_run(session, text, Choice.OPEN).run_id)
        await self._in_thread(command, run_id, by=self._access.caller().uri, **arguments)
        return await self._run(run_id)

    async def _run(self, text: str) -> messages.Run:
        return await self._read(lambda session: overview.run(session, find_run(session, text)))

    async def WatchRun(
        self, request: messages.WatchRunRequest, context: Context
    ) -> AsyncIterator[messages.WatchRunResponse]:
        """Streams what happens in a run until it ends."""
        run_id = (await self._run(request.run)).run_id
        loop, changed = asyncio.get_running_loop(), asyncio.Event()

        def wake(changed_run: str) -> None:
            if changed_run == run_id and not loop.is_closed():
                loop.call_soon_threadsafe(changed.set)

        if request.parts:
            await self._note_export("rounds.exported", run_id)
        unwatch = self._changes.watchers.listen(wake)
        try:
            watcher = Watching(run_id, parts=request.parts)
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

    # --- exports

    async def _note_export(self, action: str, subject: str) -> None:
        await self._log_export(action, subject)

    async def _log_export(self, action: str, subject: str, digest: str = "", detail: str = "") -> None:
        by, now = self._access.caller().uri, self._clock()
        await self._write(audit.record, at=now, actor=by, action=action, subject=subject, digest=digest, detail=detail)

    async def ExportModel(
        self, request: messages.ExportModelRequest, context: Context
    ) -> AsyncIterator[messages.ExportModelResponse]:
        """Streams a model of a run as a safetensors file."""
        if request.HasField("round") and request.HasField("best"):
            raise Refusal("argument", "give a round or a metric, not both")

        def find(session: Session) -> tuple[Run, int | None, messages.BestModel | None, str, int | None]:
            run = find_run(session, request.run, Choice.ONLY)
            number = request.round if request.HasField("round") else None
            best = None
            if request.HasField("best"):
                found = best_round(session, run, request.best.metric, request.best.of, request.best.split)
                number = found.number
                best = messages.BestModel(round=number, value=found.value, equals=found.equals)
            return run, number, best, *model_after(session, run, number)

        run, number, best, digest, origin_round = await self._read(find)
        try:
            source = await self._in_thread(self._blobs.open_range, digest)
        except BlobMissing:
            removed = await self._read(removed_model, self._blobs, run, number, digest, self._settings.keep_rounds)
            if removed is not None:
                raise removed from None
            raise
        with closing(source):
            size = (await self._in_thread(self._blobs.stat, digest)).size
            await self._log_export("model.exported", run.run_id, digest)
            await self._in_thread(self._sequencer.sequence)
            origin = messages.ModelOrigin(federation_id=self._home.federation_id, run_id=run.run_id, round=origin_round)
            if (mark := await self._read(marked, run, origin_round)) is not None:
                origin.record, origin.entries = self._sequencer.digest(mark), mark
            while chunk := await self._in_thread(source.read, CHUNK_BYTES):
                yield messages.ExportModelResponse(digest=digest, size=size, chunk=chunk, best=best, origin=origin)

    async def ExportBundle(
        self, request: messages.ExportBundleRequest, context: Context
    ) -> AsyncIterator[messages.ExportBundleResponse]:
        """Streams the bundle of a run."""
        run_id = await self._read(lambda session: find_run(session, request.run, Choice.ONLY).run_id)
        pieces = write_bundle(
            self._database,
            self._blobs,
            run_id,
            federation_id=self._home.federation_id,
            certificates=(self._home.ca, self._home.server),
            log_key=self._home.log_key.certified(self._home.signing_key),
            sequence=self._sequencer.sequence,
            rotations=self._home.rotations,
            payloads=request.payloads,
        )
        detail = "with payloads" if request.payloads else "without payloads"
        await self._log_export("bundle.exported", run_id, detail=detail)
        with closing(pieces):
            while piece := await self._in_thread(next, pieces, None):
                for start in range(0, len(piece), CHUNK_BYTES):
                    yield messages.ExportBundleResponse(chunk=piece[start : start + CHUNK_BYTES])
        yield messages.ExportBundleResponse(end=True)


def _check_suits(layout: Layout, size: int, parameters: ParametersSpec) -> None:
    """Raises a Refusal unless an initial model of `size` bytes has the tensors that the run shares, and our own header.

    Members take a file of just the size that follows from the tensors.
    """
    try:
        parameters.check_suits(layout)
    except SharingError as error:
        raise Refusal("spec", str(error)) from None
    if size != layout.file_bytes:
        raise Refusal(
            "layout",
            f"the initial model has {size} bytes; its tensors, without metadata and in the form that `fedpareto admin "
            f"submit --model` sends, take {layout.file_bytes}",
        )


def _models(header: messages.RunHeader) -> Sequence[messages.MeasuredModel]:
    """The models that a submission brings, in the order of their chunks."""
    return header.models or [messages.MeasuredModel(digest=header.model, size=header.model_bytes)]


def _check_stored(session: Session, blobs: BlobStore, model: messages.MeasuredModel, size: int) -> None:
    """Raises a Refusal unless a model of this size is kept here that an earlier run has deployed.

    Only such a model was made by this federation; all models of a run have the layout of the first, and so its size.
    """
    made = select(Round.round_id).where(Round.deployed_model == model.digest).limit(1)
    if session.scalar(made) is None or not blobs.exists(model.digest):
        raise Refusal("model-missing", f"no run has made the model {model.digest[:80]}, or it was removed meanwhile")
    if (known := session.get_one(Model, model.digest).size) != model.size or model.size != size:
        raise Refusal("layout", f"the model {model.digest} has {known} bytes, and the first one of the run {size}")


def _described(header: messages.RunHeader) -> DescribedModel:
    """The model of a run, as its header describes it. Raises the Refusal `argument` if no model is like that."""
    told, layout = header.layout, None
    try:
        if header.HasField("layout"):
            layout = TaskLayout(told.digest, told.tensors, told.elements)
        if header.parameters + header.buffers > MAX_ELEMENTS:
            raise ValueError(f"{header.parameters} parameters and {header.buffers} buffers; at most {MAX_ELEMENTS}")
    except ValueError as error:
        raise Refusal("argument", f"the layout of the model: {escaped(str(error))}") from None
    return DescribedModel(header.model_bytes, layout, header.parameters, header.buffers)


def _parse(header: messages.RunHeader) -> Submission:
    if len(header.spec) > MAX_SPEC_BYTES:
        raise Refusal("limit:spec", f"a specification of {len(header.spec)} bytes; at most {MAX_SPEC_BYTES}")
    metrics = tuple(MetricKind(metric.name, metric.better, metric.largest) for metric in header.metrics)
    return Submission.parse(header.spec, tuple(header.objectives), metrics)
