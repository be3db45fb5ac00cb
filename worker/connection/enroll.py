"""Joining a federation, and joining it again with the signing key (docs/operate/operations.md)."""

import contextlib
import secrets
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import grpc
from cryptography.hazmat.primitives.asymmetric.ec import EllipticCurvePrivateKey
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

from federation.digests import digest
from federation.durable_files import make_directories, rename_durably
from federation.errors import Error
from federation.transport.addresses import each_problem, in_own_order, is_address, known_addresses
from federation.transport.channels import refusal_from_rpc_error, server_verified_channel
from federation.transport.first_serving import first_serving
from federation.transport.proxies import Proxy, ProxyChoice, RouteError, no_proxy
from federation.trust.certificates import load_certificate_file, make_csr, pem
from federation.trust.identity import parse_peer
from federation.trust.join_string import JoinStringFields, fetch_ca
from federation.trust.key_chain import CoordinatorKeys
from federation.trust.keys import (
    IdentityError,
    is_encrypted,
    load_signing_key,
    load_tls_key,
    new_tls_key,
    private_key_pem,
    remedy,
    replace_private,
)
from federation.trust.member_files import MemberFiles, note_addresses, read_description, save_keys, save_renewal
from federation.trust.proofs import prove_possession
from federation.v1.enrollment_pb2 import EnrollRequest, EnrollResponse
from federation.v1.enrollment_pb2_grpc import EnrollmentStub
from worker import software
from worker.home import WorkerHome

CONNECT_SECONDS = 20.0
ENROL_SECONDS = 60.0
SERVICE = "federation.v1.Enrollment"
# The status of a call that may have been obeyed.
_UNKNOWN = frozenset({"UNAVAILABLE", "DEADLINE_EXCEEDED", "UNKNOWN", "INTERNAL", "CANCELLED", "ABORTED", "DATA_LOSS"})

_ADVICE = {
    "join-string-invalid": "the coordinator does not know this join string: check that it was copied whole, "
    "or ask a security officer for a new one",
    "join-string-expired": "this join string has expired: ask a security officer for a new one",
    "join-string-cancelled": "this join string was cancelled: ask a security officer for a new one",
    "join-string-used": "this join string was used before; it works once. If that was not you, tell the federation's "
    "security officer at once; in any case ask for a new one",
}


class EnrollmentError(Error):
    """Joining failed; the message says why and what to do. New keys are kept only if their outcome is unknown."""


class AnswerLost(EnrollmentError):
    """No answer came: the coordinator may have enrolled the member, or not."""


@dataclass(frozen=True)
class Enrolled:
    """A membership that is on the disk, and whether an operator must approve the client before it gets work."""

    member: MemberFiles
    approval_pending: bool


def enroll(
    home: WorkerHome, join: JoinStringFields, *, passphrase: bytes | None = None, proxy: ProxyChoice = no_proxy
) -> Enrolled:
    """Joins as the client that a join string names. The directory appears complete or not at all.

    The home must be missing or empty. Without a passphrase, only the file mode protects the private keys. They are on
    the disk, beside the home, before the coordinator is asked. If its answer is lost, they stay, and the next call uses
    them: the coordinator may have enrolled them.

    Raises:
        EnrollmentError: the directory is not empty, no server or another server answers, or the join string is
            refused.
        IdentityError: the keys of an earlier call cannot be opened.
    """
    _check_free(home)
    directory = home.directory.absolute()
    with _making(home):
        make_directories(directory.parent)
        address, ca = _coordinator(join, proxy)
        staging = _staging(directory, join)
        if kept := staging.exists():
            _check_fits(staging, passphrase)
        else:
            _make_keys(staging, passphrase)
        tls_key = load_tls_key(staging / "tls.key", passphrase)
        signing_key = load_signing_key(staging / "signing.key", passphrase)
        with _keeping(staging, kept, partial(shutil.rmtree, staging)):
            response = _exchange(join, address, ca, _request(join, tls_key, signing_key), proxy(address))
            _check(response, join, ca)
        member = MemberFiles(
            federation_id=response.federation_id,
            client_id=response.client_id,
            addresses=_addresses(response),
            ca=ca,
            certificate=response.certificate,
            tls_key=tls_key,
            signing_key=signing_key,
            coordinator=CoordinatorKeys(
                response.federation_id, Ed25519PublicKey.from_public_bytes(response.coordinator_key)
            ),
        )
        member.complete(staging)
        rename_durably(staging, directory)
    return Enrolled(member, response.approval_pending)


