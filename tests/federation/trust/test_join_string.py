import base64
import hashlib
import socket
import ssl
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from federation.transport.proxies import RouteError
from federation.trust.certificates import fingerprint, pem
from federation.trust.identity import coordinator_uri
from federation.trust.join_string import JoinStringFields, fetch_ca, secret_hash
from federation.trust.keys import IdentityError, new_tls_key, write_private_key
from tests.federation.trust.scene import Authority


@given(
    st.binary(min_size=32, max_size=32),
    st.binary(min_size=32, max_size=32),
    st.from_regex(r"[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?", fullmatch=True),
)
def test_a_join_string_says_what_was_put_into_it(ca: bytes, secret: bytes, client_id: str) -> None:
    join = JoinStringFields(
        addresses=("[::1]:7444", "second.example:7444"), ca_fingerprint=ca.hex(), secret=secret, client_id=client_id
    )
    word = join.encode()
    assert word.replace("_", "").replace("-", "").isalnum()
    assert JoinStringFields.decode(f" {word}\n") == join


def test_a_damaged_join_string_is_refused_and_not_repeated() -> None:
    word = JoinStringFields(addresses=("host:1",), ca_fingerprint="ab" * 32, secret=b"s" * 32, client_id="a").encode()
    other, foreign = word.replace("c3", "c4"), word[:9] + "€" + word[10:]
    for damaged in ("", "hello", word[:-1], word[:-9], word + "A", other, foreign):
        problem = "is damaged" if damaged.startswith("fpjoin1_") else "does not begin with fpjoin1_"
        with pytest.raises(IdentityError, match=problem) as caught:
            JoinStringFields.decode(damaged)
        assert not damaged or damaged == "hello" or damaged[9:] not in str(caught.value)


@pytest.mark.parametrize("said", [b"", b"a", b"a\n", b"a\nhost", b"a host:1", b"A\nhost:1"])
def test_a_join_string_with_the_right_checksum_must_have_a_name_and_an_address_with_a_port(said: bytes) -> None:
    for body in (bytes(64) + said, said):
        word = base64.urlsafe_b64encode(hashlib.sha256(body).digest()[:4] + body).decode().rstrip("=")
        with pytest.raises(IdentityError):
            JoinStringFields.decode(f"fpjoin1_{word}")


def test_a_join_string_in_a_log_does_not_show_its_secret() -> None:
    assert "SECRET" not in repr(
        JoinStringFields(addresses=("h:1",), ca_fingerprint="ab" * 32, secret=b"SECRET" * 6, client_id="a")
    )


def test_the_hash_of_a_secret_is_its_sha_256() -> None:
    # FIPS 180-4's examples, NIST: "abc"
    assert secret_hash(b"abc") == "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"


@contextmanager
def answering(
    authority: Authority,
    directory: Path,
    speak: Callable[[ssl.SSLSocket], object],
    version: ssl.TLSVersion = ssl.TLSVersion.TLSv1_3,
    times: int = 1,
) -> Iterator[int]:
    """The port of a coordinator that takes some connections, and speaks TLS up to a version."""
    key = new_tls_key()
    (directory / "server.pem").write_bytes(pem(authority.issue([coordinator_uri("fed")], ("localhost",), key)))
    write_private_key(directory / "server.key", key)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.maximum_version = version
    # A caller that leaves tickets unread resets the connection, which newer versions of Python do not take for its end.
    context.num_tickets = 0
    context.set_alpn_protocols(["h2"])
    context.load_cert_chain(directory / "server.pem", directory / "server.key")

    def serve() -> None:
        for _ in range(times):
            plain, _ = listener.accept()
            with plain, suppress(OSError), context.wrap_socket(plain, server_side=True) as connection:
                speak(connection)

    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=serve)
        thread.start()
        yield listener.getsockname()[1]
        thread.join(30)
        assert not thread.is_alive()


def test_the_ca_is_fetched_by_its_fingerprint_and_an_impostor_is_told(tmp_path: Path) -> None:
    authority, spoken = Authority(), []

    def speak(connection: ssl.SSLSocket) -> None:
        # The stranger says nothing before it knows who answers.
        spoken.append((connection.selected_alpn_protocol(), connection.recv(1)))

    with answering(authority, tmp_path, speak, times=2) as port:
        assert fetch_ca(f"localhost:{port}", fingerprint(authority.ca), timeout=30) == pem(authority.ca)
        with pytest.raises(IdentityError, match=r"not the coordinator of this federation: .* is not 0{16}\.\.\.;"):
            fetch_ca(f"[127.0.0.1]:{port}", "00" * 32, timeout=30)  # as IPv6 addresses are written
    assert spoken == [("h2", b"")] * 2, "gRPC's servers end connections that do not offer it"


def test_a_server_without_tls_1_3_is_not_spoken_to(tmp_path: Path) -> None:
    authority = Authority()
    with (
        answering(authority, tmp_path, lambda connection: connection.recv(1), ssl.TLSVersion.TLSv1_2) as port,
        pytest.raises(RouteError, match=r"does not speak TLS 1\.3 .*protocol version"),
    ):
        fetch_ca(f"localhost:{port}", fingerprint(authority.ca), timeout=30)
