"""A real federation for tests: the coordinator and its workers as processes, TLS, database and blobs as shipped."""

import json
import os
import queue
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import chdir, contextmanager
from itertools import chain
from pathlib import Path
from types import MappingProxyType
from typing import Any, TypeVar

import grpc
import numpy as np
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from google.protobuf.message import Message
from typer.testing import CliRunner

from federation.digests import digest
from federation.plugins import CODE
from federation.spec.computation import Ability
from federation.spec.run_spec import RUN_KINDS
from federation.text import escaped_lines
from federation.transport.channels import RpcRefusal, refusal_from_rpc_error, server_verified_channel
from federation.trust.admin_files import AdminFiles
from federation.trust.certificates import make_csr
from federation.trust.envelope import key_id, sign
from federation.trust.join_string import JoinStringFields, fetch_ca
from federation.trust.key_chain import CoordinatorKeys
from federation.trust.keys import new_tls_key
from federation.trust.member_files import MemberFiles
from federation.trust.proofs import prove_possession
from federation.v1.common_pb2 import AssignmentManifest, DeclineManifest, ReceiptManifest, ReplyManifest, SignedEnvelope
from federation.v1.enrollment_pb2 import EnrollRequest
from federation.v1.enrollment_pb2_grpc import EnrollmentStub
from federation.v1.federation_pb2 import AttendRequest, AttendResponse, Hello, SubmitRequest, TaskOffer, Window
from federation.v1.federation_pb2_grpc import FederationStub
from federation.vectors import to_bytes, update_layout
from fedpareto.cli.failure import CommandFailure
from fedpareto.cli.main import app
from fedpareto.processes import forked
from fedpareto.processes import process_federation as federations
from storage.database import Database
from tests import waiting
from tests.paths import PROGRAMS, ROOT

T = TypeVar("T")
SECONDS = waiting.SECONDS
wait_for = waiting.wait_for


class Process(federations.Process):
    """A process whose output a test waits for."""

    def __init__(self, arguments: Sequence[str], log: Path, *, forks: bool = True) -> None:
        super().__init__(log.stem, arguments, log, forks=forks, cwd=ROOT)

    def wait_for_text(self, text: str, count: int = 1) -> None:
        def there() -> bool:
            if self.text.count(text) >= count:
                return True
            assert self.popen.poll() is None, f"ended with {self.popen.returncode}:\n{self.text[-3000:]}"
            return False

        wait_for(there, f"{text!r} in {self.log}:\n{self.text[-2000:]}")

    def wait_killed(self) -> None:
        """Waits until it has killed itself, as a crash test tells it to."""
        self.popen.wait(SECONDS)
        assert self.popen.returncode == -signal.SIGKILL, f"{self.popen.returncode}:\n{self.text[-3000:]}"

    def stop(self) -> int:
        self.send(signal.SIGTERM)
        return self.popen.wait(SECONDS)


