"""Crowds of strangers at the ports of a real coordinator process, or floods of one member, while another one works."""

import contextlib
import resource
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from fedpareto.processes import forked
from tests.coordinator.services.scene import goes_on, pace, ports, submit, work
from tests.harness import SECONDS, Federation, federation
from tests.paths import ROOT

LIMITED = """
import resource
resource.setrlimit(resource.RLIMIT_NOFILE, ({limit} // 2, {limit}))
from fedpareto.cli.main import main
main()
"""  # the coordinator raises the soft limit to the hard one


@contextlib.contextmanager
def crowd(ports: list[int], count: int, addresses: int) -> Iterator[None]:
    """Idle connections from several loopback addresses; every other one has sent the beginning of a TLS handshake."""
    with contextlib.ExitStack() as held:
        for number in range(count):
            source = (f"127.0.0.{2 + number % addresses}", 0)
            address = ("127.0.0.1", ports[number % 2])
            try:
                made = socket.create_connection(address, timeout=SECONDS, source_address=source)
            except ConnectionResetError:  # closed before this side had seen it opened
                continue
            held.enter_context(made)
            if number // 2 % 2:
                with contextlib.suppress(OSError):  # it has been closed already
                    made.sendall(b"\x16\x03\x01\x02\x00\x01")
        yield


@pytest.fixture
def made(tmp_path: Path) -> Iterator[Federation]:
    with federation(tmp_path) as made:
        yield made


@pytest.mark.full
def test_idle_connections_of_strangers_take_no_descriptor_that_a_round_needs(made: Federation) -> None:
    made.serve(program=LIMITED.format(limit=400))
    stream = work(made.enroll("worker"))
    submit(made)
    goes_on(made, 3)
    with crowd(ports(made), 400, addresses=5):
        goes_on(made, 10)
        newcomer = made.enroll("newcomer")  # also over the enrollment port, through the crowd
        newcomer.attend(nothing=1).close()
        goes_on(made, 3)
    goes_on(made, 3)
    stream.close()
    refused = made.query("select actor, sum(times) from audit_log where action = 'connect' group by actor")
    assert {actor for actor, _ in refused} == {f"peer 127.0.0.{host}" for host in range(2, 7)}
    assert "EMFILE" not in made.serving.text
    assert "Too many open files" not in made.serving.text


@pytest.mark.full
def test_with_5000_idle_connections_more_than_half_the_rounds_are_done(made: Federation) -> None:
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    made.serve(program=LIMITED.format(limit=hard))
    stream = work(made.enroll("worker"))
    submit(made)
    goes_on(made, 20)

    undisturbed = pace(made, 15.0)
    with crowd(ports(made), 5000, addresses=10):
        disturbed = pace(made, 15.0)
        goes_on(made, 20)
    after = pace(made, 15.0)
    stream.close()
    print(f"rounds in 15 s: {undisturbed} without the crowd, {disturbed} with it, {after} after it")
    assert disturbed > undisturbed / 2
    assert after > undisturbed / 2


FLOOD = """
import sys, threading
from federation.transport.tls import require_tls13
require_tls13()
import grpc
from cryptography.hazmat.primitives.asymmetric.ec import SECP256R1
from tests.harness import Member
from federation.trust.certificates import make_csr
from federation.trust.join_string import JoinStringFields as JoinString
from federation.trust.keys import new_tls_key
from federation.trust.proofs import prove_renewal
from federation.v1.federation_pb2 import AttendRequest, FetchBlobRequest, Hello, RenewRequest
kind = sys.argv[2]
member = Member.enroll(JoinString.decode(sys.argv[1]))
csr = make_csr(new_tls_key())
renewal = RenewRequest(csr=csr, proof=prove_renewal(member.files.signing_key, csr))
calls = {
    "renew": lambda: member.stub.Renew(renewal, timeout=20),
    "attend": lambda: next(member.stub.Attend(iter([AttendRequest(hello=Hello())]), timeout=20)),
    "refused": lambda: next(member.stub.FetchBlob(FetchBlobRequest(digest="x"), timeout=20)),
}
def flood():
    while True:
        try:
            calls[kind]()
        except grpc.RpcError:
            pass
for _ in range(40):
    threading.Thread(target=flood, daemon=True).start()
threading.Event().wait()
"""


@pytest.mark.full
@pytest.mark.parametrize("kind", ["renew", "attend", "refused"])
def test_a_members_flood_leaves_more_than_half_of_the_rounds(made: Federation, kind: str) -> None:
    made.serve()
    stream = work(made.enroll("worker"))
    submit(made)
    goes_on(made, 20)
    undisturbed = pace(made, 10.0)
    join_string = made.join_string("flooder")
    program = f"import sys; sys.path.insert(0, {str(ROOT)!r})\n{FLOOD}"
    flooder = made.spawn("flooder", ["-c", program, join_string, kind])
    assert isinstance(flooder.popen, forked.Forked)
    goes_on(made, 20)
    disturbed = pace(made, 10.0)
    limited = "select count(*) from audit_log where outcome = 'limit:rate' and actor like '%/flooder'"
    assert made.query(limited)[0][0]
    flooder.kill()
    stream.close()
    print(f"{kind}: {undisturbed} rounds in 10 s, {disturbed} with the flood")
    assert disturbed > undisturbed / 2
