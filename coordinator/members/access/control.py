"""Access: identifies the caller of each rpc, checks that it may call, and answers with a refusal if it may not.

One interceptor handles every rpc of both ports, and looks at the certificate and its holder on each. It reads them in
the database; the rows of members are used again while nobody can have changed them (`known_members`). An rpc that is
under way when its caller is revoked or its certificate expires is ended at once. A `Refusal` becomes a status with its
reason; any other error becomes INTERNAL with the number of an incident, and the log has the rest. Both are recorded.
"""

import asyncio
import logging
import secrets
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import aclosing, asynccontextmanager, suppress
from contextvars import ContextVar
from datetime import datetime, timedelta
from functools import lru_cache
from time import monotonic
from typing import Any, NoReturn

import grpc
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from sqlalchemy import bindparam, select
from sqlalchemy.exc import SQLAlchemyError
from sqlalchemy.orm import Session

from coordinator.cluster.announcements import Announcement, AnnouncementKind, Announcements
from coordinator.fault_state import FaultState
from coordinator.front.listener import host_of
from coordinator.front.places import network_of
from coordinator.members.access.call_limits import RATES, REFUSED, STRANGER, STRANGERS, Buckets
from coordinator.members.access.callers import RULES, CallerRule, authorise
from coordinator.members.access.calls import Call
from coordinator.members.access.known_members import KnownMember, KnownMembers
from coordinator.members.access.refusal_record import RefusalRecord
from coordinator.members.access.rpc_messages import (
    Context,
    abort,
    checked_requests,
    only_request,
    reader,
    write_whole,
    writer,
)
from coordinator.members.access.strangers import Strangers
from coordinator.members.administrators import note_seen, revoked_among
from coordinator.members.departures import withdrawn
from coordinator.members.logged_rights import LoggedRights, unlogged_caller
from coordinator.members.membership import REVOKED, gone_clients_among, revoked
from coordinator.rounds.replies.revoked import LEFT
from coordinator.thread_pool import ThreadPool
from federation.refusals import Refusal
from federation.trust.certificates import der, load_certificate
from federation.trust.identity import PeerIdentity, admin_uris, client_uri, parse_peer
from federation.trust.keys import IdentityError
from storage.database import DatabaseBusy
from storage.faults import StorageFault
from storage.models import Certificate, Client
from storage.states import ClientState

log = logging.getLogger(__name__)

MAX_CONCURRENT_CALLS = 64  # of one caller: a worker needs two or three
CLOCK_LOOK_SECONDS = 30.0  # between two comparisons of the clock with a certificate's end
WATCH_SECONDS = 5.0  # between two looks for certificates that another process has revoked, with one coordinator
HOLD_SECONDS = 3.0  # before a member that calls too often is answered, so that it cannot ask again at once
SEEN_EVERY = timedelta(minutes=1)  # how often it is noted that an administrator calls
# The caller's certificate and state, in one query, which every rpc makes.
_CALLER = (
    select(Certificate.certificate, Certificate.revoked, Client.state, Client.signing_key, Client.start)
    .outerjoin_from(Certificate, Client, Client.client_id == bindparam("client"))
    .where(Certificate.serial == bindparam("serial"))
)
LEAVE = "Leave"  # the only rpc of a client that has left
_ENDED = frozenset({"certificate-revoked", "certificate-unknown"})
_TOO_OFTEN = frozenset({"limit:rate", "limit:calls"})
# Faults of the coordinator itself: `coordinator.fault_state` logs them, and the record may be the part that fails.
_NOT_RECORDED = frozenset(StorageFault) - {StorageFault.BLOB}


