"""What administrators do to runs and members; commands that read the record themselves."""

import asyncio
import json
import os
import signal
import threading
from contextlib import closing
from datetime import UTC, datetime
from pathlib import Path

import pytest
from sqlalchemy import select
from sqlalchemy.exc import OperationalError

from coordinator import lookup
from coordinator.rounds.runs.submission import Submission
from coordinator.server import serving
from coordinator.services.views import summaries, watching
from federation.aggregation.rules.fedavg import FedAvg
from federation.digests import digest
from federation.refusals import Refusal
from federation.trust.join_string import JoinStringFields
from federation.v1 import admin_pb2 as admin
from federation.v1.admin_pb2_grpc import AdminStub
from federation.v1.common_pb2 import RunState
from fedpareto.processes.forked import Forked
from storage import models, states
from storage.database import Database, DatabaseTooOld
from tests.fedpareto.cli import scene
from tests.harness import Federation, Member, Process, federation, refused, wait_for
from tests.running import made_home

# --- runs


def test_a_run_is_held_and_stopped_and_refuses_what_does_not_fit_its_state(centre: Federation, stub: AdminStub) -> None:
    run_id = scene.submit(centre, "held", scene.SPEC.replace("minimum = 3", "minimum = 60"), "--paused")
    assert centre.run_state(run_id)["state"] == "PAUSED"
    assert centre.admin("resume", run_id)["run"]["state"] == "RUNNING"
    with refused("ALREADY_EXISTS", "run-exists"):
        stub.SubmitRun(scene.requests('name = "held"\n' + scene.SPEC, scene.good_model()))
    wait_for(lambda: "waiting for members" in centre.run_state(run_id)["reason"], "the run to say what it waits for")
    assert centre.admin("pause", "held")["run"]["state"] == "PAUSED"
    with refused("FAILED_PRECONDITION", "run-state"):
        stub.PauseRun(admin.PauseRunRequest(run=run_id))
    stopped = centre.admin("stop", run_id, "--yes", "--reason", "enough")["run"]
    assert (stopped["state"], stopped["reason"]) == ("STOPPED", "enough")
    assert "did not complete: STOPPED enough" in scene.command(centre, "watch", run_id, code=1).stderr


@pytest.mark.full
def test_watching_begins_with_the_present_and_ends_with_the_run(centre: Federation, stub: AdminStub) -> None:
    with scene.attending(centre, stub, "watched-a", "watched-b", "watched-c") as streams:
        run_id = scene.submit(centre, "watched", scene.SPEC, "--paused")
        call = stub.WatchRun(admin.WatchRunRequest(run=run_id))
        first = next(call)
        assert first.run.state == RunState.RUN_STATE_PAUSED
        assert not first.HasField("ended")
        centre.admin("resume", run_id)
        scene.play(streams, 4)
        seen = list(call)
    assert [update.ended.round for update in seen if update.HasField("ended")] == [0, 1]
    assert seen[-1].run.state == RunState.RUN_STATE_COMPLETED
    assert any(update.phase.asked == 3 for update in seen)
    (only,) = map(json.loads, scene.command(centre, "watch", run_id, "--json").stdout.splitlines())
    assert (only["run"]["state"], only["run"]["rounds_done"]) == ("COMPLETED", 2)
    assert [member["last_outcome"] for member in only["run"]["members"]] == ["REPLIED"] * 3


def rounds_in(text: str) -> list[int]:
    """The rounds that have a line in what `watch` prints."""
    return [int(line.split()[0]) for line in text.splitlines() if line.split()[0].isdecimal()]


@pytest.mark.full
def test_watching_shows_the_rounds_so_far_and_then_each_one_once(centre: Federation, stub: AdminStub) -> None:
    with scene.attending(centre, stub, "joined-a", "joined-b", "joined-c") as streams:
        run_id = scene.submit(centre, "joined")
        scene.play(streams, 2)
        wait_for(lambda: centre.run_state(run_id)["rounds_done"] == 1, "the first round to end")
        log = centre.directory / "watch.log"
        arguments = ["-m", "fedpareto", "admin", "--home", str(centre.home / "admin"), "watch", run_id]
        watching = Process(arguments, log)
        wait_for(lambda: log.exists() and rounds_in(log.read_text()) == [0], "the round so far")
        scene.play(streams, 2)
        assert watching.popen.wait(120) == 0
    assert rounds_in(log.read_text()) == [0, 1]
    assert "joined  COMPLETED  2/2 rounds" in log.read_text()


