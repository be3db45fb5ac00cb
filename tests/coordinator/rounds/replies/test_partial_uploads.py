"""Uploads that break off: they go on where the coordinator says, for one reply, within a quota, until it is over."""

import fcntl
from collections.abc import Iterator
from dataclasses import dataclass

import grpc
import numpy as np
import pytest

from coordinator.rounds.replies.uploads import Uploads
from federation.trust.envelope import sign
from federation.v1.common_pb2 import AssignmentManifest, SignedEnvelope
from federation.v1.federation_pb2 import SubmitRequest
from federation.vectors import Layout, Tensor, to_bytes, update_layout
from storage.blob_directory import locked
from storage.models import Assignment
from storage.states import AssignmentState
from tests.few import few
from tests.harness import Handing
from tests.running import refused, wait_for
from tests.stage import LONG, Player, Stage, spec, stage, vector

LAYOUT = Layout((Tensor("weight", (1000,)),))
MODEL = to_bytes(LAYOUT, np.ones(LAYOUT.size, np.float32))
QUOTA = 6000  # bytes; an update has about 4,100


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stage]:
    directory = tmp_path_factory.mktemp("partial")
    limits = {"upload_bytes": QUOTA, "transfers": 64, "transfer_bytes": 64 << 20}
    with stage(directory, f"sqlite:///{directory / 'test.db'}", **limits) as made:
        yield made


@pytest.fixture
def lines(made: Stage) -> Iterator[Stage]:
    yield made
    made.clear()
    collect(made)
    assert partial(made) == {}


@dataclass
class Reply:
    """A reply that is handed in by hand."""

    lines: Stage
    player: Player
    order: AssignmentManifest
    payload: bytes
    envelope: SignedEnvelope

    @classmethod
    def to(cls, lines: Stage, player: Player, order: AssignmentManifest, *, sign: float = 1.0) -> "Reply":
        layout = update_layout([(row.name, row.length, row.dtype) for row in order.rows])
        payload = to_bytes(layout, sign * vector(player.name, order))
        return cls(lines, player, order, payload, player.member.sign(player.member.manifest(order, payload)))

    def send(self, start: int, end: int, *, envelope: SignedEnvelope | None = None, step: int = 500) -> Handing:
        """Sends a part of the payload; the call stays open."""
        requests = [SubmitRequest(reply=envelope or self.envelope)]
        for place in range(start, end, step):
            requests.append(SubmitRequest(chunk=self.payload[place : min(place + step, end)], offset=place))
        return Handing(self.player.member.stub, requests, goes_on=True)

    def break_off(self, start: int, end: int) -> None:
        """Sends a part, and breaks off when it has arrived."""
        call = self.send(start, end)
        wait_for(lambda: end in partial(self.lines).values() and call.windows, "the part to arrive")
        assert call.windows[0].offset == start
        call.call.cancel()
        calls = self.lines.served.coordinator.access._calls
        wait_for(lambda: len(calls[f"fedpareto://test/client/{self.player.name}"]) == 1, "the call to end")

    def hand_in(self) -> bool:
        return self.player.member.submit(self.envelope, self.payload, chunk_bytes=500).accepted

    def counts(self, run: str) -> None:
        """It is handed in, and its member plays the run to the end."""
        assert self.hand_in()
        self.lines.play(run, self.player)


def partial(lines: Stage) -> dict[str, int]:
    """What is left of uploads, by assignment."""
    return {upload.name.partition(".")[0]: upload.size for upload in lines.blobs.partial_uploads()}


def collect(lines: Stage) -> None:
    """What housekeeping does every few seconds."""
    uploads = Uploads(lines.served.database, lines.blobs, quota=QUOTA)
    wait_for(lambda: uploads.collect() >= 0 and not any(ended(lines, name) for name in partial(lines)), "the uploads")


def ended(lines: Stage, assignment_id: str) -> bool:
    return lines.look(lambda session: session.get_one(Assignment, assignment_id).state) is not AssignmentState.OPEN


def begin(lines: Stage, *names: str, model: bytes = MODEL) -> tuple[str, list[Reply]]:
    """A run that waits for these clients."""
    run, players = lines.begin(*names, more=f"selection.minimum = {len(names)}", model=model)
    return run, [Reply.to(lines, player, player.order()) for player in players]