def join_again(
    home: WorkerHome, join: JoinStringFields, *, passphrase: bytes | None = None, proxy: ProxyChoice = no_proxy
) -> Enrolled:
    """Gets a certificate for a member whose certificate has ended or whose TLS key is lost.

    The signing key in `home` proves the membership. The caller has locked the home. The passphrase opens the signing
    key and encrypts the new TLS key.

    Raises:
        EnrollmentError: the join string is for another name or federation, no server answers, or it is refused.
        IdentityError: the signing key or another file that the membership needs is missing or damaged.
    """
    directory = home.directory
    values = read_description(directory, MemberFiles.name_key)
    if values["client_id"] != join.client_id:
        raise EnrollmentError(
            f"{directory} holds the membership of {values['client_id']}, and the join string is for {join.client_id}: "
            "choose another directory for another client"
        )
    with remedy(
        f"restore it from a backup; without the signing key, have {join.client_id} revoked, and join under a new name"
    ):
        signing_key = load_signing_key(directory / "signing.key", passphrase)
        known = pem(load_certificate_file(directory / "ca.pem"))
    address, ca = _coordinator(join, proxy)
    if ca.strip() != known.strip():
        raise EnrollmentError(f"the join string is of another federation than {values['federation_id']}")
    kept = home.joining.exists()
    try:
        if not kept:
            replace_private(home.joining, private_key_pem(new_tls_key(), passphrase))
    except OSError as error:
        raise EnrollmentError(f"{directory} cannot be written ({error.strerror or error}): make room there") from error
    tls_key = load_tls_key(home.joining, passphrase)
    with _keeping(home.joining, kept, home.joining.unlink):
        response = _exchange(join, address, ca, _request(join, tls_key, signing_key), proxy(address))
        _check(response, join, ca)
    try:
        # First: with the new certificate, a withdrawal from the joining before would be one from this one.
        for file in (home.leave, home.withdrawal):
            file.unlink(missing_ok=True)
        save_renewal(directory, tls_key, response.certificate, passphrase)
        note_addresses(directory, MemberFiles.name_key, addresses=_addresses(response))
        home.joining.unlink()
    except OSError as error:
        raise EnrollmentError(
            f"the certificate cannot be written to {directory} ({error.strerror or error}): make room there, and run "
            "the same command again"
        ) from error
    return Enrolled(MemberFiles.load(directory, passphrase), response.approval_pending)


def _request(join: JoinStringFields, tls_key: EllipticCurvePrivateKey, signing_key: Ed25519PrivateKey) -> EnrollRequest:
    csr = make_csr(tls_key)
    return EnrollRequest(
        secret=join.secret,
        csr=csr,
        signing_key=signing_key.public_key().public_bytes_raw(),
        proof=prove_possession(signing_key, join.secret, csr),
        software=software(),
    )


def _check_free(home: WorkerHome) -> None:
    """Looks at the directory before the join string is used: a wrong path must not use it up."""
    directory = home.directory.absolute()
    if home.joined:
        raise EnrollmentError(
            f"{home.directory} holds a membership already: choose another directory for another client, "
            "or move this one away first"
        )
    if directory.exists() and (not directory.is_dir() or any(directory.iterdir())):
        raise EnrollmentError(f"{home.directory} is not empty: choose a directory that does not exist yet")


@contextmanager
def _making(home: WorkerHome) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise EnrollmentError(
            f"cannot make {home.directory}: {error.strerror or error}; choose one inside a directory of yours"
        ) from error


def _staging(directory: Path, join: JoinStringFields) -> Path:
    """Where the keys of a newcomer are until it has joined: one place for each name in each federation."""
    newcomer = digest(f"{join.client_id}/{join.ca_fingerprint}".encode()).partition(":")[2][:16]
    return directory.with_name(f".{directory.name}.joining-{newcomer}")


