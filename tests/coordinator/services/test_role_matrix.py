"""Who may call which rpc: every rpc by every kind of caller against a real coordinator, cell by cell."""

from collections.abc import Callable
from datetime import timedelta

import grpc
import pytest

from coordinator.members.access.callers import RULES, CallerRule
from coordinator.members.authority import register
from federation.transport.channels import mutual_channel, server_verified_channel
from federation.trust.certificates import pem
from federation.trust.identity import Role, admin_uris, client_uri
from federation.trust.keys import new_tls_key, private_key_pem
from tests.coordinator.members.scene import Officer
from tests.coordinator.services.scene import COLUMNS, answer, expected, short, stated
from tests.federation.trust.scene import Authority
from tests.few import few
from tests.running import Running

SETTINGS = {"admin_certificate_seconds": 3600}


def permitted(rule: CallerRule) -> set[str]:
    if rule.kind == "anyone":
        return set(COLUMNS)
    if rule.kind == "client":
        return {"client"}
    return {role for role in Role if rule.role in (role, Role.VIEWER)}  # every administrator is a viewer


def test_the_matrix_on_the_page_is_that_of_the_rules() -> None:
    assert stated() == {short(method): permitted(rule) for method, rule in RULES.items()}


Caller = Callable[[Running], grpc.Channel]


def certified(
    served: Running, uris: list[str], *, foreign: bool = False, known: bool = False, age: timedelta = timedelta()
) -> grpc.Channel:
    """A certificate that was made behind the coordinator's back, of its CA or of another one with the same name."""
    key, home = new_tls_key(), served.home
    authority = Authority("test") if foreign else Authority("test", home.ca, home.ca_key)
    certificate = authority.issue(uris, key=key, now=served.clock() - age, lifetime=timedelta(hours=1))
    if known:
        with served.database.begin() as session:
            register(session, certificate)
    return mutual_channel(served.address, ca=pem(home.ca), key=private_key_pem(key), certificate=pem(certificate))


def revoked_client(served: Running) -> grpc.Channel:
    channel = served.member("revoked")
    served.command("revoke", "revoked", "--yes")
    return channel


def revoked_officer(served: Running) -> grpc.Channel:
    officer = Officer(served, "gone", *Role)
    served.command("revoke-admin", "gone", "--yes")
    return officer.channel


def replaced_officer(served: Running) -> grpc.Channel:
    officer = Officer(served, "again", *Role)
    Officer(served, "again", Role.VIEWER)
    return officer.channel


def all_roles() -> list[str]:
    return admin_uris("test", "ghost", Role)


Lines = dict[str, Caller]
# A caller who may call what its columns may.
SERVED: dict[str, tuple[Caller, set[str]]] = {
    "no certificate": (lambda s: s.newcomer(), {"no certificate"}),
    "client": (lambda s: s.member("client"), {"client"}),
    "viewer": (lambda s: s.administrator(), {"viewer"}),
    "operator": (lambda s: s.administrator(Role.OPERATOR), {"viewer", "operator"}),
    "officer": (lambda s: s.administrator(Role.SECURITY_OFFICER), {"viewer", "security-officer"}),
    "operator and officer": (
        lambda s: s.administrator(Role.OPERATOR, Role.SECURITY_OFFICER),
        {"viewer", "operator", "security-officer"},
    ),
}
# Callers to whom each rpc gives the same answer, also those for anyone.
ANSWERS: dict[tuple[str, str], Lines] = {
    ("UNAUTHENTICATED", "certificate-revoked"): {
        "revoked client": revoked_client,
        "revoked officer": revoked_officer,
        "officer who was issued again": replaced_officer,
    },
    ("UNAUTHENTICATED", "certificate-unknown"): {
        "client of our CA, not on record": lambda s: certified(s, [client_uri("test", "ghost")]),
        "officer of our CA, not on record": lambda s: certified(s, all_roles()),
        "officer of another federation": lambda s: certified(s, admin_uris("other", "ghost", Role), known=True),
    },
    ("UNAVAILABLE", "unreachable"): {
        "client of another CA": lambda s: certified(s, [client_uri("test", "client")], foreign=True),
        "officer of another CA": lambda s: certified(s, all_roles(), foreign=True),
        "officer whose certificate has ended": lambda s: certified(s, all_roles(), known=True, age=timedelta(days=1)),
        "no certificate at the port of members": lambda s: server_verified_channel(s.address, pem(s.home.ca)),
    },
}
SHUT_OUT = {name: (make, reason) for reason, lines in ANSWERS.items() for name, make in lines.items()}


@few("client", "viewer", "operator and officer", "no certificate")
@pytest.mark.parametrize("name", SERVED)
def test_each_rpc_answers_each_kind_of_caller_as_the_matrix_says(served: Running, name: str) -> None:
    make, columns = SERVED[name]
    with make(served) as channel:
        answers = {method: answer(channel, method) for method in RULES}
    assert answers == {method: expected(method, columns) for method in RULES}


@few("revoked client", "revoked officer", "officer whose certificate has ended", "client of another CA")
@pytest.mark.parametrize("name", SHUT_OUT)
def test_each_rpc_shuts_out_whom_the_federation_does_not_know_any_more_or_never_did(served: Running, name: str) -> None:
    make, reason = SHUT_OUT[name]
    with make(served) as channel:
        assert {method: answer(channel, method) for method in RULES} == dict.fromkeys(RULES, reason)


def test_each_rpc_refuses_a_certificate_that_has_ended_by_the_coordinators_clock(served: Running) -> None:
    officer, hour = Officer(served, "late", *Role), timedelta(hours=1)
    with served.certified("short", known=True, lifetime=hour) as client, served.clock.moved(2 * hour):
        for channel in (client, officer.channel):
            answers = {method: answer(channel, method) for method in RULES}
            assert answers == dict.fromkeys(RULES, ("UNAUTHENTICATED", "certificate-expired"))
