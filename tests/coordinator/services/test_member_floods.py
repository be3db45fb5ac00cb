"""Floods of one member, from a process of its own, while another one works."""

from pathlib import Path

import pytest

from fedpareto.processes import forked
from tests.coordinator.services.scene import goes_on, pace, submit, work
from tests.harness import federation
from tests.paths import ROOT

FLOOD = """
import sys, threading
from federation.line.tls import require_tls13
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
def test_a_members_flood_leaves_more_than_half_of_the_rounds(tmp_path: Path, kind: str) -> None:
    with federation(tmp_path) as made:
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
