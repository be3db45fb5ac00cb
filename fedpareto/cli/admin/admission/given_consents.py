"""The consent of a second officer to requests of others."""

from collections.abc import Sequence
from functools import partial
from pathlib import Path

import typer
from rich.text import Text

from federation.text import counted
from federation.trust.envelope import envelope_digest
from federation.v1.admin_pb2 import ActionRequest, DecideRequestRequest, RequestState
from federation.v1.common_pb2 import DecisionManifest
from fedpareto.cli.admin.admission.outcomes import ItemResult, one_by_one, report
from fedpareto.cli.admin.app import confirm
from fedpareto.cli.admin.officers import Officer, every_request, named, officer
from fedpareto.cli.show.tables import console
from fedpareto.officer_requests import OfficerRequest


def consent(
    context: typer.Context, home: Path | None, names: Sequence[str], *, every: bool, yes: bool, as_json: bool
) -> None:
    """Consents to the named requests, or to `every` open one of other officers, after one question.

    Raises:
        CommandFailure: a name means no request or several, an action was not done, or nobody said yes.
    """
    with officer(context, home) as second:
        requests = every_request(second)
        if every:
            chosen = [
                item for item in requests if _open(item) and OfficerRequest.of(item).officer != second.account.name
            ]
            chosen.reverse()  # in the order in which they were made
        else:
            chosen = named(requests, names)
        listed = {item.request_id: item for item in chosen}
        if listed:
            confirm(yes, partial(_question, chosen))
        elif not as_json:
            console().print(Text("no request of another officer is open"))
        report(one_by_one(listed, lambda name: _decided(second, listed[name])), key="request_id", as_json=as_json)


def _open(item: ActionRequest) -> bool:
    return item.state == RequestState.REQUEST_STATE_OPEN


def _question(chosen: Sequence[ActionRequest]) -> str:
    """Lists the requests, as the other officers have signed them, and returns the question."""
    for asked in map(OfficerRequest.of, chosen):
        key = f"\n    key {asked.key_id}" if asked.key_id else ""
        typer.echo(f"{asked.name}  {asked}, open until {asked.until}{key}", err=True)
    several = len(chosen) > 1
    return f"Consent to {counted(len(chosen), 'request')}, and do {'what they ask for' if several else 'it'}?"


def _decided(second: Officer, item: ActionRequest) -> ItemResult:
    """Consents to the request that the other officer signed: the decision is bound to the digest of what was listed."""
    decision = DecisionManifest(consent=True, request=envelope_digest(item.request))
    answer = second.stub.DecideRequest(DecideRequestRequest(decision=second.sign(decision)))
    asked = OfficerRequest.of(item)
    return ItemResult(name=item.request_id, outcome="done", message=f"{asked}: done", more={"request": answer.request})
