"""Checks membership, the connection to the coordinator, clock, disk and data of a worker, one after the other.

The checks change nothing. If no worker runs with the directory, the check of the clock attends briefly, without tasks.
"""

import os
import secrets
import shutil
import socket
import ssl
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from datetime import UTC, datetime, timedelta
from importlib.util import find_spec
from pathlib import Path

import grpc
from cryptography import x509
from grpc_health.v1.health_pb2 import HealthCheckRequest, HealthCheckResponse
from grpc_health.v1.health_pb2_grpc import HealthStub

from federation.findings import Finding
from federation.monitoring.metrics_section import MetricsError, MetricsSection
from federation.plugins import PluginError
from federation.refusals import Refusal
from federation.spec.computation import CANNOT, Ability
from federation.tasks import DataError, DataSource
from federation.text import escaped
from federation.training.trainers import TrainerChoice, close_trainer
from federation.transport.proxies import Proxy, ProxyChoice, RouteError, dial, is_loopback
from federation.trust.certificates import fingerprint, issuer_in, load_certificate, renewal_due
from federation.trust.member_files import MemberFiles
from federation.v1.federation_pb2 import AttendRequest, Hello
from federation.v1.federation_pb2_grpc import FederationStub
from federation.work.base import Lane
from federation.work.site import FAILURES
from worker import software
from worker.connection.approval import noted, waits
from worker.connection.attendance import NONCE_BYTES, WRONG_CLOCK_SECONDS
from worker.connection.clock import TimeRefused, signed_time
from worker.connection.downloads import handshake
from worker.connection.starts import known_starts, set_aside
from worker.home import WorkerHome, WorkerHomeError
from worker.ledgers.round_ledger import RoundLedger
from worker.site.leaving import read_leave, read_withdrawal
from worker.site.pause import closing_now, read_pause
from worker.site.policy_file import OpenHours, Policy, PolicyError
from worker.work.cache import KEPT_MODELS

ANSWER_SECONDS = 20.0
SHOULD_BE_RENEWED = timedelta(days=2)  # after it is due
_LEAST_BYTES = 100_000_000  # of free disk space
_INSPECTED = "A device on the way inspects TLS: ask the network department for an exception for {}"


def check_membership(member: MemberFiles, now: datetime) -> Finding:
    """Checks that the certificate of this client is valid, by this machine's clock."""
    certificate = load_certificate(member.certificate)
    begins, ends = certificate.not_valid_before_utc, certificate.not_valid_after_utc
    description = f"{member.client_id} of {member.federation_id}, certificate from {_day(begins)} to {_day(ends)}"
    if now < begins:
        return Finding.failed("membership", f"{description}; this machine's clock says {_day(now)}: set the clock")
    if now >= ends:
        return Finding.failed(
            "membership",
            f"{description}; this machine's clock says {_day(now)}: join again, or set the clock if it is wrong",
        )
    if now >= renewal_due(certificate) + SHOULD_BE_RENEWED:
        return Finding.warning(
            "membership", f"{description}: no worker has renewed it; look at its log, or run `fedpareto worker renew`"
        )
    return Finding.ok("membership", description)


def check_network(address: str, proxy: Proxy | None, member: MemberFiles | None, now: datetime) -> Iterator[Finding]:
    """Checks name, proxy and TLS on the way to the coordinator at "host:port"; ends at the first failure.

    Without a member, the server's certificate is described and not verified. `now` is this machine's time.
    """
    host, port = (address.rpartition(":")[0].strip("[]"), 0) if proxy is None else (proxy.host, proxy.port)
    try:
        addresses = sorted({str(info[4][0]) for info in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)})
    except (OSError, UnicodeError) as error:
        yield Finding.failed(
            "dns",
            f"the name {host} has no address on this machine ({error}): check its spelling and this machine's DNS"
            + ("" if proxy is not None else "; where only a proxy knows it, set https_proxy, or proxy in worker.toml"),
        )
        return
    resolves = "" if proxy is None else f"; the proxy resolves {address.rpartition(':')[0]}"
    yield Finding.ok("dns", f"{host} is {', '.join(addresses)}{resolves}")
    if proxy is None:
        yield Finding.ok("proxy", f"none for {address}: https_proxy is not set, or no_proxy names it")
    try:
        with dial(address, proxy, ANSWER_SECONDS) as plain:
            if proxy is not None:
                yield Finding.ok("proxy", f"{proxy} connects to {address}")
            yield _tls(plain, address, member, now)
    except RouteError as error:
        yield Finding.failed("proxy" if proxy is not None else "tcp", str(error))


