"""Requires TLS 1.3, which gRPC's Python API cannot."""

import os


def require_tls13() -> None:
    """Makes gRPC in this process refuse TLS before 1.3. Call it before the import of gRPC, which reads it once.

    gRPC's core takes the cipher suites for TLS 1.2 and older from the environment. We leave only the suites for RSA
    certificates, which a federation does not have. So only TLS 1.3, whose suites are separate, can succeed. The
    coordinator tries TLS 1.2 on itself when it starts, and does not serve if that works.
    """
    os.environ["GRPC_SSL_CIPHER_SUITES"] = "ECDHE-RSA-AES256-GCM-SHA384:ECDHE-RSA-AES128-GCM-SHA256"