class Federation(federations.ProcessFederation):
    """A federation whose processes a test crashes, and whose database it reads."""

    coordinator: Process | None = None
    database_url = ""  # of PostgreSQL; empty for SQLite in the coordinator's directory

    def __init__(self, directory: Path, *, seconds: float = SECONDS) -> None:
        super().__init__(directory, seconds=seconds)
        self.workers: dict[str, Process] = {}  # the last one of each client

    @property
    def serving(self) -> Process:
        """The coordinator that was started last."""
        assert self.coordinator is not None
        return self.coordinator

    def serve(self, *, crash: str = "", program: str = "") -> Process:  # type: ignore[override]
        """Starts the coordinator and waits until it serves.

        `crash` names a point of programs/crashing.py. `program` is a Python program that runs in place of the command.
        """
        ports = self.home / "ports.json"
        ports.unlink(missing_ok=True)
        command = (
            [str(PROGRAMS / "crashing.py"), crash] if crash else ["-c", program] if program else federations.COMMAND
        )
        process = self.spawn("coordinator", [*command, "coordinator", "serve", "--home", str(self.home)])
        self.coordinator = process

        def ready() -> bool:
            return ports.exists() or process.popen.poll() is not None

        wait_for(ready, "the coordinator to serve")
        if not crash:
            assert process.popen.poll() is None, process.text[-3000:]
        return process

    @contextmanager
    def nobody_serves(self) -> Iterator[None]:
        """Keeps the port of the coordinator, which has ended, from other processes: connections to it are refused."""
        port = json.loads((self.home / "ports.json").read_text())["federation"]
        with socket.socket() as kept:
            kept.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            kept.bind(("127.0.0.1", port))
            yield

    def fedpareto(self, *arguments: str, code: int | None = 0, standard_input: str = "") -> str:
        """As `ProcessFederation` does it, but in this process, which saves 0.05 to 0.1 CPU seconds.

        A process of its own is made for commands that train or find code of an owner, and outside the main thread.
        """
        trains = arguments[0] == "simulate" or arguments[:2] == ("worker", "run")
        if trains or CODE in os.environ or threading.current_thread() is not threading.main_thread():
            return super().fedpareto(*arguments, code=code, standard_input=standard_input)
        done = here(*arguments, cwd=self.directory, text=standard_input)
        if code not in (None, done.returncode):
            told = f"{' '.join(arguments)}: exit code {done.returncode}\n{done.stdout}\n{done.stderr}"
            raise federations.ProcessError(told)
        return done.stdout

    def submit(self, name: str, spec: str, *options: str, crash: bool = False) -> str:
        """Submits a run; returns its id. `crash`: the coordinator may die before it has answered."""
        path = self.directory / f"{name}.toml"
        path.write_text(f'name = "{name}"\n' + spec)
        self.admin("submit", str(path), *options, code=None if crash else 0)
        return str(self.query("select run_id from runs where name = :name", name=name)[0][0])

    def completed(self, name: str, spec: str, *options: str) -> str:
        """Submits a run, and waits until it is completed; returns its id."""
        run = self.submit(name, spec, *options)
        self.wait_completed(run)
        return run

    def run_state(self, run: str) -> Any:
        return self.admin("run", run)["run"]

    def wait_ended(self, run: str) -> str:
        """Waits in the database (no process is started for a look) until a run has ended or pauses; its state."""

        def ended() -> str | None:
            state = self.query("select state from runs where run_id = :run", run=run)[0][0]
            return state if state in ("COMPLETED", "FAILED", "STOPPED", "PAUSED") else None

        return wait_for(ended, f"run {run} to end\n{self.coordinator.text[-2000:] if self.coordinator else ''}")

    def wait_completed(self, run: str) -> Any:
        """Waits until a run has ended, and it must be completed; the digest of its model."""
        state = self.wait_ended(run)
        assert state == "COMPLETED", self.query("select state, reason from runs where run_id = :run", run=run)
        return self.query("select model from runs where run_id = :run", run=run)[0][0]

    def query(self, sql: str, **parameters: object) -> list[Any]:
        """Looks into the database, beside the coordinator."""
        from sqlalchemy import text

        database = Database.open(self.database_url or f"sqlite:///{self.home / 'coordinator.db'}")
        try:
            with database.read() as session:
                return list(session.execute(text(sql), parameters).all())
        finally:
            database.close()

    def work(
        self, client_id: str, *options: str, task: str = "digits", crash: str = "", program: Sequence[str] = ()
    ) -> Process:
        """Starts a worker.

        `crash` names a point of tests/programs/crashing.py. `program` runs the command, in place of `-m fedpareto`.
        """
        program = [str(PROGRAMS / "crashing.py"), crash] if crash else program or federations.COMMAND
        process = super().work(client_id, "--task", task, *options, program=program)
        assert isinstance(process, Process)
        self.workers[client_id] = process
        return process

    def remembered(self, run: str) -> tuple[str, str]:
        """The digest of the model of a run that completes, and what it remembers: JSON, with the digests of vectors."""
        final = str(self.wait_completed(run))
        return final, str(self.query("select state_data from runs where run_id = :run", run=run)[0][0])

    def attending(self, *clients: str) -> None:
        """Waits until these clients attend; fails at once if the worker of one has ended."""

        def all_there() -> bool:
            for worker in (self.workers[client] for client in clients if client in self.workers):
                assert worker.popen.poll() is None, f"{worker.name} has ended:\n{worker.text[-3000:]}"
            seen = {client["client_id"] for client in self.admin("clients")["clients"] if client.get("attending")}
            return seen >= set(clients)

        wait_for(all_there, f"{clients} to attend")

    def enroll(self, client_id: str) -> "Member":
        """Enrolls a client that a test plays by hand."""
        join = JoinStringFields.decode(self.join_string(client_id))
        return Member.enroll(join)

    def administrator(self) -> grpc.Channel:
        return AdminFiles.load(self.home / "admin").channel()

    def spawn(self, name: str, arguments: Sequence[str]) -> Process:
        process = super().spawn(name, arguments)
        assert isinstance(process, Process)
        return process

    def process(self, name: str, arguments: Sequence[str]) -> Process:
        return Process(arguments, self.directory / f"{name}.log", forks=self.forks)


