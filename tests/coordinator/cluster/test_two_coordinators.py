"""Two coordinators serve one federation: members, runs and administrators of the one reach those of the other."""

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path

import grpc
import pytest
from sqlalchemy import select

from coordinator.monitoring import number_keeper
from coordinator.monitoring.number_keeper import NumberKeeper
from coordinator.services import admin as admin_calls
from federation.digests import digest
from federation.monitoring.metrics_page import page
from federation.transport.channels import refusal_from_rpc_error
from federation.trust.envelope import envelope_digest
from federation.trust.identity import Role
from federation.v1 import admin_pb2 as admin
from federation.v1.admin_pb2_grpc import AdminStub
from federation.v1.common_pb2 import RunManifest
from federation.v1.federation_pb2 import AttendRequest, AttendResponse, FetchBlobRequest, GetModelRequest, Hello
from federation.v1.federation_pb2_grpc import FederationStub
from federation.vectors import to_bytes, update_layout
from federation.work.secure.orders import asked_session
from storage.faults import StorageFault
from storage.models import Reply, Run
from storage.states import ClientState, RunState
from tests.coordinator.cluster.scene import player_at, two_players
from tests.coordinator.members.scene import Officer, client, leave, problems, withdrawal
from tests.coordinator.monitoring.scene import value
from tests.coordinator.rounds.fleets.scene import PRIVATE, ended, is_ready
from tests.harness import Attending, Member
from tests.running import SECONDS, Running, refused, wait_for
from tests.stage import MODEL, Player, Stage, reply, spec, submission, vector
from tests.verification.scene import Edited, checked, exported


@pytest.mark.full
def test_members_of_both_coordinators_are_told_that_a_private_round_is_over(first: Stage, second: Running) -> None:
    """The first test of this file: with more members, a private round needs more."""
    task, names = first.task(), [f"private-{number}" for number in range(5)]
    there = [player_at(second, first, name, **{task: 10}) for name in names[:3]]
    here = [player_at(first.served, first, name, **{task: 10}) for name in names[3:]]
    run = first.submit(spec("private", task, algorithm="fedavg-n", more=PRIVATE))
    orders = {player: player.order() for player in (*there, *here)}
    for player in there[:2]:
        is_ready(player, orders[player])
    first.stop_run(run)
    for player, order in orders.items():
        assert ended(player) == [(order.assignment_id, asked_session(order), "run-ended")]
    streams = second.coordinator.rounds.presence.streams()
    wait_for(lambda: not any(streams[player.name].given for player in there), "nothing to be left to tell")


def test_members_of_both_coordinators_play_a_run(first: Stage, second: Running) -> None:
    task, ann, ben = two_players(first, second, "ann", "ben")
    run = first.submit(spec("both", task, 2, more='selection.minimum = 2\nselection.pool = "attending"'))
    first.play(run, ann, ben)
    assert set(first.replies(run, 1)) == {"ann", "ben"}
    assert {"ann", "ben"} & set(second.coordinator.rounds.presence.streams()) == {"ben"}
    # A right to the model that one coordinator gives counts at the other one.
    answer = ann.member.stub.GetModel(GetModelRequest(run=run, nonce=bytes(16)), timeout=SECONDS)
    model = first.run(run).model
    with ann.member.files.channel(address=second.address) as channel:
        pieces = FederationStub(channel).FetchBlob(FetchBlobRequest(digest=model, grant=answer.model), timeout=SECONDS)
        assert digest(b"".join(piece.chunk for piece in pieces)) == model


@pytest.mark.parametrize("at", ["first", "second"])
def test_a_run_that_is_stopped_at_either_coordinator_is_cancelled_for_the_members_of_both(
    first: Stage, second: Running, at: str
) -> None:
    task, ann, ben = two_players(first, second, f"ann-{at}", f"ben-{at}")
    run = first.submit(spec(f"stopped-{at}", task, more="selection.minimum = 2"))
    orders = [player.order().assignment_id for player in (ann, ben)]
    if at == "first":
        first.stop_run(run)
    else:
        AdminStub(second.administrator(Role.OPERATOR)).StopRun(admin.StopRunRequest(run=run), timeout=SECONDS)
    for player, order in zip((ann, ben), orders, strict=True):
        wait_for(lambda: player.orders() or player.cancelled, "the cancellation")  # noqa: B023
        assert [cancelled.assignment_id for cancelled in player.cancelled] == [order]
    assert first.run(run).state is RunState.STOPPED


