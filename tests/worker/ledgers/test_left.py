"""What left a site, by its own ledger: on the disk before it leaves, completed by the receipt, and read by pages."""

import csv
import io
import json
import math
import os
import signal
import sqlite3
import threading
from collections.abc import Iterator
from contextlib import closing
from datetime import UTC, datetime, timedelta
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from federation.refusals import Refusal
from federation.trust.envelope import envelope_digest, from_text, sign
from federation.v1.common_pb2 import AssignmentManifest, ReceiptManifest, ReplyManifest, SignedEnvelope
from federation.v1.secure_pb2 import SecureMaskWork, SecureReadyWork, SecureStatement, SecureTerms
from fedpareto.web.site.left_table import CSV_COLUMNS, csv_text
from tests.command_lines import failure
from tests.harness import wait_for
from tests.scripted import HungUp
from tests.worker.scene import Scene, command
from worker.home import MEMBER_FILE, WorkerHomeError
from worker.ledgers.left_ledger import (
    MAX_MESSAGE,
    MAX_PHASES,
    MAX_REASONS,
    OTHER_REASONS,
    LeftLedger,
    LeftState,
    ReplyShare,
)
from worker.ledgers.left_reading import read_declines, read_left

KEY = Ed25519PrivateKey.from_private_bytes(bytes(32))
NOW = datetime(2026, 5, 4, 12, tzinfo=UTC)
PATTERN = "<b>\x1b[31m=1+1" + 185 * "x"  # HTML, a control character, and 200 characters


def signed(number: int = 0, *, kind: str = "train", work: bytes = b"", **reply: Any) -> tuple[Any, Any]:
    """A signed reply, and the assignment that it fulfils."""
    facts: dict[str, Any] = {
        "run_id": "run-1",
        "round": number,
        "assignment_id": f"assignment-{number}",
        "client_id": "ann",
    } | reply
    facts |= {"task": "digits"}
    order = {name: facts[name] for name in ("run_id", "round", "assignment_id", "client_id", "task")}
    return sign(ReplyManifest(**facts), KEY), sign(AssignmentManifest(**order, kind=kind, work=work), KEY)


def receipt_for(envelope: SignedEnvelope, *, accepted: bool = True, reason: str = "") -> tuple[Any, ReceiptManifest]:
    manifest = ReceiptManifest(envelope=envelope_digest(envelope), accepted=accepted, reason=reason)
    manifest.created.FromDatetime(NOW)
    return sign(manifest, KEY), manifest


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "left.db"


@pytest.fixture
def ledger(path: Path) -> Iterator[LeftLedger]:
    with closing(LeftLedger(path)) as made:
        yield made


def seen(scene: Scene) -> list[tuple[LeftState, int, str]]:
    """State, tries and reason of each row of a worker's ledger, the oldest first."""
    return [
        (row.telling.state, row.telling.tries, row.telling.reason) for row in reversed(read_left(scene.home.left).rows)
    ]


def test_an_evaluation_is_on_record_with_its_numbers_before_the_coordinator_answers_and_its_receipt_completes_it(
    scene: Scene,
) -> None:
    scene.coordinator.hold_submissions = threading.Event()
    scene.evaluate("train")
    running = scene.start()
    scene.wait_submitted()
    [row] = read_left(scene.home.left).rows
    assert (row.telling.state, row.first.receipt, row.first.payload_bytes) == (LeftState.KEPT, "", 0)
    said = scene.reply()
    assert row.first.numbers.items() >= {**said.metrics, "samples": said.samples}.items()
    assert (row.numbers, row.bytes) == (len(row.first.numbers), row.first.message_bytes)
    assert row.numbers > 2
    scene.coordinator.hold_submissions.set()
    running.wait_for("receipt")
    [row] = read_left(scene.home.left).rows
    line = json.loads(running.home.receipts.read_text())
    assert (row.telling.state, row.first.reply, row.first.tries) == (LeftState.ACCEPTED, line["envelope"], 1)
    assert row.first.receipt == envelope_digest(from_text(line["receipt"]))


def test_an_update_counts_its_rows_and_a_reply_that_is_sent_again_is_one_row(scene: Scene) -> None:
    scene.coordinator.submit_refusals = [HungUp(), Refusal("stopping", "later")]
    scene.worked()
    [row] = read_left(scene.home.left).rows
    assert row.first.rows == (("loss", "F32", scene.model[0].size),)
    assert row.first.payload_bytes == len(scene.coordinator.submissions[0].payload)
    assert seen(scene) == [(LeftState.ACCEPTED, 3, "")]