def broken_off(lines: Stage) -> tuple[str, Reply]:
    """A run that waits for ann, and her reply, of which a part has arrived."""
    run, (reply,) = begin(lines, "ann")
    reply.break_off(0, 1500)
    return run, reply


def test_an_upload_goes_on_where_it_broke_and_counts_once(lines: Stage) -> None:
    run, reply = broken_off(lines)
    reply.break_off(1500, 3000)
    reply.break_off(3000, 3500)
    assert reply.hand_in()
    assert partial(lines) == {}
    lines.play(run, reply.player)


def test_an_upload_goes_on_after_a_restart_of_the_coordinator(lines: Stage) -> None:
    run, reply = broken_off(lines)
    lines.restart()
    reply.break_off(1500, 2000)  # the bytes from before are in the digest, which the coordinator makes anew
    reply.counts(run)


def test_bytes_that_were_damaged_during_a_restart_are_refused_and_the_upload_begins_anew(lines: Stage) -> None:
    run, reply = broken_off(lines)

    def damage() -> None:
        (path,) = (lines.blobs.root / "partial").iterdir()
        path.write_bytes(bytes(1500))

    lines.restart(damage)
    with refused("INVALID_ARGUMENT", "payload-digest"):
        reply.hand_in()
    assert partial(lines) == {}
    reply.counts(run)


@few(1499, 2**63)
@pytest.mark.parametrize("start", [0, 1499, 1501, 2**63])
def test_a_chunk_for_another_place_is_refused_and_harms_nothing(lines: Stage, start: int) -> None:
    run, reply = broken_off(lines)
    wrong = [SubmitRequest(reply=reply.envelope), SubmitRequest(chunk=b"wrong", offset=start)]
    before = recorded(lines)
    with refused("OUT_OF_RANGE", "offset") as messages:
        Handing(reply.player.member.stub, wrong).result(60)
    assert messages == [f"a chunk for byte {start}; 1500 bytes have arrived: go on from there"]
    assert recorded(lines) == before + 1
    reply.break_off(1500, 2000)
    reply.counts(run)


def recorded(lines: Stage) -> int:
    """How many chunks of ann for a wrong place are on record."""
    entries = [entry for entry in lines.served.refusals("Submit") if entry.outcome == "offset"]
    assert {entry.actor for entry in entries} <= {"fedpareto://test/client/ann"}
    return sum(entry.times for entry in entries)


def test_too_many_bytes_are_refused_and_what_arrived_before_them_stays(lines: Stage) -> None:
    run, reply = broken_off(lines)
    size = len(reply.payload)
    reply.payload += bytes(1000)
    with refused("INVALID_ARGUMENT", "payload-length"):
        reply.send(1500, size + 1000, step=size).result(60)
    assert list(partial(lines).values()) == [1500]
    reply.payload = reply.payload[:size]
    reply.counts(run)


@pytest.mark.full
def test_a_chunk_beyond_the_window_is_refused_and_harms_nothing(lines: Stage) -> None:
    layout = Layout((Tensor("weight", (350_000,)),))  # more than a window
    model = to_bytes(layout, np.ones(layout.size, np.float32))
    run, (reply,) = begin(lines, "ann", model=model)
    chunks = [(0, 500_000), (500_000, 1_200_000)]  # the second comes before half of the window has arrived
    requests = [SubmitRequest(reply=reply.envelope)]
    requests += [SubmitRequest(chunk=reply.payload[start:end], offset=start) for start, end in chunks]
    with refused("RESOURCE_EXHAUSTED", "limit:window") as messages:
        Handing(reply.player.member.stub, requests).result(60)
    assert messages == [f"a chunk beyond byte {1 << 20}, the limit of the last window"]
    assert "limit:window" in {entry.outcome for entry in lines.served.refusals("Submit")}
    reply.counts(run)


def test_nobody_but_its_own_member_goes_on_with_an_upload(lines: Stage) -> None:
    run, (reply, other) = begin(lines, "ann", "ben")
    reply.break_off(0, 1500)
    forged = sign(reply.player.member.manifest(reply.order, reply.payload), other.player.member.files.signing_key)
    with refused("PERMISSION_DENIED", "assignment-client"):
        Handing(other.player.member.stub, [SubmitRequest(reply=reply.envelope)]).result(60)
    with refused("UNAUTHENTICATED", "key-unknown"):
        reply.send(1500, 2000, envelope=forged).result(60)
    altered = SignedEnvelope()
    altered.CopyFrom(reply.envelope)
    altered.signature = bytes(64)
    with refused("UNAUTHENTICATED", "signature"):
        reply.send(1500, 2000, envelope=altered).result(60)
    assert list(partial(lines).values()) == [1500]
    reply.break_off(1500, 2000)
    assert reply.hand_in()
    assert other.hand_in()
    lines.play(run, reply.player, other.player)


