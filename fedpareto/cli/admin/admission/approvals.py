"""The approval of pending members by one officer, or by the request of a first one."""

from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path

import typer
from rich.text import Text

from federation.text import counted, did_you_mean
from federation.trust.identity import Action
from federation.v1.admin_pb2 import ApproveClientRequest, Client, ListClientsRequest, ListRequestsRequest
from federation.v1.common_pb2 import ClientState, RequestManifest
from fedpareto.admin_messages import name_of, whole
from fedpareto.cli.admin.admission.outcomes import ItemResult, one_by_one, report
from fedpareto.cli.admin.app import confirm
from fedpareto.cli.admin.officers import DONE, Officer, officer
from fedpareto.cli.show.tables import console
from fedpareto.formatting import natural
from fedpareto.officer_requests import OfficerRequest

_WHY = "compare the fingerprint of each key with the member's owner before you approve it"
_NEXT = "Another security officer consents: fedpareto admin consent --all"


def approve(
    context: typer.Context, home: Path | None, names: Sequence[str], *, every: bool, yes: bool, as_json: bool
) -> None:
    """Approves members by name, or `every` pending one, with the keys that they have now, after one question.

    Raises:
        CommandFailure: one of them was not approved, or nobody said yes.
    """
    with officer(context, home) as approver:
        clients = {item.client_id: item for item in whole(approver.stub.ListClients, ListClientsRequest()).clients}
        if every:
            waiting = sorted((name for name, client in clients.items() if _pending(client)), key=natural)
            requested = _requested(approver)
            names = [name for name in waiting if (name, clients[name].key_id) not in requested]
            if (left := len(waiting) - len(names)) and not as_json:
                console().print(Text(f"{counted(left, 'member')} left out, with an open request. {_NEXT}"))
        listed = {name: clients[name] for name in names if name in clients and _pending(clients[name])}
        if listed:
            confirm(yes, partial(_question, listed), why=_WHY)
        elif every and not as_json:
            console().print(Text("no other member waits for approval" if left else "no member waits for approval"))
        asked = list[str]()

        def act(name: str) -> ItemResult:
            if name in listed:
                result = _approved(approver, listed[name], alone=len(listed) == 1)
            else:
                result = _refused(name, clients)
            if "request" in result.more:
                asked.append(name)
            return result

        report(one_by_one(names, act), key="client_id", as_json=as_json)
        if not as_json and len(asked) > 1:
            console().print(Text(_NEXT))


def _pending(client: Client) -> bool:
    return client.state == ClientState.CLIENT_STATE_PENDING


def _requested(approver: Officer) -> set[tuple[str, str]]:
    """The members, with their keys, for whose approval a request is open."""
    requests = whole(approver.stub.ListRequests, ListRequestsRequest()).requests
    asked = map(OfficerRequest.of, requests)
    return {(request.subject, request.key_id) for request in asked if request.action == Action.APPROVE}


def _question(listed: Mapping[str, Client]) -> str:
    """Lists the members with their keys, and returns the question."""
    width = max(map(len, listed))
    for name, client in listed.items():
        typer.echo(f"{name:{width}}  key {client.key_id}", err=True)
    what = counted(len(listed), "member") if len(listed) > 1 else next(iter(listed))
    return f"Has each owner confirmed its fingerprint? Approve {what}?"


def _approved(approver: Officer, client: Client, *, alone: bool) -> ItemResult:
    name, key = client.client_id, client.key_id
    manifest = RequestManifest(action=Action.APPROVE, subject=name, key_id=key)
    acted = approver.act(approver.stub.ApproveClient, ApproveClientRequest(client_id=name, key_id=key), manifest)
    if acted.outcome == DONE:
        message = f"{name} is active and gets work; its key: {key}"
        return ItemResult(
            name=name, outcome="approved", message=message, more={"key_id": key, "client": acted.answer.client}
        )
    asked = OfficerRequest.of(acted.answer.request)
    if asked.key_id != key:
        return ItemResult.failed(
            name,
            "client-key",
            f"its key is {key} now, and request {asked.name} of {asked.officer} names another one: withdraw the "
            f"request (fedpareto admin withdraw {asked.name}), ask its owner which key is right, and approve it anew",
        )
    message = f"{name}: request {asked.name} of {asked.officer}, open until {asked.until}"
    return ItemResult(
        name=name,
        outcome=acted.outcome,
        message=acted.message if alone else message,
        more={"key_id": key, "request": acted.answer.request},
    )


def _refused(name: str, clients: Mapping[str, Client]) -> ItemResult:
    """The result of a member that does not wait for approval."""
    if name not in clients:
        near = did_you_mean(name, clients) or ";"
        why = "client-unknown", f"there is no such member{near} `fedpareto admin clients` lists them"
    else:
        why = "client-state", f"it is {name_of(clients[name], 'state')}, and does not wait for approval"
    return ItemResult.failed(name, *why)
