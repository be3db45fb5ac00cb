"""The daemon: the front listener's two ports, one gRPC server behind them, and its services."""

import asyncio
import logging
import math
import signal
import socket
import time
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass
from datetime import datetime
from functools import partial

import grpc
from grpc_health.v1 import health as health_names
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection
from sqlalchemy.exc import DBAPIError

from coordinator.alerts.maker import AlertMaker
from coordinator.clock import ClockBehind
from coordinator.cluster.announcements import announcements_of
from coordinator.cluster.leases import SharedLeases
from coordinator.fault_state import LOG_SECONDS
from coordinator.front.connection_limits import ConnectionLimits, descriptor_limit, raise_descriptor_limit
from coordinator.front.listener import BEAT_SECONDS, Front, Serves, serves_tls12
from coordinator.home import CoordinatorHome, address
from coordinator.lease_keeper import LeaseKeeper
from coordinator.members.access.control import Access
from coordinator.members.access.refusal_record import RefusalRecord
from coordinator.monitor import Monitor
from coordinator.monitoring.number_keeper import NumberKeeper
from coordinator.rounds.changes import RunChanges
from coordinator.rounds.conductors import Conductors
from coordinator.rounds.fleets.attendances import attendances_of
from coordinator.rounds.fleets.consents import Offers
from coordinator.rounds.fleets.presence import Presence
from coordinator.rounds.housekeeping import Housekeeper
from coordinator.rounds.replies.evidence import SignatureMemory
from coordinator.rounds.replies.uploads import Uploads
from coordinator.rounds.run_commands import RunCommands
from coordinator.rounds.runs.run_states import RunStates
from coordinator.services.admin import AdminService
from coordinator.services.base import Parts, Rounds
from coordinator.services.enrollment import EnrollmentService
from coordinator.services.federation import FederationService
from coordinator.services.health import HealthService
from coordinator.services.transfers import LARGEST_WINDOW
from coordinator.settings import check_torch_device
from coordinator.startup import OpenRecord, Scope, forget_ports, open_record
from coordinator.thread_pool import ThreadPool, share_heap
from federation.errors import Error
from federation.monitoring.metrics_page import page
from federation.monitoring.metrics_section import MetricsEndpoint
from federation.monitoring.scrape_server import ScrapeServer
from federation.process.service_manager import ServiceManager
from federation.transport.channels import FRAME_BYTES, Option
from federation.trust.certificates import pem
from federation.trust.keys import private_key_pem
from federation.v1 import admin_pb2, enrollment_pb2, federation_pb2
from federation.v1.admin_pb2_grpc import add_AdminServicer_to_server
from federation.v1.enrollment_pb2_grpc import add_EnrollmentServicer_to_server
from federation.v1.federation_pb2_grpc import add_FederationServicer_to_server
from storage.faults import StorageFault, explain_fault, fault_of

log = logging.getLogger(__name__)

MAX_MESSAGE_BYTES = (2 << 20) + (64 << 10)  # two chunks and some room; holds after decompression too
MAX_METADATA_BYTES = 16 << 10
MAX_CALLS = 8192  # under way at a time, over all callers
GRACE_SECONDS = 5.0
START_SECONDS = 240.0  # how long a start waits for PostgreSQL; the startup probe of `deploy/` allows 300 s
_FIRST_PAUSE_SECONDS, _MAX_PAUSE_SECONDS = 1.0, 10.0  # between two tries

_OPTIONS: tuple[Option, ...] = (
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", -1),
    ("grpc.max_metadata_size", MAX_METADATA_BYTES),
    ("grpc.absolute_max_metadata_size", MAX_METADATA_BYTES),
    ("grpc.max_concurrent_streams", 100),  # of one connection
    # How much of a stream may wait in memory to be read: fixed, or gRPC lets it grow with the line's speed until every
    # member's whole update is in memory at once. How much an upload uses of it is up to its own windows.
    FRAME_BYTES,
    ("grpc.http2.bdp_probe", 0),
    ("grpc.http2.lookahead_bytes", LARGEST_WINDOW),
    ("grpc.server_handshake_timeout_ms", 20_000),
    ("grpc.max_connection_idle_ms", 600_000),
    # A worker whose machine disappears is noticed within a minute; one that pings too often is disconnected.
    ("grpc.keepalive_time_ms", 30_000),
    ("grpc.keepalive_timeout_ms", 20_000),
    ("grpc.http2.min_ping_interval_without_data_ms", 10_000),
    ("grpc.http2.max_ping_strikes", 3),
)

