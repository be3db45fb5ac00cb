"""A certificate authority for tests."""

from datetime import UTC, datetime, timedelta

from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.x509 import Certificate

from federation.trust.certificates import issue_certificate, make_ca, pem
from federation.trust.identity import client_uri
from federation.trust.key_chain import CoordinatorKeys
from federation.trust.keys import new_tls_key
from federation.trust.member_files import MemberFiles

NOW = datetime.now(UTC).replace(microsecond=0)
TlsKey = ec.EllipticCurvePrivateKey


class Authority:
    """The CA of a federation; a new one, unless its certificate and key are given."""

    def __init__(self, federation: str = "fed", ca: Certificate | None = None, key: TlsKey | None = None) -> None:
        self.federation, self.key = federation, key or new_tls_key()
        self.ca = ca or make_ca(self.key, federation, NOW)

    def issue(
        self,
        uris: list[str],
        hosts: tuple[str, ...] = (),
        key: TlsKey | None = None,
        now: datetime = NOW,
        lifetime: timedelta = timedelta(days=90),
    ) -> Certificate:
        return issue_certificate(
            ca=self.ca,
            ca_key=self.key,
            public_key=(key or new_tls_key()).public_key(),
            federation_id=self.federation,
            common_name="x",
            uris=uris,
            now=now,
            lifetime=lifetime,
            hosts=hosts,
        )

    def member(self, coordinator: CoordinatorKeys) -> MemberFiles:
        """The membership of "a", whose coordinator has these keys."""
        key = new_tls_key()
        return MemberFiles(
            federation_id=self.federation,
            client_id="a",
            addresses=("localhost:1",),
            ca=pem(self.ca),
            certificate=pem(self.issue([client_uri(self.federation, "a")], key=key)),
            tls_key=key,
            signing_key=Ed25519PrivateKey.generate(),
            coordinator=coordinator,
        )