def _tls(plain: socket.socket, address: str, member: MemberFiles | None, now: datetime) -> Finding:
    """Checks TLS and the certificate of the server over a connection to it."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    context.set_alpn_protocols(["h2"])
    host = address.rpartition(":")[0].strip("[]")
    try:
        with context.wrap_socket(plain, server_hostname=host) as connection:
            leaf, protocol = connection.getpeercert(binary_form=True) or b"", connection.selected_alpn_protocol()
        certificate = x509.load_der_x509_certificate(leaf)
    except (OSError, ValueError) as error:  # an SSLError is an OSError
        return Finding.failed("tls", f"no TLS 1.3 with {address} ({error}): {_INSPECTED.format(address)}")
    issuer = escaped(certificate.issuer.rfc4514_string(), 100)
    if member is None:
        authorities = [fingerprint(x509.load_der_x509_certificate(authority)) for authority in issuer_in(leaf)]
        if not authorities:
            return Finding.failed(
                "tls", f"the certificate there is of {issuer}, not of a coordinator. {_INSPECTED.format(address)}"
            )
        text = f"a coordinator's certificate, which names the CA {authorities[0]}"
    else:
        try:
            certificate.verify_directly_issued_by(load_certificate(member.ca))
        except Exception:  # of several kinds: another name, another signature, another kind of key
            return Finding.failed(
                "tls", f"the certificate there is of {issuer}, not of this federation. {_INSPECTED.format(address)}"
            )
        if protocol != "h2":
            return Finding.failed("tls", f"the server does not offer HTTP/2. {_INSPECTED.format(address)}")
        text = "the certificate is of the federation's CA"
    begins, ends = certificate.not_valid_before_utc, certificate.not_valid_after_utc
    if not begins <= now <= ends:
        return Finding.failed(
            "tls",
            f"{text}, from {_day(begins)} to {_day(ends)}; this machine's clock says {_day(now)}: set the clock, or, "
            "if it is right, ask the coordinator's operator",
        )
    return Finding.ok("tls", f"{text}, until {_day(ends)}")


def check_coordinator(member: MemberFiles) -> Finding:
    """Checks that the coordinator accepts this client's certificate, and serves."""
    try:
        address, channel = member.serving_channel()
    except RouteError as error:
        return Finding.failed("coordinator", escaped(str(error), 500))
    with channel:
        try:
            answer = HealthStub(channel).Check(HealthCheckRequest(), timeout=ANSWER_SECONDS)
        except grpc.RpcError as error:
            refusal = member.refusal(error, address)
            reason = ": ".join(filter(None, (refusal.reason, refusal.message or refusal.status)))
            return Finding.failed("coordinator", escaped(reason, 500))
    if answer.status != HealthCheckResponse.SERVING:
        return Finding.warning(
            "coordinator",
            "it accepts the certificate, but does not serve now: its disk or its database is away; its operator knows "
            "more",
        )
    return Finding.ok("coordinator", f"{address} accepts the certificate, and serves")


