"""The rows of alerts: made after a commit, again after a crash, and ended when their cause is gone."""

from datetime import UTC, datetime, timedelta

import pytest
from google.protobuf.timestamp_pb2 import Timestamp
from sqlalchemy.orm import Session

from coordinator.alerts import about_federation, about_runs, rows
from coordinator.alerts.facts import AlertFact
from coordinator.alerts.recording import record_run
from coordinator.monitoring.federation_numbers import MEMBER_SEEN, member_numbers
from federation.v1 import admin_pb2 as admin
from federation.v1.federation_pb2 import Heartbeat
from fedpareto.admin_messages import newest_alerts
from storage import audit
from storage.faults import StorageFault
from storage.models import Alert, Client
from storage.states import AlertKind, AlertSeverity, RunState
from tests.running import SECONDS, refused, wait_for
from tests.stage import Stage, reply_to

HOUR = timedelta(hours=1)


def failing_run(stage: Stage, rounds: int = 4) -> str:
    """A run in which the member ben declines each round."""
    more = "selection.minimum = 3\nselection.quorum = 0.2"
    run, (ann, ben, cleo) = stage.begin("ann", "ben", "cleo", rounds=rounds, more=more)

    def answer() -> None:
        reply_to((ann, cleo), lambda _: True)
        for _, order in ben.orders():
            ben.decline(order, "busy") if order.kind == "train" else ben.reply(order)

    stage.play(run, until=answer)
    list(stage._admin.WatchRun(admin.WatchRunRequest(run=run), timeout=SECONDS))  # it ends after the last alert
    return run


def listed(stage: Stage, request: admin.ListAlertsRequest) -> list[admin.Alert]:
    return list(stage._admin.ListAlerts(request, timeout=SECONDS).alerts)


def of_run(stage: Stage, run: str) -> list[tuple[object, ...]]:
    def read(session: Session) -> list[tuple[object, ...]]:
        found = session.query(Alert).filter_by(run_id=run).order_by(Alert.began, Alert.kind)
        return [(a.kind, a.client_id, a.message, a.first_round, a.last_round, a.began, a.ended) for a in found]

    return stage.look(read)


@pytest.mark.full
def test_alerts_that_a_crash_prevented_are_made_again_as_they_were(stage: Stage) -> None:
    run = failing_run(stage)
    before = of_run(stage, run)
    assert {(kind, name) for kind, name, *_ in before} >= {(AlertKind.MEMBER_FAILS, "ben"), (AlertKind.RUN_ENDED, "")}
    database = stage.served.database
    for lost in (AlertKind, {AlertKind.RUN_ENDED}):  # all rows, or those of the last transaction
        with database.begin() as session:
            session.query(Alert).filter(Alert.run_id == run, Alert.kind.in_(list(lost))).delete()
        recorded = record_run(database, run, None, datetime.now(UTC))
        assert (recorded.facts, recorded.changed) == (None, True)
        assert of_run(stage, run) == before
        assert record_run(database, run, None, datetime.now(UTC)).changed is False


def test_alerts_are_listed_by_run_and_member_in_pages_and_bad_requests_are_refused(stage: Stage) -> None:
    run = failing_run(stage, 3)
    assert listed(stage, admin.ListAlertsRequest(run=run)) == []  # all have ended with the run
    ended = listed(stage, admin.ListAlertsRequest(run=run, all=True))
    assert {alert.client_id for alert in ended} == {"", "ben"}
    assert {alert.run_name for alert in ended} == {stage._admin.GetRun(admin.GetRunRequest(run=run)).run.name}
    (fails,) = listed(stage, admin.ListAlertsRequest(run=run, client_id="ben", all=True))
    assert fails.message.startswith("ben failed in 3 rounds in a row, last in round 2: busy")
    assert (fails.first_round, fails.last_round) == (0, 2)
    page = admin.ListAlertsRequest(run=run, all=True, page_size=1)
    first = stage._admin.ListAlerts(page)
    page.page_token = first.next_page_token
    second = stage._admin.ListAlerts(page)
    assert [*first.alerts, *second.alerts] == ended
    assert second.next_page_token == ""
    assert list(newest_alerts(stage._admin.ListAlerts, page, 5).alerts) == ended
    told = stage.served.command("alerts", "--run", run, "--all", "--last", "1")
    assert "These are the newest 1; more: --last 5" in told
    for reason, request in (
        ("run-unknown", admin.ListAlertsRequest(run="no-such-run")),
        ("client-unknown", admin.ListAlertsRequest(client_id="no-such-member")),
        *(("argument", admin.ListAlertsRequest(page_token=token)) for token in ("x", "1", "1-", "1-\u0661", "-1-1")),
    ):
        with refused("INVALID_ARGUMENT" if reason == "argument" else "NOT_FOUND", reason):
            listed(stage, request)