@contextmanager
def federation(directory: Path, *options: str) -> Iterator[Federation]:
    """A federation whose coordinator is initialised; every process is killed at the end."""
    made = Federation(directory)
    try:
        made.init(*options)
        yield made
    finally:
        made.close()


class Attending:
    """An attendance stream played by hand."""

    def __init__(
        self,
        member: "Member",
        tasks: dict[str, int],
        serves: Mapping[str, Sequence[str]] = MappingProxyType({}),
        *,
        consents: bool = False,
        run_kinds: Sequence[str] = RUN_KINDS,
        abilities: Sequence[str] = tuple(Ability),
    ) -> None:
        self._out: queue.SimpleQueue[AttendRequest | None] = queue.SimpleQueue()
        self.inbox: queue.SimpleQueue[AttendResponse | grpc.RpcError | None] = queue.SimpleQueue()
        offers = [
            TaskOffer(task=task, samples=samples, objectives=serves.get(task, ()), abilities=abilities)
            for task, samples in tasks.items()
        ]
        hello = Hello(software="test", tasks=offers, device="cpu", consents=consents, run_kinds=run_kinds)
        self.say(AttendRequest(hello=hello))
        self.call = member.stub.Attend(iter(self._out.get, None))
        threading.Thread(target=self._read, daemon=True).start()

    def say(self, request: AttendRequest) -> None:
        self._out.put(request)

    def close(self) -> None:
        self._out.put(None)
        self.call.cancel()

    def next(self, seconds: float = SECONDS) -> AttendResponse | grpc.RpcError | None:
        """The coordinator's next word; the error that ended the stream; None when it ended well."""
        return self.inbox.get(timeout=seconds)

    def end(self) -> RpcRefusal:
        """The refusal that ends the stream."""
        while isinstance(message := self.next(), AttendResponse):
            continue
        assert message is not None, "it ended well"
        return refusal_from_rpc_error(message)

    def assignment(self) -> SignedEnvelope:
        """The next assignment."""
        while True:
            message = self.next()
            assert isinstance(message, AttendResponse), message
            if message.WhichOneof("message") == "assignment":
                return message.assignment

    def _read(self) -> None:
        try:
            for message in self.call:
                self._come(message)
            self._come(None)
        except grpc.RpcError as error:
            self._come(error)

    def _come(self, message: AttendResponse | grpc.RpcError | None) -> None:
        self.inbox.put(message)
        waiting.HAPPENINGS.tell()


class Handing(Future[SignedEnvelope]):
    """A reply that is being handed in, as a thread sees it; `windows` are those that have come.

    If it `goes_on`, these requests are not its last: `say` adds others, until the call ends.
    """

    def __init__(self, stub: FederationStub, requests: Iterable[SubmitRequest], *, goes_on: bool = False) -> None:
        super().__init__()
        self.windows: list[Window] = []
        self._more: queue.SimpleQueue[SubmitRequest | None] = queue.SimpleQueue()
        self.call = stub.Submit(chain(requests, iter(self._more.get, None) if goes_on else ()), timeout=SECONDS)
        self.call.add_callback(lambda: self._more.put(None))
        threading.Thread(target=self._read, daemon=True).start()

    def say(self, request: SubmitRequest) -> None:
        self._more.put(request)

    def _read(self) -> None:
        try:
            for answer in self.call:
                if answer.WhichOneof("message") == "receipt":
                    self.set_result(answer.receipt)
                else:
                    self.windows.append(answer.window)
        except grpc.RpcError as error:
            self.set_exception(error)


