"""A site that decides: runs that wait for the owner, rules of the policy about runs, and the hours of the site."""

import json
import sqlite3
import time
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from federation.digests import digest
from federation.v1.common_pb2 import AssignmentManifest
from federation.v1.record_pb2 import RoundRecord
from tests.command_lines import completed
from tests.harness import Federation, federation, wait_for
from tests.verification.scene import Edited
from tests.worker.scene import DOCUMENT, Scene, command, files_of_at_most, run_request
from tests.works import set_train
from worker.home import WorkerHome
from worker.site.policy_file import OpenHours, Policy
from worker.site.run_requests import RunRequest, RunsFile, Verdict

ASKED = run_request()
WAITING = Verdict("waiting", "owner", "the owner approves each run, and has not decided about this one")

# --- what a site answers


@pytest.mark.parametrize(
    ("policy", "run", "answer", "reason"),
    [
        (Policy(), ASKED, "accepted", ""),
        (Policy(algorithms=("fedavg", "fedmgda+")), ASKED, "accepted", ""),
        (Policy(algorithms=("fedmgda+",)), ASKED, "refused", "policy:algorithm"),
        (Policy(submitters=("alice",)), ASKED, "accepted", ""),
        (Policy(submitters=("bob",)), ASKED, "refused", "policy:submitter"),
        (Policy(submitters=("bob",)), replace(ASKED, owner="approved"), "refused", "policy:submitter"),
        (Policy(approve="each-run"), ASKED, "waiting", "owner"),
        (Policy(approve="each-run"), replace(ASKED, owner="approved"), "accepted", ""),
        (Policy(approve="each-run"), replace(ASKED, owner="refused"), "refused", "owner"),
        (Policy(), replace(ASKED, owner="refused"), "refused", "owner"),
        (Policy(), replace(ASKED, task="mnist"), "refused", "spec"),
        (Policy(), replace(ASKED, document=b"rounds ="), "refused", "spec"),
    ],
)
def test_the_policy_decides_about_a_run_and_then_the_owner(
    policy: Policy, run: RunRequest, answer: str, reason: str
) -> None:
    verdict = run.verdict(policy)
    assert (verdict.answer, verdict.reason) == (answer, reason)


def test_decisions_are_about_a_specification_and_another_process_sees_them(tmp_path: Path) -> None:
    worker, owner = RunsFile(tmp_path / "runs.db"), RunsFile(tmp_path / "runs.db")
    other = replace(ASKED, spec=digest(b"other"), asked="2026-01-02T00:00:00+00:00")
    before = worker.changes()
    for one in (ASKED, other, replace(ASKED, name="again")):
        worker.add(one)
    assert owner.runs("run") == owner.runs("trial") == [ASKED, other]
    owner.decide(ASKED, "approved", "", datetime.now(UTC))
    assert worker.changes() != before
    found = worker.get("run-1", ASKED.spec)
    assert found is not None
    assert found.owner == "approved"
    assert worker.get("run-1", other.spec) == other
    assert (tmp_path / "runs.db").stat().st_mode & 0o777 == 0o600
    for file in (worker, owner):
        file.close()


# --- the hours of a site


def utc(text: str) -> datetime:
    return datetime.fromisoformat(text).replace(tzinfo=UTC)


NIGHT = OpenHours(zone="Europe/Berlin", begin="22:00", end="06:00", days=("mon", "fri"))


@pytest.mark.parametrize(
    ("hours", "now", "opens"),
    [
        (OpenHours(), "2026-01-05T12:00", None),
        (OpenHours(begin="08:00", end="17:30"), "2026-01-05T08:00", None),
        (OpenHours(begin="08:00", end="17:30"), "2026-01-05T17:30", "2026-01-06T08:00"),
        (OpenHours(begin="08:00", end="17:30"), "2026-01-05T07:59", "2026-01-05T08:00"),
        (OpenHours(begin="10:00", end="10:00", days=("sat",)), "2026-01-11T09:59", None),
        (OpenHours(begin="10:00", end="10:00", days=("sat",)), "2026-01-11T10:00", "2026-01-17T10:00"),
        (NIGHT, "2026-01-05T20:59", "2026-01-05T21:00"),  # a Monday, in winter one hour ahead of UTC
        (NIGHT, "2026-01-05T21:00", None),
        (NIGHT, "2026-01-06T04:59", None),
        (NIGHT, "2026-01-06T05:00", "2026-01-09T21:00"),
        (NIGHT, "2026-07-06T20:00", None),  # in summer two hours
        (NIGHT, "2026-03-27T21:00", None),
        (OpenHours(zone="Asia/Kolkata", end="12:00"), "2026-01-05T18:29", "2026-01-05T18:30"),
        (OpenHours(days=("sun",)), "2026-01-04T23:59", None),
        (OpenHours(days=("sun",)), "2026-01-05T00:00", "2026-01-11T00:00"),
    ],
)
def test_a_site_is_open_in_its_hours_and_says_when_it_opens_next(hours: OpenHours, now: str, opens: str | None) -> None:
    assert hours.closed_until(utc(now)) == (None if opens is None else utc(opens))


