"""Administrators and members that a test plays by hand, and what the record says of them."""

import secrets
import threading
from collections.abc import Iterator, Sequence
from dataclasses import replace
from datetime import timedelta
from functools import cached_property
from typing import Any

import grpc
import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from sqlalchemy import select

from coordinator.members.access.call_limits import RATES, Buckets, Rate
from coordinator.services.checks.envelope_checks import EnvelopeChecks
from coordinator.services.checks.record_check import record_problems
from federation.transport.channels import refusal_from_rpc_error
from federation.trust.admin_files import load_admin_key
from federation.trust.certificates import make_csr
from federation.trust.envelope import key_id, sign
from federation.trust.identity import Action, Role, parse_peer
from federation.trust.key_chain import rotate
from federation.trust.keys import new_tls_key
from federation.trust.member_files import MemberFiles
from federation.trust.proofs import prove_renewal
from federation.v1 import admin_pb2 as messages
from federation.v1 import common_pb2 as common
from federation.v1.admin_pb2_grpc import AdminStub
from federation.v1.common_pb2 import (
    DecisionManifest,
    LoginManifest,
    RequestManifest,
    SignedEnvelope,
    WithdrawalManifest,
)
from federation.v1.enrollment_pb2 import LoginRequest
from federation.v1.enrollment_pb2_grpc import EnrollmentStub
from federation.v1.federation_pb2 import (
    AttendRequest,
    FetchBlobRequest,
    Hello,
    LeaveRequest,
    RenewRequest,
    RotateKeyRequest,
    RotateKeyResponse,
)
from federation.v1.federation_pb2_grpc import FederationStub
from storage.models import Certificate, Client
from tests.harness import Member
from tests.running import SECONDS, Running, refused
from tests.stage import Player, Stage


class Officer:
    """An administrator with its keys in a directory of its own: a security officer, unless it is given other roles."""

    def __init__(self, served: Running, name: str, *roles: Role, passphrase: bytes | None = None) -> None:
        self.served, self.name = served, name
        self.home = served.home.directory.parent / f"{name}-{secrets.token_hex(4)}"
        given: dict[str, Any] = {"now": served.clock(), "by": "test", "passphrase": passphrase}
        held = roles or [Role.SECURITY_OFFICER]
        self.files = served.home.issue_admin(served.database, name, held, self.home, **given)
        self.key = load_admin_key(self.home, passphrase)

    @property
    def row(self) -> str:
        """The key of its row."""
        return key_id(self.key.public_key()).hex()

    @cached_property
    def channel(self) -> grpc.Channel:
        return self.files.channel()

    @cached_property
    def stub(self) -> AdminStub:
        return AdminStub(self.channel)

    def asks_login(self, **changed: object) -> LoginManifest:
        """What it would sign to log in."""
        values = {"federation_id": "test", "name": self.name, "csr": make_csr(new_tls_key()), **changed}
        manifest = LoginManifest(**values)  # type: ignore[arg-type]
        manifest.created.FromDatetime(self.served.clock())
        return manifest

    def login(self, manifest: LoginManifest | None = None) -> bytes:
        return login(self.served, sign(manifest or self.asks_login(), self.key))

    # With two officers.

    def request(self, action: str, subject: str, **changed: Any) -> RequestManifest:
        """What this officer would sign."""
        now = self.served.clock()
        values = {"federation_id": "test", "officer": self.name, "action": action, "subject": subject, **changed}
        age, lifetime = values.pop("age", timedelta()), values.pop("lifetime", timedelta(hours=1))
        manifest = RequestManifest(**values)
        if action == Action.APPROVE and not manifest.key_id:
            manifest.key_id = key_of(self.served, subject)
        manifest.created.FromDatetime(now - age)
        manifest.expires.FromDatetime(now + lifetime)
        return manifest

    def ask(self, action: str, subject: str, **changed: Any) -> messages.ActionRequest:
        return self.hand_in(sign(self.request(action, subject, **changed), self.key))

    def hand_in(self, envelope: SignedEnvelope) -> messages.ActionRequest:
        return self.stub.RequestAction(messages.RequestActionRequest(request=envelope), timeout=SECONDS).request

    def decision(self, asked: messages.ActionRequest, **changed: Any) -> SignedEnvelope:
        values = {"federation_id": "test", "officer": self.name, "request": asked.request_id, "consent": True}
        age = changed.pop("age", timedelta())
        manifest = DecisionManifest(**{**values, **changed})
        manifest.created.FromDatetime(self.served.clock() - age)
        return sign(manifest, self.key)

    def decide(self, asked: messages.ActionRequest, **changed: Any) -> messages.ActionRequest:
        return self.say(self.decision(asked, **changed))

    def say(self, envelope: SignedEnvelope) -> messages.ActionRequest:
        return self.stub.DecideRequest(messages.DecideRequestRequest(decision=envelope), timeout=SECONDS).request

    def requests(self, *, every: bool = True) -> Sequence[messages.ActionRequest]:
        return self.stub.ListRequests(messages.ListRequestsRequest(all=every)).requests

    def command(self, *arguments: str) -> str:
        return self.served.command(*arguments, home=self.home)

    def document(self, *arguments: str) -> Any:
        return self.served.document(*arguments, home=self.home)