@pytest.mark.full
def test_watching_a_run_that_has_ended_shows_its_rounds_and_how_it_ended(
    centre: Federation, finished: scene.Finished
) -> None:
    run_id, _ = finished
    shown = scene.command(centre, "watch", run_id).stdout
    assert rounds_in(shown) == [0, 1]
    assert shown.splitlines()[-1] == "finished  COMPLETED  2/2 rounds"
    assert len(shown.splitlines()) == 4


@pytest.mark.parametrize(
    ("rule", "warned"),
    [
        ('"fedmgda"', True),
        ('"fedmgda"\nepsilon = 0.5', False),
        ('"fedmgda+"', False),
        ('"fedmgda+"\nepsilon = 1.0', True),
        ('"fedmgda+"\nepsilon = 0.1', False),
        ('"fedavg"', False),
    ],
)
def test_a_run_that_one_client_could_bring_to_a_standstill_is_taken_with_a_warning(
    stub: AdminStub, rule: str, warned: bool
) -> None:
    spec = f'name = "warned-{digest(rule.encode())[7:15]}"\n' + scene.SPEC.replace('"fedmgda+"', rule)
    warnings = stub.SubmitRun(scene.requests(spec, scene.good_model())).warnings
    assert len(warnings) == warned
    assert all("standstill" in warning and "epsilon" in warning for warning in warnings)


def test_a_rule_that_reads_losses_says_who_could_abuse_it() -> None:
    class Believing(FedAvg):
        reads_losses = True

    assert ["inflates its loss" in caution for caution in Believing().cautions()] == [True]


# --- members


def test_a_join_string_is_shown_once_and_nowhere_else(centre: Federation) -> None:
    done = scene.command(centre, "join-string", "discreet")
    assert done.stdout.startswith("fpjoin1_")
    assert "fedpareto worker join --home discreet" in done.stderr
    assert "fpjoin1_" not in done.stderr


def test_another_join_string_for_a_name_replaces_the_first_and_says_so(centre: Federation) -> None:
    older = JoinStringFields.decode(centre.join_string("twice"))
    done = scene.command(centre, "join-string", "twice")
    assert "It replaces 1 open join string for twice" in done.stderr
    with refused("UNAUTHENTICATED", "join-string-cancelled"):
        Member.enroll(older)
    Member.enroll(JoinStringFields.decode(done.stdout.strip())).channel.close()
    assert "replaces" not in scene.command(centre, "join-string", "once").stderr


def test_a_member_is_made_approved_and_shut_out(centre: Federation, stub: AdminStub) -> None:
    member = centre.enroll("visitor")
    with refused("ALREADY_EXISTS", "client-exists"):
        stub.CreateJoinString(admin.CreateJoinStringRequest(client_id="visitor"))
    for name in ("", "Upper", "../etc", "a" * 64):
        with refused("INVALID_ARGUMENT", "argument"):
            stub.CreateJoinString(admin.CreateJoinStringRequest(client_id=name))
    with refused("INVALID_ARGUMENT", "argument"):
        stub.CreateJoinString(admin.CreateJoinStringRequest(client_id="later", lifetime_seconds=40 * 86_400))
    for name in ("nobody", "", "nobo\0dy"):
        with refused("NOT_FOUND", "client-unknown"):
            stub.ApproveClient(admin.ApproveClientRequest(client_id=name))
    stream = member.attend(toy=10)
    states = {client["client_id"]: client for client in centre.admin("clients")["clients"]}
    assert states["visitor"]["state"] == "PENDING"
    assert centre.admin("approve", "visitor", "--yes")["results"][0]["client"]["state"] == "ACTIVE"
    with refused("FAILED_PRECONDITION", "client-state"):
        stub.ApproveClient(admin.ApproveClientRequest(client_id="visitor"))
    centre.attending("visitor")
    assert centre.admin("revoke", "visitor", "--yes", "--reason", "left the consortium")["client"]["state"] == "REVOKED"
    ended = stream.end()
    assert (ended.status, ended.reason) == ("UNAUTHENTICATED", "certificate-revoked")
    with refused("FAILED_PRECONDITION", "client-state"):
        stub.RevokeClient(admin.RevokeClientRequest(client_id="visitor"))
    actions = {row[0] for row in centre.query("select action from audit_log where subject = 'visitor'")}
    assert {"join-string.created", "client.approved", "client.revoked"} <= actions


# --- the record, when nobody serves it


SHOWING = [
    *("runs", "run open", "rounds open", "round open 0", "replies open", "clients", "join-strings", "admins"),
    *("requests", "disk", "audit"),
]


