"""TLS 1.3 and nothing older, which gRPC's Python API cannot ask for."""

import os


def require_tls13() -> None:
    """Makes gRPC in this process refuse anything older than TLS 1.3. Call it before gRPC is imported: it reads once.

    gRPC's core takes the cipher suites for TLS 1.2 and older from the environment. We leave it only those for RSA
    certificates, of which a federation has none, so that nothing but TLS 1.3, whose suites are set apart, can agree
    on any. The coordinator tries TLS 1.2 on itself when it starts, and does not serve if that works.
    """
    os.environ["GRPC_SSL_CIPHER_SUITES"] = "ECDHE-RSA-AES256-GCM-SHA384:ECDHE-RSA-AES128-GCM-SHA256"
