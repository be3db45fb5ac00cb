"""A real coordinator for tests, in this process: real ports, real TLS, its event loop in a thread."""

import asyncio
import json
import secrets
import threading
from collections.abc import Callable, Coroutine, Iterator
from contextlib import AsyncExitStack, contextmanager
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, TypeVar

import grpc
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from sqlalchemy import ColumnElement, select
from sqlalchemy.orm import Session
from typer.testing import CliRunner, Result

from coordinator.home import CoordinatorHome
from coordinator.members.authority import register
from coordinator.members.logged_rights import join_string_digest
from coordinator.server import Coordinator, serving
from coordinator.settings import Settings
from federation.digests import digest
from federation.transport.channels import mutual_channel, server_verified_channel
from federation.trust.admin_files import AdminFiles
from federation.trust.certificates import fingerprint, pem
from federation.trust.identity import Role, client_uri
from federation.trust.join_string import JoinStringFields, secret_hash
from federation.trust.keys import new_tls_key, private_key_pem
from federation.trust.member_files import MemberFiles
from federation.v1.enrollment_pb2 import EnrollRequest, EnrollResponse
from federation.v1.enrollment_pb2_grpc import EnrollmentStub
from fedpareto.cli.main import app
from storage import audit
from storage.database import Database
from storage.models import AuditEntry, Client
from storage.models import JoinString as JoinRow
from storage.states import ClientState
from tests import harness, waiting
from tests.federation.trust.scene import Authority
from worker.connection.enroll import enroll
from worker.home import WorkerHome

T = TypeVar("T")
SECONDS = 60.0  # how long anything may take before the test fails


wait_for = waiting.wait_for
refused = harness.refused
Applicant = harness.Applicant


def command(*arguments: object, code: int = 0, columns: int = 100, text: str | None = None) -> Result:
    """Runs `fedpareto` in this process, with `text` as its input; it must end with this code."""
    done = CliRunner(env={"COLUMNS": str(columns)}).invoke(app, [*map(str, arguments)], input=text)
    assert done.exit_code == code, (done.output, done.exception)
    return done


def made_home(directory: Path, *, now: datetime, passphrase: bytes | None = None, **settings: Any) -> CoordinatorHome:
    """Makes a federation."""
    values = Settings.check({"federation_id": "test", **settings}, "test")
    return CoordinatorHome.init(directory, values, now=now, passphrase=passphrase)


class Clock:
    """The time, which a test may move."""

    def __init__(self) -> None:
        self.ahead = timedelta()

    def __call__(self) -> datetime:
        return datetime.now(UTC) + self.ahead

    @contextmanager
    def moved(self, ahead: timedelta) -> Iterator[None]:
        """It is ahead of this machine's clock by this time; afterwards it is right."""
        self.ahead = ahead
        try:
            yield
        finally:
            self.ahead = timedelta()


def add_join_string(
    session: Session, secret: bytes, client_id: str, *, now: datetime, lifetime: timedelta = timedelta(hours=1)
) -> None:
    """On record, and in the log."""
    row = JoinRow(client_id=client_id, created_by="test", created=now, expires=now + lifetime)
    row.secret_hash = secret_hash(secret)
    session.add(row)
    logged = join_string_digest(row)
    audit.record(session, at=now, actor="test", action=audit.JOIN_CREATED, subject=client_id, digest=logged)