def check_welcome(home: WorkerHome, member: MemberFiles) -> list[Finding]:
    """Checks the coordinator's first message to a worker: its signed time, and whether the member waits for approval.

    If a worker runs with the directory, its log tells of the first, and a file of the second.
    """
    try:
        with home.lock(), member.serving_channel()[1] as channel:
            nonce = secrets.token_bytes(NONCE_BYTES)
            hello = AttendRequest(hello=Hello(software=software(), nonce=nonce))
            call = FederationStub(channel).Attend(iter([hello]), timeout=ANSWER_SECONDS)
            welcome = next(iter(call)).welcome
            member.coordinator.learn(welcome.rotations)
            offset = (signed_time(welcome.time, nonce, member) - datetime.now(UTC)).total_seconds()
            call.cancel()
    except RouteError as error:
        return [Finding.failed("clock", escaped(str(error), 500))]
    except WorkerHomeError:
        skipped = Finding.skipped("clock", "a worker runs with this directory: its log warns of a wrong clock")
        return [skipped, *_approval(noted(home.pending))]
    except grpc.RpcError as error:
        refusal = member.refusal(error)
        return [Finding.failed("clock", escaped(f"{refusal.reason}: {refusal.message or refusal.status}", 500))]
    except (TimeRefused, Refusal, StopIteration) as error:
        return [Finding.failed("clock", str(error) or "the coordinator ended the stream without a word")]
    waiting = waits(member.client_id, welcome.pending) if welcome.HasField("pending") else ""
    return [_clock(offset), *_approval(waiting)]


def _clock(offset: float) -> Finding:
    if abs(offset) > WRONG_CLOCK_SECONDS:
        side = "behind" if offset > 0 else "ahead of"
        return Finding.failed(
            "clock", f"this machine's clock is {abs(offset):.0f} s {side} the coordinator's: set the wrong one (NTP)"
        )
    return Finding.ok("clock", f"within {max(abs(offset), 1):.0f} s of the coordinator's")


def _approval(waiting: str) -> list[Finding]:
    return [Finding.warning("approval", waiting)] if waiting else []


def check_downloads(home: WorkerHome, proxy: ProxyChoice) -> Iterator[Finding]:
    """Checks TLS with each host from which the owner allows downloads (`downloads_from`); no request is sent.

    A problem is a warning, since the coordinator then sends the models.
    """
    try:
        policy = Policy.load(home.policy)
    except PolicyError as error:
        yield Finding.failed("policy", str(error))
        return
    for address in sorted(policy.download_addresses):
        try:
            version = handshake(address, proxy(address))
        except RouteError as error:
            problem = str(error)
        except ssl.SSLCertVerificationError as error:
            problem = (
                f"the certificate of {address} is not accepted ({error.verify_message}). If its authority is your own, "
                f"name the authority's file in SSL_CERT_FILE; otherwise: {_INSPECTED.format(address)}"
            )
        except (OSError, ValueError) as error:
            if isinstance(error, ssl.SSLError) and is_loopback(address.rpartition(":")[0]):
                yield Finding.ok("bucket", f"{address} answers without TLS, which is allowed on this machine")
                continue
            problem = f"no TLS with {address} ({error}): {_INSPECTED.format(address)}"
        else:
            yield Finding.ok("bucket", f"{address} speaks {version}, and its certificate is accepted")
            continue
        yield Finding.warning("bucket", f"{problem}. Until then the coordinator sends the models")


def check_failures(home: WorkerHome) -> Iterator[Finding]:
    """Checks that no data set is kept out of private rounds by failed computations; nothing without a ledger."""
    if not home.rounds.exists():
        return
    try:
        policy = Policy.load(home.policy)
        with closing(RoundLedger(home.rounds)) as ledger:
            failures = ledger.all_failures()
    except (PolicyError, WorkerHomeError, OSError) as error:
        yield Finding.failed("failures", str(error))
        return
    if not failures:
        yield Finding.ok("failures", "no computation of a private round has failed since the last that did not")
    for tasks in dict.fromkeys(policy.data_sets.get(failed.task, frozenset({failed.task})) for failed in failures):
        names, count = ", ".join(sorted(tasks)), sum(failed.task in tasks for failed in failures)
        text = escaped(f"{names}: {count} computations of private rounds failed in a row")
        if count >= FAILURES:
            yield Finding.failed(
                "failures", f"{text}, so it takes part in none: see `fedpareto worker failures`, which also ends this"
            )
        else:
            yield Finding.warning("failures", f"{text}: see `fedpareto worker failures`")


