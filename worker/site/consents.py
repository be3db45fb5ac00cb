"""A site's answers to the runs that ask it to take part: the policy decides, or the owner.

The worker reads the owner's decisions once a second, signs the answers and sends them.
"""

import queue
from collections.abc import Callable, Collection, Sequence
from datetime import UTC, datetime
from pathlib import Path

import grpc
from google.protobuf.message import DecodeError

from federation.digests import digest, parse
from federation.monitoring.events import Events
from federation.record.signed_scales import MAX_RESULT_BYTES
from federation.refusals import Refusal
from federation.spec.run_spec import RunSpec, SpecError
from federation.text import escaped
from federation.trust.envelope import key_id, sign
from federation.v1.common_pb2 import (
    AssignmentManifest,
    ConsentManifest,
    ResultManifest,
    RunManifest,
    SignedEnvelope,
)
from federation.v1.federation_pb2 import FetchBlobRequest
from worker.connection.attendance import Attendance
from worker.home import disk_texts, with_remedy
from worker.site.assignment_checks import Declined
from worker.site.policy_file import Policy
from worker.site.run_requests import (
    MAX_STATISTICS_BYTES,
    MAX_UNDECIDED,
    MAX_UNDECIDED_BYTES,
    RunRequest,
    RunsFile,
    Verdict,
)

MAX_SPEC_BYTES = 64 << 10
MAX_WAITING = 1000  # unread requests, and requests whose specification cannot be fetched
MAX_ENVELOPE_BYTES = 8 << 10  # of a request
FETCH_SECONDS = 10.0  # for a specification; the owner's decisions wait no longer


