"""The wish to leave a federation, and the signed withdrawal, in files of a worker's home."""

from datetime import UTC, datetime
from pathlib import Path

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from federation.trust.envelope import sign
from federation.v1.common_pb2 import WithdrawalManifest
from worker.home import WorkerHomeError
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