class Applicant:
    """A client to be: its keys, and the request that it makes of a secret."""

    def __init__(self) -> None:
        self.tls_key = new_tls_key()
        self.signing_key = Ed25519PrivateKey.generate()
        self.csr = make_csr(self.tls_key)

    def request(self, secret: bytes) -> EnrollRequest:
        return EnrollRequest(
            secret=secret,
            csr=self.csr,
            signing_key=self.signing_key.public_key().public_bytes_raw(),
            proof=prove_possession(self.signing_key, secret, self.csr),
            software="test",
        )


def enrolled(join: JoinStringFields, channel: grpc.Channel, applicant: Applicant | None = None) -> MemberFiles:
    """Enrolls a client over a channel to the enrollment port; who asks again because of a lost answer is the same."""
    applicant = applicant or Applicant()
    answer = EnrollmentStub(channel).Enroll(applicant.request(join.secret))
    return MemberFiles(
        federation_id=answer.federation_id,
        client_id=answer.client_id,
        addresses=tuple(answer.addresses),
        ca=answer.ca_certificate,
        certificate=answer.certificate,
        tls_key=applicant.tls_key,
        signing_key=applicant.signing_key,
        coordinator=CoordinatorKeys(answer.federation_id, Ed25519PublicKey.from_public_bytes(answer.coordinator_key)),
    )


CONTEXT = ("federation_id", "run_id", "round", "phase", "assignment_id", "client_id", "base_model")


def copied(message: Message, *names: str) -> dict[str, Any]:
    """Fields that another message repeats."""
    return {name: getattr(message, name) for name in names}


class Member:
    """A client played by hand: real keys, real certificate, any misbehaviour."""

    def __init__(self, files: MemberFiles) -> None:
        self.files = files
        self.channel = files.channel()
        self.stub = FederationStub(self.channel)

    @property
    def key_id(self) -> str:
        """The id of its signing key, by which an officer approves it."""
        return key_id(self.files.signing_key.public_key()).hex()

    @classmethod
    def enroll(cls, join: JoinStringFields) -> "Member":
        ca = fetch_ca(join.address, join.ca_fingerprint, timeout=10)
        with server_verified_channel(join.address, ca) as channel:
            return cls(enrolled(join, channel))

    def attend(self, **tasks: int) -> Attending:
        return Attending(self, tasks)

    def open(self, envelope: SignedEnvelope) -> AssignmentManifest:
        return self.files.coordinator.verify(envelope, AssignmentManifest)

    def payload(self, order: AssignmentManifest, seed: int = 0) -> bytes:
        """A well-formed update of random numbers."""
        layout = update_layout([(row.name, row.length, row.dtype) for row in order.rows])
        return to_bytes(layout, np.random.default_rng(seed).standard_normal(layout.size).astype(np.float32))

    def manifest(self, order: AssignmentManifest, payload: bytes = b"") -> ReplyManifest:
        """The manifest that an honest worker would sign."""
        metrics = {"train/loss": 2.0, "train/accuracy": 0.5, "test/accuracy": 0.5, "test/loss": 2.0}
        repeated = copied(order, *CONTEXT, "attempt", "spec", "rows", "task")
        told: dict[str, Any] = {"samples": 10, "losses": {"loss": 2.0}, "metrics": metrics, "software": "test"}
        return ReplyManifest(payload=digest(payload) if payload else "", payload_bytes=len(payload), **repeated, **told)

    def sign(self, manifest: ReplyManifest) -> SignedEnvelope:
        return sign(manifest, self.files.signing_key)

    def declined(self, assignment_id: str, reason: str, message: str = "", **changes: str) -> SignedEnvelope:
        """A signed decline of an assignment."""
        said = DeclineManifest(assignment_id=assignment_id, reason=reason, message=message)
        said.federation_id, said.client_id = self.files.federation_id, self.files.client_id
        for name, value in changes.items():
            setattr(said, name, value)
        return sign(said, self.files.signing_key)

    def submit(self, envelope: SignedEnvelope, *parts: bytes, chunk_bytes: int = 1 << 20) -> ReceiptManifest:
        """Hands in, from the first window's offset on, in chunks; the receipt is verified.

        With chunks of more than 1 MiB, it does not keep to the windows either.
        """
        data, windows = b"".join(parts), queue.SimpleQueue[Window | None]()
        declared = ReplyManifest.FromString(envelope.manifest).payload_bytes if data else 0

        def requests() -> Iterator[SubmitRequest]:
            yield SubmitRequest(reply=envelope)
            window = windows.get() if data else None
            place = window.offset if window is not None else 0
            while window is not None and place < len(data):
                # More than was declared goes out as well: a test may want that.
                keeps_to_it = window.limit < declared and chunk_bytes <= 1 << 20
                chunk = data[place : min(place + chunk_bytes, window.limit if keeps_to_it else len(data))]
                if chunk:
                    yield SubmitRequest(chunk=chunk, offset=place)
                    place += len(chunk)
                else:
                    window = windows.get()

        try:
            for answer in self.stub.Submit(requests(), timeout=SECONDS):
                if answer.WhichOneof("message") == "receipt":
                    return self.files.coordinator.verify(answer.receipt, ReceiptManifest)
                windows.put(answer.window)
        finally:
            windows.put(None)
        raise AssertionError("no receipt")

    def signed(self, order: AssignmentManifest, seed: int = 0) -> tuple[SignedEnvelope, bytes]:
        """The reply that an honest worker would sign, and its payload."""
        payload = self.payload(order, seed) if order.rows else b""
        return self.sign(self.manifest(order, payload)), payload

    def answer(self, envelope: SignedEnvelope, seed: int = 0) -> ReceiptManifest:
        """Does an assignment as an honest worker would."""
        return self.submit(*self.signed(self.open(envelope), seed))


