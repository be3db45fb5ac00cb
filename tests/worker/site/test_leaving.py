"""The wish to leave a federation, and the signed withdrawal, in files of a worker's home."""

from datetime import UTC, datetime
from pathlib import Path

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from federation.findings import CheckOutcome
from federation.trust.envelope import sign
from federation.v1.common_pb2 import WithdrawalManifest
from worker.doctor import check_leaving
from worker.home import WorkerHome, WorkerHomeError
from worker.site.leaving import Leave, SignedWithdrawal, read_leave, read_withdrawal, write_leave, write_withdrawal

NOW = datetime(2026, 5, 4, 12, tzinfo=UTC)


@pytest.mark.parametrize("leave", [Leave(NOW), Leave(NOW, now=True, forget=True)])
def test_a_wish_to_leave_is_read_as_it_was_written(leave: Leave, tmp_path: Path) -> None:
    path = tmp_path / "leave.json"
    assert read_leave(path) == (None, "")
    write_leave(path, leave)
    assert read_leave(path) == (leave, "")


@pytest.mark.parametrize(
    "content",
    [
        "x",
        '{"format": 99, "since": "2026-05-04T12:00:00+00:00", "now": false, "forget": false}',
        '{"format": 1, "since": "2026-05-04T12:00:00+00:00", "now": 1, "forget": false}',
        '{"format": 1, "since": "2026-05-04T12:00:00", "now": false, "forget": false}',
        '{"format": 1, "now": false, "forget": false}',
    ],
)
def test_a_damaged_wish_is_none_and_the_problem_says_what_to_do(content: str, tmp_path: Path) -> None:
    path = tmp_path / "leave.json"
    path.write_text(content)
    leave, problem = read_leave(path)
    assert leave is None
    assert str(path) in problem
    assert "fedpareto worker leave" in problem


def test_a_withdrawal_is_kept_as_it_was_signed_and_a_damaged_one_is_refused(tmp_path: Path) -> None:
    path, manifest = tmp_path / "withdrawal.json", WithdrawalManifest(client_id="ann", certificate="a1")
    envelope = sign(manifest, Ed25519PrivateKey.generate())
    assert read_withdrawal(path) is None
    for withdrawal in (SignedWithdrawal(envelope), SignedWithdrawal(envelope, NOW, (envelope,))):
        write_withdrawal(path, withdrawal)
        assert read_withdrawal(path) == withdrawal
    path.write_text('{"format": 1, "withdrawal": "!", "left": null, "earlier": []}')
    with pytest.raises(WorkerHomeError, match=r"withdrawal\.json is damaged"):
        read_withdrawal(path)


def test_the_doctor_says_that_a_withdrawal_waits_and_that_the_site_has_left(tmp_path: Path) -> None:
    home, envelope = WorkerHome(tmp_path), sign(WithdrawalManifest(client_id="ann"), Ed25519PrivateKey.generate())
    assert list(check_leaving(home)) == []

    def said() -> tuple[CheckOutcome, str]:
        (finding,) = check_leaving(home)
        return finding.outcome, finding.message

    write_leave(home.leave, Leave(NOW))
    outcome, message = said()
    assert (outcome, "once begun work has ended and a coordinator answers" in message) == (CheckOutcome.WARNING, True)
    write_leave(home.leave, Leave(NOW, now=True))
    write_withdrawal(home.withdrawal, SignedWithdrawal(envelope))
    assert "A withdrawal is signed, and no coordinator has acknowledged it." in said()[1]
    write_withdrawal(home.withdrawal, SignedWithdrawal(envelope, NOW))
    outcome, message = said()
    assert outcome is CheckOutcome.WARNING
    assert message.startswith("this site has left the federation on 2026-05-04 12:00 UTC")
    home.leave.write_text("x")
    home.withdrawal.unlink()
    assert (said()[0], "fedpareto worker leave" in said()[1]) == (CheckOutcome.FAILED, True)
    home.withdrawal.write_text("x")
    assert (said()[0], "withdrawal.json is damaged" in said()[1]) == (CheckOutcome.FAILED, True)