def test_a_silent_member_is_an_alert_with_its_contact_until_it_attends(stage: Stage) -> None:
    stage.cast(stage.task(), "dora")
    tagging = admin.TagClientRequest(client_id="dora", contact="Ada\x1b[31m, ext. 7")
    told = stage._admin.TagClient(tagging, timeout=SECONDS)
    assert "\x1b" not in told.client.contact
    with refused("INVALID_ARGUMENT", "argument"):
        stage._admin.TagClient(admin.TagClientRequest(client_id="dora", contact="x" * 201), timeout=SECONDS)
    now = datetime.now(UTC) + timedelta(days=1)

    def silent(attending: set[str], after: timedelta = HOUR) -> list[AlertFact]:
        return stage.look(lambda s: about_federation.silent(s, attending, after=after, since=now - 2 * HOUR, now=now))

    facts = {fact.client_id: fact for fact in silent(set())}
    assert facts["dora"].began == now - HOUR
    assert "reach Ada" in facts["dora"].remedy
    assert "dora" not in {fact.client_id for fact in silent({"dora"})}
    assert silent(set(), after=3 * HOUR) == []


def test_times_that_a_clock_ahead_has_noted_hide_no_alert_and_make_none(stage: Stage) -> None:
    stage.cast(stage.task(), "future")
    stage.hang_up(stage.players["future"])
    now, ahead = datetime.now(UTC), timedelta(days=365)

    with Session(stage.served.database.engine) as session:  # nothing of it is committed
        client = session.get_one(Client, "future")
        client.enrolled, client.last_seen, client.copied = now - 9 * HOUR, now + ahead, now + ahead
        for at in (now - HOUR, now + ahead):
            audit.record(session, at=at, actor="a", action=about_federation.BACKUP_MADE, subject="one")
        session.flush()
        silent = about_federation.silent(session, (), after=HOUR, since=now - 2 * HOUR, now=now)
        copied = about_federation.copied(session, now)
        backup = about_federation.last_backup(session, None, now)
        seen = next(shown for number, shown in member_numbers(session, (), now=now) if number is MEMBER_SEEN)
    (fact,) = [fact for fact in silent if fact.client_id == "future"]
    assert fact.message == "future has not attended since a wrong clock was set right"
    assert fact.began == now - HOUR
    assert [fact for fact in copied if fact.client_id == "future"] == []
    assert backup == now - HOUR
    assert ("future",) not in seen


def test_a_member_that_went_while_its_site_was_paused_or_closed_is_not_silent_before_that_ends(stage: Stage) -> None:
    task, [ann] = stage.crew("ann")
    now = stage.clock().astimezone(UTC)
    until = Timestamp()
    until.FromDatetime(now + 5 * HOUR)

    def shown() -> tuple[bool, bool, bool]:
        clients = stage._admin.ListClients(admin.ListClientsRequest(), timeout=SECONDS).clients
        [client] = [client for client in clients if client.client_id == "ann"]
        return client.attending, client.paused, client.HasField("closed_until")

    def silent_at(hour: int) -> bool:
        def facts(session: Session) -> list[AlertFact]:
            return about_federation.silent(session, (), after=HOUR, since=now, now=now + hour * HOUR)

        return any(fact.client_id == "ann" for fact in stage.look(facts))

    def silent_hours() -> list[int]:
        return [hour for hour in (1, 2, 5, 6, 9999) if silent_at(hour)]

    for paused, closed, hours in ((True, False, []), (True, True, [6, 9999]), (False, True, [6, 9999])):
        ann.say(heartbeat=Heartbeat(paused=paused, closed_until=until if closed else None))
        wait_for(lambda: shown() == (True, paused, closed), "the site to be closed")  # noqa: B023
        ann.leave()
        wait_for(lambda: not shown()[0], "ann to be away")
        stage.parts.housekeeper.tidy()
        wait_for(lambda: silent_hours() == hours, f"no alert but at {hours}")  # noqa: B023
        assert shown() == (False, paused, closed)
        ann.attend(**{task: 10})
    assert shown() == (True, False, False)
    ann.leave()
    assert silent_hours() == [2, 5, 6, 9999]