_ADMIN = admin_pb2.DESCRIPTOR.services_by_name["Admin"].full_name
_SERVICES = (
    enrollment_pb2.DESCRIPTOR.services_by_name["Enrollment"].full_name,
    federation_pb2.DESCRIPTOR.services_by_name["Federation"].full_name,
    _ADMIN,
)


class PortTaken(Error, RuntimeError):
    """The coordinator cannot listen where it should; the message says where and what to do."""


@dataclass(frozen=True)
class Coordinator:
    """A federation's coordinator, while it serves.

    Attributes:
        record: which is open.
        rounds: of the runs.
        access: knows the caller of each call.
        health: answers health checks.
        monitor: of its database, disk and bucket.
        monitoring: the task of the monitor; it ends when the coordinator must stop.
        federation_port: for members.
        enrollment_port: for newcomers.
        metrics_port: for scrapes; None if `/metrics` is not served.
    """

    record: OpenRecord
    rounds: Rounds
    access: Access
    health: HealthService
    monitor: Monitor
    monitoring: asyncio.Task[None]
    federation_port: int
    enrollment_port: int
    metrics_port: int | None

    async def watch(self) -> None:
        """Returns when the coordinator stops by itself.

        Raises:
            DirectoryGone: a directory of the coordinator is.
            LockLost: another coordinator has the database.
        """
        await asyncio.shield(self.monitoring)


@asynccontextmanager
async def serving(
    home: CoordinatorHome,
    *,
    clock: Callable[[], datetime] | None = None,
    conduct: bool = True,
    grace: float = GRACE_SECONDS,
) -> AsyncIterator[Coordinator]:
    """Takes the database, goes on with the runs, and serves for as long as the block lasts.

    At its end streams end, calls may finish within `grace` seconds, and all that was started is stopped in reverse
    order; so it is if something cannot be started. Without `conduct`, no run advances. `clock` is aware; a
    `SteadyClock`, which is the default, is compared with the machine's clock.

    Raises:
        ClockBehind, DatabaseBusy, DatabaseIncompatible, HomeError, LogError, BlobStoreUnavailable: see `open_record`.
        MetricsError: `/metrics` cannot be served.
        PortTaken: another process has a port.
    """
    async with Scope() as scope:
        record = await open_record(scope, home, clock, conduct=conduct)
        ports = _open_ports(scope, record)  # nobody is served yet, but no run goes on if a port is taken
        rounds = await _start_rounds(scope, record, conduct=conduct)
        yield await _serve_calls(scope, record, ports, rounds, grace)


@dataclass(frozen=True)
class _Ports:
    """The public ports, which are bound, and that of scrapes, if there is one."""

    front: Front
    refusals: RefusalRecord
    access_threads: ThreadPool
    federation: int
    enrollment: int
    scrapes: "_Scrapes | None"


@dataclass(frozen=True)
class _Scrapes:
    """The bound port of scrapes."""

    listener: socket.socket
    endpoint: MetricsEndpoint

    @property
    def port(self) -> int:
        """The number of the port."""
        return int(self.listener.getsockname()[1])


