"""Access: who calls, whether they may, and what they hear when they may not.

One interceptor stands before every rpc of both ports. What is not in `RULES` is nobody's to call. A certificate is
looked up in the database on each rpc, nothing is remembered between two, and an rpc that is under way when its
caller is revoked or its certificate expires is ended at once. A `Refusal` becomes a status with its reason; anything
unforeseen becomes INTERNAL with the number of an incident, and the log has the rest. Both are recorded.
"""

import asyncio
import logging
import secrets
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from concurrent.futures import Executor
from contextlib import aclosing, asynccontextmanager, suppress
from contextvars import ContextVar
from dataclasses import dataclass
from datetime import datetime
from time import monotonic
from typing import Any, Literal, NoReturn

import grpc
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from sqlalchemy.exc import SQLAlchemyError

from coordinator.clock import utc_now
from coordinator.condition import Condition
from coordinator.front.listener import host_of
from coordinator.members.administrators import revoked_among
from coordinator.members.answers import MAX_MESSAGE_CHARACTERS, abort
from coordinator.members.limits import RATES, REFUSED, Buckets
from coordinator.members.messages import Context, checked_requests, forgiving, only_request, write_whole
from coordinator.members.refusal_record import RefusalRecord
from coordinator.members.revocation import REVOKED, revoked
from coordinator.members.strangers import Strangers
from federation.certificates import der, load_certificate
from federation.identity import PeerIdentity, Role, admin_uris, parse_peer
from federation.keys import IdentityError
from federation.refusals import Refusal
from storage.database import Database
from storage.faults import Fault
from storage.models import Certificate, Client, ClientState

log = logging.getLogger(__name__)

MAX_CONCURRENT_CALLS = 64  # of one caller: a worker needs two or three
CLOCK_LOOK_SECONDS = 30.0  # after which the clock is compared with a certificate's end again
WATCH_SECONDS = 5.0  # between two looks for certificates that were revoked behind our back
HOLD_SECONDS = 3.0  # before a member that calls too often is answered, so that it cannot ask again at once
_ENDED_FOR_GOOD = frozenset({"certificate-revoked", "certificate-unknown"})
_TOO_OFTEN = frozenset({"limit:rate", "limit:calls"})
# Faults of the coordinator itself: `coordinator.condition` logs them, and the record may be the part that fails.
_NOT_RECORDED = frozenset({"stopping", Fault.DISK, Fault.DATABASE, Fault.DESCRIPTORS})


@dataclass(frozen=True)
class Rule:
    """Who may call an rpc.

    Attributes:
        kind: clients, administrators, or anyone, with or without a certificate.
        role: the role that an administrator needs.
    """

    kind: Literal["client", "admin", "anyone"]
    role: Role | None = None


_ANYONE = Rule("anyone")
_CLIENT = Rule("client")
_VIEWER = Rule("admin", Role.VIEWER)
_OPERATOR = Rule("admin", Role.OPERATOR)
_OFFICER = Rule("admin", Role.SECURITY_OFFICER)

