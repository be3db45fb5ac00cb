"""A certificate authority for tests."""

from datetime import UTC, datetime, timedelta

from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509 import Certificate

from federation.trust.certificates import issue_certificate, make_ca
from federation.trust.keys import new_tls_key

NOW = datetime.now(UTC).replace(microsecond=0)


class Authority:
    def __init__(self) -> None:
        self.key = new_tls_key()
        self.ca = make_ca(self.key, "fed", NOW)

    def issue(
        self, uris: list[str], hosts: tuple[str, ...] = (), key: ec.EllipticCurvePrivateKey | None = None
    ) -> Certificate:
        return issue_certificate(
            ca=self.ca,
            ca_key=self.key,
            public_key=(key or new_tls_key()).public_key(),
            federation_id="fed",
            common_name="x",
            uris=uris,
            now=NOW,
            lifetime=timedelta(days=90),
            hosts=hosts,
        )