# --- a worker


def test_nothing_is_done_for_a_run_before_its_owner_has_approved_this_specification(scene: Scene) -> None:
    running = scene.start(policy=Policy(approve="each-run"))
    scene.home.policy.write_text('approve = "each-run"')
    running.wait_for("attending")
    assert scene.coordinator.hellos[0].consents
    scene.assign(0, spec=digest(DOCUMENT))
    running.wait_for("declined")
    with files_of_at_most(100):
        scene.coordinator.ask(DOCUMENT)
        told = running.wait_for("disk")[0]["message"]
        assert "no run is answered" in told
        assert "runs.db cannot be written" in told
        assert "make room on this worker's disk" in told
        assert scene.coordinator.consents == []
    assert scene.answers(1) == [("run-1", "waiting", WAITING.message)]
    scene.assign(1, spec=digest(DOCUMENT))
    wait_for(lambda: len(scene.coordinator.declines) == 2, "the declines")
    assert [said.reason for said in scene.coordinator.declines] == ["consent", "consent"]
    assert scene.models() == []
    place = ("--home", scene.joined())
    shown = command("runs", "run-1", *place)
    assert "waiting, owner" in shown
    assert digest(DOCUMENT) in shown
    assert 'algorithm.name = "fedavg"' in shown
    assert '"answer": "waiting"' in command("runs", *place, "--json")
    assert completed(scene.home.directory, f"worker approve --home {scene.joined()} t") == ["trial"]
    assert completed(scene.home.directory, f"worker runs --home {scene.home.directory / 'none'} ") == []
    assert not (scene.home.directory / "none").exists()
    assert "no run 'run-2' has asked" in command("approve", "run-2", *place, code=1)
    began = time.monotonic()
    assert digest(DOCUMENT) in command("approve", "run-1", *place)
    assert scene.answers(2)[-1] == ("run-1", "accepted", "")
    assert time.monotonic() - began < 30
    scene.receipts(1, 2, spec=digest(DOCUMENT))
    other = DOCUMENT.replace(b"rounds = 2", b"rounds = 3")
    scene.coordinator.ask(other)
    assert scene.answers(3)[-1] == ("run-1", "waiting", WAITING.message)
    scene.assign(3, spec=digest(other))
    running.wait_for("declined", 3)
    running.stop()
    assert len(running.events("training")) == 1


def test_what_the_policy_refuses_the_owner_cannot_approve_and_a_refusal_outlives_the_policy(scene: Scene) -> None:
    place = ("--home", scene.joined())
    file = RunsFile(scene.home.runs)
    file.add(ASKED)
    scene.home.policy.write_text('algorithms = ["fedmgda+"]')
    refused = command("approve", "trial", *place, code=1)
    assert "policy.toml refuses this run: the owner does not allow fedavg" in refused
    assert file.runs() == [ASKED]
    scene.home.policy.write_text("")
    command("refuse", "trial", "--reason", "no", *place)
    file.close()
    scene.attending()
    scene.assign(spec=digest(DOCUMENT))
    assert scene.declined()[1] == "owner"