# A test holds this against the contract: every rpc is here.
RULES: Mapping[str, Rule] = {
    "/federation.v1.Enrollment/Enroll": _ANYONE,
    "/federation.v1.Federation/Attend": _CLIENT,
    "/federation.v1.Federation/FetchBlob": _CLIENT,
    "/federation.v1.Federation/Submit": _CLIENT,
    "/federation.v1.Federation/Renew": _CLIENT,
    "/federation.v1.Admin/CreateJoinString": _OFFICER,
    "/federation.v1.Admin/ListJoinStrings": _VIEWER,
    "/federation.v1.Admin/CancelJoinStrings": _OFFICER,
    "/federation.v1.Admin/ListClients": _VIEWER,
    "/federation.v1.Admin/ApproveClient": _OFFICER,
    "/federation.v1.Admin/RevokeClient": _OFFICER,
    "/federation.v1.Admin/ListAdministrators": _VIEWER,
    "/federation.v1.Admin/RevokeAdministrator": _OFFICER,
    "/federation.v1.Admin/SubmitRun": _OPERATOR,
    "/federation.v1.Admin/GetDisk": _VIEWER,
    "/federation.v1.Admin/ListRuns": _VIEWER,
    "/federation.v1.Admin/GetRun": _VIEWER,
    "/federation.v1.Admin/PauseRun": _OPERATOR,
    "/federation.v1.Admin/ResumeRun": _OPERATOR,
    "/federation.v1.Admin/StopRun": _OPERATOR,
    "/federation.v1.Admin/WatchRun": _VIEWER,
    "/federation.v1.Admin/ListRounds": _VIEWER,
    "/federation.v1.Admin/GetRound": _VIEWER,
    "/federation.v1.Admin/ExportRounds": _VIEWER,
    "/federation.v1.Admin/ListUpdates": _VIEWER,
    "/federation.v1.Admin/ExportModel": _VIEWER,
    "/grpc.health.v1.Health/Check": _ANYONE,
    "/grpc.health.v1.Health/List": _ANYONE,
    "/grpc.health.v1.Health/Watch": _ANYONE,
    "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo": _ANYONE,
}


@dataclass(frozen=True)
class Caller:
    """Who makes a call, once that is established.

    Attributes:
        identity: what the certificate says.
        peer: the network address, without the port.
    """

    identity: PeerIdentity
    peer: str

    @property
    def name(self) -> str:
        """The client id, or the administrator's name."""
        return self.identity.name

    @property
    def actor(self) -> str:
        """How the record names the caller."""
        return self.identity.uri


@dataclass(eq=False)
class _Call:
    """An rpc under way, whether it streams to its caller, and why it is to end, if it is."""

    task: "asyncio.Task[Any]"
    streams: bool
    serial: str = ""  # of an administrator's certificate, which another process may revoke
    doom: Refusal | None = None
    expiry: asyncio.TimerHandle | None = None

    def end(self, refusal: Refusal) -> None:
        if self.doom is None:
            self.doom = refusal
            self.task.cancel()

    async def settle(self, refusal: Refusal) -> None:
        """From here on nothing ends the call: its answer is on its way, and would never arrive."""
        if self.doom is None:
            self.doom = refusal
            return
        with suppress(asyncio.CancelledError):  # it was ended at this very moment
            await asyncio.sleep(0)
        self.task.uncancel()