@pytest.mark.full
def test_while_no_coordinator_runs_commands_that_show_read_its_directory_and_others_say_how_to_start_it(
    tmp_path: Path,
) -> None:
    with federation(tmp_path) as made:
        process = made.serve()
        stream = made.enroll("reader").attend(toy=10)
        run_id = scene.submit(made, "open", scene.SPEC.replace("minimum = 3", "minimum = 1"))
        stream.assignment()
        served = {arguments: made.admin(*arguments) for arguments in (("run", "open"), ("round", "open", "0"))}
        process.kill()
        with made.nobody_serves():
            assert made.home.joinpath("coordinator.db-wal").stat().st_size  # has what it wrote last
            for arguments, document in served.items():
                assert made.admin(*arguments) == document
            database = made.home / "coordinator.db"
            with closing(Database.open(f"sqlite:///{database}")) as opened, opened.begin() as session:
                phase = session.scalars(select(models.Phase)).one()
                phase.deadline = datetime(2026, 1, 1, tzinfo=UTC)  # long past
            for key in made.home.glob("*.key"):
                key.rename(key.with_suffix(".away"))  # none is needed, so no passphrase either
            before = database.read_bytes()
            for shown in SHOWING:
                assert scene.command(made, *shown.split()).stdout
            assert database.read_bytes() == before
            for refusal in (("pause", "open"), ("watch", "open"), ("login",), ("export", "open", "--out", "model")):
                said = scene.command(made, *refusal, code=1).stderr.replace("\n", " ")
                assert f"no coordinator serves {made.home}" in said
                assert f"fedpareto coordinator serve --home {made.home}" in said
        for key in made.home.glob("*.away"):
            key.rename(key.with_suffix(".key"))
        made.serve()  # and now it goes on: nobody replied in time
        wait_for(lambda: made.query("select 1 from rounds where state = 'SKIPPED'"), "the round to end")
        assert made.run_state(run_id)["state"] in ("RUNNING", "FAILED", "COMPLETED")


def test_a_record_in_postgresql_is_shown_by_a_coordinator_alone(tmp_path: Path) -> None:
    with federation(tmp_path) as made:
        settings = made.home / "coordinator.toml"
        text = settings.read_text().replace("sqlite:///coordinator.db", "postgresql://fedpareto@localhost/fedpareto")
        settings.write_text(text)
        said = scene.command(made, "runs", code=1).stderr.replace("\n", " ")
        assert "PostgreSQL" in said
        assert f"fedpareto coordinator serve --home {made.home}" in said


def test_the_database_of_a_record_is_opened_so_that_nothing_can_be_written(tmp_path: Path) -> None:
    with closing(Database.open(f"sqlite:///{tmp_path / 'record.db'}")) as written:
        with pytest.raises(DatabaseTooOld, match="older version"):
            Database.open_to_read(f"sqlite:///{tmp_path / 'record.db'}").check_current()
        written.migrate()
    with closing(Database.open_to_read(f"sqlite:///{tmp_path / 'record.db'}")) as database:
        database.check_current()
        with pytest.raises(OperationalError, match="readonly"), database.begin() as session:
            session.add(models.Model(digest=digest(b""), size=0, parameters=0, created=datetime.now(UTC)))


def test_a_coordinator_that_does_not_conduct_notes_what_operators_say_and_asks_nobody(tmp_path: Path) -> None:
    home, data, now = made_home(tmp_path / "held", now=datetime.now(UTC)), scene.good_model(), datetime.now(UTC)
    submission = Submission.parse(b'name = "held"\n' + scene.SPEC.encode(), ())

    async def held() -> str:
        async with serving(home, conduct=False) as coordinator:
            record, commands = coordinator.record, coordinator.rounds.commands
            model = {"digest": record.blobs.put(data), "size": len(data), "parameters": scene.LAYOUT.size}
            with record.database.begin() as session:
                session.add(models.Model(**model, created=now))
            run_id = commands.submit(submission, digest(data), by="test", paused=True)
            commands.resume(run_id, by="test")
            assert not [thread.name for thread in threading.enumerate() if thread.name == f"run-{run_id}"]
            return run_id

    run_id = asyncio.run(held())
    with closing(home.open_database()) as database, database.read() as session:
        assert session.get_one(models.Run, run_id).state is states.RunState.RUNNING
        assert session.scalars(select(models.Round)).all() == []


@pytest.mark.parametrize("options", [("--json",), pytest.param((), marks=pytest.mark.full)])
def test_serving_prints_one_document_with_the_ports_or_nothing(tmp_path: Path, options: tuple[str, ...]) -> None:
    with federation(tmp_path, "--name", "printed") as made:
        out, errors = tmp_path / "out", tmp_path / "errors"
        arguments = ["-m", "fedpareto", "coordinator", "serve", "--home", str(made.home), *options]
        serving = Forked(arguments, out, errors, cwd=tmp_path, env=os.environ)
        try:
            ports = made.home / "ports.json"
            wait_for(ports.exists, "the coordinator to serve")
            noted = json.loads(ports.read_text())
            if options:
                wait_for(lambda: out.exists() and out.read_text().endswith("\n"), "the document")
                assert json.loads(out.read_text()) == {
                    "federation_id": "printed",
                    "home": str(made.home),
                    "pid": serving.pid,
                    "ports": {"federation": noted["federation"], "enrollment": noted["enrollment"]},
                }
            serving.send(signal.SIGTERM)
            assert serving.wait(60) == 0
            assert len(out.read_text().splitlines()) == len(options)
        finally:
            serving.send(signal.SIGKILL)