def test_another_payload_for_the_same_assignment_takes_the_place_of_the_first(lines: Stage) -> None:
    run, reply = broken_off(lines)
    another = Reply.to(lines, reply.player, reply.order, sign=-1.0)
    another.break_off(0, 2000)
    assert list(partial(lines).values()) == [2000]
    another.counts(run)


def test_a_member_hands_in_while_an_upload_of_another_waits_for_the_store(lines: Stage) -> None:
    run, (slow, prompt) = begin(lines, "ann", "ben")
    slow.break_off(0, 1500)
    another = Reply.to(lines, slow.player, slow.order, sign=-1.0)
    uploads = lines.parts.uploads
    with locked(lines.blobs.root / "lock", fcntl.LOCK_SH):  # as while the blob of a third member is written
        call = another.send(0, 500)  # the first payload has to be removed
        wait_for(uploads._lock.locked, "the upload to begin")
        assert prompt.player.member.submit(prompt.envelope, prompt.payload).accepted
        assert uploads._lock.locked()
    wait_for(lambda: list(partial(lines).values()) == [500] and call.windows, "the part to arrive")
    assert another.hand_in()
    lines.play(run, slow.player, prompt.player)


@pytest.mark.parametrize("restarted", [False, True], ids=["", "restarted"])
def test_an_upload_ends_with_its_assignment(lines: Stage, restarted: bool) -> None:
    run, (late, prompt) = begin(lines, "ann", "ben")
    late.break_off(0, 1500)
    assert prompt.hand_in()
    if restarted:
        lines.restart()
    lines.clock.ahead += LONG
    with refused("FAILED_PRECONDITION", "deadline"):
        late.send(1500, 2000).result(60)
    lines.nudge()
    lines.wait_round(run, 0)
    collect(lines)
    assert partial(lines) == {}


@pytest.mark.full
def test_uploads_of_a_member_have_a_quota_together_and_one_alone_has_none(lines: Stage) -> None:
    [(first, second), others] = two_each(lines, "ann", "ben")
    first.break_off(0, 3000)
    with refused("RESOURCE_EXHAUSTED", "limit:uploads") as messages:
        second.hand_in()
    assert messages == [
        f"{len(second.payload)} bytes, beside 3000 of your other uploads that broke off or are under way; at most "
        f"{QUOTA} together: finish those first"
    ]
    assert [reply.hand_in() for reply in others] == [True, True]  # the quota is ann's alone
    lines.restart()
    with refused("RESOURCE_EXHAUSTED", "limit:uploads"):  # it counts what an earlier process has kept
        second.hand_in()
    assert first.hand_in()
    assert second.hand_in()


def two_each(lines: Stage, *names: str) -> list[list[Reply]]:
    """The replies of these clients to two runs, which wait for all of them."""
    task, players = lines.crew(*names)
    for i in range(2):
        lines.submit(spec(f"{task}-{i}", task, more=f"selection.minimum = {len(names)}"), model=MODEL)

    def both() -> bool:
        for player in players:
            player.kept = player.orders()
        return all(len(player.kept) == 2 for player in players)

    wait_for(both, "two assignments each")
    return [[Reply.to(lines, player, order) for _, order in player.orders()] for player in players]


def test_a_payload_in_one_chunk_needs_no_quota_and_leaves_no_upload(lines: Stage) -> None:
    [(first, second)] = two_each(lines, "ann")
    first.break_off(0, 3000)
    assert second.player.member.submit(second.envelope, second.payload).accepted
    assert list(partial(lines)) == [first.order.assignment_id]


def test_uploads_of_a_run_that_was_stopped_are_removed(lines: Stage) -> None:
    run, reply = broken_off(lines)
    lines.stop_run(run)
    with pytest.raises(grpc.RpcError, match="is CANCELLED: run-ended"):
        reply.hand_in()
    collect(lines)
    assert partial(lines) == {}
