"""The daemon: the front listener's two ports, one gRPC server behind them, and its services."""

import asyncio
import logging
import math
import secrets
import signal
import socket
import ssl
import time
from collections.abc import Callable
from contextlib import suppress
from datetime import datetime

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection
from sqlalchemy.exc import DBAPIError

from coordinator.alerts.maker import AlertMaker, Limits
from coordinator.audit.checkpoints import LogError
from coordinator.audit.sequencer import Sequencer
from coordinator.clock import SteadyClock, utc_now
from coordinator.cluster.announcements import Announcements, announcements_of
from coordinator.cluster.leases import SharedLeases
from coordinator.cluster.registry import Registry, software
from coordinator.device import check_torch_device
from coordinator.fault_state import LOG_SECONDS, FaultState
from coordinator.front.connection_limits import ConnectionLimits, descriptor_limit, raise_descriptor_limit
from coordinator.front.listener import BEAT_SECONDS, Front, Serves
from coordinator.home import CoordinatorHome, address
from coordinator.lease_keeper import LeaseKeeper
from coordinator.members.access.control import Access
from coordinator.members.logged_rights import LoggedRights
from coordinator.members.requests import officers_caution
from coordinator.monitor import ClockBehind, ClockWatch, Monitor, check_follows
from coordinator.rounds.fleets.attendances import Attendances, attendances_of
from coordinator.rounds.fleets.consents import Offers
from coordinator.rounds.fleets.presence import Presence
from coordinator.rounds.replies.uploads import Uploads
from coordinator.rounds.supervisor import Supervisor
from coordinator.services.admin import AdminService
from coordinator.services.base import Parts
from coordinator.services.enrollment import EnrollmentService
from coordinator.services.federation import FederationService
from coordinator.services.health import HealthService
from coordinator.services.transfers import LARGEST_WINDOW
from coordinator.startup import ProcessLock, Startup, check_shares_blobs, forget_ports, lock_database, start_up
from coordinator.thread_pool import ThreadPool, all_started, share_heap
from federation.directories import Directories
from federation.errors import Error
from federation.process.service_manager import ServiceManager
from federation.transport.channels import Option
from federation.trust.certificates import pem
from federation.trust.keys import make_private_directory, private_key_pem
from federation.v1 import admin_pb2, enrollment_pb2, federation_pb2
from federation.v1.admin_pb2_grpc import add_AdminServicer_to_server
from federation.v1.enrollment_pb2_grpc import add_EnrollmentServicer_to_server
from federation.v1.federation_pb2_grpc import add_FederationServicer_to_server
from storage import audit
from storage.database import UNAVAILABLE, Database
from storage.faults import StorageFault, explain_fault, fault_of
from storage.reserve import Reserve

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