def _open_ports(scope: Scope, record: OpenRecord) -> _Ports:
    home, settings, many = record.home, record.home.settings, record.database.serves_many
    # Threads of their own, so that access is checked without a queue behind the calls that are served.
    threads = scope.threads(record.database, 4, "access")
    refusals = RefusalRecord(threads, record.faults, record.clock)
    scope.push_async_callback(refusals.finish)
    # If this process freezes, members go to another coordinator as soon as that one has its runs.
    unheard = max(settings.lease_seconds, 3 * BEAT_SECONDS) if many else None
    limits = ConnectionLimits.for_descriptors(descriptor_limit())
    front = Front(limits, refusals.note_connections, settings.enrollment_host, unheard)
    scope.push_async_callback(front.stop)
    federation, enrollment = home.ports()
    if settings.enrollment_host:
        federation = enrollment = _bind(front, home, "both", federation)
    else:
        federation, enrollment = _bind(front, home, "members", federation), _bind(front, home, "newcomers", enrollment)
    scrapes = None
    if (endpoint := settings.metrics.endpoint(home.directory)) is not None:
        scrapes = _Scrapes(endpoint.bind(), endpoint)
        scope.callback(scrapes.listener.close)
    return _Ports(front, refusals, threads, federation, enrollment, scrapes)


async def _start_rounds(scope: Scope, record: OpenRecord, *, conduct: bool) -> Rounds:
    """Goes on with the runs; without `conduct`, commands are only noted."""
    home, settings, database, blobs = record.home, record.home.settings, record.database, record.blobs
    faults, clock, startup = record.faults, record.clock, record.startup
    own_id, lease, keep = startup.registry.coordinator, settings.lease_seconds, settings.keep_rounds or None
    announcements = await scope.start(announcements_of(database, own_id, faults))
    presence, uploads = Presence(announcements), Uploads(database, blobs, quota=settings.upload_bytes)
    offers, signatures = Offers(home.federation_id, home.signing_key), SignatureMemory()
    changes = RunChanges(announcements, presence, database)
    states = RunStates(database, presence, changes, clock)
    attendances = attendances_of(
        database, presence, announcements, offers, faults, coordinator=own_id, lease_seconds=lease, clock=clock
    )
    await scope.start(attendances)
    machine, end_revoked = record.machine_clock, states.end_revoked
    keeper = Housekeeper(
        database, blobs, presence, uploads, faults, end_revoked=end_revoked, keep_rounds=keep, clock=machine
    )
    conductors = Conductors(
        database=database,
        blobs=blobs,
        presence=presence,
        changes=changes,
        states=states,
        signing=home.signing,
        signatures=signatures,
        faults=faults,
        leases=startup.leases,
        submitted=record.is_submitted,
        device=settings.device,
        clock=clock,
        conducts=conduct,
    )
    scope.push_async_callback(asyncio.to_thread, keeper.stop)  # also if it is not started: it notes who attended
    if conduct:
        keeper.start()
    if conduct and isinstance(leases := startup.leases, SharedLeases):
        # Started before the conductors, so that it ends after them: until then they need their leases.
        await scope.start(LeaseKeeper(database, leases, startup.registry, conductors, faults, record.steady))
    await scope.start(conductors)
    if conduct:
        await scope.start(AlertMaker(record, presence, changes))
    commands = RunCommands(database, conductors, startup.leases, states, changes, faults, clock=clock)
    return Rounds(
        announcements, presence, attendances, offers, uploads, changes, states, signatures, keeper, conductors, commands
    )