class Access(grpc.aio.ServerInterceptor):  # type: ignore[misc,type-arg,unused-ignore]
    """The interceptor.

    Args:
        database: where certificates, clients and the record are.
        blocking: runs what waits for the database, so that the event loop never does.
        federation_id: whose certificates count.
        signing_key: the coordinator's.
        condition: which faults the coordinator suffers from, and where those met here are noted.
        clock: the time, aware.
    """

    def __init__(
        self,
        database: Database,
        blocking: Executor,
        federation_id: str,
        *,
        signing_key: Ed25519PrivateKey,
        condition: Condition | None = None,
        clock: Callable[[], datetime] = utc_now,
    ) -> None:
        self._database = database
        self._condition = condition or Condition()
        self._blocking = blocking
        self._federation_id = federation_id
        self._signing_key = signing_key
        self._clock = clock
        self._calls: dict[str, set[_Call]] = {}  # by actor; touched on the event loop only
        self._strangers = Strangers()  # those of `_calls` that showed no certificate
        self._buckets = Buckets(RATES)
        # Serial numbers of certificates that were refused for good. Their calls are not charged to the member: somebody
        # with a certificate that was replaced must not use up what the member itself may do.
        self._ended: set[str] = set()
        self._record = RefusalRecord(database, blocking, self._condition, clock)
        # Told the peer, as gRPC names it, and the caller of each call with a good certificate.
        self.on_verified: Callable[[str, str], None] = lambda peer, actor: None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._stopping = False
        self._caller: ContextVar[Caller | None] = ContextVar("caller", default=None)
        self._call: ContextVar[_Call] = ContextVar("call")

    async def caller(self, context: Context, *, kind: Literal["client", "admin"], role: Role | None = None) -> Caller:
        """Who makes the rpc that the running task serves. A service says here what it relies on.

        Args:
            context: the rpc's.
            kind: what the caller must be.
            role: what an administrator must hold.

        Raises:
            Refusal: `certificate-unknown` or `role`.
        """
        caller = self._caller.get()
        _authorise(Rule(kind, role), caller.identity if caller else None, "this call")
        if caller is None:
            raise AssertionError("no caller passed")
        return caller

    def charge(self, caller: Caller, kind: str) -> None:
        """Counts something that a member does within a call.

        Raises:
            Refusal: `limit:rate`: it does this too often.
        """
        self._must_not_be_too_often(caller.actor, kind)

    async def finish(self) -> None:
        """Writes down what is not on record yet."""
        await self._record.finish()

    def ender(self) -> Callable[[Refusal], None]:
        """What ends the rpc that the running task serves, with a refusal; to be called on the event loop."""
        return self._call.get().end

    def revoke_live(self, client_id: str) -> None:
        """Ends every rpc of a client that is under way. Callable from any thread, after the revocation is committed."""
        actor = f"fedpareto://{self._federation_id}/client/{client_id}"
        with self._database.read() as session:
            client = session.get_one(Client, client_id)
            refusal = revoked(self._federation_id, self._signing_key, client, None)
        if self._loop is not None and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._end, actor, refusal)

    async def note_refused_connections(self, source: str, reason: str, times: int) -> None:
        """Puts on record what the front listener has refused.

        Args:
            source: a host, a network, or the URI of a member's certificate.
            reason: of the refusals.
            times: how many connections.
        """
        actor = source if source.startswith("fedpareto://") else f"peer {source}"
        log.warning("closed %d connections of %s: %s", times, actor, reason)
        await self._record.write(actor, "connect", reason, f"{times} connections closed", times)

    def revoke_live_administrator(self, name: str) -> None:
        """Ends every rpc of an administrator that is under way, after the revocation is committed.

        The running rpc gets its answer, should it be the administrator's own. Called on the event loop.
        """
        own = self._call.get()
        for call in list(self._calls.get(admin_uris(self._federation_id, name, ())[0], ())):
            if call is not own:
                call.end(Refusal("certificate-revoked", REVOKED))

    async def watch_administrators(self) -> None:
        """Ends the rpcs of administrators whose certificate another process revokes meanwhile. Returns never."""
        while True:
            await asyncio.sleep(WATCH_SECONDS)
            calls = [call for ours in self._calls.values() for call in ours if call.serial]
            try:
                ended = await asyncio.get_running_loop().run_in_executor(
                    self._blocking, self._revoked_among, {call.serial for call in calls}
                )
            except SQLAlchemyError as error:  # the next look may find the database
                if self._condition.note(error) is None:
                    log.warning("could not look whether certificates were revoked: %s", error)
                continue
            for call in calls:
                if call.serial in ended:
                    call.end(Refusal("certificate-revoked", REVOKED))

    def _revoked_among(self, serials: set[str]) -> set[str]:
        with self._database.read() as session:
            return revoked_among(session, serials) if serials else set()

    def stop(self) -> None:
        """Lets nobody in any more, and ends what streams to callers; a reply that is being handed in may finish.

        Called on the event loop.
        """
        self._stopping = True
        for calls in list(self._calls.values()):
            for call in list(calls):
                if call.streams:
                    call.end(_stopping())

    def _end_at_expiry(self, loop: asyncio.AbstractEventLoop, call: _Call, identity: PeerIdentity) -> None:
        """Ends a call when its caller's certificate expires, also when the clock is set meanwhile."""
        left = (identity.not_after - self._clock()).total_seconds()
        if left <= 0:
            call.end(_expired(identity))
        else:
            wait = min(left, CLOCK_LOOK_SECONDS)
            call.expiry = loop.call_later(wait, self._end_at_expiry, loop, call, identity)

    def _end(self, actor: str, refusal: Refusal) -> None:
        for call in list(self._calls.get(actor, ())):
            call.end(refusal)

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
        return self._guarded(handler, method.rpartition("/")[2], RULES.get(method))

    def _guarded(self, handler: Any, action: str, rule: Rule | None) -> Any:
        behaviour = handler.unary_unary or handler.unary_stream or handler.stream_unary or handler.stream_stream

        # Every rpc is served as one that takes a stream, which is the same on the wire. gRPC would read a single
        # request before it calls us: whoever opened calls and sent nothing would hold them for ever, uncounted.
        async def said(requests: AsyncIterator[Any]) -> Any:
            return checked_requests(requests) if handler.request_streaming else await only_request(requests)

        async def single(requests: AsyncIterator[Any], context: Context) -> Any:
            async with self._admitted(context, action, rule):
                request = await said(requests)
                self._strangers.heard(self._call.get())
                return await behaviour(request, context)

        # Not a generator: whoever ends a call while gRPC writes would end gRPC's write, and we should never hear of it.
        async def stream(requests: AsyncIterator[Any], context: Context) -> None:
            async with self._admitted(context, action, rule, streams=True):
                responses = behaviour(await said(requests), context)
                async with aclosing(responses):
                    async for response in responses:
                        await write_whole(context, response)

        make, function = (
            (grpc.stream_stream_rpc_method_handler, stream)
            if handler.response_streaming
            else (grpc.stream_unary_rpc_method_handler, single)
        )
        return make(function, forgiving(handler.request_deserializer), handler.response_serializer)

    @asynccontextmanager
    async def _admitted(
        self, context: Context, action: str, rule: Rule | None, *, streams: bool = False
    ) -> AsyncIterator[None]:
        """Establishes the caller, runs the body as an rpc of theirs, and turns what goes wrong into a status."""
        self._loop = asyncio.get_running_loop()
        task = asyncio.current_task()
        if task is None:
            raise RuntimeError("an rpc runs in a task")
        call = _Call(task, streams)
        peer = host_of(context.peer())
        account = actor = f"peer {peer}"
        calls: set[_Call] | None = None
        try:
            if self._stopping:
                raise _stopping()
            self._condition.must_serve(action)
            presented = context.auth_context().get("x509_pem_cert")
            identity = _identify(next(iter(presented))) if presented else None
            if identity is not None:
                account = actor = identity[0].uri
                if identity[0].serial in self._ended:
                    account = f"{actor} {identity[0].serial}"
            # Counted among the calls under way before it is checked: a revocation in between finds it.
            calls = self._calls.setdefault(account, set())
            if identity is not None:
                self._must_not_be_too_often(account, action)
                if len(calls) >= MAX_CONCURRENT_CALLS:
                    raise Refusal("limit:calls", f"{MAX_CONCURRENT_CALLS} calls of yours are under way: wait for one")
            calls.add(call)
            self._call.set(call)
            if identity is None:
                self._strangers.admit(call, peer, streams=streams, later=self._loop.call_later)
            else:
                call.serial = identity[0].serial if identity[0].kind == "admin" else ""
                try:
                    await self._in_background(self._check, *identity)
                except Refusal as refusal:
                    if refusal.reason in _ENDED_FOR_GOOD:
                        self._ended.add(identity[0].serial)
                    raise
                self.on_verified(context.peer(), actor)
                self._end_at_expiry(self._loop, call, identity[0])
            _authorise(rule, identity[0] if identity else None, action)
            self._caller.set(Caller(identity[0], peer) if identity else None)
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
            fault = self._condition.refusal(error)
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

    def _check(self, identity: PeerIdentity, certificate: bytes) -> None:
        """What TLS does not know: is this one of ours, and does it still count?

        Raises:
            Refusal: `certificate-unknown`, `certificate-revoked` or `certificate-expired`.
        """
        with self._database.read() as session:
            row = session.get(Certificate, identity.serial)
            client = session.get(Client, identity.name) if identity.kind == "client" else None
        if (
            identity.federation_id != self._federation_id
            or row is None
            or row.certificate != certificate
            or (identity.kind == "client" and client is None)
        ):
            raise Refusal("certificate-unknown", "this federation has not issued your certificate")
        if row.revoked is not None or (client is not None and client.state is ClientState.REVOKED):
            if client is None:
                raise Refusal("certificate-revoked", REVOKED)
            raise revoked(self._federation_id, self._signing_key, client, row)
        if self._clock() >= identity.not_after:
            raise _expired(identity)

    async def _refuse(self, context: Context, actor: str, action: str, refusal: Refusal, account: str) -> NoReturn:
        # In quotes: part of the message may be the caller's own words, line breaks and all.
        if refusal.reason in _NOT_RECORDED:
            await abort(context, refusal)
        if not actor.startswith("peer "):
            if refusal.reason in _TOO_OFTEN:
                self._record.count(actor, action, refusal.reason, "")
                await asyncio.sleep(min(HOLD_SECONDS, (context.time_remaining() or HOLD_SECONDS * 2) / 2))
                await abort(context, refusal)
            self._buckets.charge(account, REFUSED, monotonic())
        log.info("refused %s by %s: %s (%r)", action, actor, refusal.reason, refusal.message[:MAX_MESSAGE_CHARACTERS])
        await self._record.write(actor, action, refusal.reason, refusal.message)
        await abort(context, refusal)

    def _must_not_be_too_often(self, account: str, action: str) -> None:
        """Charges a call to an account: its member's, or that of a certificate that has ended.

        Raises:
            Refusal: `limit:rate`.
        """
        now = monotonic()
        for kind in (action, REFUSED):
            seconds = self._buckets.wait(account, kind, now)
            if seconds > 0:
                many = "calls of yours were refused" if kind == REFUSED else f"calls of {kind} by you"
                raise Refusal("limit:rate", f"too many {many}: try again in {seconds:.1f} s", retry_seconds=seconds)
        self._buckets.charge(account, action, now)

    async def _in_background(self, function: Callable[..., None], *arguments: Any) -> None:
        await asyncio.get_running_loop().run_in_executor(self._blocking, function, *arguments)