def test_a_run_that_its_owner_refuses_later_is_dropped_and_the_answer_survives_a_restart(scene: Scene) -> None:
    policy, told = Policy(approve="each-run"), scene.home.directory.parent / "told"
    notify = ("sh", "-c", 'cat >> "$0"', str(told))
    running = scene.attending(policy=policy, notify=notify)
    scene.coordinator.ask(DOCUMENT)
    running.wait_for("run-waits")
    command("approve", "trial", "--home", scene.joined())
    assert scene.answers(2)[-1][1] == "accepted"
    long = scene.order(spec=digest(DOCUMENT))
    set_train(long, steps=1_000_000)
    scene.coordinator.assign(long)
    running.wait_for("training")
    command("refuse", "trial", "--reason", "the ethics board said no", "--home", scene.joined())
    assert scene.answers(3)[-1] == ("run-1", "refused", "the ethics board said no")
    assert scene.declined() == ("assignment-0", "owner", "the ethics board said no")
    scene.coordinator.ask(other := DOCUMENT.replace(b"rounds = 2", b"rounds = 3"))
    assert scene.answers(4)[-1][1] == "waiting"
    running.stop()
    scene.coordinator.open.clear()
    running = scene.attending(policy=policy, notify=notify)
    scene.coordinator.ask(DOCUMENT)
    assert scene.answers(5)[-1] == ("run-1", "refused", "the ethics board said no")
    for count in (6, 7):  # as after a broken connection
        scene.coordinator.ask(other)
        assert scene.answers(count)[-1][1] == "waiting"
    running.stop()
    facts = [fact for line in told.read_text().splitlines() for fact in json.loads(line)["facts"]]
    states = ["begins", "over", "begins", "begins"]  # the last one after the restart
    assert [(fact["kind"], fact["state"]) for fact in facts] == [("run-waits", state) for state in states]
    assert facts[0]["submitted_by"] == "alice"


def test_a_run_of_another_federation_or_without_a_signature_or_its_specification_is_not_asked_about(
    scene: Scene,
) -> None:
    running = scene.attending(policy=Policy(algorithms=("fedmgda+",)))
    scene.coordinator.ask(DOCUMENT, "foreign", federation_id="other")
    scene.coordinator.ask(DOCUMENT, "other-task", task="mnist")
    honest, scene.coordinator.signing_key = scene.coordinator.signing_key, scene.coordinator.member().signing_key
    scene.coordinator.ask(DOCUMENT, "forged")
    scene.coordinator.signing_key = honest
    swapped = scene.coordinator.ask(b"name = 'swapped'", "swapped")
    scene.coordinator.blobs[swapped.spec] = DOCUMENT
    scene.coordinator.ask(DOCUMENT)
    assert scene.answers(1) == [("run-1", "refused", "the owner does not allow fedavg")]
    assert len(running.events("run-invalid")) == 1
    running.stop()
    with closing(sqlite3.connect(scene.home.runs)) as database:
        assert database.execute("SELECT run FROM runs").fetchall() == [("run-1",)]


def test_a_closed_site_says_when_it_opens_and_begins_no_work_before(scene: Scene) -> None:
    now = datetime.now(UTC)
    begin, end = (f"{now + timedelta(hours=hours):%H:%M}" for hours in (2, 4))
    late = timedelta(0)
    running = scene.attending(
        policy=Policy(open=OpenHours(begin=begin, end=end)), clock=lambda: datetime.now(UTC) + late
    )
    opens = scene.coordinator.hellos[0].closed_until.ToDatetime(tzinfo=UTC)
    assert f"{opens:%H:%M}" == begin
    assert timedelta(0) < opens - now <= timedelta(hours=2)
    for number, hours in enumerate((5, 1)):
        asked = scene.order(number)
        asked.deadline.FromDatetime(now + timedelta(hours=hours))
        scene.coordinator.assign(asked)
    *declined, message = scene.declined()
    assert declined == ["assignment-1", "closed"]
    assert f"closed until {opens:%Y-%m-%d %H:%M} UTC" in message
    wait_for(
        lambda: scene.coordinator.heartbeats and scene.coordinator.heartbeats[-1].HasField("closed_until"),
        "a heartbeat",
    )
    assert not running.events("training")
    late = timedelta(hours=3)
    running.wait_for("receipt")
    wait_for(lambda: not scene.coordinator.heartbeats[-1].HasField("closed_until"), "the site to be open")


# --- a federation


RUN = """
task = "digits"
rounds = 2
[train]
steps = 2
[evaluate]
every = 0
"""


@pytest.fixture(scope="module")
def fed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Federation]:
    with federation(tmp_path_factory.mktemp("federation")) as made:
        made.serve()
        for place, client in enumerate(("hospital-a", "hospital-b")):
            directory = made.join(client)
            if client == "hospital-a":
                (directory / "policy.toml").write_text('approve = "each-run"\nsubmitters = ["admin"]\n')
                with (directory / "worker.toml").open("a") as settings:
                    told = made.directory / "told"
                    settings.write(f"""notify.command = ["sh", "-c", 'cat >> "$0"', "{told}"]\n""")
            made.work(client, "--set", f"part={place + 1}/8")
        made.attending("hospital-a", "hospital-b")
        yield made


