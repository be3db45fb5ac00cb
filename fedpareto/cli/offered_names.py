"""The names in a federation that commands take, as completion by Tab offers them: each with a few words about it."""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator

from federation.text import escaped
from federation.v1 import admin_pb2 as v1
from federation.v1.admin_pb2_grpc import AdminStub
from federation.v1.common_pb2 import ClientState
from fedpareto.admin_messages import name_of
from fedpareto.officer_requests import OfficerRequest
from fedpareto.run_names import ENDED

_SECONDS = 2.0  # for a call; who presses Tab waits for less
Offer = tuple[str, str]  # a name, and words about it


def runs(stub: AdminStub, incomplete: str) -> Iterator[Offer]:
    """The newest runs."""
    return _runs(stub, incomplete, lambda run: True)


def open_runs(stub: AdminStub, incomplete: str) -> Iterator[Offer]:
    """The newest runs that have not ended."""
    return _runs(stub, incomplete, lambda run: run.state not in ENDED)


def _runs(stub: AdminStub, incomplete: str, wanted: Callable[[v1.Run], bool]) -> Iterator[Offer]:
    """Runs by name, and by id where a name means several or the line begins with one."""
    listed = stub.ListRuns(v1.ListRunsRequest(brief=True, page_size=100), timeout=_SECONDS).runs
    times = Counter(run.name for run in listed)
    for run in filter(wanted, listed):
        words = f"{name_of(run, 'state').lower()}, {run.rounds_done} of {run.rounds_total} rounds"
        if times[run.name] == 1 and run.name.startswith(incomplete):
            yield run.name, words
        elif (incomplete and run.run_id.startswith(incomplete)) or not incomplete:
            yield run.run_id, f"{run.name}, {words}"


def members(stub: AdminStub, incomplete: str) -> Iterator[Offer]:
    """The members."""
    return _members(stub, incomplete, lambda client: True)


def pending(stub: AdminStub, incomplete: str) -> Iterator[Offer]:
    """The members that wait for approval."""
    return _members(stub, incomplete, lambda client: client.state == ClientState.CLIENT_STATE_PENDING)


def _members(stub: AdminStub, incomplete: str, wanted: Callable[[v1.Client], bool]) -> Iterator[Offer]:
    listed = stub.ListClients(v1.ListClientsRequest(), timeout=_SECONDS).clients
    return _beginning(incomplete, ((item.client_id, name_of(item, "state").lower()) for item in filter(wanted, listed)))


def open_requests(stub: AdminStub, incomplete: str) -> Iterator[Offer]:
    """The requests that wait for another officer."""
    listed = stub.ListRequests(v1.ListRequestsRequest(), timeout=_SECONDS).requests
    return _beginning(incomplete, ((asked.name, escaped(str(asked))) for asked in map(OfficerRequest.of, listed)))


def _beginning(incomplete: str, offers: Iterable[Offer]) -> Iterator[Offer]:
    return (offer for offer in offers if offer[0].startswith(incomplete))
