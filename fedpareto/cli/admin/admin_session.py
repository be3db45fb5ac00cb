"""The session of a command with the coordinator: it logs the administrator in, and again before the login ends."""

import threading
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import grpc
import typer
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from federation.text import escaped
from federation.transport.addresses import known_addresses
from federation.transport.channels import Option, RpcRefusal, refusal_from_rpc_error, server_verified_channel
from federation.transport.first_serving import first_serving
from federation.transport.proxies import ProxyChoice, RouteError, no_proxy
from federation.trust.admin_files import LOGIN, SIGNING_KEY, Account, AdminFiles, load_admin_key
from federation.trust.certificates import load_certificate, make_csr, renewal_due
from federation.trust.envelope import sign
from federation.trust.keys import FileDamaged, IdentityError, is_encrypted, new_tls_key
from federation.trust.member_files import note_addresses
from federation.v1.common_pb2 import LoginManifest
from federation.v1.enrollment_pb2 import LoginRequest
from federation.v1.enrollment_pb2_grpc import EnrollmentStub
from fedpareto.cli.failure import USAGE, CommandFailure, failing
from fedpareto.cli.secret_input import proxies_for, read_passphrase

_LOGIN_SECONDS = 60.0
_ENROLLMENT = "federation.v1.Enrollment"


@dataclass(frozen=True)
class Local:
    """The coordinator on this machine: its addresses, "host:port", and the names that its certificate has for them."""

    federation: str
    enrollment: str
    host: str
    enrollment_host: str


class Route:
    """The route to the coordinators of an administrator.

    `home` is the administrator's directory, `proxy` the user's setting, `local` None for coordinators on other
    machines. `stopped` is True if `home` is in the directory of a coordinator that does not run. `account` has the
    addresses as they are known by now.
    """

    def __init__(
        self,
        home: Path,
        account: Account,
        local: Local | None,
        *,
        stopped: bool = False,
        passphrase_file: Path | None = None,
        proxy: str | None = None,
    ) -> None:
        self.home = home
        self.account = account
        self.local = local
        self.stopped = stopped
        self.passphrase_file = passphrase_file
        known = (*account.addresses, *account.enrollment_addresses)
        self._proxy: ProxyChoice = no_proxy if local is not None else proxies_for(known, proxy)
        self.address = account.addresses[0] if local is None else local.federation  # of the newest channel

    def channel(self, files: AdminFiles) -> grpc.Channel:
        """A mutual-TLS channel to the federation port of the first coordinator that serves.

        Raises:
            CommandFailure: no coordinator answers.
        """
        if self.local is not None:
            return files.channel(_named(self.local.host), address=self.local.federation)
        with failing(RouteError):
            self.address, channel = replace(
                files, addresses=self.account.addresses, proxy=self._proxy
            ).serving_channel()
        account = self.account
        self._note(known_addresses(self.address, (), account.addresses), account.enrollment_addresses)
        return channel

    def refusal(self, error: grpc.RpcError, files: AdminFiles | None) -> RpcRefusal:
        """The refusal of a call that was made with the certificate in `files`."""
        not_after = None if files is None else files.not_after
        return refusal_from_rpc_error(error, not_after=not_after, proxy=self._proxy(self.address))

    def log_in(self, key: Ed25519PrivateKey, now: datetime) -> AdminFiles:
        """Logs in with the signing key, for a new TLS key, and writes both into the directory.

        Raises:
            CommandFailure: the coordinator refuses, or none can be reached.
        """
        account, tls_key = self.account, new_tls_key()
        manifest = LoginManifest(federation_id=account.federation_id, name=account.name, csr=make_csr(tls_key))
        manifest.created.FromDatetime(now)
        with failing(RouteError, what="cannot log in"):
            address, channel = self._enrollment_channel()
        with channel:
            try:
                request = LoginRequest(login=sign(manifest, key))
                answer = EnrollmentStub(channel).Login(request, timeout=_LOGIN_SECONDS)
            except grpc.RpcError as error:
                refusal = refusal_from_rpc_error(error, proxy=self._proxy(address))
                reason = f"{escaped(refusal.message)} [{escaped(refusal.reason or refusal.status)}]"
                raise CommandFailure(f"cannot log in at {address}: {reason}") from None
        with failing(IdentityError):
            certificate = load_certificate(answer.certificate)
        if certificate.public_key() != tls_key.public_key():
            raise CommandFailure(f"cannot log in at {address}: the coordinator sent the certificate of another key")
        files = account.files(tls_key, certificate)
        with failing(OSError):
            files.save(self.home)
        worked = address if self.local is None else ""
        self._note(
            known_addresses("", answer.addresses, account.addresses),
            known_addresses(worked, answer.enrollment_addresses, account.enrollment_addresses),
        )
        return files

    def _enrollment_channel(self) -> tuple[str, grpc.Channel]:
        """The address of the first coordinator that serves logins, and a channel to it."""
        ca, local = self.account.ca, self.local
        if local is not None:
            return local.enrollment, server_verified_channel(local.enrollment, ca, _named(local.enrollment_host))
        return first_serving(
            self.account.enrollment_addresses,
            _ENROLLMENT,
            self._proxy,
            lambda address: server_verified_channel(address, ca, proxy=self._proxy(address)),
        )

    def _note(self, addresses: tuple[str, ...], enrollment_addresses: tuple[str, ...]) -> None:
        """Keeps addresses in the directory, where they differ; a directory that cannot be written stays as it is."""
        changed = replace(self.account, addresses=addresses, enrollment_addresses=enrollment_addresses)
        if changed != self.account:
            self.account = changed
            with suppress(OSError, IdentityError):
                note_addresses(
                    self.home,
                    AdminFiles.name_key,
                    addresses=addresses,
                    enrollment_addresses=enrollment_addresses,
                )