def _make_keys(staging: Path, passphrase: bytes | None) -> None:
    """Makes new keys in a directory, which appears with both or not at all."""
    new = staging.with_name(f"{staging.name}.{secrets.token_hex(4)}")
    try:
        save_keys(new, new_tls_key(), Ed25519PrivateKey.generate(), passphrase)
        rename_durably(new, staging)
    finally:
        with contextlib.suppress(FileNotFoundError):
            shutil.rmtree(new)


def _check_fits(staging: Path, passphrase: bytes | None) -> None:
    """Raises EnrollmentError if the keys of an earlier call have a passphrase and this one has none, or vice versa."""
    if is_encrypted(staging / "signing.key") is not bool(passphrase):
        kept = "have a passphrase" if passphrase is None else "have no passphrase"
        raise EnrollmentError(
            f"the keys of an earlier attempt, in {staging}, {kept}: join with the same passphrase, or without"
        )


@contextmanager
def _keeping(keys: Path, kept: bool, remove: Callable[[], object]) -> Iterator[None]:
    """Removes new keys that a coordinator has refused. Those whose outcome is unknown stay; `kept` are of before."""
    try:
        yield
    except EnrollmentError as error:
        if not (kept or isinstance(error, AnswerLost)):
            remove()
            raise
        raise type(error)(
            f"{error}. The coordinator may have enrolled this member before: the keys are kept in {keys}. To go on "
            "with them, run the same command again; if the join string is no longer good, with another one for the "
            "same name"
        ) from error


def _coordinator(join: JoinStringFields, proxy: ProxyChoice) -> tuple[str, bytes]:
    """The address of the first coordinator of a join string that serves newcomers, and the CA that it belongs to.

    The join string is used up by one call at most: only coordinators that do not answer, or not as the federation's,
    are passed over.
    """
    problems = dict[str, str]()
    for address in join.addresses:
        try:
            ca = fetch_ca(address, join.ca_fingerprint, CONNECT_SECONDS, proxy(address))
        except (IdentityError, RouteError) as error:
            problems[address] = str(error)
        else:
            break
    else:
        raise EnrollmentError(each_problem(problems))
    left = [address for address in join.addresses if address not in problems]
    try:
        address, channel = first_serving(
            left, SERVICE, proxy, lambda address: server_verified_channel(address, ca, proxy=proxy(address))
        )
    except RouteError as error:
        raise EnrollmentError("; ".join(filter(None, (each_problem(problems), str(error))))) from error
    channel.close()
    return address, ca


def _exchange(
    join: JoinStringFields, address: str, ca: bytes, request: EnrollRequest, proxy: Proxy | None
) -> EnrollResponse:
    with server_verified_channel(address, ca, proxy=proxy) as channel:
        try:
            return EnrollmentStub(channel).Enroll(request, timeout=ENROL_SECONDS)
        except grpc.RpcError as error:
            refusal = refusal_from_rpc_error(error, proxy=proxy)
            failed = AnswerLost if refusal.status in _UNKNOWN else EnrollmentError
            explanation = _ADVICE.get(refusal.reason, refusal.message or refusal.status)
            reason = f"{refusal.reason}: " if refusal.reason else ""
            raise failed(f"{address} did not enroll {join.client_id}: {reason}{explanation}") from error


def _addresses(response: EnrollResponse) -> tuple[str, ...]:
    """The coordinators' addresses, in the order in which this member tries them."""
    return in_own_order(response.client_id, known_addresses("", response.addresses, ()))


def _check(response: EnrollResponse, join: JoinStringFields, ca: bytes) -> None:
    """Compares the answer with the join string. The coordinator is authenticated; this finds its mistakes early."""
    try:
        identity = parse_peer(response.certificate)
    except IdentityError as error:
        raise EnrollmentError(f"the coordinator issued a certificate that cannot be read: {error}") from error
    fits = (
        response.client_id == identity.name == join.client_id
        and identity.kind == "client"
        and identity.federation_id == response.federation_id
        and response.ca_certificate.strip() == ca.strip()
        and len(response.coordinator_key) == 32
        and any(map(is_address, response.addresses))
    )
    if not fits:
        raise EnrollmentError(
            f"the coordinator enrolled {identity.uri}, which is not what the join string for {join.client_id} promised"
        )