class Access(grpc.aio.ServerInterceptor):  # type: ignore[misc,type-arg,unused-ignore]
    """The interceptor. Its methods are called on the event loop, unless they say otherwise.

    Args:
        threads: in which the record is read, without a queue behind the calls that are served.
        federation_id: in every certificate.
        signing_key: signs that a member was revoked.
        rights: are compared with the record of each caller.
        chain_log: lets them learn of the newest entries.
        verified: called for each call with a valid certificate: with the peer, as gRPC names it, and the caller.
        refusals: records them.
        announcements: of revocations, by other coordinators and for them.
        faults: of the machine.
        clock: the time, aware.
    """

    def __init__(
        self,
        threads: ThreadPool,
        federation_id: str,
        *,
        signing_key: Ed25519PrivateKey,
        rights: LoggedRights,
        chain_log: Callable[[], object],
        verified: Callable[[str, str], None],
        refusals: RefusalRecord,
        announcements: Announcements,
        faults: FaultState,
        clock: Callable[[], datetime],
    ) -> None:
        self._threads = threads
        self._rights = rights
        self._chain_log = chain_log
        self._verified = verified
        self._record = refusals
        self._announcements = announcements
        self._faults = faults
        self._federation_id = federation_id
        self._signing_key = signing_key
        self._clock = clock
        self._calls: dict[str, set[Call]] = {}  # by account
        self._strangers = Strangers()  # those of `_calls` that showed no certificate
        self._buckets = Buckets(RATES)
        # Serial numbers of certificates that have ended. Their calls are not charged to the member: the holder of a
        # stolen certificate that was replaced must not use up the calls that the member may make.
        self._ended: set[str] = set()
        self._members = KnownMembers(threads.database)
        self._seen: dict[str, datetime] = {}  # serial number of an administrator's certificate -> when it was noted
        self._stopping = False
        self._call: ContextVar[Call] = ContextVar("call")

    def caller(self) -> PeerIdentity:
        """The identity of the caller whose rpc the running task serves."""
        identity = self._call.get().identity
        if identity is None:
            raise AssertionError("anyone may make this rpc")
        return identity

    def member(self) -> KnownMember | None:
        """The member whose rpc the running task serves, as the record had it when the rpc began."""
        return self._call.get().member

    def charge(self, account: str, kind: str) -> None:
        """Charges a call, or an action within one, to its member or to a certificate that has ended.

        Any thread may call.

        Raises:
            Refusal: `limit:rate`: this happens too often.
        """
        now = monotonic()
        for charged in (kind, REFUSED):
            seconds = self._buckets.wait(account, charged, now)
            if seconds > 0:
                many = "calls of yours were refused" if charged == REFUSED else f"calls of {kind} by you"
                raise Refusal("limit:rate", f"too many {many}: try again in {seconds:.1f} s", retry_seconds=seconds)
        self._buckets.charge(account, kind, now)

    async def _charge_stranger(self, host: str) -> None:
        """Charges a call without a certificate to its address, and to all strangers.

        While few calls of the address wait, a refusal comes after some seconds, so that the caller cannot repeat it at
        once.

        Raises:
            Refusal: `limit:rate`: there are too many. Those of one address alone do not use up the calls of the others.
        """
        now = monotonic()
        accounts = {STRANGER: network_of(host), STRANGERS: ""}
        for kind, account in accounts.items():
            if (seconds := self._buckets.wait(account, kind, now)) > 0:
                whose = "from your address" if kind == STRANGER else "from all addresses"
                message = f"too many calls without a certificate {whose}: try again in {seconds:.1f} s"
                if self._strangers.few_wait(host):
                    await asyncio.sleep(HOLD_SECONDS)
                raise Refusal("limit:rate", message, retry_seconds=seconds)
        for kind, account in accounts.items():
            self._buckets.charge(account, kind, now)

    def ender(self) -> Callable[[Refusal], None]:
        """A function that ends the rpc that the running task serves with a refusal."""
        return self._call.get().end

    def revoke_live(self, client: Client) -> None:
        """Ends every rpc of a client that is under way, everywhere, after the revocation is committed."""
        self._end_calls(client.client_id, revoked(self._federation_id, self._signing_key, client, None))
        self._announcements.announce(AnnouncementKind.REVOCATION, client.client_id)

    def end_left(self, client_id: str, refusal: Refusal) -> None:
        """Ends every rpc under way of a client that has left, everywhere, but not the one with which it leaves."""
        self._end_calls(client_id, refusal)
        self._announcements.announce(AnnouncementKind.REVOCATION, client_id)

    def _end_calls(self, client_id: str, refusal: Refusal) -> None:
        for call in list(self._calls.get(client_uri(self._federation_id, client_id), ())):
            if refusal.reason != LEFT or call.action != LEAVE:
                call.end(refusal)

    def revoke_live_administrator(self, name: str) -> None:
        """Ends every rpc of an administrator that is under way, everywhere, after the revocation is committed.

        If the running rpc is the administrator's own, it still gets its answer.
        """
        for call in list(self._calls.get(admin_uris(self._federation_id, name, ())[0], ())):
            if call is not self._call.get():
                call.end(Refusal("certificate-revoked", REVOKED))
        self._announcements.announce(AnnouncementKind.REVOCATION, name)

    async def watch_revocations(self) -> NoReturn:
        """Ends rpcs whose callers other processes have revoked: administrators, and members that attend elsewhere, too.

        It goes on until it is cancelled.
        """
        loop, announced = asyncio.get_running_loop(), asyncio.Event()

        def hear(announcement: Announcement | None) -> None:
            if (announcement is None or announcement.kind is AnnouncementKind.REVOCATION) and not loop.is_closed():
                loop.call_soon_threadsafe(announced.set)

        unlisten = self._announcements.heard.listen(hear)
        try:
            while True:
                with suppress(TimeoutError):
                    async with asyncio.timeout(self._announcements.look_seconds or WATCH_SECONDS):
                        await announced.wait()
                announced.clear()
                try:
                    await self._end_revoked()
                except SQLAlchemyError as error:  # the next look may reach the database
                    if self._faults.note(error) is None:
                        log.warning("could not check whether certificates were revoked: %s", error)
        finally:
            unlisten()

    async def _end_revoked(self) -> None:
        callers = [
            (call, call.identity) for calls in self._calls.values() for call in calls if call.identity is not None
        ]
        serials = {call: identity.serial for call, identity in callers if identity.kind == "admin"}
        ended = await self._threads.read(revoked_among, set(serials.values())) if serials else set[str]()
        for call, serial in serials.items():
            if serial in ended:
                call.end(Refusal("certificate-revoked", REVOKED))
        # Without other coordinators, `revoke_live` is called here for each revoked client.
        clients = {identity.name for _, identity in callers if identity.kind == "client"}
        if clients and self._announcements.look_seconds is not None:
            for client_id, refusal in await self._threads.read(self._gone_among, clients):
                self._end_calls(client_id, refusal)

    def _gone_among(self, session: Session, names: set[str]) -> list[tuple[str, Refusal]]:
        """The clients among these that were revoked or have left, each with its refusal."""
        gone = gone_clients_among(session, names)
        return [
            (
                client.client_id,
                withdrawn(session, client)
                if client.state is ClientState.LEFT
                else revoked(self._federation_id, self._signing_key, client, None),
            )
            for client in gone
        ]

    def stop(self) -> None:
        """Refuses new rpcs, and ends those that stream; a reply that is being sent may finish."""
        self._stopping = True
        for call in [call for calls in self._calls.values() for call in calls if call.streams]:
            call.end(_stopping())

    def _end_at_expiry(self, call: Call, identity: PeerIdentity) -> None:
        """Ends a call when its caller's certificate expires, also when the clock is set meanwhile."""
        left = (identity.not_after - self._clock()).total_seconds()
        if left <= 0:
            call.end(_expired(identity))
        else:
            later = asyncio.get_running_loop().call_later
            call.expiry = later(min(left, CLOCK_LOOK_SECONDS), self._end_at_expiry, call, identity)

    def _note_seen(self, serial: str) -> None:
        """Notes once in a while that an administrator calls; the call does not wait for it."""
        now = self._clock()
        if serial not in self._seen or abs(now - self._seen[serial]) >= SEEN_EVERY:
            self._seen[serial] = now
            self._threads.executor.submit(self._write_seen, serial, now)

    def _write_seen(self, serial: str, now: datetime) -> None:
        try:
            with self._threads.database.begin() as session:
                note_seen(session, serial, now)
        except (SQLAlchemyError, DatabaseBusy) as error:  # the call itself matters more
            if self._faults.gone() is None:
                log.warning("could not note that the administrator with certificate %s has called: %s", serial, error)

    # The interceptor

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Any]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Any:
        """Puts itself between gRPC and the service's method."""
        handler = await continuation(handler_call_details)
        if handler is None:
            return None  # gRPC answers UNIMPLEMENTED
        method = handler_call_details.method
        method = method.decode() if isinstance(method, bytes) else method
        return self._guarded(handler, method, RULES.get(method))

    def _guarded(self, handler: Any, method: str, rule: CallerRule | None) -> Any:
        action = method.rpartition("/")[2]
        behaviour = handler.unary_unary or handler.unary_stream or handler.stream_unary or handler.stream_stream

        # Every rpc is served as one that takes a stream, which is the same on the wire. gRPC would read a single
        # request before it calls us: calls without a request would stay open for ever, uncounted.
        async def read(requests: AsyncIterator[Any]) -> Any:
            return checked_requests(requests) if handler.request_streaming else await only_request(requests)

        async def single(requests: AsyncIterator[Any], context: Context) -> Any:
            async with self._admitted(context, action, rule):
                request = await read(requests)
                self._strangers.heard(self._call.get())
                return await behaviour(request, context)

        # Not a generator: cancelling a call while gRPC writes would end gRPC's write without notice to this code.
        async def stream(requests: AsyncIterator[Any], context: Context) -> None:
            async with self._admitted(context, action, rule, streams=True):
                responses = behaviour(await read(requests), context)
                async with aclosing(responses):
                    async for response in responses:
                        await write_whole(context, response)

        make, function = (
            (grpc.stream_stream_rpc_method_handler, stream)
            if handler.response_streaming
            else (grpc.stream_unary_rpc_method_handler, single)
        )
        return make(function, reader(method, handler.request_deserializer), writer(handler.response_serializer))

    @asynccontextmanager
    async def _admitted(
        self, context: Context, action: str, rule: CallerRule | None, *, streams: bool = False
    ) -> AsyncIterator[None]:
        """Identifies the caller, runs the body as its rpc, and turns errors into a status."""
        task = asyncio.current_task()
        if task is None:
            raise RuntimeError("an rpc runs in a task")
        call = Call(task, streams, action)
        self._call.set(call)
        peer = host_of(context.peer())
        account = actor = f"peer {peer}"
        calls: set[Call] | None = None
        try:
            if self._stopping:
                raise _stopping()
            self._faults.check_serving(action)
            presented = context.auth_context().get("x509_pem_cert")
            identity, certificate = _identify(next(iter(presented))) if presented else (None, b"")
            if identity is not None:
                account = actor = identity.uri
                if identity.serial in self._ended:
                    account = f"{actor} {identity.serial}"
            # Counted among the calls under way before it is checked: a revocation in between finds it.
            calls = self._calls.setdefault(account, set())
            if identity is not None:
                self.charge(account, action)
                if len(calls) >= MAX_CONCURRENT_CALLS:
                    raise Refusal("limit:calls", f"{MAX_CONCURRENT_CALLS} calls of yours are under way: wait for one")
            calls.add(call)
            if identity is None:
                self._strangers.admit(call, peer)
                await self._charge_stranger(peer)
            else:
                call.identity = identity
                try:
                    call.member = self._known(identity, certificate)
                    if call.member is None and not await self._threads.read(self._check, call, certificate):
                        await self._threads.run(self._chain_log)  # the right may be a moment old
                        await self._threads.read(self._check_logged, call, certificate)
                except Refusal as refusal:
                    if refusal.reason in _ENDED:
                        self._ended.add(identity.serial)
                    raise
                self._verified(context.peer(), actor)
                self._end_at_expiry(call, identity)
            authorise(rule, identity, action)
            if identity is not None and identity.kind == "admin":
                self._note_seen(identity.serial)
            yield
        except Refusal as refusal:
            await call.settle(refusal)
            self._strangers.discard(call)
            await self._refuse(context, actor, action, refusal, account)
        except asyncio.CancelledError:
            if call.doom is None:
                raise
            task.uncancel()
            await self._refuse(context, actor, action, call.doom, account)
        except (grpc.aio.AbortError, GeneratorExit):
            raise
        except Exception as error:
            fault = self._faults.refusal(error)
            await call.settle(fault or _stopping())
            if fault is not None:
                await self._refuse(context, actor, action, fault, account)
            incident = secrets.token_hex(4)
            log.exception("incident %s: %s by %s failed", incident, action, actor)
            await self._record.write(actor, action, "internal", f"incident {incident}")
            await context.abort(
                grpc.StatusCode.INTERNAL, f"internal error; the coordinator's log has more under incident {incident}"
            )
        finally:
            if call.expiry is not None:
                call.expiry.cancel()
            self._strangers.discard(call)
            if calls is not None:
                calls.discard(call)
                if not calls and self._calls.get(account) is calls:
                    del self._calls[account]

    def _known(self, identity: PeerIdentity, certificate: bytes) -> KnownMember | None:
        """The member that calls, if it is known, and `_check` would find nothing against it; None otherwise."""
        member = self._members.find(identity.serial)
        if member is None or member.certificate != certificate or self._clock() >= identity.not_after:
            return None
        return member if self._rights.permit(identity, member.state, member.signing_key) else None

    def _check_logged(self, session: Session, call: Call, certificate: bytes) -> None:
        if not self._check(session, call, certificate) and call.identity is not None:
            raise unlogged_caller(call.identity)

    def _check(self, session: Session, call: Call, certificate: bytes) -> bool:
        """Checks, beyond TLS, that this federation has issued a caller's certificate, and that it is still valid.

        A member that has left may only say so again.

        Returns True if the audit log tells the same of the caller.
        """
        identity, changes = call.identity, self._members.changes()
        if identity is None:
            raise AssertionError("who shows no certificate is a stranger")
        client_id = identity.name if identity.kind == "client" else None
        parameters = {"serial": identity.serial, "client": client_id}
        row = session.connection().execute(_CALLER, parameters).one_or_none()
        if (
            identity.federation_id != self._federation_id
            or row is None
            or row.certificate != certificate
            or (client_id is not None and row.state is None)
        ):
            raise Refusal("certificate-unknown", "this federation has not issued your certificate")
        if row.revoked is not None or row.state is ClientState.REVOKED:
            if client_id is None:
                raise Refusal("certificate-revoked", REVOKED)
            client, shown = session.get_one(Client, client_id), session.get_one(Certificate, identity.serial)
            raise revoked(self._federation_id, self._signing_key, client, shown)
        if self._clock() >= identity.not_after:
            raise _expired(identity)
        if row.state is ClientState.LEFT and call.action != LEAVE:
            raise withdrawn(session, session.get_one(Client, identity.name))
        permitted = self._rights.permit(identity, row.state, row.signing_key)
        if permitted and client_id is not None and row.state is not ClientState.LEFT:
            call.member = KnownMember(row.certificate, row.state, row.signing_key, row.start)
            self._members.note(identity.serial, call.member, changes)
        return permitted

    async def _refuse(self, context: Context, actor: str, action: str, refusal: Refusal, account: str) -> NoReturn:
        if refusal.reason in _NOT_RECORDED:
            await abort(context, refusal)
        if not actor.startswith("peer "):
            if refusal.reason in _TOO_OFTEN:
                self._record.count(actor, action, refusal.reason)
                await asyncio.sleep(min(HOLD_SECONDS, (context.time_remaining() or HOLD_SECONDS * 2) / 2))
                await abort(context, refusal)
            self._buckets.charge(account, REFUSED, monotonic())
        await self._record.write(actor, action, refusal.reason, refusal.message)
        await abort(context, refusal)


@lru_cache(maxsize=256)  # a certificate comes with each of its holder's calls, and its content never changes
def _identify(certificate: bytes) -> tuple[PeerIdentity, bytes]:
    """The caller, and the certificate in DER."""
    try:
        return parse_peer(certificate), der(load_certificate(certificate))
    except IdentityError as error:
        raise Refusal("certificate-unknown", str(error)) from None


def _stopping() -> Refusal:
    return Refusal("stopping", "the coordinator is stopping; try again when it is back")


def _expired(identity: PeerIdentity) -> Refusal:
    remedy = "run `fedpareto admin login`" if identity.kind == "admin" else "ask an administrator for a new one"
    return Refusal(
        "certificate-expired", f"your certificate expired on {identity.not_after:%Y-%m-%d %H:%M} UTC: {remedy}"
    )