def _named(host: str) -> Sequence[Option]:
    return [("grpc.ssl_target_name_override", host)]


class AdminSession:
    """The calls of one command. Before each, the certificate is renewed if it has ended or is in its last third.

    The renewal needs the signing key. If the key has a passphrase and the command got no file with it, a certificate
    that has ended is a CommandFailure. A key without a passphrase logs in without a question, since a reader of the
    directory could do so as well.
    """

    def __init__(
        self,
        route: Route,
        *,
        clock: Callable[[], datetime] = lambda: datetime.now(UTC),
        warn: Callable[[str], object] | None = None,
    ) -> None:
        self._route = route
        self._warn = warn or (lambda text: typer.echo(f"warning: {text}", err=True))
        self._clock = clock
        self._lock = threading.Lock()
        self._stack = ExitStack()
        self._channel: grpc.Channel | None = None
        self.files: AdminFiles | None = None  # of the newest channel
        self._tried = False  # to renew a certificate that is still valid

    def open(self) -> grpc.Channel:
        """The channel for the next call; logs in first if need be.

        Raises:
            CommandFailure: the certificate has ended, and a login needs a passphrase or fails.
        """
        with self._lock:
            files = self._renewed(self.files or self._last_login(), self._clock())
            if files is not self.files or self._channel is None:
                self.files = files
                self._channel = self._stack.enter_context(self._route.channel(files))  # streams may use the one before
            return self._channel

    def close(self) -> None:
        """Closes the channels."""
        self._stack.close()

    def call(self, kind: str, method: str, **settings: Any) -> Callable[..., Any]:
        """A function that makes a call on the present channel; `kind` is a method of a gRPC channel ("unary_unary")."""

        def call(*arguments: Any, **options: Any) -> Any:
            return getattr(self.open(), kind)(method, **settings)(*arguments, **options)

        return call

    def _renewed(self, files: AdminFiles | None, now: datetime) -> AdminFiles:
        if files is None:
            return self._route.log_in(self._signing_key(f"{self._route.home} has no certificate of a login"), now)
        certificate = load_certificate(files.certificate)
        begins, ends = certificate.not_valid_before_utc, certificate.not_valid_after_utc
        clock = f"this machine's clock says {now:%Y-%m-%d %H:%M} UTC"
        path = self._route.home / LOGIN
        if now < begins:
            raise CommandFailure(
                f"the certificate {path} is valid from {begins:%Y-%m-%d %H:%M} UTC on, and {clock}: set it"
            )
        if now >= ends:
            problem = f"the certificate of the last login, {path}, ended at {ends:%Y-%m-%d %H:%M} UTC, and {clock}"
            return self._route.log_in(self._signing_key(problem), now)
        if self._tried or now < renewal_due(certificate):
            return files
        self._tried = True
        try:
            key = self._signing_key(f"the certificate of the last login ends at {ends:%Y-%m-%d %H:%M} UTC")
            files = self._route.log_in(key, now)
        except CommandFailure as failure:
            self._warn(failure.message)
        else:
            self._tried = False
        return files

    def _signing_key(self, problem: str) -> Ed25519PrivateKey:
        """The signing key; a CommandFailure that begins with `problem` if it needs a passphrase that was not given."""
        home, file = self._route.home, self._route.passphrase_file
        with failing(IdentityError, code=USAGE):
            if file is None and is_encrypted(home / SIGNING_KEY):
                raise CommandFailure(
                    f"{problem}: run `fedpareto admin --home {home} login`, which asks for the passphrase"
                )
            return load_admin_key(home, read_passphrase(file))

    def _last_login(self) -> AdminFiles | None:
        try:
            return AdminFiles.load(self._route.home)
        except FileDamaged:  # a login writes it anew
            return None
