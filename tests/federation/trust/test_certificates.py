"""Certificates: what they may be used for, and whom they name."""

from datetime import timedelta
from typing import Any

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID

from federation.trust.certificates import csr_public_key, der, make_csr, pem
from federation.trust.identity import Role, admin_uris, check_name, client_uri, coordinator_uri, parse_peer
from federation.trust.keys import IdentityError, new_tls_key
from tests.federation.trust.scene import NOW, Authority


@pytest.fixture
def authority() -> Authority:
    return Authority()


def test_certificates_may_be_used_for_what_they_are_and_nothing_else(authority: Authority) -> None:
    def extension(certificate: x509.Certificate, kind: type[Any]) -> Any:
        return certificate.extensions.get_extension_for_class(kind)

    client = authority.issue([client_uri("fed", "a")])
    server = authority.issue([coordinator_uri("fed")], ("localhost",))
    for leaf, usage in ((client, ExtendedKeyUsageOID.CLIENT_AUTH), (server, ExtendedKeyUsageOID.SERVER_AUTH)):
        assert extension(leaf, x509.BasicConstraints).critical
        assert not extension(leaf, x509.BasicConstraints).value.ca
        assert list(extension(leaf, x509.ExtendedKeyUsage).value) == [usage]
        assert extension(leaf, x509.KeyUsage).critical
        assert extension(leaf, x509.KeyUsage).value.digital_signature
        assert not extension(leaf, x509.KeyUsage).value.key_cert_sign
        issuer = extension(authority.ca, x509.SubjectKeyIdentifier).value.digest
        assert extension(leaf, x509.AuthorityKeyIdentifier).value.key_identifier == issuer
        leaf.verify_directly_issued_by(authority.ca)
    constraints = extension(authority.ca, x509.BasicConstraints)
    assert constraints.critical
    assert (constraints.value.ca, constraints.value.path_length) == (True, 0)
    assert extension(authority.ca, x509.KeyUsage).value.key_cert_sign
    assert authority.ca.not_valid_after_utc == NOW + timedelta(days=3650)


def test_a_certificate_does_not_outlive_its_ca(authority: Authority) -> None:
    late = authority.ca.not_valid_after_utc - timedelta(days=1)
    certificate = authority.issue([client_uri("fed", "a")], now=late)
    assert certificate.not_valid_after_utc == authority.ca.not_valid_after_utc


def test_a_request_for_another_curve_or_with_a_forged_signature_is_no_request() -> None:
    good = make_csr(new_tls_key())
    assert isinstance(csr_public_key(good), ec.EllipticCurvePublicKey)
    other = x509.CertificateSigningRequestBuilder().subject_name(x509.Name([]))
    p384 = other.sign(ec.generate_private_key(ec.SECP384R1()), hashes.SHA256())
    forged = bytearray(good)
    forged[-5] ^= 1
    for csr in (p384.public_bytes(serialization.Encoding.DER), bytes(forged), b"", b"\x30\x03\x02\x01\x05", good * 40):
        with pytest.raises(IdentityError):
            csr_public_key(csr)


# --- whom a certificate names


def test_a_certificate_of_a_client_names_the_client(authority: Authority) -> None:
    certificate = authority.issue([client_uri("fed", "ward-3")])
    identity = parse_peer(pem(certificate))
    assert identity == parse_peer(der(certificate))
    told = identity.federation_id, identity.kind, identity.name, identity.roles
    assert told == ("fed", "client", "ward-3", frozenset())
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