@pytest.mark.parametrize(
    ("reason", "state"), [("assignment-closed", LeftState.DROPPED), ("limit:payload", LeftState.DECLINED)]
)
def test_a_reply_that_is_refused_for_good_says_so_with_the_reason(scene: Scene, reason: str, state: LeftState) -> None:
    scene.coordinator.submit_refusals = [Refusal(reason, "no")]
    scene.assign()
    running = scene.start()
    running.wait_for("dropped")
    running.wait_spooled()
    assert seen(scene) == [(state, 1, reason)]


def test_a_refusal_that_is_signed_and_a_reply_that_was_no_longer_wanted_are_on_record(scene: Scene) -> None:
    coordinator = scene.coordinator
    coordinator.receipt = lambda submission, receipt: sign(
        ReceiptManifest(**{**_fields(receipt), "accepted": False, "reason": "non-finite"}), coordinator.signing_key
    )
    running = scene.attending()
    scene.receipts(1)
    assert seen(scene) == [(LeftState.REFUSED, 1, "non-finite")]
    coordinator.receipt, coordinator.submit_refusals = None, [Refusal("stopping", "later")] * 1000
    scene.assign(1)
    wait_for(lambda: seen(scene)[-1][0] is LeftState.SENT, "an answer without a receipt")
    coordinator.cancel("assignment-1")
    running.wait_for("cancelled")
    wait_for(lambda: seen(scene)[-1][0] is LeftState.CANCELLED, "the end of the reply")
    assert seen(scene)[-1][2] == "run-ended"


def _fields(manifest: ReceiptManifest) -> dict[str, Any]:
    return {field.name: value for field, value in manifest.ListFields()}


class Killed(Exception):
    """Ends a worker at a point, as a kill does: nothing after it is done."""


# Where the worker ends, the state that its ledger then shows, and how often the reply had been sent.
POINTS: dict[str, tuple[str, bool, list[LeftState], int]] = {
    "before it is kept": ("keep", False, [], 0),
    "kept, and not sent": ("keep", True, [LeftState.KEPT], 0),
    "sent, without a receipt": ("acknowledge", False, [LeftState.KEPT], 1),
    "after the receipt": ("acknowledge", True, [LeftState.ACCEPTED], 1),
}


@pytest.mark.parametrize("point", POINTS)
def test_a_worker_that_dies_at_each_point_shows_what_may_have_left_and_counts_it_once(
    scene: Scene, monkeypatch: pytest.MonkeyPatch, point: str
) -> None:
    name, after, states, sent = POINTS[point]
    original = getattr(LeftLedger, name)

    def dying(self: LeftLedger, *arguments: Any) -> None:
        if after:
            original(self, *arguments)
        raise Killed(point)

    scene.assign()
    with monkeypatch.context() as patch:
        patch.setattr(LeftLedger, name, dying)
        dead = scene.start()
        dead.thread.join(60)
        assert isinstance(dead.failure, Killed)
    assert ([state for state, *_ in seen(scene)], len(scene.coordinator.submissions)) == (states, sent)
    scene.start().wait_for("receipt")
    assert seen(scene) == [(LeftState.ACCEPTED, 1 + len(states), "")]
    [_] = {submission.envelope.SerializeToString() for submission in scene.coordinator.submissions}


def test_a_file_that_was_left_in_the_middle_of_a_change_can_be_read_at_once(path: Path, ledger: LeftLedger) -> None:
    ledger.keep(*signed(0), NOW)

    def write_and_die() -> None:
        with closing(sqlite3.connect(path, isolation_level=None)) as connection:
            connection.execute("PRAGMA journal_mode = TRUNCATE")
            connection.execute("PRAGMA cache_size = 1")  # so that changes are written before the end
            connection.execute("BEGIN")
            connection.execute("UPDATE replies SET reason = hex(zeroblob(100000))")
            os.kill(os.getpid(), signal.SIGKILL)

    process = get_context("fork").Process(target=write_and_die)
    process.start()
    process.join()
    assert path.with_name("left.db-journal").stat().st_size > 0
    [row] = read_left(path).rows
    assert row.first.reason == ""


def test_declines_are_counted_by_reason_up_to_a_bound_and_one_that_is_made_again_counts_once(
    path: Path, ledger: LeftLedger
) -> None:
    assert read_declines(path.with_name("missing")) == []
    for number, assignment in enumerate(("one", "two", "two")):
        at = NOW + timedelta(minutes=number)
        ledger.decline("limit:bytes", f"{assignment}{PATTERN}", run="run-1", assignment=assignment, at=at)
    [declined] = read_declines(path)
    assert (declined.count, declined.assignment, declined.message) == (2, "two", f"two{PATTERN}")
    assert (declined.first, declined.last) == (NOW.isoformat(), (NOW + timedelta(minutes=2)).isoformat())
    for number in range(MAX_REASONS + 9):
        ledger.decline(f"bad-share:{number}", "x" * 2000, run="", assignment=str(number), at=NOW)
    found = {each.reason: each for each in read_declines(path)}
    assert len(found) == MAX_REASONS + 1
    assert (found[OTHER_REASONS].count, len(found[OTHER_REASONS].message)) == (10, MAX_MESSAGE)


