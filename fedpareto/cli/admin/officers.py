"""`fedpareto admin ...`: decisions of one or two security officers about members and administrators."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any

import typer

from fedpareto.cli import completion
from fedpareto.cli.admin.app import Answer, ClientName, Home, Reason, Yes, command, confirm, connected, show
from fedpareto.cli.failure import USAGE, CommandFailure, failing
from fedpareto.cli.secret_input import passphrase_for
from fedpareto.cli.shared_options import JsonOption
from fedpareto.on_first_use import on_first_use

with on_first_use():
    import grpc
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
    from google.protobuf.message import Message

    from federation.transport import channels
    from federation.trust import admin_files, envelope, identity, keys
    from federation.v1 import admin_pb2 as v1
    from federation.v1 import common_pb2 as common
    from federation.v1.admin_pb2_grpc import AdminStub
    from fedpareto import admin_messages
    from fedpareto.cli.admin import client
    from fedpareto.cli.show import member_tables
    from fedpareto.officer_requests import OfficerRequest


RequestName = Annotated[
    str,
    typer.Argument(
        metavar="ID", help="The request's id, or the beginning of it.", autocompletion=completion.open_requests
    ),
]
DONE, REQUESTED, OPEN = "done", "requested", "open"  # what became of an action


@dataclass(frozen=True)
class Acted:
    """What became of an action: it was done, or it takes two officers and is requested now, or was open already.

    `answer` is the coordinator's, with the request if there is one; `message` is for people, empty if it was done.
    """

    outcome: str
    answer: Any
    message: str = ""

    @property
    def shown(self) -> Answer:
        """For `show`."""
        return self.answer, self.message


class Officer:
    """A security officer at the Admin service, who can sign."""

    def __init__(self, stub: "AdminStub", home: Path, passphrase_file: Path | None) -> None:
        self.stub = stub
        self._home = home
        self._passphrase_file = passphrase_file
        self._taking_two = set[str]()  # actions, as far as the coordinator has said so

    @cached_property
    def account(self) -> "admin_files.Account":
        """Its name and its federation."""
        with failing(keys.IdentityError, code=USAGE):
            return admin_files.Account.load(self._home)

    @cached_property
    def _key(self) -> "Ed25519PrivateKey":
        with failing(keys.IdentityError, code=USAGE):
            passphrase = passphrase_for(self._home / admin_files.SIGNING_KEY, self._passphrase_file)
            return admin_files.load_admin_key(self._home, passphrase)

    @cached_property
    def _lifetime(self) -> timedelta:
        """How long a request may be open."""
        rules = self.stub.ListRequests(v1.ListRequestsRequest(page_size=1))
        return timedelta(seconds=rules.lifetime_seconds)

    def sign(self, manifest: "common.RequestManifest | common.DecisionManifest") -> "common.SignedEnvelope":
        """Signs a manifest as this officer, with the present time."""
        manifest.federation_id, manifest.officer = self.account.federation_id, self.account.name
        manifest.created.FromDatetime(datetime.now(UTC))
        return envelope.sign(manifest, self._key)

    def act(self, call: "Callable[[Any], Message]", request: "Message", manifest: "common.RequestManifest") -> Acted:
        """Makes a call. If the action takes two officers, sends a signed request for it instead.

        If a request for this action and subject is open, it stays the only one, and the answer has it.
        """
        if manifest.action not in self._taking_two:
            try:
                return Acted(DONE, call(request))
            except grpc.RpcError as error:
                if channels.refusal_from_rpc_error(error).reason != "two-officers":
                    raise
                self._taking_two.add(manifest.action)
        manifest.expires.FromDatetime(datetime.now(UTC) + self._lifetime)
        try:
            answer = self.stub.RequestAction(v1.RequestActionRequest(request=self.sign(manifest)))
        except grpc.RpcError as error:
            refusal = channels.refusal_from_rpc_error(error)
            present = self._named_in(refusal.message) if refusal.reason == "request-exists" else None
            if present is None:
                raise
            return Acted(OPEN, v1.RequestActionResponse(request=present), self._open(OfficerRequest.of(present)))
        made = OfficerRequest.of(answer.request)
        return Acted(
            REQUESTED,
            answer,
            f"{made.action} takes two officers: this is request {made.name} now, open until {made.until}.\n"
            f"Another security officer consents: fedpareto admin consent {made.name}",
        )

    def _named_in(self, message: str) -> "v1.ActionRequest | None":
        """The open request that a message names; None if it names none."""
        listed = admin_messages.whole(self.stub.ListRequests, v1.ListRequestsRequest()).requests
        return next((item for item in listed if OfficerRequest.of(item).name in message), None)

    def _open(self, present: "OfficerRequest") -> str:
        """Says that a request is open already, and what can be done with it."""
        own = self.account.name == present.officer
        who, consent = ("you have", "another officer consents") if own else (f"{present.officer} has", "to consent")
        return (
            f"no new request was made: {who} asked for this already.\n"
            f"request {present.name}: {present.wanted}\n"
            f"open until {present.until}\n"
            f"{consent}: fedpareto admin consent {present.name}\n"
            f"to {'withdraw' if own else 'refuse'} it: fedpareto admin withdraw {present.name}"
        )


@contextmanager
def officer(context: typer.Context, home: Path | None) -> "Iterator[Officer]":
    """The officer whose directory is given, at the Admin service; see `connected`."""
    given, passphrase_file, _ = context.obj
    with connected(context, home) as stub:
        yield Officer(stub, client.find_home(home or given), passphrase_file)


def revoke(
    context: typer.Context,
    name: ClientName,
    reason: Reason = "",
    yes: Yes = False,
    home: Home = None,
    as_json: JsonOption = False,
) -> None:
    """Revoke a member, at once and permanently."""
    confirm(yes, lambda: f"Shut {name} out for good? Its name is never given again.")
    with officer(context, home) as by:
        request = v1.RevokeClientRequest(client_id=name, reason=reason)
        manifest = common.RequestManifest(action=identity.Action.REVOKE, subject=name, reason=reason)
        answer, message = by.act(by.stub.RevokeClient, request, manifest).shown
    show(as_json, answer, message or f"{name} is revoked; its past updates stay in the record")


def forget(
    context: typer.Context,
    name: ClientName,
    reason: Reason = "",
    yes: Yes = False,
    home: Home = None,
    as_json: JsonOption = False,
) -> None:
    """Remove the updates that a member has sent.

    Its signed envelopes, the steps and the models stay, so that signatures can still be verified; K and the models of
    its rounds cannot be recomputed any more. Updates that the current round needs are removed after the round. The
    command does not revoke the member. Backups are not changed: make a new one into each directory.
    """
    confirm(yes, lambda: f"Remove every update that {name} has sent? Its rounds cannot be recomputed afterwards.")
    with officer(context, home) as by:
        request = v1.ForgetClientRequest(client_id=name, reason=reason)
        manifest = common.RequestManifest(action=identity.Action.FORGET, subject=name, reason=reason)
        answer, message = by.act(by.stub.ForgetClient, request, manifest).shown
    if not message:
        message = f"{answer.removed} payloads of {name} were removed, {answer.removed_bytes / 1e6:.1f} MB"
        if answer.kept:
            message += f"; {answer.kept} are removed within a day after the round or the run that needs them has ended"
    show(as_json, answer, message)


def revoke_admin(
    context: typer.Context,
    name: Annotated[str, typer.Argument(metavar="NAME", help="The administrator's name.")],
    reason: Reason = "",
    yes: Yes = False,
    home: Home = None,
    as_json: JsonOption = False,
) -> None:
    """Revoke an administrator, at once. `coordinator admin` can issue the name again."""
    confirm(yes, lambda: f"End the signing key and the certificates of the administrator {name}?")
    with officer(context, home) as by:
        request = v1.RevokeAdministratorRequest(name=name, reason=reason)
        manifest = common.RequestManifest(action=identity.Action.REVOKE_ADMIN, subject=name, reason=reason)
        answer, message = by.act(by.stub.RevokeAdministrator, request, manifest).shown
    show(
        as_json, answer, message or f"the signing key and the certificates of {name} have ended, and so have its calls"
    )


@command
def requests(
    stub: "AdminStub",
    every: Annotated[bool, typer.Option("--all", help="Also list decided and expired requests.")] = False,
) -> Answer:
    """List the requests that wait for another officer."""
    response = admin_messages.whole(stub.ListRequests, v1.ListRequestsRequest(all=every))
    return response, lambda: member_tables.requests(response)


def withdraw(
    context: typer.Context,
    request: RequestName,
    reason: Reason = "",
    yes: Yes = False,
    home: Home = None,
    as_json: JsonOption = False,
) -> None:
    """Withdraw a request, or refuse one of another officer."""
    with officer(context, home) as by:
        asked = named(every_request(by), [request])[0]
        # The command shows the request that the other officer signed, and binds the decision to it.
        decision = common.DecisionManifest(request=envelope.envelope_digest(asked.request), reason=reason)
        text = str(OfficerRequest.of(asked))
        confirm(yes, lambda: f"{text}. Refuse or withdraw it?")
        answer = by.stub.DecideRequest(v1.DecideRequestRequest(decision=by.sign(decision)))
    show(as_json, answer, f"{text}: {admin_messages.name_of(answer.request, 'state').lower()}")


def every_request(by: Officer) -> "Sequence[v1.ActionRequest]":
    """All requests, also those that were decided."""
    return admin_messages.whole(by.stub.ListRequests, v1.ListRequestsRequest(all=True)).requests


def named(requests: "Sequence[v1.ActionRequest]", names: Sequence[str]) -> "list[v1.ActionRequest]":
    """The requests whose ids, or the beginnings of their ids, are given, each once.

    Raises:
        CommandFailure: a name means no request, or several; the message has each such name.
    """
    found, wrong = dict[str, v1.ActionRequest](), list[str]()
    for name in names:
        digits = name.rpartition(":")[2]  # also of a whole id, with the name of its hash function
        matching = [item for item in requests if item.request_id.rpartition(":")[2].startswith(digits)]
        if len(matching) == 1:
            found[matching[0].request_id] = matching[0]
        else:
            count = f"{len(matching)} requests have" if matching else "no request has"
            wrong.append(f"{count} an id that begins with {name!r}")
    if wrong:
        raise CommandFailure(f"{'; '.join(wrong)}; `fedpareto admin requests` lists them", code=USAGE)
    return list(found.values())