@pytest.mark.full
def test_a_run_is_watched_at_the_coordinator_that_does_not_conduct_it(
    first: Stage, second: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(admin_calls, "SIGN_OF_LIFE_SECONDS", SECONDS)  # it must be told
    run, players = first.begin("cid", "dan", rounds=2, more="selection.minimum = 2")
    orders = {player: player.order() for player in players}
    news = AdminStub(second.administrator(Role.VIEWER)).WatchRun(admin.WatchRunRequest(run=run), timeout=SECONDS)
    assert next(news).phase.outstanding
    reply(orders)
    first.play(run, *players)
    rounds = [message.ended.round for message in news if message.HasField("ended")]
    assert rounds == [0, 1]


@pytest.mark.parametrize("announcement", ["heard", "lost"])
def test_a_member_or_an_administrator_revoked_at_one_coordinator_loses_its_streams_at_the_other(
    first: Stage, second: Running, announcement: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if announcement == "lost":  # then a look each second finds it
        monkeypatch.setattr(second.coordinator.rounds.announcements.heard, "_listeners", [])
    task, ann, eve = two_players(first, second, f"ann-{announcement}", f"eve-{announcement}")
    run = first.submit(spec(f"revoked-{announcement}", task, more="selection.minimum = 2"))
    ann.order()
    eve.order()
    viewer = Officer(second, f"viewer-{announcement}", Role.VIEWER)
    news = viewer.stub.WatchRun(admin.WatchRunRequest(run=run), timeout=SECONDS)
    next(news)
    first.revoke(eve.name)
    assert eve.stream is not None
    assert eve.stream.end().reason == "certificate-revoked"
    first.wait_outcome(run, eve.name, "CANCELLED")
    first._admin.RevokeAdministrator(admin.RevokeAdministratorRequest(name=viewer.name), timeout=SECONDS)
    with refused("UNAUTHENTICATED", "certificate-revoked"):
        list(news)


def test_a_member_at_another_coordinator_is_asked_once_about_each_run_of_its_task(
    first: Stage, second: Running
) -> None:
    task = first.task()
    member = Member.enroll(second.join_string("fay"))
    stream = Attending(member, {task: 10}, consents=True)
    assert isinstance(stream.next(), AttendResponse)
    runs = [first.submit(spec(f"asked-{number}", task)) for number in range(2)]
    assert [question(stream) for _ in runs] == runs
    first.submit(spec("of-another-task", first.task()))
    last = first.submit(spec("asked-at-last", task))
    assert question(stream) == last


def question(stream: Attending) -> str:
    """The id of the run about which a member is asked next."""
    message = stream.next()
    assert isinstance(message, AttendResponse)
    assert message.WhichOneof("message") == "run", message
    return RunManifest.FromString(message.run.manifest).run_id


def test_a_member_that_changes_its_coordinator_in_a_round_goes_on_with_its_work(first: Stage, second: Running) -> None:
    run, (gil, hal) = first.begin("gil", "hal", more="selection.minimum = 2")
    order, older = gil.order(), gil.stream
    assert older is not None
    gil.stream = None
    gil.member = Member(replace(gil.member.files, addresses=(second.address,)))
    gil.attend(**gil.tasks)
    assert older.end().reason == "superseded"
    envelope = gil.stream.assignment()  # type: ignore[attr-defined]
    assert gil.member.open(envelope) == order
    gil.reply(order)
    first.play(run, gil, hal)
    assert set(first.replies(run)) == {"gil", "hal"}


def id_of(served: Running) -> str:
    return served.coordinator.record.startup.registry.coordinator


@pytest.mark.full
def test_a_coordinator_whose_disk_is_full_gives_its_runs_to_the_other(
    first: Stage, second: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, players = first.begin("ida", "jon", rounds=2, more="selection.minimum = 2")
    orders = {player: player.order() for player in players}
    assert first.run(run).conductor == id_of(first.served)
    faults = first.served.coordinator.record.faults
    monkeypatch.setattr(faults, "over", lambda fault: None)  # as long as the disk is full
    faults.begin(StorageFault.DISK, "no space left")
    first.parts.conductors.hold_back()
    wait_for(lambda: first.run(run).conductor == id_of(second), "the other to take the run")
    monkeypatch.undo()
    faults.over(StorageFault.DISK)
    reply(orders)
    first.play(run, *players)
    assert first.run(run).state is RunState.COMPLETED


def test_the_writes_of_a_conductor_whose_run_was_taken_are_refused_and_the_run_goes_on(
    first: Stage, second: Running, caplog: pytest.LogCaptureFixture
) -> None:
    run, players = first.begin("kim", "leo", rounds=2, more="selection.minimum = 2")
    orders = {player: player.order() for player in players}
    with first.served.database.begin() as session:  # as after it slept past its lease, and the other one died since
        row = session.get_one(Run, run, with_for_update=True)
        row.epoch, row.conductor, row.lease_until = row.epoch + 1, "0" * 32, row.created
    reply(orders)
    first.play(run, *players)
    assert first.run(run).state is RunState.COMPLETED
    assert set(first.replies(run, 1)) == {"kim", "leo"}
    assert "another coordinator" in caplog.text


def test_of_one_reply_to_both_coordinators_one_is_recorded_and_the_other_gets_its_receipt(
    first: Stage, second: Running
) -> None:
    run, (max_, nia) = first.begin("max", "nia", more="selection.minimum = 2")
    order, elsewhere = max_.order(), Member(replace(max_.member.files, addresses=(second.address,)))
    payload = to_bytes(update_layout([(row.name, row.length, row.dtype) for row in order.rows]), vector("max", order))
    manifest = max_.member.manifest(order, payload)
    manifest.samples = max_.tasks[order.task]
    envelope = max_.member.sign(manifest)
    with ThreadPoolExecutor(2) as pool:
        receipts = list(pool.map(lambda member: member.submit(envelope, payload), (max_.member, elsewhere)))
    assert receipts[0] == receipts[1]
    first.play(run, max_, nia)
    assert len(first.look(lambda session: session.scalars(select(Reply).where(Reply.client_id == "max")).all())) == 2


def test_a_name_is_taken_once_also_at_two_coordinators_at_the_same_time(first: Stage, second: Running) -> None:
    document = spec("twice", first.task())
    stubs = [AdminStub(served.administrator(Role.OPERATOR)) for served in (first.served, second)]

    def submit(stub: AdminStub) -> str:
        try:
            return str(stub.SubmitRun(iter(submission(document, MODEL)), timeout=SECONDS).run.run_id)
        except grpc.RpcError as error:
            return refusal_from_rpc_error(error).reason

    with ThreadPoolExecutor(4) as pool:
        answers = list(pool.map(submit, stubs * 2))
    assert answers.count("run-exists") == 3


def test_one_coordinator_gives_the_numbers_of_the_federation_and_the_other_one_when_it_has_stopped(
    first: Stage, second: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(number_keeper, "LOOK_SECONDS", 0.05)

    def keeper(served: Running) -> NumberKeeper:
        made = NumberKeeper(served.coordinator.record, served.coordinator.rounds.presence, names_members=False)
        made.start()
        return made

    def names(made: NumberKeeper) -> set[str]:
        return {metric.name for metric, _ in made.readings()}

    def looked(made: NumberKeeper) -> float:
        """When it last looked; its own machine is in the numbers of each."""
        return value(page(made.readings()).decode(), "fedpareto_looked_timestamp_seconds") or 0

    keepers = []
    try:
        for served in (first.served, second):
            keepers.append(made := keeper(served))
            wait_for(partial(looked, made), "its first look")
        one, other = keepers
        last = looked(other)
        wait_for(lambda: looked(other) > last, "another look")
        assert "fedpareto_members" in names(one)
        assert "fedpareto_members" not in names(other)
        one.stop()
        wait_for(lambda: "fedpareto_members" in names(other), "the other one to give them")
    finally:
        for made in keepers:
            made.stop()


def at(served: Running, player: Player) -> Player:
    """The same member, whose calls go to this coordinator."""
    return Player(Member(replace(player.member.files, addresses=(served.address,))))


@pytest.mark.full
def test_a_member_leaves_by_one_coordinator_within_a_round_of_the_other_and_attends_nowhere(
    first: Stage, second: Running, tmp_path: Path
) -> None:
    task, ann, gone = two_players(first, second, "ann-stays", "ben-leaves")
    selection = 'selection = { minimum = 2, quorum = 0.5, pool = "attending" }'
    run = first.submit(spec("left", task, more=selection))
    gone.order()
    # At both coordinators at the same time: it has left once.
    said = withdrawal(gone.member)
    with ThreadPoolExecutor(2) as pool:
        times = list(pool.map(lambda player: leave(player, said), (at(first.served, gone), at(second, gone))))
    assert times[0] == times[1]
    assert gone.stream is not None
    assert gone.stream.end().reason == "client-left"
    first.players.pop(gone.name)
    first.complete(run, ann)
    assert first.outcomes(run)[gone.name] == ("CANCELLED", "client-left")
    assert client(second, gone.name).state is ClientState.LEFT
    entries = second.entries(action="client.left", subject=gone.name)
    assert [entry.digest for entry in entries] == [envelope_digest(said)]
    assert checked(Edited.of(exported(first, run, tmp_path / "run")), tmp_path)
    assert problems(first) == []


@pytest.mark.full
def test_of_two_homes_that_start_at_both_coordinators_at_the_same_time_one_is_welcomed(
    first: Stage, second: Running
) -> None:
    member, before = first.player("copied").member, bytes(16)

    def start(served: Running, made: bytes) -> str:
        hello = Hello(software="test", nonce=bytes(32), start=made, earlier_starts=[before])
        with member.files.channel(address=served.address) as channel:
            call = FederationStub(channel).Attend(iter([AttendRequest(hello=hello)]), timeout=SECONDS)
            try:
                return str(next(call).WhichOneof("message"))
            except grpc.RpcError as error:
                return refusal_from_rpc_error(error).reason

    with ThreadPoolExecutor(2) as pool:
        for number in range(1, 6):
            starts = [bytes([number, place]) * 8 for place in (1, 2)]
            answers = list(pool.map(start, (first.served, second), starts))
            assert sorted(answers) == ["home_copied", "welcome"], answers
            before = starts[answers.index("welcome")]