def as_before_declines(path: Path, *, table: bool) -> None:
    """Makes of a file one that was made between two releases: its number is 1, with or without the table."""
    with closing(sqlite3.connect(path)) as connection:
        connection.execute("PRAGMA user_version = 1")
        if not table:
            connection.execute("DROP TABLE declines")


@pytest.mark.parametrize("table", [False, True])
def test_a_file_from_between_two_releases_is_brought_up_with_its_replies(path: Path, table: bool) -> None:
    with closing(LeftLedger(path)) as file:
        file.keep(*signed(0), NOW)
    as_before_declines(path, table=table)
    if not table:
        with pytest.raises(WorkerHomeError, match="tables of version 1: start the worker, which brings them up"):
            read_declines(path)
    for _ in range(2):
        with closing(LeftLedger(path)) as file:
            file.decline("limit:bytes", "too many", run="run-1", assignment="one", at=NOW)
            file.keep(*signed(0), NOW)
    assert [row.telling.tries for row in read_left(path).rows] == [3]
    assert [(each.reason, each.count) for each in read_declines(path)] == [("limit:bytes", 1)]


def test_a_private_session_is_one_row_with_its_phases_and_the_coefficient_that_was_asked_for(
    path: Path, ledger: LeftLedger
) -> None:
    terms = SecureTerms(run_id="run-1")
    terms.train.steps = 1
    mask = SecureMaskWork(members=["ann", "ben"], coefficients=[-(2**31), 2**32])
    works = {
        "secure-ready": SecureReadyWork(terms=terms.SerializeToString()).SerializeToString(),
        "secure-deal": b"",
        "secure-mask": mask.SerializeToString(),
    }
    for attempt in range(2):
        statement = SecureStatement(session=bytes([attempt])).SerializeToString()
        for phase, (kind, work) in enumerate(works.items()):
            name = f"{attempt}-{phase}"
            pair = signed(0, kind=kind, work=work, statement=statement, assignment_id=name, attempt=attempt)
            ledger.keep(*pair, NOW)
            ledger.keep(*signed(9, assignment_id=f"between-{name}"), NOW)  # another run's work goes on meanwhile
            if (attempt, phase) != (0, 2):
                ledger.acknowledge(*receipt_for(pair[0]))
    ledger.keep(*signed(0, kind="secure-deal", statement=b"\xff", assignment_id="unreadable"), NOW)
    first, second = (row for row in reversed(read_left(path).rows) if row.private)
    for row, attempt in ((first, 0), (second, 1)):
        assert [reply.kind for reply in row.replies] == list(works)
        assert (row.work, row.first.attempt, row.coefficient) == ("train", attempt, -0.5)
        assert row.last.told_by == "order"
    assert (first.telling.state, second.telling.state) == (LeftState.KEPT, LeftState.ACCEPTED)


def test_a_session_that_asks_without_end_is_read_in_rows_of_bounded_length(path: Path, ledger: LeftLedger) -> None:
    statement = SecureStatement(session=b"s").SerializeToString()
    for number in range(MAX_PHASES + 1):
        pair = signed(0, kind="secure-open", statement=statement, assignment_id=str(number))
        ledger.keep(*pair, NOW)
    assert [len(row.replies) for row in read_left(path).rows] == [1, MAX_PHASES]


def test_numbers_beyond_the_bound_are_counted_and_not_kept(path: Path, ledger: LeftLedger) -> None:
    ledger.keep(*signed(0, metrics={f"test/{number:03}": math.nan for number in range(150)}, samples=7), NOW)
    [row] = read_left(path).rows
    assert (len(row.first.numbers), row.first.more_numbers, row.numbers) == (100, 51, 151)


def test_pages_are_bounded_newest_first_and_of_one_run(path: Path, ledger: LeftLedger) -> None:
    for number in range(7):
        ledger.keep(*signed(number, run_id=f"run-{number % 2}", assignment_id=str(number)), NOW)

    def rounds(run: str) -> list[list[int]]:
        before, pages = None, list[list[int]]()
        while pages == [] or before is not None:
            page = read_left(path, run=run, before=before, limit=2)
            pages.append([row.first.round for row in page.rows])
            before = page.before
        return pages

    assert rounds("") == [[6, 5], [4, 3], [2, 1], [0]]
    assert rounds("run-1") == [[5, 3], [1]]
    assert rounds("run-%") == [[]]
    plan = "EXPLAIN QUERY PLAN SELECT DISTINCT part_of FROM replies WHERE part_of < 9 ORDER BY part_of DESC LIMIT 2"
    with ledger._file.using() as connection:
        assert "TEMP B-TREE" not in str(connection.execute(plan).fetchall()), "a page reads no more than its rows"