def _serves_tls12(bind: str, port: int, host: str) -> bool:
    """True if a handshake in TLS 1.2 succeeds with a server that asks for no certificate."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    context.minimum_version = context.maximum_version = ssl.TLSVersion.TLSv1_2
    context.set_alpn_protocols(["h2"])
    address = {"0.0.0.0": "127.0.0.1", "::": "::1", "[::]": "::1"}.get(bind, bind)  # noqa: S104 - read, not bound
    try:
        with (
            socket.create_connection((address, port), timeout=10) as plain,
            context.wrap_socket(plain, server_hostname=host),
        ):
            return True
    except OSError:  # an SSLError is one too
        return False


class PortTaken(Error, RuntimeError):
    """The coordinator cannot listen where it should; the message says where and what to do."""


class Coordinator:
    """A federation's coordinator, from `start` to `stop`; without `conduct`, no run advances. `clock` is aware.

    `database` is that of the federation; it is closed at the end. By default it is opened here, which may take seconds.
    By default the time is that of a `SteadyClock`, which is compared with the machine's clock.
    """

    def __init__(
        self,
        home: CoordinatorHome,
        database: Database | None = None,
        *,
        clock: Callable[[], datetime] | None = None,
        conduct: bool = True,
    ) -> None:
        self._home = home
        self._conduct = conduct
        steady = SteadyClock()
        self._steady = steady if clock is None else None
        self._clock = clock = clock or steady
        self._database = home.open_database() if database is None else database
        self._executor = all_started(16, "service")
        # A second one, so that access is checked without a queue behind the calls that are served.
        self._access_executor = all_started(4, "access")
        self._faults = FaultState(alone=not self._database.serves_many)
        self._rights = LoggedRights()
        self._sequencer = Sequencer(
            self._database,
            home.log_key,
            home.directory,
            faults=self._faults,
            clock=clock,
            listener=self._rights.learn,
        )
        self._access = Access(
            ThreadPool(self._database, self._access_executor),
            home.federation_id,
            signing_key=home.signing_key,
            rights=self._rights,
            chain_log=self._sequencer.sequence,
            faults=self._faults,
            clock=clock,
        )
        limits, newcomers = ConnectionLimits.for_descriptors(descriptor_limit()), home.settings.enrollment_host
        # If this process freezes, members go to another coordinator as soon as that one has its runs.
        unheard = max(home.settings.lease_seconds, 3 * BEAT_SECONDS) if self._database.serves_many else None
        self._front = Front(limits, self._access.note_refused_connections, newcomers, unheard)
        self._access.on_verified = self._front.verified
        self._health = HealthService()
        self._server: grpc.aio.Server | None = None
        self._supervisor: Supervisor | None = None
        self._process_lock: ProcessLock | None = None
        self._startup: Startup | None = None
        self._keeper: LeaseKeeper | None = None
        self._alerts: AlertMaker | None = None
        self._monitor: Monitor | None = None
        self._monitoring: asyncio.Task[None] | None = None
        self._watching: asyncio.Task[None] | None = None
        self._announcements = Announcements()
        self._attendances = Attendances()
        self.federation_port = 0
        self.enrollment_port = 0

    async def start(self) -> None:
        """Takes the database, goes on with the runs, and serves.

        Raises:
            DatabaseBusy: another coordinator has the database.
            DatabaseIncompatible: a newer or an unreleased version made it.
            LogError: the audit log differs from what was signed, or an administrator or a member from the log.
            BlobStoreUnavailable: the bucket of the blobs does not work.
            PortTaken: another process has a port.
        """
        home, database, settings = self._home, self._database, self._home.settings
        newcomers = settings.enrollment_host or settings.hosts[0]
        self._process_lock = process_lock = await asyncio.to_thread(lock_database, home, database)  # it may wait
        reserve = self._reserve()
        self._startup = startup = self._start_up(process_lock)
        self._sequencer.start()
        self._check_logged()
        blobs = home.open_blobs(database)
        blobs.sweep_temporary()
        blobs.probe(takes_new=True)
        check_shares_blobs(database, blobs, startup.registry)
        coordinator = startup.registry.coordinator
        self._announcements = self._access.announcements = announcements_of(database, coordinator, self._faults)
        presence, uploads = Presence(self._announcements), Uploads(database, blobs, quota=settings.upload_bytes)
        offers = Offers(home.federation_id, home.signing_key)
        self._attendances = attendances_of(
            database,
            presence,
            self._announcements,
            offers,
            self._faults,
            coordinator=coordinator,
            lease_seconds=settings.lease_seconds,
            clock=self._clock,
        )
        self._supervisor = supervisor = Supervisor(
            database=database,
            blobs=blobs,
            presence=presence,
            uploads=uploads,
            signing=home.signing,
            faults=self._faults,
            announcements=self._announcements,
            device=settings.device,
            keep_rounds=settings.keep_rounds or None,
            clock=self._clock,
            machine_clock=self._machine_clock,
            submitted=self._submitted,
            leases=startup.leases,
        )
        self._server = server = grpc.aio.server(
            interceptors=[self._access], options=_OPTIONS, maximum_concurrent_rpcs=MAX_CALLS
        )
        self._listen(server)
        parts = Parts(
            settings=settings,
            chain=home.signing.chain,
            home=home,
            threads=ThreadPool(database, self._executor),
            blobs=blobs,
            uploads=uploads,
            attendances=self._attendances,
            offers=offers,
            presence=presence,
            supervisor=supervisor,
            access=self._access,
            sequencer=self._sequencer,
            rights=self._rights,
            faults=self._faults,
            clock=self._clock,
            machine_clock=self._machine_clock,
            **home.addresses(self.federation_port, self.enrollment_port),
        )
        add_EnrollmentServicer_to_server(EnrollmentService(parts), server)
        add_FederationServicer_to_server(FederationService(parts), server)
        add_AdminServicer_to_server(AdminService(parts), server)
        health_pb2_grpc.add_HealthServicer_to_server(self._health, server)
        reflection.enable_server_reflection([*_SERVICES, health.SERVICE_NAME, reflection.SERVICE_NAME], server)
        startup.registry.note_addresses(parts.address, parts.enrollment_address)
        self._announcements.start()
        await asyncio.to_thread(self._attendances.start)
        supervisor.start(conduct=self._conduct)
        if self._conduct and isinstance(startup.leases, SharedLeases):
            self._keeper = LeaseKeeper(
                database, startup.leases, startup.registry, supervisor, self._faults, self._steady
            )
            self._keeper.start()
        if self._conduct:
            self._alerts = AlertMaker(
                database=database,
                blobs=blobs,
                presence=presence,
                supervisor=supervisor,
                faults=self._faults,
                certificates=(home.ca, home.server),
                limits=Limits.of(settings),
                clock=self._clock,
            )
            self._alerts.start()
        await server.start()
        await self._front.start()
        if await asyncio.to_thread(_serves_tls12, settings.bind, self.enrollment_port, newcomers):
            raise RuntimeError(
                "gRPC was imported before federation.transport.tls.require_tls13 was called: it would serve TLS 1.2"
            )
        clocks = None
        if self._steady is not None:
            clocks = ClockWatch(self._steady, self._faults, judged=database.serves_many)
        self._monitor = Monitor(
            database=database,
            blobs=blobs,
            reserve=reserve,
            supervisor=supervisor,
            faults=self._faults,
            registry=startup.registry,
            clocks=clocks,
            changed=self._tell_health,
        )
        await self._tell_health(frozenset(self._faults.present))
        self._monitoring = asyncio.create_task(self._monitor.run())
        self._watching = asyncio.create_task(self._access.watch_revocations())
        home.note_ports(self.federation_port, self.enrollment_port)
        message = "federation %s: members at %s, newcomers at %s, database %s"
        log.info(message, home.federation_id, parts.address, parts.enrollment_address, database.url)

    @property
    def _machine_clock(self) -> Callable[[], datetime]:
        return self._clock if self._steady is None else self._steady.machine

    async def stop(self, grace: float = GRACE_SECONDS) -> None:
        """Ends streams, lets calls finish within `grace` seconds, stops the supervisor, and closes the database."""
        if self._database.holds_lock() and self._faults.gone() is None:  # or the file may be another coordinator's
            self._home.ports_file.unlink(missing_ok=True)
        await self._front.stop_accepting()
        self._access.stop()
        if self._watching is not None:
            self._watching.cancel()
        if self._monitor is not None and self._monitoring is not None:
            self._monitor.stop()
            await asyncio.gather(self._monitoring, return_exceptions=True)
        await self._health.enter_graceful_shutdown()
        if self._server is not None:
            await self._server.stop(grace)
        await self._front.stop()
        await self._access.finish()
        if self._alerts is not None:
            await asyncio.to_thread(self._alerts.stop)
        if self._supervisor is not None:
            await asyncio.to_thread(self._supervisor.stop)
        if self._keeper is not None:
            await asyncio.to_thread(self._keeper.stop)
        await asyncio.to_thread(self._sequencer.stop)
        for executor in (self._executor, self._access_executor):
            await asyncio.to_thread(executor.shutdown)
        await asyncio.to_thread(self._attendances.stop)
        await asyncio.to_thread(self._announcements.stop)
        if self._startup is not None:
            await asyncio.to_thread(self._leave, self._startup.registry)
        self._database.close()
        if self._process_lock is not None:
            self._process_lock.release()
            self._process_lock = None

    async def watch(self) -> None:
        """Returns when the coordinator stops by itself.

        Raises:
            DirectoryGone: a directory of the coordinator is.
            LockLost: another coordinator has the database.
        """
        if self._monitoring is not None:
            await asyncio.shield(self._monitoring)

    def _start_up(self, process_lock: ProcessLock) -> Startup:
        """Enters the registry, and records the start."""
        home, database = self._home, self._database
        directories = [home.directory, home.blobs_dir, *filter(None, [database.directory])]
        self._faults.keep(Directories(directories, "the coordinator", waits=True))
        home.ports_file.unlink(missing_ok=True)
        startup = start_up(home, database, process_lock, secrets.token_hex(16), clock=self._clock)
        with database.read() as session:
            if (caution := officers_caution(session, home.settings)) is not None:
                log.warning("%s", caution)
        if self._conduct:
            detail = software()
            with database.begin() as session:
                audit.record(
                    session, at=self._clock(), actor="coordinator", action="coordinator.started", detail=detail
                )
        return startup

    def _leave(self, registry: Registry) -> None:
        """Leaves the registry, so that other coordinators need not wait for a sign of life."""
        try:
            if self._faults.gone() is None:
                registry.leave()
        except UNAVAILABLE as error:
            log.warning("could not note that this coordinator has stopped: %s", explain_fault(error))

    def _submitted(self, run_id: str, spec: str) -> bool:
        if not self._rights.tells_of_run(run_id, spec):  # it may have been submitted a moment ago
            try:
                self._sequencer.sequence()
            except LogError as error:
                log.error("audit log: %s", error)
        return self._rights.tells_of_run(run_id, spec)

    def _check_logged(self) -> None:
        """Compares administrators and members with the log; looks twice, since one may be issued meanwhile."""
        problems = list[str]()
        for _ in range(2):
            self._sequencer.sequence()
            with self._database.read() as session:
                problems = self._rights.problems(session)
            if not problems:
                return
        raise LogError(
            f"the database gives rights that the audit log does not tell of: {'; '.join(problems[:5])}. Somebody has "
            "changed the database: keep a copy of it, and restore the newest backup"
        )

    def _reserve(self) -> Reserve:
        """The reserve on the disks of the database and the blobs; on a disk that is full already, it is released."""
        home = self._home
        make_private_directory(home.blobs_dir)
        directories = [home.blobs_dir]
        if (database := self._database.directory) is not None:
            directories.insert(0, database)
        reserve = Reserve(directories)
        try:
            reserve.hold()
        except OSError as error:
            if self._faults.note(error) is None:
                raise
        return reserve

    async def _tell_health(self, faults: frozenset[StorageFault]) -> None:
        """Administrators are served while a disk is full or a bucket away: they read, and free some space."""
        for service in ("", *_SERVICES):
            stops = faults - {StorageFault.DISK, StorageFault.BLOB_STORE} if service == _ADMIN else faults
            status = health_pb2.HealthCheckResponse.NOT_SERVING if stops else health_pb2.HealthCheckResponse.SERVING
            await self._health.set(service, status)

    def _listen(self, server: grpc.aio.Server) -> None:
        home = self._home
        pair = (private_key_pem(home.server_key), pem(home.current_server_certificate(self._clock())))
        mutual = grpc.ssl_server_credentials([pair], root_certificates=pem(home.ca), require_client_auth=True)
        server.add_secure_port(self._front.inner("members"), mutual)
        server.add_secure_port(self._front.inner("newcomers"), grpc.ssl_server_credentials([pair]))
        federation, enrollment = home.ports()
        if home.settings.enrollment_host:
            self.federation_port = self.enrollment_port = self._bind("both", federation)
        else:
            self.federation_port = self._bind("members", federation)
            self.enrollment_port = self._bind("newcomers", enrollment)

    def _bind(self, service: Serves, port: int) -> int:
        bind = self._home.settings.bind
        try:
            return self._front.listen(bind, port, service)
        except OSError as error:
            raise PortTaken(
                f"cannot listen on {address(bind, port)}: {error}. Another process has the port, or the address is not "
                f"this machine's: see bind and the ports in {self._home.directory / 'coordinator.toml'}"
            ) from None


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
    coordinator = await _started(home, conduct, signalled)
    if coordinator is None:
        log.info("stopping: it has not served yet")
        return
    try:
        ready(coordinator)
        manager.ready()
        waits = [asyncio.create_task(signalled.wait()), asyncio.create_task(coordinator.watch())]
        done, pending = await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        for task in pending:
            task.cancel()
        for task in done:
            task.result()
        log.info("stopping")
    finally:
        manager.stopping()
        await coordinator.stop()


async def _started(home: CoordinatorHome, conduct: bool, signalled: asyncio.Event) -> Coordinator | None:
    """Starts a coordinator as soon as its database answers and its clock is right; None if a signal comes before.

    A PostgreSQL that starts, or restarts, refuses connections, or ends them in the middle of the start. No reason that
    it gives tells this from a wrong password, so the log has its words.
    """
    ends, pause, told = time.monotonic() + START_SECONDS, _FIRST_PAUSE_SECONDS, -math.inf
    while True:
        try:
            return await _start(home, conduct)
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


async def _start(home: CoordinatorHome, conduct: bool) -> Coordinator:
    database = await asyncio.to_thread(home.open_database)  # it may wait ten seconds for an answer
    try:
        await asyncio.to_thread(check_follows, database, utc_now())
    except BaseException:
        database.close()
        raise
    coordinator = Coordinator(home, database, conduct=conduct)
    try:
        await coordinator.start()
    except BaseException:
        await coordinator.stop()
        raise
    return coordinator
