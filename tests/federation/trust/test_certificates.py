from datetime import timedelta
from typing import Any

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID
from hypothesis import given
from hypothesis import strategies as st

from federation.trust.certificates import csr_public_key, make_csr
from federation.trust.identity import client_uri, coordinator_uri
from federation.trust.keys import IdentityError, new_tls_key
from tests.federation.trust.scene import NOW, Authority


@pytest.fixture
def authority() -> Authority:
    return Authority()


def test_certificates_may_be_used_for_what_they_are_and_nothing_else(authority: Authority) -> None:
    def extension(certificate: x509.Certificate, kind: type[Any]) -> Any:
        return certificate.extensions.get_extension_for_class(kind)

    client, server = (
        authority.issue([client_uri("fed", "a")]),
        authority.issue([coordinator_uri("fed")], ("localhost",)),
    )
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


@given(st.binary(max_size=400))
def test_no_bytes_make_the_request_parser_fail_otherwise(data: bytes) -> None:
    with pytest.raises(IdentityError):
        csr_public_key(data)