def test_a_member_learns_its_coefficient_from_the_answer_about_the_model_and_an_unknown_one_stays_empty(
    path: Path, ledger: LeftLedger
) -> None:
    pairs = [signed(number) for number in range(3)]
    for pair in pairs:
        ledger.keep(*pair, NOW)
    digests = [envelope_digest(envelope) for envelope, _ in pairs]
    ledger.learn([ReplyShare(digests[0], 0.5, 0.25), ReplyShare(digests[1], 0.5, math.nan), ReplyShare("no", 1, 1)])
    found = [(row.first.weight, row.coefficient, row.first.told_by) for row in reversed(read_left(path).rows)]
    assert found == [(0.5, 0.25, "answer"), (0.5, None, ""), (None, None, "")]


def test_reading_makes_no_file_writes_nothing_and_waits_for_no_lock_of_the_worker(scene: Scene) -> None:
    assert read_left(scene.home.left).rows == ()
    assert not scene.home.directory.exists()
    scene.worked()
    content = scene.home.left.read_bytes()
    with scene.home.lock():
        assert len(read_left(scene.home.left).rows) == 1
    assert scene.home.left.read_bytes() == content


@pytest.fixture
def site(tmp_path: Path) -> Path:
    (tmp_path / MEMBER_FILE).touch()
    return tmp_path


def shown(site: Path, *options: str) -> str:
    return command("left", "--home", str(site), *options)


def test_the_command_shows_pages_and_escapes_what_others_named(site: Path, ledger: LeftLedger) -> None:
    ledger.keep(*signed(0, samples=50, losses={"loss": 0.25}, run_id=PATTERN), NOW)
    pair = signed(1)
    ledger.keep(*pair, NOW)
    ledger.acknowledge(*receipt_for(pair[0], accepted=False, reason=PATTERN))
    text = shown(site)
    assert "samples 50, losses/loss 0.25" in " ".join(text.split())
    assert "kept, may have left" in " ".join(text.split())
    assert "\x1b" not in text
    page = json.loads(shown(site, "--json", "--last", "1"))
    assert (page["rows"][0]["state"], page["before"], page["earlier"]) == ("refused", 2, False)
    older = json.loads(shown(site, "--json", "--before", str(page["before"])))
    assert older["rows"][0]["replies"][0]["numbers"] == {"samples": 50, "losses/loss": 0.25}
    assert "nothing that left this site is on record for a run 'other'" in shown(site, "--run", "other")
    refused = failure("worker", "left", "--home", str(site), "--csv", "--json")
    assert str(refused) == "--csv cannot be given with --json"


def test_no_cell_of_the_csv_is_a_formula(site: Path, ledger: LeftLedger) -> None:
    for number, name in enumerate(("=1+1", "+1", "-1", "@sum", "\t=1", "\uff1d1", PATTERN)):
        ledger.keep(*signed(number, run_id=name, assignment_id=name), NOW)
    pair = signed(7)
    ledger.keep(*pair, NOW)
    ledger.learn([ReplyShare(envelope_digest(pair[0]), 0.5, -0.25)])
    rows = list(csv.DictReader(io.StringIO(shown(site, "--csv"))))
    assert (len(rows), list(rows[0])) == (8, list(CSV_COLUMNS))
    assert rows[0]["coefficient"] == "-0.25", "a number stays one"
    texts = [cell for row in rows for name, cell in row.items() if name not in ("weight", "coefficient")]
    assert not any(cell.lstrip().startswith(("=", "+", "-", "@", "\uff1d")) for cell in texts)
    assert "\x1b" not in "".join(texts)
    assert len(list(csv.DictReader(io.StringIO("".join(csv_text(site / "left.db", last=3)))))) == 3


def test_a_home_of_a_version_without_this_ledger_begins_empty_and_names_where_the_earlier_replies_are(
    scene: Scene,
) -> None:
    scene.worked()
    home = Path(scene.joined())
    assert "receipts.jsonl" not in shown(home)
    scene.started[-1].stop()
    scene.home.left.unlink()  # as 0.1.0 leaves a home
    assert "nothing that left this site is on record" in shown(home)
    assert "from before this record began are in receipts.jsonl alone" in shown(home)
    scene.start()
    scene.receipts(1, 1)
    document = json.loads(shown(home, "--json"))
    assert ([row["replies"][0]["round"] for row in document["rows"]], document["earlier"]) == ([1], True)
