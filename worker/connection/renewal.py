"""Renewal: the owner, or the running worker, requests a member's next certificate."""

import threading
from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta

import grpc

from federation.errors import Error
from federation.monitoring.events import Events
from federation.transport.proxies import RouteError
from federation.trust.certificates import load_certificate, make_csr, renewal_due
from federation.trust.identity import parse_peer
from federation.trust.keys import IdentityError, new_tls_key
from federation.trust.member_files import MemberFiles, save_renewal
from federation.trust.proofs import prove_renewal
from federation.v1.federation_pb2 import RenewRequest
from federation.v1.federation_pb2_grpc import FederationStub
from worker.connection.attendance import Attendance
from worker.connection.backoff import Backoff
from worker.home import WorkerHome

RENEW_SECONDS = 60.0
LOOK_SECONDS = 600.0  # the longest wait before the clock is read again
REMINDER = timedelta(days=1)


class RenewalError(Error):
    """The certificate was not renewed, and the membership is unchanged; the message says why and what to do.

    Attributes:
        retry_seconds: the delay that the coordinator asks for before the next attempt.
    """

    def __init__(self, message: str, retry_seconds: float = 0.0) -> None:
        super().__init__(message)
        self.retry_seconds = retry_seconds


def next_certificate(member: MemberFiles) -> MemberFiles:
    """Requests a certificate. Returns the member with it and its new key, which are not on the disk yet.

    Raises:
        RenewalError: the coordinator cannot be reached, refuses, or answers with another member's certificate.
    """
    key = new_tls_key()
    csr = make_csr(key)
    try:
        address, channel = member.serving_channel()
    except RouteError as error:
        raise RenewalError(f"the certificate of {member.client_id} was not renewed: {error}") from error
    with channel:
        try:
            request = RenewRequest(csr=csr, proof=prove_renewal(member.signing_key, csr))
            certificate = FederationStub(channel).Renew(request, timeout=RENEW_SECONDS).certificate
        except grpc.RpcError as error:
            refusal = member.refusal(error, address)
            reason = ": ".join(part for part in (refusal.reason, refusal.message or refusal.status) if part)
            raise RenewalError(
                f"{address} did not renew the certificate of {member.client_id}: {reason}", refusal.retry_seconds
            ) from error
    try:
        fits = parse_peer(certificate).uri == parse_peer(member.certificate).uri
        fits = fits and load_certificate(certificate).public_key() == key.public_key()
    except IdentityError as error:
        raise RenewalError(f"the coordinator issued a certificate that cannot be read: {error}") from error
    if not fits:
        raise RenewalError(f"the coordinator issued a certificate that is not {member.client_id}'s, or not for its key")
    return replace(member, certificate=certificate, tls_key=key)


def save(home: WorkerHome, member: MemberFiles, passphrase: bytes | None = None) -> None:
    """Replaces the TLS key and the certificate in `home` by the member's; a passphrase encrypts the key.

    Raises:
        RenewalError: the directory cannot be written.
    """
    try:
        save_renewal(home.directory, member.tls_key, member.certificate, passphrase)
    except OSError as error:
        raise RenewalError(
            f"the new certificate cannot be written to {home.directory} ({error.strerror or error}): make room there, "
            "and let this process write to it"
        ) from error


@dataclass(eq=False)
class Renewer:
    """Renews the certificate of a running worker in the last third of its life.

    A certificate is used only once it is on the disk. The coordinator ends the older ones when a newer one attends, and
    would refuse a worker that was then started from the disk.
    """

    home: WorkerHome
    attendance: Attendance
    passphrase: bytes | None
    backoff: Backoff
    events: Events
    _changed: threading.Condition = field(default_factory=threading.Condition, init=False)
    _stopping: bool = field(default=False, init=False)
    _unsaved: MemberFiles | None = field(default=None, init=False)
    _last_warning: tuple[str, datetime] | None = field(default=None, init=False)  # its reason and time

    def run(self) -> None:
        """Renews whenever it is time, until `stop`."""
        delay = 0.0
        while not self._wait(delay):
            member = self.attendance.member
            left = (renewal_due(load_certificate(member.certificate)) - self.attendance.now()).total_seconds()
            if left > 0:
                delay = min(left, LOOK_SECONDS)
                continue
            try:
                self._unsaved = self._unsaved or next_certificate(member)
                save(self.home, self._unsaved, self.passphrase)
            except RenewalError as error:
                delay = max(self.backoff.delay(), error.retry_seconds)
                self._warn(member, str(error), delay)
            else:
                member, self._unsaved, self._last_warning, delay = self._unsaved, None, None, 0.0
                self.backoff.reset()
                self.events.tell(
                    "renewed",
                    f"this client has a new certificate, until {member.not_after:%Y-%m-%d %H:%M} UTC",
                    not_after=member.not_after.isoformat(),
                )
                self.attendance.renewed(member)

    def stop(self) -> None:
        """Ends `run`."""
        with self._changed:
            self._stopping = True
            self._changed.notify_all()

    def _wait(self, seconds: float) -> bool:
        """True if the worker stops within `seconds`."""
        with self._changed:
            return self._changed.wait_for(lambda: self._stopping, timeout=seconds)

    def _warn(self, member: MemberFiles, reason: str, delay: float) -> None:
        """Warns that the certificate was not renewed: once for each new reason, then once a day."""
        now = self.attendance.now()
        if (
            self._last_warning is not None
            and self._last_warning[0] == reason
            and now < self._last_warning[1] + REMINDER
        ):
            return
        self._last_warning = (reason, now)
        days = max((member.not_after - now).days, 0)
        self.events.warn(
            "certificate-ends",
            f"this client's certificate ends on {member.not_after:%Y-%m-%d %H:%M} UTC, in {days} days, and was not "
            f"renewed: {reason}; trying again in {delay:.0f} s",
            not_after=member.not_after.isoformat(),
            days_left=days,
            retry_seconds=delay,
        )