class Running:
    """A coordinator that serves."""

    def __init__(self, home: CoordinatorHome, clock: Clock) -> None:
        self.home = home
        self.clock = clock
        self.database = Database.open(home.database_url)
        self.database.entry_key = home.log_key.entry_key
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        self._scope = AsyncExitStack()
        self.coordinator: Coordinator = self.run(
            self._scope.enter_async_context(serving(home, clock=self.clock, grace=1.0))
        )

    def run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result(SECONDS)

    def stop(self) -> None:
        self.run(self._scope.aclose())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(SECONDS)
        self._loop.close()
        self.database.close()

    def look(self, query: Callable[[Session], T]) -> T:
        with self.database.read() as session:
            return query(session)

    def entries(self, *conditions: ColumnElement[bool], **values: object) -> list[AuditEntry]:
        """The entries of the audit log with these values, oldest first."""
        wanted = select(AuditEntry).where(*conditions).filter_by(**values).order_by(AuditEntry.entry_id)
        return self.look(lambda session: list(session.scalars(wanted)))

    def command(self, *arguments: object, home: Path | None = None, code: int = 0, columns: int = 100) -> str:
        """What `fedpareto admin` prints, with the administrator that `coordinator init` has made, or another one."""
        return command("admin", "--home", home or self.home.admin_dir, *arguments, code=code, columns=columns).stdout

    def document(self, *arguments: object, home: Path | None = None) -> Any:
        """What `fedpareto admin ... --json` prints."""
        return json.loads(self.command(*arguments, "--json", home=home))

    @property
    def address(self) -> str:
        return f"{self.home.settings.hosts[0]}:{self.coordinator.federation_port}"

    @property
    def enrollment_address(self) -> str:
        return f"localhost:{self.coordinator.enrollment_port}"

    def newcomer(self) -> grpc.Channel:
        """A channel to the enrollment port."""
        return server_verified_channel(self.enrollment_address, pem(self.home.ca))

    def join_string(self, client_id: str) -> JoinStringFields:
        return JoinStringFields(
            (self.enrollment_address,), fingerprint(self.home.ca), self.join_secret(client_id), client_id
        )

    def joined(self, directory: Path, name: str, *, ago: timedelta, passphrase: bytes | None = None) -> MemberFiles:
        """A member that joined some time ago."""
        with self.clock.moved(-ago):
            return enroll(WorkerHome(directory), self.join_string(name), passphrase=passphrase).member

    def join_secret(self, client_id: str, lifetime: timedelta = timedelta(hours=1)) -> bytes:
        secret = secrets.token_bytes(32)
        with self.database.begin() as session:
            add_join_string(session, secret, client_id, now=self.clock(), lifetime=lifetime)
        return secret

    def admit(self, request: EnrollRequest) -> EnrollResponse:
        """The answer to a request of a client to be."""
        with self.newcomer() as channel:
            return EnrollmentStub(channel).Enroll(request, timeout=SECONDS)

    def enroll(self, client_id: str) -> tuple[Applicant, EnrollResponse]:
        applicant = Applicant()
        return applicant, self.admit(applicant.request(self.join_secret(client_id)))

    def member(self, client_id: str) -> grpc.Channel:
        """Enrolls a client; its mutual-TLS channel."""
        applicant, answer = self.enroll(client_id)
        return mutual_channel(
            self.address, ca=pem(self.home.ca), key=private_key_pem(applicant.tls_key), certificate=answer.certificate
        )

    def administrator(self, *roles: Role) -> grpc.Channel:
        return self.administrators_files(*roles).channel()

    def administrators_files(self, *roles: Role) -> AdminFiles:
        name = f"eve-{secrets.token_hex(4)}"  # of its own, or the administrator before would end
        directory = self.home.directory / f"admin-{name}"
        lasting = self.home.settings.model_copy(update={"admin_certificate_seconds": 365 * 86_400})  # for moved clocks
        home = replace(self.home, settings=lasting)
        return home.issue_admin(self.database, name, roles, directory, now=self.clock(), by="test")

    def certified(self, client_id: str, *, known: bool, lifetime: timedelta = timedelta(days=1)) -> grpc.Channel:
        """A client with a certificate of the CA, made behind the coordinator's back; `known` puts it on record."""
        key, now = new_tls_key(), datetime.now(UTC)
        authority = Authority(self.home.federation_id, self.home.ca, self.home.ca_key)
        uris = [client_uri(self.home.federation_id, client_id)]
        certificate = authority.issue(uris, key=key, now=now, lifetime=lifetime)
        if known:
            with self.database.begin() as session:
                raw = Ed25519PrivateKey.generate().public_key().public_bytes_raw()
                of_key = {"signing_key": raw, "key_id": raw.hex()}
                session.add(Client(client_id=client_id, state=ClientState.ACTIVE, enrolled=now, **of_key))
                session.flush()
                register(session, certificate, client_id=client_id)
                logged = digest(raw)
                audit.record(session, at=now, actor="test", action=audit.ENROLLED, subject=client_id, digest=logged)
        return mutual_channel(
            self.address, ca=pem(self.home.ca), key=private_key_pem(key), certificate=pem(certificate)
        )

    def refusals(self, action: str) -> list[AuditEntry]:
        """What the record says about refusals of an rpc, oldest first; those of the last minute are written now."""
        self.run(self.coordinator.access._record.finish())
        return self.entries(AuditEntry.outcome != "", action=action)


@contextmanager
def running(directory: Path, ahead: timedelta = timedelta(), **settings: Any) -> Iterator[Running]:
    """Makes a federation and serves it; its clock is ahead of this machine's from the beginning."""
    clock = Clock()
    clock.ahead = ahead
    served = Running(made_home(directory, now=clock(), **settings), clock)
    try:
        yield served
    finally:
        served.stop()