async def _serve_calls(scope: Scope, record: OpenRecord, ports: _Ports, rounds: Rounds, grace: float) -> Coordinator:
    home, settings, database, front = record.home, record.home.settings, record.database, ports.front
    addresses = home.addresses(ports.federation, ports.enrollment)
    access = Access(
        ports.access_threads,
        home.federation_id,
        signing_key=home.signing_key,
        rights=record.rights,
        chain_log=record.sequencer.sequence,
        verified=front.verified,
        refusals=ports.refusals,
        announcements=rounds.announcements,
        faults=record.faults,
        clock=record.clock,
    )
    parts = Parts(
        settings=settings,
        chain=home.signing.chain,
        threads=scope.threads(database, 16, "service"),
        blobs=record.blobs,
        presence=rounds.presence,
        clock=record.clock,
        record=record,
        rounds=rounds,
        access=access,
        **addresses,
    )
    record.startup.registry.note_addresses(**addresses)
    server = grpc.aio.server(interceptors=[access], options=_OPTIONS, maximum_concurrent_rpcs=MAX_CALLS)
    scope.push_async_callback(server.stop, grace)
    health = HealthService()
    _add_services(server, front, parts, health)
    await server.start()
    await front.start()
    newcomers = settings.enrollment_host or settings.hosts[0]
    if await asyncio.to_thread(serves_tls12, settings.bind, ports.enrollment, newcomers):
        raise RuntimeError(
            "gRPC was imported before federation.transport.tls.require_tls13 was called: it would serve TLS 1.2"
        )
    scope.push_async_callback(health.enter_graceful_shutdown)
    monitor, monitoring = await _start_monitor(scope, record, rounds, health)
    if ports.scrapes is not None:
        await _serve_scrapes(scope, record, rounds, ports.scrapes)
    scope.callback(asyncio.create_task(access.watch_revocations()).cancel)
    scope.callback(access.stop)
    scope.push_async_callback(front.stop_accepting)
    home.note_ports(ports.federation, ports.enrollment)
    scope.callback(_forget_own_ports, record)
    message = "federation %s: members at %s, newcomers at %s, database %s"
    log.info(message, home.federation_id, *addresses.values(), database.url)
    scrapes = None if ports.scrapes is None else ports.scrapes.port
    return Coordinator(record, rounds, access, health, monitor, monitoring, ports.federation, ports.enrollment, scrapes)


def _add_services(server: grpc.aio.Server, front: Front, parts: Parts, health: HealthService) -> None:
    """Lets the server take calls of all services over the sockets behind the front listener."""
    home = parts.record.home
    pair = (private_key_pem(home.server_key), pem(home.current_server_certificate(parts.clock())))
    mutual = grpc.ssl_server_credentials([pair], root_certificates=pem(home.ca), require_client_auth=True)
    server.add_secure_port(front.inner("members"), mutual)
    server.add_secure_port(front.inner("newcomers"), grpc.ssl_server_credentials([pair]))
    add_EnrollmentServicer_to_server(EnrollmentService(parts), server)
    add_FederationServicer_to_server(FederationService(parts), server)
    add_AdminServicer_to_server(AdminService(parts), server)
    health_pb2_grpc.add_HealthServicer_to_server(health, server)
    reflection.enable_server_reflection([*_SERVICES, health_names.SERVICE_NAME, reflection.SERVICE_NAME], server)


async def _serve_scrapes(scope: Scope, record: OpenRecord, rounds: Rounds, scrapes: _Scrapes) -> None:
    token = scrapes.endpoint.token
    keeper = await scope.start(NumberKeeper(record, rounds.presence, names_members=token is not None))
    await scope.start(ScrapeServer(scrapes.listener, token, lambda: page(keeper.readings(), process=True)))


async def _tell_health(health: HealthService, faults: frozenset[StorageFault]) -> None:
    """Administrators are served while a disk is full or a bucket away: they read, and free some space."""
    for service in ("", *_SERVICES):
        stops = faults - {StorageFault.DISK, StorageFault.BLOB_STORE} if service == _ADMIN else faults
        status = health_pb2.HealthCheckResponse.NOT_SERVING if stops else health_pb2.HealthCheckResponse.SERVING
        await health.set(service, status)


async def _start_monitor(
    scope: Scope, record: OpenRecord, rounds: Rounds, health: HealthService
) -> tuple[Monitor, asyncio.Task[None]]:
    monitor = Monitor(record, rounds.commands, partial(_tell_health, health))
    await _tell_health(health, frozenset(record.faults.present))
    monitoring = asyncio.create_task(monitor.run())

    async def end() -> None:
        monitor.stop()
        await asyncio.gather(monitoring, return_exceptions=True)

    scope.push_async_callback(end)
    return monitor, monitoring