def check_pause(home: WorkerHome, now: datetime) -> Iterator[Finding]:
    """Warns of an owner's pause at the time `now`; nothing without one."""
    pause, problem = read_pause(home.pause)
    if problem:
        yield Finding.failed("pause", problem)
    elif (paused := closing_now(pause, OpenHours(), now)) is not None:
        yield Finding.warning(
            "pause", f"the site is {paused}, and begins no new work: `fedpareto worker resume` ends the pause"
        )


def check_leaving(home: WorkerHome) -> Iterator[Finding]:
    """Warns of an owner's wish to leave, and says when the site has left; nothing without a wish."""
    leave, problem = read_leave(home.leave)
    try:
        withdrawal = read_withdrawal(home.withdrawal)
    except WorkerHomeError as error:
        yield Finding.failed("leaving", str(error))
        return
    if withdrawal is not None and withdrawal.left is not None:
        yield Finding.warning(
            "leaving",
            f"this site has left the federation on {_day(withdrawal.left)}: to come back, join again with a new join "
            "string for its name",
        )
    elif problem:
        yield Finding.failed("leaving", problem)
    elif leave is not None:
        asked = "" if withdrawal is None else " A withdrawal is signed, and no coordinator has acknowledged it."
        yield Finding.warning(
            "leaving",
            f"since {_day(leave.since)} the owner wants to leave: no new work begins, and the withdrawal is sent once "
            f"{'a coordinator answers' if leave.now else 'begun work has ended and a coordinator answers'}.{asked} "
            "`fedpareto worker run` sends it; if no worker runs, `fedpareto worker leave` does, too",
        )


def check_copy(home: WorkerHome) -> Iterator[Finding]:
    """Checks that this home is not one of two copies, of which the owner has to choose one; nothing if it is not."""
    try:
        known = known_starts(home.starts)
    except WorkerHomeError as error:
        yield Finding.failed("copy", str(error))
        return
    if set_aside(home):
        yield Finding.failed(
            "copy",
            "this directory was set aside for another copy: remove it, or run `fedpareto worker copied --this-one`",
        )
    elif known.refused and known.since is not None:
        yield Finding.failed(
            "copy",
            f"a copy of this directory runs elsewhere, and the coordinator refuses this one since {_day(known.since)}: "
            "stop both workers, then run `fedpareto worker copied` with the directory that goes on",
        )


def check_disk(directory: Path, model_bytes: int) -> Finding:
    """Checks the disk space for models and updates; `model_bytes` is the size of the largest model."""
    existing = next(path for path in (directory.absolute(), *directory.absolute().parents) if path.exists())
    free = shutil.disk_usage(existing).free
    # The cached models of each lane, one that arrives, and an update that waits for its receipt.
    needed = (KEPT_MODELS * len(Lane) + 2) * model_bytes
    text = f"{free / 1e9:.1f} GB are free at {existing}"
    if model_bytes:
        text += f"; models and updates take up to {needed / 1e9:.3g} GB"
    if free < max(_LEAST_BYTES, 2 * model_bytes):
        return Finding.failed("disk", f"{text}: free some space")
    return Finding.warning("disk", f"{text}: free some space") if free < needed else Finding.ok("disk", text)


def check_metrics(section: MetricsSection) -> Finding:
    """Checks the token and the library of `/metrics`; its port may be the running worker's."""
    try:
        endpoint = section.endpoint(Path())
    except MetricsError as error:
        return Finding.failed("metrics", str(error))
    scrapes = "any process of this machine" if endpoint is None or endpoint.token is None else "who has the token"
    return Finding.ok("metrics", f"/metrics is served at {section.listen}, to {scrapes}")


