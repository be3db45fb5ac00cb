"""A site leaves its federation: its signed withdrawal is sent until a coordinator has recorded it.

The owner's wish is in the site's home, and stays there while no coordinator answers. The withdrawal is signed when it
is sent, and again if the signing key was replaced since.
"""

import threading
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime

import grpc

from federation.errors import Error
from federation.monitoring.events import Events
from federation.text import escaped
from federation.transport.proxies import RouteError
from federation.trust.envelope import key_id, sign
from federation.trust.identity import parse_peer
from federation.trust.member_files import MemberFiles
from federation.v1.common_pb2 import SignedEnvelope, WithdrawalManifest
from federation.v1.federation_pb2 import LeaveRequest
from federation.v1.federation_pb2_grpc import FederationStub
from worker.connection.attendance import Attendance
from worker.connection.backoff import Backoff
from worker.home import WorkerHome
from worker.site.leaving import Leave, SignedWithdrawal, WatchedLeave, read_leave, read_withdrawal, write_withdrawal

LEAVE_SECONDS = 60.0
LOOK_SECONDS = 1.0
_OUTAGES = ("UNAVAILABLE", "DEADLINE_EXCEEDED")  # the statuses of a coordinator that cannot be reached, or is away
MAX_EARLIER = 10  # withdrawals that are kept beside the newest one


class LeavingError(Error):
    """The site has not left; the message says why. Its wish stays in the home.

    Attributes:
        retry_seconds: the delay that the coordinator asks for before the next attempt.
        refused: true if a coordinator has refused, and another attempt is not likely to help soon.
    """

    def __init__(self, message: str, retry_seconds: float = 0.0, *, refused: bool = False) -> None:
        super().__init__(message)
        self.retry_seconds = retry_seconds
        self.refused = refused


def withdraw(home: WorkerHome, member: MemberFiles, leave: Leave) -> datetime:
    """Sends the withdrawal of a site whose owner wants to leave; the caller has locked the home.

    A withdrawal that was sent before is sent again. It is kept in the home, before it is sent and afterwards.

    Returns:
        When the coordinator has recorded it.

    Raises:
        LeavingError: the coordinator cannot be reached, is too old, or refuses.
        WorkerHomeError: the withdrawal in the home is damaged.
        OSError: it cannot be written.
    """
    kept = read_withdrawal(home.withdrawal)
    if kept is None or not _fits(kept.envelope, member, leave):
        before = () if kept is None else (kept.envelope, *kept.earlier)
        kept = SignedWithdrawal(_signed(member, leave), earlier=before[:MAX_EARLIER])
        write_withdrawal(home.withdrawal, kept)
    try:
        address, channel = member.serving_channel()
    except RouteError as error:
        raise LeavingError(f"{member.client_id} has not left: {error}") from error
    with channel:
        try:
            answer = FederationStub(channel).Leave(LeaveRequest(withdrawal=kept.envelope), timeout=LEAVE_SECONDS)
        except grpc.RpcError as error:
            raise _refused(member, address, error) from error
    left = answer.left.ToDatetime(UTC)
    write_withdrawal(home.withdrawal, replace(kept, left=max(left, datetime.now(UTC))))
    return left


def withdraw_again(home: WorkerHome, member: MemberFiles) -> bool:
    """True if the site has left; its withdrawal is then sent once more, since a backup can have been restored.

    Raises:
        LeavingError, WorkerHomeError, OSError: as of `withdraw`.
    """
    kept = read_withdrawal(home.withdrawal)
    if kept is None or kept.left is None:
        return False
    wanted, _ = read_leave(home.leave)
    forget = WithdrawalManifest.FromString(kept.envelope.manifest).forget
    withdraw(home, member, wanted or Leave(kept.left, forget=forget))
    return True


def _fits(envelope: SignedEnvelope, member: MemberFiles, leave: Leave) -> bool:
    """True if a withdrawal is signed with the member's present key, and says what its owner wants."""
    if envelope.key_id != key_id(member.signing_key.public_key()):
        return False
    return WithdrawalManifest.FromString(envelope.manifest).forget == leave.forget


def _signed(member: MemberFiles, leave: Leave) -> SignedEnvelope:
    manifest = WithdrawalManifest(
        federation_id=member.federation_id,
        client_id=member.client_id,
        certificate=parse_peer(member.certificate).serial,
        forget=leave.forget,
    )
    manifest.created.FromDatetime(datetime.now(UTC))
    return sign(manifest, member.signing_key)


def _refused(member: MemberFiles, address: str, error: grpc.RpcError) -> LeavingError:
    refusal = member.refusal(error, address)
    if refusal.status == "UNIMPLEMENTED":
        return LeavingError(
            f"{member.client_id} has not left: the coordinator at {address} is of a version that does not know how "
            "members leave; the wish stays in this directory until that one is upgraded, and no work is begun: ask its "
            "operator",
            refused=True,
        )
    reason = ": ".join(part for part in (refusal.reason, refusal.message or refusal.status) if part)
    message = f"{member.client_id} has not left: {address}: {escaped(reason)}"
    return LeavingError(message, refusal.retry_seconds, refused=refusal.status not in _OUTAGES)


@dataclass(eq=False)
class Leaver:
    """Withdraws a site whose worker runs, once its begun work has ended, or at once if its owner wants it.

    Attributes:
        idle: true once nothing that has begun is left.
        drop: drops what has begun, and erases what private rounds keep.
        left: called once the coordinator has recorded the withdrawal.
        backoff: gives the delays after an outage.
        patience: gives the delays after a refusal, which grow longer.
    """

    home: WorkerHome
    attendance: Attendance
    wish: WatchedLeave
    idle: Callable[[], bool]
    drop: Callable[[], None]
    left: Callable[[], None]
    backoff: Backoff
    patience: Backoff
    events: Events
    _changed: threading.Condition = field(default_factory=threading.Condition, init=False)
    _stopping: bool = field(default=False, init=False)
    _told: str = field(default="", init=False)  # the last sentence to the owner

    def run(self) -> None:
        """Looks for the wish, and withdraws the site, until `stop`."""
        delay = LOOK_SECONDS
        while not self._wait(delay):
            delay, leave = LOOK_SECONDS, self.wish.leave
            if leave is None:
                self._told = ""
                continue
            if leave.now:
                self.drop()
            elif not self.idle():
                self._tell("this site leaves the federation, once the work that it has begun has ended")
                continue
            try:
                since = withdraw(self.home, self.attendance.member, leave)
            except (LeavingError, OSError) as error:
                delay = self._delay(error)
                self._tell(f"{error}; trying again", warns=True)
                continue
            self.drop()  # also what private rounds keep that have gone on without this site: no later start erases it
            self.events.tell("left", f"this site has left the federation on {since:%Y-%m-%d %H:%M} UTC")
            self.left()

    def _delay(self, error: LeavingError | OSError) -> float:
        """Seconds until the next attempt: as for the stream after an outage, and longer ones after a refusal."""
        if isinstance(error, OSError):
            return self.patience.delay()
        return max((self.patience if error.refused else self.backoff).delay(), error.retry_seconds)

    def stop(self) -> None:
        """Ends `run`."""
        with self._changed:
            self._stopping = True
            self._changed.notify_all()

    def _wait(self, seconds: float) -> bool:
        """True if the worker stops within `seconds`."""
        with self._changed:
            return self._changed.wait_for(lambda: self._stopping, timeout=seconds)

    def _tell(self, message: str, *, warns: bool = False) -> None:
        """Tells the owner, once for each new sentence."""
        if message != self._told:
            self._told = message
            (self.events.warn if warns else self.events.tell)("leaving", message)
