"""`fedpareto admin ...`: decisions of one or two security officers about members and administrators."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Annotated, Any

import typer

from fedpareto.cli.admin.app import Answer, ClientName, Home, Reason, Yes, command, confirm, connected, show
from fedpareto.cli.failure import USAGE, CommandFailure, failing
from fedpareto.cli.secret_input import passphrase_for
from fedpareto.cli.shared_options import JsonOption
from fedpareto.on_first_use import on_first_use

with on_first_use():
    import grpc
    from google.protobuf.message import Message

    from federation.line import channels
    from federation.trust import admin_files, envelope, identity, keys
    from federation.v1 import admin_pb2 as v1
    from federation.v1 import common_pb2 as common
    from federation.v1.admin_pb2_grpc import AdminStub
    from fedpareto import admin_messages, formatting
    from fedpareto.cli.admin import client
    from fedpareto.cli.show import member_tables
    from fedpareto.officer_requests import OfficerRequest


RequestName = Annotated[str, typer.Argument(metavar="ID", help="The request's id, or the beginning of it.")]


class Officer:
    """A security officer at the Admin service, who can sign."""

    def __init__(self, stub: "AdminStub", home: Path, passphrase_file: Path | None) -> None:
        self.stub = stub
        self._home = home
        self._passphrase_file = passphrase_file

    def sign(self, manifest: "common.RequestManifest | common.DecisionManifest") -> "common.SignedEnvelope":
        """Signs a manifest as this officer, with the present time."""
        with failing(keys.IdentityError, code=USAGE):
            account = admin_files.Account.load(self._home)
            passphrase = passphrase_for(self._home / admin_files.SIGNING_KEY, self._passphrase_file)
            key = admin_files.load_admin_key(self._home, passphrase)
        manifest.federation_id, manifest.officer = account.federation_id, account.name
        manifest.created.FromDatetime(datetime.now(UTC))
        return envelope.sign(manifest, key)

    def act(self, call: "Callable[[Any], Message]", request: "Message", manifest: "common.RequestManifest") -> Answer:
        """Makes a call. If the action takes two officers, sends a signed request for it instead.

        If a request for this action and subject is open, it stays the only one, and the answer has it.
        """
        try:
            return call(request), ""
        except grpc.RpcError as error:
            if channels.refusal_from_rpc_error(error).reason != "two-officers":
                raise
        rules = self.stub.ListRequests(v1.ListRequestsRequest(page_size=1))
        manifest.expires.FromDatetime(datetime.now(UTC) + timedelta(seconds=rules.lifetime_seconds))
        try:
            answer = self.stub.RequestAction(v1.RequestActionRequest(request=self.sign(manifest)))
        except grpc.RpcError as error:
            refusal = channels.refusal_from_rpc_error(error)
            present = self._named_in(refusal.message) if refusal.reason == "request-exists" else None
            if present is None:
                raise
            return v1.RequestActionResponse(request=present), self._open(OfficerRequest.of(present))
        made = OfficerRequest.of(answer.request)
        return answer, (
            f"{made.action} takes two officers: this is request {made.name} now, open until "
            f"{formatting.local(manifest.expires)}.\n"
            f"Another security officer consents: fedpareto admin consent {made.name}"
        )

    def _named_in(self, message: str) -> "v1.ActionRequest | None":
        """The open request that a message names; None if it names none."""
        listed = admin_messages.whole(self.stub.ListRequests, v1.ListRequestsRequest()).requests
        return next((item for item in listed if OfficerRequest.of(item).name in message), None)

    def _open(self, present: "OfficerRequest") -> str:
        """Says that a request is open already, and what can be done with it."""
        until = formatting.UNKNOWN if present.expires is None else formatting.local(present.expires)
        with failing(keys.IdentityError, code=USAGE):
            own = admin_files.Account.load(self._home).name == present.officer
        who, consent = ("you have", "another officer consents") if own else (f"{present.officer} has", "to consent")
        return (
            f"no new request was made: {who} asked for this already.\n"
            f"request {present.name}: {present.wanted}\n"
            f"open until {until}\n"
            f"{consent}: fedpareto admin consent {present.name}\n"
            f"to {'withdraw' if own else 'refuse'} it: fedpareto admin withdraw {present.name}"
        )


@contextmanager
def _officer(context: typer.Context, home: Path | None) -> "Iterator[Officer]":
    given, passphrase_file, _ = context.obj
    with connected(context, home) as stub:
        yield Officer(stub, client.find_home(home or given), passphrase_file)


def approve(context: typer.Context, name: ClientName, home: Home = None, as_json: JsonOption = False) -> None:
    """Approve a pending member, so that it gets work."""
    with _officer(context, home) as officer:
        request = v1.ApproveClientRequest(client_id=name)
        manifest = common.RequestManifest(action=identity.Action.APPROVE, subject=name)
        answer, message = officer.act(officer.stub.ApproveClient, request, manifest)
    show(as_json, answer, message or f"{name} is active and gets work")


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
    with _officer(context, home) as officer:
        request = v1.RevokeClientRequest(client_id=name, reason=reason)
        manifest = common.RequestManifest(action=identity.Action.REVOKE, subject=name, reason=reason)
        answer, message = officer.act(officer.stub.RevokeClient, request, manifest)
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
    with _officer(context, home) as officer:
        request = v1.ForgetClientRequest(client_id=name, reason=reason)
        manifest = common.RequestManifest(action=identity.Action.FORGET, subject=name, reason=reason)
        answer, message = officer.act(officer.stub.ForgetClient, request, manifest)
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
    with _officer(context, home) as officer:
        request = v1.RevokeAdministratorRequest(name=name, reason=reason)
        manifest = common.RequestManifest(action=identity.Action.REVOKE_ADMIN, subject=name, reason=reason)
        answer, message = officer.act(officer.stub.RevokeAdministrator, request, manifest)
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


def consent(
    context: typer.Context, request: RequestName, yes: Yes = False, home: Home = None, as_json: JsonOption = False
) -> None:
    """Consent to a request of another officer.

    The action is then done.
    """
    _decide(context, home, request, common.DecisionManifest(consent=True), yes=yes, as_json=as_json)


def withdraw(
    context: typer.Context,
    request: RequestName,
    reason: Reason = "",
    yes: Yes = False,
    home: Home = None,
    as_json: JsonOption = False,
) -> None:
    """Withdraw a request, or refuse one of another officer."""
    _decide(context, home, request, common.DecisionManifest(consent=False, reason=reason), yes=yes, as_json=as_json)


def _decide(
    context: typer.Context,
    home: Path | None,
    name: str,
    decision: "common.DecisionManifest",
    *,
    yes: bool,
    as_json: bool,
) -> None:
    with _officer(context, home) as officer:
        listed = admin_messages.whole(officer.stub.ListRequests, v1.ListRequestsRequest(all=True)).requests
        digits = name.rpartition(":")[2]  # also of a whole id, with the name of its hash function
        matching = [item for item in listed if item.request_id.rpartition(":")[2].startswith(digits)]
        if len(matching) != 1:
            count = "no request has" if not matching else f"{len(matching)} requests have"
            raise CommandFailure(
                f"{count} an id that begins with {name!r}; `fedpareto admin requests` lists them", code=USAGE
            )
        # The command shows the request that the other officer signed, and binds the decision to it.
        signed = matching[0].request
        decision.request = envelope.envelope_digest(signed)
        text = str(OfficerRequest.of(matching[0]))
        confirm(yes, lambda: f"{text}. {'Consent, and do it?' if decision.consent else 'Refuse or withdraw it?'}")
        answer = officer.stub.DecideRequest(v1.DecideRequestRequest(decision=officer.sign(decision)))
    done = "done" if decision.consent else admin_messages.name_of(answer.request, "state").lower()
    show(as_json, answer, f"{text}: {done}")