def check_notify(command: Sequence[str]) -> Finding:
    """Checks that the program exists which tells the owner. It is not run."""
    program = escaped(command[0], 200)
    if (found := shutil.which(command[0])) is None:
        return Finding.failed(
            "notify",
            f"notify.command of worker.toml names {program}, which is no program that this user can run: correct it, "
            "or install the program",
        )
    return Finding.ok("notify", f"{escaped(found, 200)} tells the owner; it is not run now")


def check_device(name: str) -> Finding:
    """Checks the device that trains; a missing GPU is not an error."""
    if find_spec("torch") is None:
        return Finding.warning(
            "device", "PyTorch is not installed: install fedpareto[torch], unless your trainer does without"
        )
    import torch  # noqa: PLC0415 - it may be missing

    from federation.training.determinism import describe_device, pick_device  # noqa: PLC0415

    try:
        device = pick_device(name)
    except ValueError as error:
        return Finding.failed("device", str(error))
    if torch.device(device).type == "cuda":
        free, total = torch.cuda.mem_get_info(torch.device(device))
        description = f"{describe_device(device)}, {free / 1e9:.1f} of {total / 1e9:.1f} GB free"
        return Finding.ok("device", description)
    if name == "auto" and Path("/dev/nvidiactl").exists():
        return Finding.warning(
            "device",
            "there is an NVIDIA driver, but PyTorch finds no GPU: install a PyTorch for CUDA; training uses the CPU",
        )
    return Finding.ok("device", f"no GPU; training uses the CPU, {os.cpu_count()} cores")


def described_tasks(home: WorkerHome, tasks: Iterable[str]) -> frozenset[str]:
    """Those of these tasks that may be described in some run."""
    try:
        return Policy.load(home.policy).described_of(tasks)
    except PolicyError:  # `worker run` names what is wrong
        return frozenset()


def check_tasks(
    names: Sequence[str],
    source: DataSource,
    device: str,
    trainers: Mapping[str, TrainerChoice],
    describes: Collection[str] = (),
) -> Iterator[tuple[Finding, int]]:
    """Loads each task and this client's data, and tries a batch; each finding with the size of the model in bytes.

    `describes` are the tasks that may be described in some run, also where the model has no finite loss.
    """
    from worker.service import prepare_offers  # noqa: PLC0415 - loads PyTorch

    for name in names:
        try:
            offers, _ = prepare_offers(
                [name], source, device=device, threads=None, trainers=trainers, describes=describes
            )
        except DataError as error:
            yield Finding.ok("task", f"{name} is found"), 0
            yield Finding.failed("data", f"{name}: {error}"), 0
        except (ImportError, ValueError, RuntimeError, MemoryError) as error:  # RuntimeError: a GPU out of memory, say
            yield Finding.failed("task", f"{name}: {error}"), 0
        else:
            trainer = offers[name]
            size = trainer.layout.file_bytes
            text = f"{name}: {trainer.layout.size} parameters, {size / 1e6:.3g} MB a model"
            if Ability.REPEATABLE not in trainer.abilities:
                text += f"; its trainer {CANNOT[Ability.REPEATABLE]}, so replies are marked unrepeatable"
            yield Finding.ok("task", text), size
            try:
                close_trainer(trainer)
            except PluginError as error:
                yield Finding.failed("task", f"{name}: {error}"), 0
            if trainer.unfit:
                yield Finding.warning("data", f"{name} is offered for statistics alone: {trainer.unfit}"), size
                continue
            samples = f"{name}: {trainer.samples} training samples; a batch of each split has finite losses"
            yield (Finding.ok if trainer.samples else Finding.warning)("data", samples), size


def _day(time: datetime) -> str:
    return f"{time:%Y-%m-%d %H:%M} UTC"
