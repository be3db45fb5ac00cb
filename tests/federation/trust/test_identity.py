from datetime import timedelta

import pytest

from federation.trust.certificates import der, pem
from federation.trust.identity import Role, admin_uris, check_name, client_uri, coordinator_uri, parse_peer
from federation.trust.keys import IdentityError
from tests.federation.trust.scene import NOW, Authority


@pytest.fixture
def authority() -> Authority:
    return Authority()


def test_a_certificate_of_a_client_names_the_client(authority: Authority) -> None:
    certificate = authority.issue([client_uri("fed", "ward-3")])
    identity = parse_peer(pem(certificate))
    assert identity == parse_peer(der(certificate))
    assert (identity.federation_id, identity.kind, identity.name, identity.roles) == (
        "fed",
        "client",
        "ward-3",
        frozenset(),
    )
    assert identity.uri == "fedpareto://fed/client/ward-3"
    assert identity.serial == f"{certificate.serial_number:x}"
    assert identity.not_after == NOW + timedelta(days=90)


def test_a_certificate_of_an_administrator_carries_its_roles(authority: Authority) -> None:
    identity = parse_peer(pem(authority.issue(admin_uris("fed", "eve", [Role.VIEWER, Role.OPERATOR]))))
    assert (identity.kind, identity.name, set(identity.roles)) == ("admin", "eve", {"viewer", "operator"})


def test_a_certificate_of_the_coordinator_names_the_coordinator(authority: Authority) -> None:
    identity = parse_peer(pem(authority.issue([coordinator_uri("fed")], hosts=("localhost",))))
    assert (identity.kind, identity.name, set(identity.roles)) == ("coordinator", "coordinator", set())
    assert identity.uri == "fedpareto://fed/coordinator"


def test_a_certificate_without_alternative_names_names_nobody(authority: Authority) -> None:
    with pytest.raises(IdentityError, match="names 0 members"):
        parse_peer(der(authority.ca))


@pytest.mark.parametrize(
    "uris",
    [
        [],
        ["https://example.org"],
        ["fedpareto://fed/client/a", "fedpareto://fed/client/b"],
        ["fedpareto://fed/client/a", "fedpareto://fed/admin/a"],
        ["fedpareto://fed/client/a", "fedpareto://fed/role/operator"],
        ["fedpareto://fed/admin/a", "fedpareto://other/role/operator"],
        ["fedpareto://fed/client/A B"],
        ["fedpareto://fed/client/"],
        ["fedpareto:///client/a"],
        ["fedpareto://fed/role/operator"],
    ],
)
def test_a_certificate_that_names_nobody_or_two_is_nobodys(authority: Authority, uris: list[str]) -> None:
    with pytest.raises(IdentityError):
        parse_peer(pem(authority.issue(uris, hosts=("localhost",))))


@pytest.mark.parametrize("name", ["", "A", "a_b", "-a", "a-", "a" * 64, "a/b", "a b", "ä", "a\n"])
def test_names_that_would_not_survive_a_uri_are_refused(name: str) -> None:
    with pytest.raises(IdentityError):
        check_name(name)


def test_a_refused_name_is_repeated_up_to_80_characters() -> None:
    with pytest.raises(IdentityError, match=f"^client '{'a' * 80}' will not do"):
        check_name("a" * 200, "client")
