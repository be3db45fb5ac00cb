"""A worker that runs renews its own certificate: no stop, no work lost, and a failure is told."""

from contextlib import closing
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from coordinator.home import CoordinatorHome
from coordinator.members.authority import certify
from federation.trust.certificates import CLIENT_LIFETIME, pem
from federation.trust.keys import load_tls_key, new_tls_key
from federation.trust.member_files import MemberFiles, save_renewal
from tests import running
from tests.coordinator.members.scene import AGE, certificates
from tests.few import few
from tests.harness import Federation, wait_for
from tests.worker.scene import Running as Worker
from tests.worker.scene import events
from worker.home import WorkerHome

SPEC = """
task = "digits"
rounds = 2
train.epochs = 120
train.deadline_seconds = 300
evaluate.every = 0
"""
# A worker whose certificate is due while a file exists, which it then removes.
WHEN_TOLD = """
import sys
from pathlib import Path
from worker.connection import renewal
told, due = Path(sys.argv.pop(1)), renewal.renewal_due
def now_or_when_due(certificate):
    if told.exists():
        told.unlink()
        return certificate.not_valid_before_utc
    return due(certificate)
renewal.renewal_due, renewal.LOOK_SECONDS = now_or_when_due, 0.02
from fedpareto.cli.main import main
main()
"""


def age(fed: Federation, client: str, days: float) -> MemberFiles:
    """Gives a member a certificate that was issued some days ago."""
    home, directory, key = CoordinatorHome.load(fed.home), fed.directory / client, new_tls_key()
    raw = MemberFiles.load(directory).signing_key.public_key().public_bytes_raw()
    issued = datetime.now(UTC) - timedelta(days=days)
    with closing(home.open_database()) as database, database.begin() as session:
        certificate = certify(session, client, key.public_key(), raw, authority=home.authority, now=issued)
    save_renewal(directory, key, pem(certificate))
    return MemberFiles.load(directory)


def states(fed: Federation, client: str) -> list[bool]:
    """Whether each certificate of a member still counts, the oldest first."""
    rows = fed.query("select revoked from certificates where client_id = :client order by not_before", client=client)
    return [revoked is None for (revoked,) in rows]


@pytest.mark.full
def test_a_worker_renews_while_it_trains_and_the_training_goes_on(fed: Federation) -> None:
    fed.join("busy")
    age(fed, "busy", days=1)
    told = fed.directory / "renew-now"
    worker = fed.work("busy", "--set", "part=1/8", "--json", program=["-c", WHEN_TOLD, str(told)])
    worker.wait_for_text("attending")
    run = fed.submit("across", SPEC)
    worker.wait_for_text('"event": "training"')
    told.touch()
    worker.wait_for_text('"event": "renewed"')
    worker.wait_for_text('"event": "attending"', count=2)
    fed.wait_completed(run)
    happened = [(event["event"], event.get("assignment_id")) for event in events(worker)]
    names = [name for name, _ in happened]
    first, done = (next(entry for entry in happened if entry[0] == name) for name in ("training", "done"))
    assert first[1] == done[1]
    assert names.index("training") < names.index("renewed") < names.index("done")
    assert names.count("training") == 2, "each assignment was worked on once"
    assert {"disconnected", "refused", "declined", "dropped"}.isdisjoint(names)
    aged, *_, newest = states(fed, "busy")
    assert (aged, newest) == (False, True), "the old certificate ended when the new one attended"
    assert worker.stop() == 0


@few("certificate-issued")
@pytest.mark.parametrize(("point", "kept"), [("certificate-issued", 3), ("certificate-saved", 2)])
def test_a_worker_that_dies_between_renewal_and_saving_goes_on(fed: Federation, point: str, kept: int) -> None:
    fed.join(point)
    age(fed, point, days=80)
    fed.work(point, "--set", "part=1/8", crash=point).wait_killed()
    worker = fed.work(point, "--set", "part=1/8", "--json")
    end = datetime.now(UTC) + CLIENT_LIFETIME - timedelta(hours=1)
    wait_for(lambda: not states(fed, point)[0], "the aged one to end")  # the new one is saved before it attends
    assert MemberFiles.load(fed.directory / point).not_after > end
    assert states(fed, point)[-1]
    assert len(states(fed, point)) == kept + 1
    assert "Traceback" not in worker.text
    assert worker.stop() == 0


@pytest.mark.full
def test_a_certificate_that_cannot_be_written_is_told_of_and_not_used_until_it_is(
    served: running.Running, tmp_path: Path
) -> None:
    member = served.joined(tmp_path / "h", "read-only", ago=AGE, passphrase=b"secret")
    (tmp_path / "h" / "replacing.json").mkdir()  # nothing can be written in its place, not even by root
    worker = Worker(WorkerHome(tmp_path / "h"), member, {}, passphrase=b"secret", uniform=lambda *_: 0.05)
    try:
        [warning] = worker.wait_for("certificate-ends")
        assert "in 9 days, and was not renewed: the new certificate cannot be written" in warning["message"]
        assert "let this process write to it" in warning["message"]
        worker.wait_for("attending")
        assert all(row.revoked is None for row in certificates(served, "read-only"))
        (tmp_path / "h" / "replacing.json").rmdir()
        worker.wait_for("renewed")
        worker.wait_for("attending", count=2)
    finally:
        worker.stop()
    assert worker.failure is None
    old, new = certificates(served, "read-only")
    assert (old.revoked is None, new.revoked) == (False, None), "one certificate was issued, however often it was tried"
    assert len(worker.events("certificate-ends")) == 1
    assert b"ENCRYPTED" in (tmp_path / "h" / "tls.key").read_bytes()
    load_tls_key(tmp_path / "h" / "tls.key", b"secret")


@pytest.mark.full
def test_a_worker_that_is_refused_a_certificate_says_so_and_works_on(served: running.Running, tmp_path: Path) -> None:
    member = served.joined(tmp_path / "h", "mixed-up", ago=AGE)
    mixed = {**vars(member), "signing_key": Ed25519PrivateKey.generate()}
    worker = Worker(WorkerHome(tmp_path / "h"), MemberFiles(**mixed), {}, uniform=lambda *_: 0.05)
    try:
        warning = worker.wait_for("certificate-ends")[0]
        assert "did not renew the certificate of mixed-up: proof: " in warning["message"]
        assert "limit:rate" in worker.wait_for("certificate-ends", count=2)[1]["message"]
        assert worker.events("certificate-ends")[1]["retry_seconds"] > 1000, "as long as the coordinator asks"
        worker.wait_for("attending")
    finally:
        worker.stop()
    assert worker.failure is None