def login(served: Running, envelope: SignedEnvelope) -> bytes:
    """The certificate that a signed request to log in gives."""
    with served.newcomer() as channel:
        return EnrollmentStub(channel).Login(LoginRequest(login=envelope), timeout=SECONDS).certificate


def key_of(served: Running, name: str) -> str:
    """The id of a member's signing key; empty if there is no such member."""
    return served.look(lambda session: session.scalar(select(Client.key_id).filter_by(client_id=name)) or "")


def client(served: Running, name: str) -> Client:
    return served.look(lambda session: session.get_one(Client, name))


def certificates(served: Running, name: str) -> list[Certificate]:
    """Those of a member, oldest first."""
    rows = select(Certificate).where(Certificate.client_id == name).order_by(Certificate.not_before)
    return served.look(lambda session: list(session.scalars(rows)))


def renewed(member: Member) -> Member:
    """The member with a new key, and the certificate that it gets for that."""
    key = new_tls_key()
    csr = make_csr(key)
    request = RenewRequest(csr=csr, proof=prove_renewal(member.files.signing_key, csr))
    certificate = member.stub.Renew(request, timeout=SECONDS).certificate
    return Member(replace(member.files, tls_key=key, certificate=certificate))


def attends(member: MemberFiles) -> None:
    with member.channel() as channel:
        call = FederationStub(channel).Attend(iter([AttendRequest(hello=Hello(software="test"))]))
        assert next(call).WhichOneof("message") == "welcome"
        call.cancel()


def knock(channel: grpc.Channel) -> None:
    """Anything that needs a valid certificate; there is nothing for this member."""
    next(FederationStub(channel).FetchBlob(FetchBlobRequest(), timeout=SECONDS))


def fetches(channel: grpc.Channel, *, answer: str = "blob-not-offered") -> None:
    """A call of a member, and the reason of its refusal."""
    with refused("PERMISSION_DENIED", answer):
        knock(channel)


def silent(over: threading.Event) -> Iterator[bytes]:
    """What a caller says who says nothing until this is over."""
    over.wait(SECONDS)
    yield from ()


def rated(served: Running, monkeypatch: pytest.MonkeyPatch, **rates: Rate) -> None:
    """Callers may call as often as they like, but for these kinds of calls."""
    fast = {kind: Rate(1e9, 1e9) for kind in RATES}
    monkeypatch.setattr(served.coordinator.access, "_buckets", Buckets({**fast, **rates}))


def knocks(member: MemberFiles) -> None:
    with member.channel() as channel:
        knock(channel)


def end_of(call: Iterator[object]) -> str:
    """The reason that a stream ends with."""
    with pytest.raises(grpc.RpcError) as caught:
        for _ in call:
            pass
    return refusal_from_rpc_error(caught.value).reason


AGE = timedelta(days=80)  # of the certificates that are to be renewed


class Change:
    """The request of a member for a new signing key."""

    def __init__(self, member: Member, number: int = 1, key: Ed25519PrivateKey | None = None, csr: bytes = b"") -> None:
        self.member, self.number = member, number
        self.key, self.tls_key = key or Ed25519PrivateKey.generate(), new_tls_key()
        self.csr = csr or make_csr(self.tls_key)
        self.rotation = self.signed()

    def signed(self, old: Ed25519PrivateKey | None = None, **changes: Any) -> common.KeyRotation:
        files = self.member.files
        facts = {"federation_id": files.federation_id, "client_id": files.client_id, "number": self.number}
        return rotate(old or files.signing_key, self.key, **{**facts, "now": files.not_after, **changes})

    def ask(self, proof: bytes | None = None, **changes: Any) -> RotateKeyResponse:
        """The answer to the request; `changes` are of what is signed."""
        rotation = self.signed(**changes) if changes else self.rotation
        proof = prove_renewal(self.key, self.csr) if proof is None else proof
        request = RotateKeyRequest(rotation=rotation, csr=self.csr, proof=proof)
        return self.member.stub.RotateKey(request, timeout=SECONDS)

    def done(self) -> Member:
        """The member with its new keys."""
        certificate = self.ask().certificate
        return Member(replace(self.member.files, signing_key=self.key, tls_key=self.tls_key, certificate=certificate))


def withdrawal(member: Member, *, forget: bool = False, **changes: Any) -> SignedEnvelope:
    """What a member signs that leaves; `changes` are of the manifest."""
    files = member.files
    values = {"federation_id": files.federation_id, "client_id": files.client_id, "forget": forget}
    values["certificate"] = parse_peer(files.certificate).serial
    return sign(WithdrawalManifest(**{**values, **changes}), files.signing_key)


def leave(player: Player, envelope: SignedEnvelope | None = None) -> float:
    """Leaves; the time that it is told."""
    request = LeaveRequest(withdrawal=envelope or withdrawal(player.member))
    return player.member.stub.Leave(request, timeout=SECONDS).left.ToDatetime().timestamp()


def problems(stage: Stage) -> list[str]:
    home = stage.served.home
    checks = EnvelopeChecks(home.federation_id, home.signing.chain)
    key = home.log_key.entry_key
    found = stage.look(lambda session: list(record_problems(session, checks, key, stage.blobs)))
    return [one for one in found if isinstance(one, str)]