def test_what_holds_is_one_row_that_keeps_its_beginning_until_it_has_ended(stage: Stage) -> None:
    now = datetime.now(UTC)

    def at(minute: int, faults: dict[StorageFault, str]) -> list[Alert]:
        when = now + timedelta(minutes=minute)
        with stage.served.database.begin() as session:
            facts = about_federation.disk(session, 10**18, faults, when)
            rows.reconcile(session, None, [AlertKind.DISK_LOW], facts, when)
        return stage.look(lambda s: s.query(Alert).filter_by(kind=AlertKind.DISK_LOW).order_by(Alert.began).all())

    assert at(0, {}) == []
    (row,) = at(1, {StorageFault.DISK: "no space left"})
    assert (row.severity, row.ended) == (AlertSeverity.CRITICAL, None)
    (row,) = at(2, {StorageFault.DISK: "still none"})
    assert (row.began, "still none" in row.message) == (now + timedelta(minutes=1), True)
    (row,) = at(3, {})
    assert row.ended == now + timedelta(minutes=3)
    assert len(at(4, {StorageFault.DISK: "again"})) == 2
    at(5, {})


@pytest.mark.parametrize(("minutes", "stalled"), [(2, False), (4, True)])
def test_a_run_is_stalled_after_three_times_its_median_round(stage: Stage, minutes: int, stalled: bool) -> None:
    run, _ = stage.begin("emil", rounds=2)
    stage.wait_state(run, RunState.RUNNING)
    now = datetime.now(UTC) + timedelta(minutes=minutes)
    seconds = [60.0, 60.0, 900.0]

    row = stage.run(run)
    facts = stage.look(lambda session: about_runs.stalled(session, row, seconds, since=now - HOUR, now=now))
    assert [fact.kind for fact in facts] == ([AlertKind.RUN_STALLED] if stalled else [])
    stage.stop_run(run)


def test_a_pause_by_the_coordinator_is_an_alert_until_the_run_goes_on(stage: Stage) -> None:
    database = stage.served.database
    if database.serves_many:
        pytest.skip("with several coordinators, one whose disk has space takes the run: here, this one does so itself")
    run, _ = stage.begin("gina", rounds=2)
    stage.wait_state(run, RunState.RUNNING)

    def pauses() -> list[tuple[AlertSeverity, bool]]:
        record_run(database, run, None, datetime.now(UTC))
        query = {"run_id": run, "kind": AlertKind.RUN_PAUSED}
        return stage.look(lambda s: [(row.severity, row.ended is None) for row in s.query(Alert).filter_by(**query)])

    stage.pause(run)
    assert pauses() == []  # an operator knows
    stage.resume(run)
    stage.parts.commands.pause_for_fault(StorageFault.DISK, "no space left")
    assert pauses() == [(AlertSeverity.CRITICAL, True)]
    stage.parts.commands.resume_after_fault()
    stage.wait_state(run, RunState.RUNNING)
    assert pauses() == [(AlertSeverity.CRITICAL, False)]
    stage.stop_run(run)


def test_the_coordinators_own_certificates_are_an_alert_before_they_end(stage: Stage) -> None:
    home = stage.served.home
    ca, server = home.ca, home.server

    def messages(now: datetime) -> list[tuple[AlertSeverity, str]]:
        return [(fact.severity, fact.message) for fact in about_federation.own_certificates(ca, server, now)]

    end = server.not_valid_after_utc
    assert messages(end - timedelta(days=31)) == []
    ((severity, message),) = messages(end - timedelta(days=29))
    assert severity is AlertSeverity.WARNING
    assert message == f"the coordinator's certificate ends on {end:%Y-%m-%d %H:%M} UTC"
    ((severity, _),) = messages(end)
    assert severity is AlertSeverity.CRITICAL
    ((_, message),) = messages(ca.not_valid_after_utc - timedelta(days=1))  # it comes first: it cannot be replaced
    assert message.startswith("the CA's certificate ends on")


def test_backups_and_certificates_are_looked_at_by_their_age(stage: Stage) -> None:
    now = datetime.now(UTC)
    week = timedelta(days=7)

    def made(last: datetime | None, days: int) -> list[str]:
        later = now + timedelta(days=days)
        found = stage.look(lambda session: about_federation.backup(session, last, after=week, now=later))
        return [fact.message for fact in found]

    assert made(None, 0) == []
    assert made(None, 8) == ["no backup has been made"]
    assert made(now, 6) == []
    assert made(now, 8)[0].startswith("the last backup was made on")
    stage.cast(stage.task(), "fred")
    soon = stage.look(lambda s: about_federation.member_certificates(s, now + timedelta(days=80)))
    assert "fred" in {fact.client_id for fact in soon if fact.severity is AlertSeverity.WARNING}
    over = stage.look(lambda s: about_federation.member_certificates(s, now + timedelta(days=91)))
    assert {fact.severity for fact in over if fact.client_id == "fred"} == {AlertSeverity.CRITICAL}
    assert stage.look(lambda s: about_federation.member_certificates(s, now)) == []
    assert stage.look(lambda s: s.get_one(Client, "fred")).contact == ""