# --- views, on both databases


def a_run(run_id: str, name: str, minute: int) -> models.Run:
    return models.Run(
        run_id=run_id,
        name=name,
        state=states.RunState.STOPPED,
        spec=f'name = "{name}"\ntask = "digits"\nrounds = 3'.encode(),
        spec_digest=digest(b""),
        initial_model=digest(b"model"),
        model=digest(b"model"),
        submitted_by="test",
        created=datetime(2026, 1, 1, 12, minute, tzinfo=UTC),
    )


def test_a_name_that_several_runs_have_is_refused_where_something_is_written_and_commands_mean_the_one_not_ended(
    database: Database,
) -> None:
    choice = lookup.Choice
    with database.begin() as session:
        session.add(
            models.Model(digest=digest(b"model"), size=1, parameters=1, created=datetime(2026, 1, 1, tzinfo=UTC))
        )
        session.flush()
        runs = [a_run(f"x{minute}", "x", minute) for minute in range(8)]
        for run in runs[2:]:
            run.ended, run.reason = run.created, "no more time"
        session.add_all(runs)
        session.flush()
        with pytest.raises(
            Refusal, match=r"run-ambiguous.*'x': x7 \(2026-01-01 12:07 UTC, STOPPED: no more time\), x6 "
        ):
            lookup.find_run(session, "x", choice.ONLY)
        with pytest.raises(Refusal, match=r"x3 \([^)]*\), and 3 older ones; give the id"):
            lookup.find_run(session, "x", choice.ONLY)
        with pytest.raises(Refusal, match=r"run-ambiguous.*'x': x1 \([^)]*\), x0 \([^)]*\); give the id"):
            lookup.find_run(session, "x", choice.OPEN)
        runs[0].ended = runs[0].created
        session.flush()
        assert lookup.find_run(session, "x", choice.OPEN).run_id == "x1"
        runs[1].ended = runs[1].created
        session.flush()
        assert lookup.find_run(session, "x", choice.OPEN).run_id == "x7", "a command refuses it by its state"
        assert lookup.find_run(session, "x6", choice.ONLY).run_id == "x6"


def test_a_run_is_found_by_id_by_its_beginning_or_by_its_name(database: Database) -> None:
    now = datetime(2026, 1, 1, tzinfo=UTC)
    with database.begin() as session:
        session.add(models.Model(digest=digest(b"model"), size=1, parameters=1, created=now))
        session.flush()
        session.add_all([a_run("abc1", "x", 0), a_run("abc2", "x", 1), a_run("abd3", "abc", 2)])
    with database.read() as session:
        assert lookup.find_run(session, "abc1").run_id == "abc1"
        assert lookup.find_run(session, "x").run_id == "abc2"  # the newest of that name
        assert lookup.find_run(session, "abc").run_id == "abd3"  # a name before a beginning
        assert lookup.find_run(session, "abd").run_id == "abd3"
        with pytest.raises(Refusal, match=r"run-ambiguous.*abd3 \(2026-01-01 12:02 UTC, STOPPED\), abc2 \(.*, abc1 \("):
            lookup.find_run(session, "ab")
        with pytest.raises(Refusal, match=r"no run 'bc'; did you mean 'abc'\? `fedpareto admin runs` lists them"):
            lookup.find_run(session, "bc")
        for nothing in ("", "%", "zzz", "abc1\0"):
            with pytest.raises(Refusal, match="run-unknown"):
                lookup.find_run(session, nothing)
        assert [run.run_id for run in watching.runs_from(session, 0, 10, brief=False)] == ["abd3", "abc2", "abc1"]
        assert summaries.rounds_from(session, "abc1", 0, 10) == []
        watcher = watching.Watching("abc1", parts=False)
        looks = 0
        while not watcher.over:  # nobody makes the alert of its end here
            assert len(watcher.look(session, {}, now)) == 1
            looks += 1
        assert looks == watching.MOST_LOOKS_AFTER_END + 1
        with pytest.raises(Refusal, match=r"round-unknown.*it has none yet"):
            lookup.find_round(session, lookup.find_run(session, "abc1"), -1)