def _bind(front: Front, home: CoordinatorHome, service: Serves, port: int) -> int:
    bind = home.settings.bind
    try:
        return front.listen(bind, port, service)
    except OSError as error:
        raise PortTaken(
            f"cannot listen on {address(bind, port)}: {error}. Another process has the port, or the address is not "
            f"this machine's: see bind and the ports in {home.directory / 'coordinator.toml'}"
        ) from None


def _forget_own_ports(record: OpenRecord) -> None:
    if record.database.holds_lock() and record.faults.gone() is None:  # or the file may be another coordinator's
        record.home.ports_file.unlink(missing_ok=True)


def serve(
    home: CoordinatorHome,
    *,
    ready: Callable[[Coordinator], None] = lambda coordinator: None,
    conduct: bool = True,
    manager: ServiceManager | None = None,
) -> None:
    """Runs a coordinator until SIGTERM or SIGINT; a second signal ends the process at once.

    `ready` is called when it serves; without `conduct` no run advances. If PostgreSQL does not answer at the start, it
    waits up to `START_SECONDS`; if the machine's clock is behind the record, until it is right. `manager` hears when it
    serves, and that its event loop runs, also while the database is away.

    Raises:
        DBAPIError: PostgreSQL has not answered until then, or SQLite does not.
        BlobStoreUnavailable: at the start, the bucket of the blobs does not work.
        DatabaseBusy, LockLost: another coordinator has the database.
        DatabaseIncompatible: a newer or an unreleased version made it.
        DirectoryGone: the home, or another directory of the coordinator, was unmounted, moved or removed.
        HomeError: the settings do not fit the machine.
        LogError: the audit log differs from what was signed.
        MetricsError: `/metrics` cannot be served.
        PortTaken: another process has a port.
    """
    asyncio.run(_serve(home, ready, conduct, manager or ServiceManager()))


async def _serve(
    home: CoordinatorHome, ready: Callable[[Coordinator], None], conduct: bool, manager: ServiceManager
) -> None:
    share_heap()
    raise_descriptor_limit()
    loop = asyncio.get_running_loop()
    manager.feed_from(loop)
    signalled = asyncio.Event()

    def on_signal() -> None:
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.remove_signal_handler(number)
        signalled.set()

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, on_signal)
    check_torch_device(home.settings.device)
    async with AsyncExitStack() as scope:
        coordinator = await _started(scope, home, conduct, signalled)
        if coordinator is None:
            log.info("stopping: it has not served yet")
            return
        ready(coordinator)
        manager.ready()
        scope.callback(manager.stopping)
        waits = [asyncio.create_task(signalled.wait()), asyncio.create_task(coordinator.watch())]
        done, pending = await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        for task in pending:
            task.cancel()
        for task in done:
            task.result()
        log.info("stopping")


async def _started(
    scope: AsyncExitStack, home: CoordinatorHome, conduct: bool, signalled: asyncio.Event
) -> Coordinator | None:
    """Starts a coordinator as soon as its database answers and its clock is right; None if a signal comes before.

    A PostgreSQL that starts, or restarts, refuses connections, or ends them in the middle of the start. No reason that
    it gives tells this from a wrong password, so the log has its words.
    """
    ends, pause, told = time.monotonic() + START_SECONDS, _FIRST_PAUSE_SECONDS, -math.inf
    while True:
        try:
            return await scope.enter_async_context(serving(home, conduct=conduct))
        except DBAPIError as error:
            cause, now = f"the coordinator waits for its database ({explain_fault(error)})", time.monotonic()
            if fault_of(error) is not StorageFault.DATABASE or home.database_url.startswith("sqlite") or now > ends:
                raise
        except ClockBehind as error:
            cause, now = str(error), time.monotonic()
        if now - told >= LOG_SECONDS:
            told = now
            log.error("%s", cause)
        await asyncio.to_thread(forget_ports, home)
        with suppress(TimeoutError):
            await asyncio.wait_for(signalled.wait(), pause)
        if signalled.is_set():
            return None
        pause = min(2 * pause, _MAX_PAUSE_SECONDS)