def _identify(certificate: bytes) -> tuple[PeerIdentity, bytes]:
    """The caller, and the certificate in DER."""
    try:
        return parse_peer(certificate), der(load_certificate(certificate))
    except IdentityError as error:
        raise Refusal("certificate-unknown", str(error)) from None


def _authorise(rule: Rule | None, identity: PeerIdentity | None, action: str) -> None:
    if rule is not None and rule.kind == "anyone":
        return
    if identity is None:
        raise Refusal(
            "certificate-unknown", f"{action} needs a certificate of the federation, and its port asks for it"
        )
    if rule is None:
        raise Refusal("role", f"no role permits {action}")
    if identity.kind != rule.kind:
        holders = {"client": "clients", "admin": "administrators"}
        raise Refusal("role", f"{action} is for {holders[rule.kind]}; your certificate is of a {identity.kind}")
    if rule.role is not None and rule.role not in identity.roles:
        held = ", ".join(sorted(identity.roles)) or "none"
        raise Refusal("role", f"{action} needs the role {rule.role}; your certificate gives {held}")


def _stopping() -> Refusal:
    return Refusal("stopping", "the coordinator is stopping; try again when it is back")


def _expired(identity: PeerIdentity) -> Refusal:
    return Refusal(
        "certificate-expired",
        f"your certificate expired on {identity.not_after:%Y-%m-%d %H:%M} UTC; ask an administrator for a new one",
    )