class Consents:
    """Answers runs for a site, if its policy says anything about runs.

    `withdrawn` is called with the id of a run that was accepted and is refused from now on, and the verdict.
    """

    def __init__(
        self,
        path: Path,
        policy: Policy,
        offers: Collection[str],
        attendance: Attendance,
        events: Events,
        withdrawn: Callable[[str, Verdict], None],
    ) -> None:
        self._policy = policy
        self._offers = offers
        self._attendance = attendance
        self._events = events
        self._withdrawn = withdrawn
        self._file = RunsFile(path)
        self._asked: queue.SimpleQueue[SignedEnvelope] = queue.SimpleQueue()
        self._open: dict[tuple[str, str], RunManifest] = {}  # runs whose specification has to be fetched
        self._recent: set[tuple[str, str]] = set()  # with `approve`, runs that have asked since this worker began
        self._crowded = False  # the last run was refused, since too many wait
        self._changes = -1
        self._full = False  # the last `look` could not write to the disk

    def close(self) -> None:
        """Closes the file."""
        self._file.close()

    def asked(self, envelope: SignedEnvelope) -> None:
        """Queues the request of a run. Callable from any thread."""
        if not self._policy.decides or self._asked.qsize() >= MAX_WAITING:
            return
        if (size := envelope.ByteSize()) > MAX_ENVELOPE_BYTES:
            self._events.warn("run-invalid", f"a run asks with {size} bytes; at most {MAX_ENVELOPE_BYTES}")
        else:
            self._asked.put(envelope)

    def accepted(self, manifest: AssignmentManifest) -> Sequence[RunRequest]:
        """The run of an assignment as it is kept here, once for each specification with which it has asked.

        Raises:
            Declined: the run is not accepted with the specification that the assignment names.
        """
        try:
            kept = self._file.of(manifest.run_id)
        except OSError as error:
            raise Declined("disk", disk_texts(error)) from error
        run = next((run for run in kept if run.spec == manifest.spec), None)
        if run is None and not self._policy.decides:
            return kept
        if run is None:
            message = "this site answers each run first, and this one has not asked with this specification"
            raise Declined("consent", message)
        verdict = run.verdict(self._policy)
        if verdict.answer != "accepted":
            raise Declined("consent" if verdict.answer == "waiting" else verdict.reason, verdict.message[:500])
        if manifest.task != run.task:
            message = f"the run was accepted for the task {run.task}, and asks for {manifest.task}"
            raise Declined("consent", message)
        return kept

    def look(self) -> None:
        """Answers the runs that have asked, and sends the owner's new decisions.

        A run that cannot be written to the disk is not answered; the next call tries again.
        """
        if not self._policy.decides:
            return
        try:
            self._look()
        except OSError as error:
            if not self._full:
                self._events.disk(f"no run is answered: {with_remedy(error)}")
            self._full, self._changes = True, -1
        else:
            self._full = False

    def _look(self) -> None:
        changes = self._file.changes()
        if self._asked.empty() and not self._open and changes == self._changes:
            return
        if changes != self._changes:
            for run in self._file.runs():
                self._answer(run, again=False)
            self._changes = changes
        while not self._asked.empty():
            self._take(self._asked.get())
        for key, manifest in list(self._open.items()):
            document = self._fetched(manifest.spec)
            statistics = None if document is None else self._statistics(document)
            if document is None or statistics is None:
                self._open[key] = self._open.pop(key)  # the others come first the next time
                break
            self._add(manifest, document, statistics)
            del self._open[key]

    def _take(self, envelope: SignedEnvelope) -> None:
        try:
            manifest = self._attendance.member.coordinator.verify(envelope, RunManifest)
            for name in (manifest.spec, manifest.initial_model):
                parse(name)
        except (Refusal, ValueError) as error:
            self._events.warn("run-invalid", f"a run asks to take part with a request that cannot be used: {error}")
            return
        if manifest.federation_id != self._attendance.member.federation_id or manifest.task not in self._offers:
            return
        run = self._file.get(manifest.run_id, manifest.spec)
        if run is not None and run.initial_model != manifest.initial_model:
            subject = f"run {escaped(run.run)} asked with the initial model {run.initial_model}"
            self._events.warn("run-invalid", f"{subject}, and asks again with {manifest.initial_model}")
        elif run is not None:
            if self._note(run):  # a run of before the start
                self._tell_waits(run, run.verdict(self._policy))
            self._answer(run, again=True)
        elif not self._has_room(0):
            self._refuse(manifest)
        elif len(self._open) < MAX_WAITING:
            self._open[manifest.run_id, manifest.spec] = manifest

    def _has_room(self, size: int) -> bool:
        """Makes room for a run with a specification of this size, unless too many runs wait for the owner.

        Runs that have not asked since this worker began have probably ended. Without `approve` no run waits: it gets
        the same answer when it asks again.
        """
        return self._file.make_room(size, self._recent)

    def _note(self, run: RunRequest) -> bool:
        """Remembers that a run has asked. True if it can wait for the owner, and asks for the first time."""
        if self._policy.approve != "each-run" or (run.run, run.spec) in self._recent:
            return False
        self._recent.add((run.run, run.spec))
        return True

    def _tell_waits(self, run: RunRequest, verdict: Verdict) -> None:
        """Warns the owner of a run that waits, as `verdict` says."""
        if verdict.answer != "waiting":
            return
        advice = f"`fedpareto worker runs {escaped(run.run)}` shows it, `fedpareto worker approve` approves it"
        self._events.warn(
            "run-waits",
            f"{_subject(run)} waits for your approval: {advice}",
            run_id=run.run,
            spec=run.spec,
            answer=verdict.answer,
            name=run.name,
            task=run.task,
            submitted_by=run.submitted_by,
        )

    def _refuse(self, manifest: RunManifest) -> None:
        """Refuses a run, since too many wait for the owner. Nothing of it is kept."""
        message = f"{MAX_UNDECIDED} runs, or specifications of {MAX_UNDECIDED_BYTES} bytes, wait at this site already"
        if not self._crowded:
            advice = "`fedpareto worker runs` lists them, `fedpareto worker refuse` makes room"
            self._events.warn("runs-crowded", f"further runs are refused: {message}; {advice}")
        self._crowded = True
        self._attendance.consent(
            self._signed(manifest.run_id, manifest.spec, Verdict("refused", "limit:runs", message))
        )

    def _add(self, manifest: RunManifest, document: bytes, statistics: bytes) -> None:
        if not self._has_room(len(document) + len(statistics)):
            return self._refuse(manifest)
        self._crowded = False
        run = RunRequest(
            run=manifest.run_id,
            spec=manifest.spec,
            initial_model=manifest.initial_model,
            name=manifest.name,
            task=manifest.task,
            submitted_by=manifest.submitted_by,
            document=document,
            asked=datetime.now(UTC).isoformat(),
            owner="",
            words="",
            decided="",
            statistics=statistics,
        )
        self._file.add(run)
        self._note(run)
        verdict = run.verdict(self._policy)
        self._tell_waits(run, verdict)
        if verdict.answer != "waiting":
            reason = f", {verdict.reason}: {verdict.message}" if verdict.reason else ""
            self._events.tell(
                "run-answered",
                f"{_subject(run)}: {verdict.answer}{reason}",
                run_id=run.run,
                spec=run.spec,
                answer=verdict.answer,
            )
        self._answer(run, again=False)

    def _statistics(self, document: bytes) -> bytes | None:
        """Fetches the document of the result with which a run fills its model; None if that fails now.

        Empty for a run that names none, and if it is not a result that the coordinator has signed, or too large: the
        worker compares the model of each work again.
        """
        try:
            name = RunSpec.parse(document).parameters.statistics
        except SpecError:
            return b""
        if not name:
            return b""
        if (envelope := self._fetched(name, MAX_RESULT_BYTES)) is None:
            return None
        try:
            signed = SignedEnvelope.FromString(envelope)
            manifest = self._attendance.member.coordinator.verify(signed, ResultManifest)
            parse(manifest.document)
        except (Refusal, ValueError, DecodeError):
            return b""
        if manifest.document_bytes > MAX_STATISTICS_BYTES:
            return b""
        return self._fetched(manifest.document, MAX_STATISTICS_BYTES)

    def _fetched(self, name: str, most: int = MAX_SPEC_BYTES) -> bytes | None:
        """Fetches the document of this digest, of at most so many bytes; None if that fails now."""
        files = self._attendance.files_now()
        if files is None:
            return None
        data = b""
        try:
            for piece in files.fetch(FetchBlobRequest(digest=name), timeout=FETCH_SECONDS):
                data += piece
                if len(data) > most:
                    break
        except (grpc.RpcError, ValueError):
            return None
        return data if digest(data, parse(name)[0]) == name else None

    def _answer(self, run: RunRequest, *, again: bool) -> None:
        """Sends the answer to a run if it has changed. If the run asks `again`, sends the earlier answer once more."""
        member, verdict, sent = self._attendance.member, run.verdict(self._policy), self._file.consent(run)
        consent = ConsentManifest() if sent is None else ConsentManifest.FromString(sent.manifest)
        changed = (consent.answer, consent.reason, consent.message) != (
            verdict.answer,
            verdict.reason,
            verdict.message[:400],
        )
        changed |= sent is not None and sent.key_id != key_id(member.signing_key.public_key())
        if sent is None or changed:
            sent = self._signed(run.run, run.spec, verdict)
            self._file.keep_consent(run, sent)
            if consent.answer == "accepted":
                self._withdrawn(run.run, verdict)
            if consent.answer:
                self._events.tell(
                    "run-answered",
                    f"run {escaped(run.run)}: {verdict.answer}",
                    run_id=run.run,
                    spec=run.spec,
                    answer=verdict.answer,
                )
        elif not again:
            return
        self._attendance.consent(sent)

    def _signed(self, run_id: str, spec: str, verdict: Verdict) -> SignedEnvelope:
        """A verdict about a run with this specification, as a signed answer."""
        member = self._attendance.member
        manifest = ConsentManifest(
            federation_id=member.federation_id,
            client_id=member.client_id,
            run_id=run_id,
            spec=spec,
            answer=verdict.answer,
            reason=verdict.reason,
            message=verdict.message[:400],
        )
        manifest.created.FromDatetime(self._attendance.now())
        return sign(manifest, member.signing_key)


def _subject(run: RunRequest) -> str:
    return f"run {escaped(run.run)} ({escaped(run.name)}, submitted by {escaped(run.submitted_by)})"