def python(
    *arguments: str | Path, code: int = 0, cwd: Path = ROOT, **environment: str
) -> "subprocess.CompletedProcess[str]":
    """An interpreter of its own, which must end with this code; `environment` is added to that of this process."""
    command, env = [sys.executable, *map(str, arguments)], {**os.environ, **environment}
    done = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS, check=False, cwd=cwd, env=env)
    assert done.returncode == code, done.stdout + done.stderr
    return done


def fedpareto(
    *arguments: object, code: int = 0, cwd: Path | None = None, **environment: str
) -> "subprocess.CompletedProcess[str]":
    """The command as a process of its own, which must end with this code; `environment` as of `python`."""
    command, env = ["-m", "fedpareto", *map(str, arguments)], {**os.environ, **environment}
    done = forked.completed(command, cwd=cwd, env=env)
    assert done.returncode == code, done.stdout + done.stderr
    return done


def here(*arguments: str, cwd: Path, text: str = "") -> "subprocess.CompletedProcess[str]":
    """The command in this process, with this working directory and standard input; it ends as one of its own would."""
    with chdir(cwd):
        done = CliRunner().invoke(app, arguments, input=text)
    code, errors = done.exit_code, done.stderr
    if isinstance(done.exception, CommandFailure):
        code, errors = done.exception.code, f"{errors}fedpareto: {escaped_lines(done.exception.message)}\n"
    elif not isinstance(done.exception, SystemExit | None):
        raise done.exception
    return subprocess.CompletedProcess(arguments, code, done.stdout, errors)


@contextmanager
def refused(status: str, reason: str) -> Iterator[list[str]]:
    """The call inside must be refused with exactly this status and reason; yields where its message goes."""
    messages: list[str] = []
    try:
        yield messages
    except grpc.RpcError as error:
        found = refusal_from_rpc_error(error)
        assert (found.status, found.reason) == (status, reason), found
        messages.append(found.message)
    else:
        raise AssertionError(f"was not refused; expected {status} {reason}")