def test_a_run_waits_for_the_owner_of_a_member_and_goes_on_seconds_after_the_approval(fed: Federation) -> None:
    run = fed.submit("waits", RUN + "[selection]\nminimum = 2\n")
    expected = "1 of 2 are ready for digits; hospital-a waits for the approval of its owner"
    wait_for(lambda: expected in fed.query("select reason from runs where run_id = :run", run=run)[0][0], expected)
    home = fed.directory / "hospital-a"
    assert [path for path in WorkerHome(home).cache.rglob("*") if path.is_file()] == []
    [waiting] = [one for one in fed.admin("clients")["clients"] if one["client_id"] == "hospital-a"]
    assert waiting["undecided"] == ["waits"]
    told = fed.directory / "told"
    wait_for(lambda: told.exists() and told.read_text().endswith("\n"), "the fact")
    [document] = [json.loads(line) for line in told.read_text().splitlines()]
    [fact] = document["facts"]
    assert (document["client_id"], fact["kind"], fact["run_id"]) == ("hospital-a", "run-waits", run)
    [consent] = fed.run_state(run)["consents"]
    assert (consent["client_id"], consent["answer"], consent["check"]["verified"]) == ("hospital-a", "waiting", True)
    fed.fedpareto("worker", "approve", run, "--home", str(home))
    fed.wait_completed(run)
    assert [one["answer"] for one in fed.run_state(run)["consents"]] == ["accepted"]
    asked = fed.query("select selected, not_asked from rounds where run_id = :run", run=run)
    assert [str(row[0]) for row in asked] == ['["hospital-a", "hospital-b"]'] * 2
    assert fed.admin("audit", "verify")["problems"] == []


def test_a_site_knows_what_it_has_sent_and_finds_it_in_the_record(fed: Federation) -> None:
    [(run,)] = fed.query("select run_id from runs where name = 'waits'")
    home, bundle = ("--home", str(fed.directory / "hospital-b")), fed.directory / "run.fedpareto"
    log = json.loads(fed.fedpareto("worker", "log", *home, "--json"))
    assert [(one["run"], one["kind"], one["rounds"], one["accepted"]) for one in log] == [
        (run, "train", 2, 2),
        (run, "evaluate", 1, 1),
    ]
    assert log[0]["bytes"] > 0
    assert "evaluate" in fed.fedpareto("worker", "log", *home)
    fed.admin("bundle", run, "--out", str(bundle), "--payloads", "--yes")
    found = json.loads(fed.fedpareto("worker", "verify", str(bundle), *home, "--json"))
    assert (found["verified"], found["receipts"], found["problems"]) == (True, 3, [])
    assert [len(one["coefficients"]) for one in found["replies"]] == [1, 1, 0]

    def forget(record: RoundRecord) -> None:
        for told in record.phases[0].exchanges:
            if AssignmentManifest.FromString(told.assignment.manifest).client_id == "hospital-b":
                told.ClearField("answers")

    edited = Edited.of(bundle).with_round(1, forget).write(fed.directory / "edited.fedpareto")
    document = json.loads(fed.fedpareto("worker", "verify", str(edited), *home, "--json", code=1))
    assert "round 1 phase 0: the record lacks an accepted reply" in document["problems"][0]
    assert "the record does not verify" in document["problems"][1]


def test_a_run_that_an_owner_refuses_goes_on_without_that_member_and_the_round_says_so(fed: Federation) -> None:
    run = fed.submit("refused", RUN, "--paused")
    home = str(fed.directory / "hospital-a")
    asked = "select 1 from consents where run_id = :run"
    wait_for(lambda: fed.query(asked, run=run), "the run to ask hospital-a")
    fed.fedpareto("worker", "refuse", "refused", "--reason", "not this study", "--home", home)
    wait_for(lambda: fed.query(f"{asked} and answer = 'REFUSED'", run=run), "the refusal")
    fed.admin("resume", run)
    fed.wait_completed(run)
    shown = fed.admin("round", run, "0")
    assert shown["not_asked"] == [{"client_id": "hospital-a", "reason": "refuses the run: owner: not this study"}]
    assert [part["client_id"] for part in shown["participations"]] == ["hospital-b"]
